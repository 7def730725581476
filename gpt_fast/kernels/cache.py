"""What every attention kernel, plain or fast, reads: the keys and values of one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.reference import quantize_heads


class LayerCache(NamedTuple):
    """Keys and values of one layer, [num_pages, G, K, D] each; scales float32 [num_pages, G, K], for int8 alone.

    Legend: G page size, K key-value heads, D head dimension.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> LayerCache:
        """An empty cache of ``shape`` = [num_pages, G, K, D]."""
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.int8:
            return cls(k, v)
        return cls(k, v, *(torch.zeros(shape[:3], dtype=torch.float32, device=device) for _ in range(2)))

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
