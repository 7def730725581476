"""Memory that is read from one end to the other: weights, keys and values."""

from __future__ import annotations

import ctypes
import math
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on huge pages where the system has them: fewer address translations while streaming.

    It begins where a huge page does, so that as few small pages as possible remain at its end.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    room = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    skipped = -room.data_ptr() % _HUGE_PAGE
    whole = room[skipped : skipped + num_bytes]
    ctypes.CDLL(None).madvise(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return whole.view(dtype).view(shape)
