"""Weights as the C++ kernels stream them, and back; nothing is lost.

In plain torch. Where the kernels run, ``cpu/pack.h`` packs the same in a fraction of the time.

A matrix [N, K] becomes tiles of 16 (float32, bfloat16) or 8 (int8, int4) outputs, the last one filled up with zeros, so
that lanes of a vector are different outputs and a thread reads memory from front to back:

    float32, bfloat16  [ceil(N / 16), K, 16]; bfloat16 stores output j beside output j + 8
    int8               [ceil(N / 8), ceil(K / 32), 8, 8 outputs, 4 k]; the last block of k filled up with zeros
    int4               [ceil(N / 8), K / group_size, 16 + 4 * group_size] uint8: 8 scales and 8 zeros, then per block
                       of 32 k [4, 8 outputs, 4] bytes

The plain format of int4 is [N, K / 2] bytes: in each block of 32 values, byte j holds value j in its low and value
j + 16 in its high half; a value is ``(q - zero / 8) * scale * row_scale`` with scale and zero uint8 [N, K / group_size]
and row_scale float32 [N], which both layouts keep apart.
"""

from __future__ import annotations

import ctypes
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu import library as cpu

BLOCK = 32  # values of k with one activation scale
GROUP_SIZES = (32, 64, 128)
_DENSE_TILE, _TILE = 16, 8
_HEADER = 2 * _TILE  # bytes before each group of int4
_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on huge pages where the system has them: fewer address translations while streaming."""
    out = torch.empty(shape, dtype=dtype)
    begin = -(-out.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    num_bytes = out.data_ptr() + out.numel() * out.element_size() - begin
    if num_bytes >= _HUGE_PAGE and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return out


def _pad_rows(t: Tensor, multiple: int) -> Tensor:
    missing = -t.shape[0] % multiple
    return torch.cat((t, t.new_zeros(missing, *t.shape[1:]))) if missing else t


def _dense_view(packed: Tensor) -> Tensor:
    """[tiles, 16 outputs, K] of [tiles, K, 16]."""
    tiles, k, _ = packed.shape
    if packed.dtype == torch.bfloat16:
        return packed.view(tiles, k, 8, 2).permute(0, 3, 2, 1)
    return packed.view(tiles, k, 2, 8).permute(0, 2, 3, 1)


def pack_dense(w: Tensor) -> Tensor:
    """w [N, K] float32 or bfloat16 -> [ceil(N / 16), K, 16] of the same dtype."""
    if w.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"pack_dense takes float32 or bfloat16, not {w.dtype}")
    n, k = w.shape
    whole = n // _DENSE_TILE
    packed = empty((-(-n // _DENSE_TILE), k, _DENSE_TILE), w.dtype)
    if cpu.available():
        cpu.pack(str(w.dtype).removeprefix("torch."), w.contiguous(), packed, units=k, group=k)
        return packed
    view = _dense_view(packed)
    view[:whole].copy_(w[: whole * _DENSE_TILE].view(whole, 2, 8, k))
    if whole < packed.shape[0]:
        view[whole:].copy_(_pad_rows(w[whole * _DENSE_TILE :], _DENSE_TILE).view(1, 2, 8, k))
    return packed


def unpack_dense(packed: Tensor, out_features: int) -> Tensor:
    """The inverse of :func:`pack_dense`: [out_features, K]."""
    tiles, k, _ = packed.shape
    return _dense_view(packed).reshape(tiles * _DENSE_TILE, k)[:out_features].contiguous()


def pack_int8(w: Tensor) -> Tensor:
    """w [N, K] int8 -> [ceil(N / 8), ceil(K / 32), 8, 8, 4] int8."""
    if w.dtype != torch.int8:
        raise ValueError(f"pack_int8 takes int8, not {w.dtype}")
    if w.shape[1] % BLOCK:
        w = F.pad(w, (0, -w.shape[1] % BLOCK))
    tiles, blocks = -(-w.shape[0] // _TILE), w.shape[1] // BLOCK
    packed = empty((tiles, blocks, 8, _TILE, 4), torch.int8)
    if cpu.available():
        cpu.pack("int8", w.contiguous(), packed, units=8 * blocks, group=8 * blocks)
        return packed
    w = _pad_rows(w, _TILE)
    # Four values as one 32-bit element: the copy is several times faster.
    packed.view(torch.int32)[..., 0].copy_(w.view(torch.int32).view(tiles, _TILE, blocks, 8).permute(0, 2, 3, 1))
    return packed


def unpack_int8(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of :func:`pack_int8`: [out_features, in_features]."""
    tiles, blocks = packed.shape[:2]
    w = packed.permute(0, 3, 1, 2, 4).reshape(tiles * _TILE, blocks * BLOCK)
    return w[:out_features, :in_features].contiguous()


def nibbles(q: Tensor) -> Tensor:
    """Values 0..15 [N, K] uint8 -> the plain bytes [N, K / 2]."""
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


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Values 0..15 ``q`` [N, K] uint8 with scale and zero [N, K / group_size] -> the streamed layout."""
    return pack_int4_plain(nibbles(q), scale, zero)


def pack_int4_plain(data: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Plain bytes [N, K / 2] with scale and zero, uint8 [N, K / group_size] -> the streamed layout (uint8)."""
    groups = scale.shape[1]
    group_size = 2 * data.shape[1] // groups
    check_group_size(2 * data.shape[1], group_size)
    scale, zero = (_pad_rows(t, _TILE) for t in (scale, zero))
    tiles = scale.shape[0] // _TILE
    packed = empty((tiles, groups, _HEADER + 4 * group_size), torch.uint8)
    packed[:, :, :_TILE] = scale.view(tiles, _TILE, groups).transpose(1, 2)
    packed[:, :, _TILE:_HEADER] = zero.view(tiles, _TILE, groups).transpose(1, 2)
    if cpu.available():
        cpu.pack("int4", data.contiguous(), packed, units=data.shape[1] // 4, group=group_size // 8, header=_HEADER)
        return packed
    data = _pad_rows(data, _TILE)
    body = packed[:, :, _HEADER:].view(torch.int32)  # [tiles, groups, group_size]: four bytes an element
    blocks = group_size // BLOCK
    source = data.contiguous().view(torch.int32).view(tiles, _TILE, groups, blocks, 4)
    body.unflatten(2, (blocks, 4, _TILE)).copy_(source.permute(0, 2, 3, 4, 1))
    return packed


def unpack_int4(packed: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`pack_int4`: values [N, K], scale and zero [N, K / group_size], all uint8."""
    data, scale, zero = unpack_int4_plain(packed, out_features)
    return from_nibbles(data), scale, zero


def unpack_int4_plain(packed: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`pack_int4_plain`."""
    tiles, groups, width = packed.shape
    body = packed[:, :, _HEADER:].reshape(tiles, groups, (width - _HEADER) // 128, 4, _TILE, 4)
    data = body.permute(0, 4, 1, 2, 3, 5).reshape(tiles * _TILE, -1)[:out_features]
    heads = packed[:, :, :_HEADER].split(_TILE, dim=-1)  # [tiles, groups, 8]
    scale, zero = (h.transpose(1, 2).reshape(tiles * _TILE, groups)[:out_features] for h in heads)
    return data.contiguous(), scale.contiguous(), zero.contiguous()


def check_group_size(k: int, group_size: int) -> None:
    """Raise ValueError unless rows of ``k`` values can be cut into groups of ``group_size``."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    if k % group_size:
        raise ValueError(f"K ({k}) is not a multiple of group_size ({group_size})")
