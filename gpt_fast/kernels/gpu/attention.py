"""Attention over the paged cache on a GPU: decoding, verifying and prefilling by one kernel.

The new tokens of a step stand in one flat row, see ``StepLayout``. A step of few tokens
is split over each sequence's length (flash-decoding: Dao et al. 2023, "Flash-Decoding for long-context inference"),
with the running softmax of FlashAttention (arXiv 2205.14135) inside a part. The number of parts depends on the heads
alone and their bounds on the token alone, so a row's result is the same bits in any batch. A longer step takes 16
queries of a sequence at a time and reads its keys once for them, unsplit. Lengths are never read on the host: a CUDA
graph can hold a launch.

The cache may hold float32, bfloat16, float16, or int8 with a float32 scale for every position and head; scores and
weights are scaled instead of keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.attention_kernel import _LOG2E, attend_kernel, combine_kernel

_SPLIT_TOKENS = 16  # a step of more new tokens fills the machine without splitting sequences
_QUERIES = 16  # tokens of a sequence that a program of a long step takes together
_PROGRAMS = 132  # multiprocessors to fill at batch 1


class Scratch(NamedTuple):
    """Where parts of a step of at most 16 tokens meet; one for all layers and steps of a model."""

    partial: Tensor  # [tokens, K, splits, rows, width] float32
    stats: Tensor  # [tokens, K, splits, 2, rows] float32: the greatest score and the sum of weights
    arrivals: Tensor  # [tokens * K] int32: zeros between launches


def num_splits(num_kv_heads: int) -> int:
    """Into how many parts a sequence is split: enough that one sequence fills the GPU; a power of two up to 32."""
    return min(32, max(4, launching.power_of_two(-(-_PROGRAMS // num_kv_heads) // 2 + 1)))


def scratch(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Scratch:
    """Room for steps of up to ``num_tokens`` tokens."""
    rows, width, splits = _rows(num_heads // num_kv_heads), _width(head_dim), num_splits(num_kv_heads)
    return Scratch(
        torch.empty(num_tokens, num_kv_heads, splits, rows, width, dtype=torch.float32, device=device),
        torch.empty(num_tokens, num_kv_heads, splits, 2, rows, dtype=torch.float32, device=device),
        torch.zeros(num_tokens * num_kv_heads, dtype=torch.int32, device=device),
    )


def _rows(count: int) -> int:
    return max(16, launching.power_of_two(count))


def _width(head_dim: int) -> int:
    return max(16, launching.power_of_two(head_dim))


def attend(
    q: Tensor,
    cache: LayerCache,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    window: int,
    scale: float,
    room: Scratch | None = None,
    one_launch: bool = True,
) -> Tensor:
    """q [N, H, D] against what the cache holds already, the new tokens' keys and values included -> [N, H, D].

    ``query_start`` [S + 1], ``context_len`` [S], ``page_table`` [S, P] int32 as in ``StepLayout``. ``window`` > 0
    limits a query to the last ``window`` positions, itself included. Tokens of no slot give zeros. ``one_launch`` lets
    the last part of a row combine all parts; False takes a second launch for that, with the same bits.
    """
    num_tokens, heads, dim = q.shape
    kv_heads, page_size = cache.k.shape[2], cache.k.shape[1]
    num_slots, group = context_len.shape[0], heads // kv_heads
    few = num_tokens <= _SPLIT_TOKENS
    queries, splits = (1, num_splits(kv_heads)) if few else (_QUERIES, 1)
    rows, width = _rows(group * queries), _width(dim)
    if few and room is None:
        room = scratch(num_tokens, heads, kv_heads, dim, q.device)
    out = torch.empty_like(q) if few else torch.zeros_like(q)
    block = 64 if width <= 128 else 32
    programs = num_tokens if few else -(-num_tokens // queries) + num_slots
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "group": group,
        "queries": queries,
        "rows": rows,
        "width": width,
        "splits": splits,
        "block": block,
        "slots_pad": launching.power_of_two(num_slots),
    }
    attend_kernel[(programs, kv_heads, splits)](
        q.contiguous(), *cache, query_start, context_len, page_table, out,
        *(room if few and room is not None else (None, None, None)),
        num_slots, page_table.shape[1], _LOG2E.value * scale, window,
        page_size=page_size, compute=launching.compute_dtype(q.dtype), one_launch=one_launch, **constants,
        **launching.options(num_warps=4 if rows * width <= 64 * 128 else 8, num_stages=3 if width <= 128 else 2),
    )  # fmt: skip
    if few and not one_launch:
        assert room is not None
        combine_kernel[(num_tokens, kv_heads)](
            query_start, context_len, out, room.partial, room.stats, num_slots, window, **constants,
            **launching.options(num_warps=4),
        )  # fmt: skip
    return out


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, window: int, scale: float
) -> Tensor:
    """model/attention.py's operation: write ``k`` and ``v`` [N, K, D], then attend. Its twins are there."""
    cache.write(k, v, layout.write_slots)
    return attend(q, cache, layout.query_start, layout.context_len, layout.page_table, window, scale)
