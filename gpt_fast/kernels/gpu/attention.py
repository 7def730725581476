"""Attention over the paged cache on a GPU: one kernel for decoding, verifying and prefilling.

A step of few tokens is split over each sequence's length (flash-decoding: Dao et al. 2023, "Flash-Decoding for
long-context inference"), with the running softmax of FlashAttention (arXiv 2205.14135) inside a part. The number of
parts depends on the heads alone and their bounds on the token alone, so a row's result is the same bits in any batch.
For prompts (``many``) up to 16 queries of a sequence are taken at a time, and its keys read once for them, unsplit.
Lengths are never read on the host, so a CUDA graph can hold a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.attention_kernel import LOG2E, attend_kernel

_QUERIES = (16, 8, 4, 2)  # tokens of a sequence that a program of a long step takes together: the first that fits
_ROWS = 256  # heads of all of them, at most where there is a choice: what the registers of a program hold


class Scratch(NamedTuple):
    """Where parts of a step of at most MAX_TOKENS meet; one for all layers and steps of a model."""

    partial: Tensor  # [tokens, K, splits, rows, width] float32
    stats: Tensor  # [tokens, K, splits, 2, rows] float32: the greatest score and the sum of weights
    arrivals: Tensor  # [tokens * K] int32: zeros between launches


def num_splits(num_kv_heads: int) -> int:
    """Into how many parts a sequence is split: enough that one sequence fills the GPU; a power of two up to 32."""
    return min(32, launching.power_of_two(-(-launching.MULTIPROCESSORS // num_kv_heads) // 2 + 1, 4))


def scratch(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Scratch:
    """Room for steps of up to ``num_tokens`` tokens."""
    rows, width = (launching.power_of_two(n, 16) for n in (num_heads // num_kv_heads, head_dim))
    splits = num_splits(num_kv_heads)
    return Scratch(
        torch.empty(num_tokens, num_kv_heads, splits, rows, width, dtype=torch.float32, device=device),
        torch.empty(num_tokens, num_kv_heads, splits, 2, rows, dtype=torch.float32, device=device),
        torch.zeros(num_tokens * num_kv_heads, dtype=torch.int32, device=device),
    )


def _division(
    group: int, width: int, many: bool, dtype: torch.dtype, stored: torch.dtype, memory: int
) -> tuple[int, int, int]:
    """Queries that a program takes together, the rows that their heads make, and the keys that it takes at a time: what
    fits into ``memory``, bytes. ``stored``: the dtype of the cache. The number of tokens has no part in it."""
    item = dtype.itemsize
    # Bytes of a key and its value: as they come, in several blocks at a time, and as they are multiplied.
    each = width * (max(6, 2 * item) if stored == dtype else 2 * (item + stored.itemsize))
    most = 64 if width <= 128 else 32
    for block in (most, most // 2):
        for queries in _QUERIES if many else (1,):
            rows = launching.power_of_two(group * queries, 16)
            fits = rows * (width + block) * item + each * block <= memory
            if fits and (rows <= _ROWS or queries <= _QUERIES[-1]):
                return queries, rows, block
    return queries, rows, block


def attend(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    window: int,
    scale: float,
    room: Scratch | None = None,
    many: bool | None = None,
    cap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [N, H, D] against what the cache holds already, the new tokens' keys and values included -> [N, H, D].

    The cache is float32, bfloat16, float16, or int8 with scales. ``window`` > 0 limits a query to the last ``window``
    positions, itself included. Tokens of no slot give zeros. ``room``: None makes it for this call. ``many``: tokens of
    prompts, which have other bits; None: more than MAX_TOKENS are. ``cap`` > 0: scores become ``cap * tanh(score /
    cap)``. ``slopes`` [H] float32: how much a score falls with each token of distance. ``sinks`` [H]: scores that take
    weight and give nothing.
    """
    q = q.contiguous()
    num_tokens, heads, dim = q.shape
    page_size, kv_heads = cache.k.shape[1:3]
    num_slots, pages_per_slot = layout.page_table.shape
    group, few = heads // kv_heads, not (num_tokens > launching.MAX_TOKENS if many is None else many)
    width, splits = launching.power_of_two(dim, 16), num_splits(kv_heads) if few else 1
    memory = launching.shared_memory(q.device)
    queries, rows, block = _division(group, width, not few, q.dtype, cache.k.dtype, memory)
    programs = num_tokens if few else -(-num_tokens // queries) + num_slots
    parts: Sequence[Tensor | None] = (None, None, None)
    if few:
        parts = room or scratch(num_tokens, heads, kv_heads, dim, q.device)
    out = torch.empty_like(q) if few else torch.zeros_like(q)
    attend_kernel[(programs, kv_heads, splits)](
        q, *cache, *layout[:3], out, *parts, slopes, sinks, num_slots,
        pages_per_slot, LOG2E.value * scale, window, LOG2E.value * cap if cap else None,
        page_size=page_size, heads=heads, kv_heads=kv_heads, dim=dim, compute=launching.compute_dtype(q.dtype),
        group=group, queries=queries, rows=rows, width=width, splits=splits, block=block,
        slots_pad=launching.power_of_two(num_slots),
        num_warps=4 if rows * width <= 64 * 128 else 8, num_stages=3 if width <= 128 else 2,
    )  # fmt: skip
    return out
