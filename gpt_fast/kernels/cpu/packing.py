"""Weights as the C++ kernels stream them; nothing is lost. Packing them needs the kernels (``src/pack.h``).

A matrix [N, K] becomes tiles of 16 outputs, the last one filled up with zeros, so that lanes of a vector are different
outputs and a thread reads memory from front to back:

    float32   [ceil(N / 16), K, 16]
    bfloat16  [ceil(N / 16), ceil(K / 32), 16, 16 outputs, 2 k]; the last block of k filled up with zeros
    int8      [ceil(N / 16), ceil(K / 32), 8, 16 outputs, 4 k]; the same
    int4      [ceil(N / 16), K / group_size, 32 + 8 * group_size] uint8: 16 scales and 16 zeros, then per block of 32 k
              [4, 16 outputs, 4] bytes

The plain format of int4 is [N, K / 2] bytes: in each block of 32 values, byte j holds value j in its low and value
j + 16 in its high half; a value is ``(q - zero / 8) * scale * row_scale`` with scale and zero uint8 [N, K / group_size]
and row_scale float32 [N], which both layouts keep apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu.library import library
from gpt_fast.kernels.huge_pages import empty

BLOCK = 32  # neighbours along k that packed weights are a whole number of
GROUP_SIZES = (32, 64, 128)  # values of k with one scale and zero in int4
_TILE = 16  # outputs
_HEADER = 2 * _TILE  # bytes before each group of int4


def pack_dense(w: Tensor) -> Tensor:
    """w [N, K] float32 -> [ceil(N / 16), K, 16]; bfloat16 -> [ceil(N / 16), ceil(K / 32), 16, 16, 2]. Raises ValueError
    for another dtype."""
    if w.dtype == torch.bfloat16:
        return _pack_blocks(w, 2)
    if w.dtype != torch.float32:
        raise ValueError(f"pack_dense takes float32 or bfloat16, not {w.dtype}")
    packed = empty((-(-w.shape[0] // _TILE), w.shape[1], _TILE), w.dtype)
    return _filled(packed, w, w.shape[1])


def pack_int8(w: Tensor) -> Tensor:
    """w [N, K] int8 -> [ceil(N / 16), ceil(K / 32), 8, 16, 4] int8. Raises ValueError for another dtype."""
    if w.dtype != torch.int8:
        raise ValueError(f"pack_int8 takes int8, not {w.dtype}")
    return _pack_blocks(w, 4)


def _pack_blocks(w: Tensor, unit: int) -> Tensor:
    """w [N, K] -> [ceil(N / 16), ceil(K / 32), 32 / unit, 16, unit], where ``unit`` values have 4 bytes."""
    if w.shape[1] % BLOCK:
        w = F.pad(w, (0, -w.shape[1] % BLOCK))
    packed = empty((-(-w.shape[0] // _TILE), w.shape[1] // BLOCK, BLOCK // unit, _TILE, unit), w.dtype)
    return _filled(packed, w, w.shape[1] // unit)


def pack_int4(data: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Plain bytes [N, K / 2] with scale and zero, uint8 [N, K / group_size] -> the streamed layout, uint8.

    Raises ValueError for groups that are not whole blocks of 32.
    """
    (n, groups), k = scale.shape, 2 * data.shape[1]
    if k % (BLOCK * groups):
        raise ValueError(f"K ({k}) is not {groups} groups of whole blocks of {BLOCK}")
    tiles = -(-n // _TILE)
    packed = empty((tiles, groups, _HEADER + k // groups * _TILE // 2), torch.uint8)
    for i, numbers in enumerate((scale, zero)):
        whole = F.pad(numbers, (0, 0, 0, -n % _TILE)).view(tiles, _TILE, groups)
        packed[:, :, i * _TILE : (i + 1) * _TILE] = whole.transpose(1, 2)
    return _filled(packed, data, k // 8, k // groups // 8, _HEADER)


def _filled(packed: Tensor, rows: Tensor, units: int, group: int = 0, header: int = 0) -> Tensor:
    """``packed`` with ``rows``, each of ``units`` units (pack.h), in it; headers are left as they are."""
    rows, threads = rows.contiguous(), torch.get_num_threads()
    places = rows.data_ptr(), packed.data_ptr()
    library().gpt_fast_pack(*places, rows.shape[0], units, group or units, header, threads)
    return packed


def nibbles(q: Tensor) -> Tensor:
    """Values 0..15 [N, K] uint8 -> the plain bytes [N, K / 2]. Raises ValueError for K that is not whole blocks."""
    n, k = q.shape
    if k % BLOCK:
        raise ValueError(f"K ({k}) is not a multiple of {BLOCK}")
    halves = q.view(n, k // BLOCK, 2, BLOCK // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(n, k // 2)


def from_nibbles(data: Tensor) -> Tensor:
    """The inverse of :func:`nibbles`: [N, K / 2] -> [N, K]."""
    n, half = data.shape
    blocks = data.view(n, 2 * half // BLOCK, BLOCK // 2)
    return torch.stack((blocks & 15, blocks >> 4), dim=2).reshape(n, 2 * half)
