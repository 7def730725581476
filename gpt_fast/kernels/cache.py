"""What every attention kernel, plain or fast, reads: keys and values of one layer, and where a step's tokens stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.huge_pages import empty
from gpt_fast.kernels.reference import quantize_heads

LANES = 8  # numbers of a vector of the C++ kernels
TOGETHER = 16  # tokens that lie together in a cache of the C++ kernels


def token_bytes(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys, values and scales in a ``LayerCache`` of ``dtype``."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * num_kv_heads * (head_dim * dtype.itemsize + scale)


def padded(head_dim: int) -> int:
    """Numbers of a head in the cache of the C++ kernels: whole vectors, filled up with zeros."""
    return -(-head_dim // LANES) * LANES


class LayerCache(NamedTuple):
    """Keys and values of one layer, [num_pages, G, K, D] each; scales float32 [num_pages, G, K], for int8 alone.

    Legend: G page size, K key-value heads, D head dimension. The C++ kernels keep keys and values in the order of their
    products (kernels/cpu/src/paged.h): there the shapes say how much there is, and not where it is.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> LayerCache:
        """An empty cache of ``shape`` = [num_pages, G, K, D]."""
        num_pages, page_size = shape[:2]
        step = TOGETHER // math.gcd(TOGETHER, page_size) if device.type == "cpu" else 1
        held = (-(-num_pages // step) * step, *shape[1:])  # memory of whole groups, of which some pages are not used
        if device.type == "cpu":
            k, v = (empty(held, dtype).zero_()[:num_pages] for _ in range(2))
        else:
            k, v = (torch.zeros(held, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.int8:
            return cls(k, v)
        return cls(k, v, *(torch.zeros(held[:3], dtype=torch.float32, device=device)[:num_pages] for _ in range(2)))

    @property
    def num_bytes(self) -> int:
        """Of keys, values and scales."""
        return sum(t.numel() * t.element_size() for t in self if t is not None)

    def write(self, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
        """New keys and values [N, K, D] into flat slots ``write_slots`` [N] int64 (page * G + offset)."""
        for new, target, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if scales is not None:
                new, scale = quantize_heads(new)
                scales.view(-1, scales.shape[2]).index_copy_(0, write_slots, scale)
            target.view(-1, *target.shape[2:]).index_copy_(0, write_slots, new.to(target.dtype))


class StepLayout(NamedTuple):
    """Where the new tokens of one step belong. Fixed shapes except ``write_slots``.

    query_start: [S + 1] int32, tokens ``query_start[s]:query_start[s + 1]`` belong to slot s.
    context_len: [S] int32, tokens of slot s after this step (cached before it plus new).
    page_table:  [S, P] int32, pages of slot s in order; entries past the context are ignored.
    write_slots: [N] int64, flat cache slot (page * G + offset) that receives each new token's key and value.
    """

    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    write_slots: Tensor


class StepNumbers(NamedTuple):
    """The numbers of a step of N new tokens on the host: tokens, their positions, the ``lengths`` of their sequences,
    where they are written, the [R] tokens whose logits are wanted; and two of ``StepLayout``."""

    tokens: list[int]
    positions: list[int]
    lengths: list[int]
    write_slots: list[int]
    rows: list[int]
    query_start: list[int]
    context_len: list[int]


def whole_sequences(batch: int, length: int, page_size: int, device: torch.device) -> tuple[Tensor, StepLayout]:
    """A step of ``batch`` sequences from their beginnings to ``length``: positions [batch * length] int64, and a layout
    in which each sequence has pages that follow each other, from page 0 on."""
    each = -(-length // page_size)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    page_table = torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)
    write_slots = torch.arange(batch * each * page_size, device=device).view(batch, -1)[:, :length].flatten()
    layout = StepLayout(starts, torch.full_like(starts[1:], length), page_table, write_slots)
    return torch.arange(length, device=device).repeat(batch), layout


class PagedLayer(NamedTuple):
    """A layer that caches the keys and values of every token, in pages."""

    num_kv_heads: int
    head_dim: int
    device: torch.device | None = None  # None: the model's

    def allocate(
        self, num_slots: int, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """Empty pages that all slots share. ``device``: the model's."""
        return LayerCache.zeros((num_pages, page_size, self.num_kv_heads, self.head_dim), dtype, self.device or device)


def check_cache(cache: Sequence[LayerCache]) -> Tensor:
    """The keys of the first layer. Raises ValueError for a cache of another form than the kernels read."""
    first = cache[0].k
    for layer in cache:
        for tensor in (layer.k, layer.v):
            if tensor.shape != first.shape or tensor.dtype != first.dtype or not tensor.is_contiguous():
                raise ValueError("all caches must be contiguous and of one shape and dtype")
        scales = [t for t in layer[2:] if t is not None and t.is_contiguous() and t.shape == first.shape[:3]]
        if len(scales) != (2 if first.dtype == torch.int8 else 0):
            raise ValueError("a cache of int8, and no other, has scales of keys and of values")
    return first


def holds_whole_groups(part: Tensor) -> bool:
    """Whether the memory of a cache's keys, values or scales, [num_pages, G, ...], ends where TOGETHER tokens end."""
    num_tokens, each = part.shape[0] * part.shape[1], part[0, 0].numel() * part.itemsize
    held = part.untyped_storage().nbytes() - part.storage_offset() * part.itemsize
    return held >= -(-num_tokens // TOGETHER) * TOGETHER * each
