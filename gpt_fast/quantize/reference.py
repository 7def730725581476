"""The plain products with quantized weights: dequantize, multiply in float32. What every fast kernel must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.quantize.scheme import BLOCK


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[..., K] times int8 [N, K] with float32 scale [N] -> [..., N] in the dtype of ``x``."""
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


def linear_int4(x: Tensor, weight: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[..., P] times packed int4 [N, P / 2] with float16 scale and minimum [N, groups] -> [..., N] as ``x``."""
    return F.linear(x.float(), dequantize_int4(weight, scale, minimum)).to(x.dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[..., K] times float8_e4m3fn [N, K] with float32 scale [N] -> [..., N] in the dtype of ``x``."""
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


def dequantize_int4(weight: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Packed [N, P / 2], scale and minimum [N, groups] -> float32 [N, P]."""
    n, groups = scale.shape
    codes = unpack_int4(weight).view(n, groups, -1).float()
    return (codes * scale.float()[..., None] + minimum.float()[..., None]).view(n, -1)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [N, P], P a multiple of 32 -> uint8 [N, P / 2] in the order of scheme.py."""
    low, high = codes.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    packed: Tensor = (low | (high << 4)).flatten(-2)
    return packed


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_int4`."""
    halves = packed.unflatten(-1, (-1, BLOCK // 2))
    codes: Tensor = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)
    return codes
