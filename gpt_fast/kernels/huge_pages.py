"""Memory that is read from one end to the other: weights, keys and values."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on huge pages where the system has them: fewer address translations while streaming."""
    out = torch.empty(shape, dtype=dtype)
    begin = -(-out.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    num_bytes = out.data_ptr() + out.nbytes - begin
    if num_bytes >= _HUGE_PAGE and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return out
