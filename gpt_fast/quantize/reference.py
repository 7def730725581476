"""The plain products with quantized weights: dequantize, multiply in float32. What every fast kernel must equal."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu.packing import from_nibbles as unpack_int4
from gpt_fast.kernels.cpu.packing import nibbles as pack_int4
from gpt_fast.kernels.reference import dequantize_int4

__all__ = ["dequantize_int4", "linear_fp8", "linear_int4", "linear_int8", "pack_int4", "unpack_int4"]


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[..., K] times int8 [N, K] with float32 scale [N] -> [..., N] in the dtype of ``x``."""
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


def linear_int4(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, row_scale: Tensor) -> Tensor:
    """[..., P] times packed int4 [N, P / 2] with its uint8 [N, groups] twice and float32 [N] -> [..., N] as ``x``."""
    return F.linear(x.float(), dequantize_int4(weight, scale, zero, row_scale)).to(x.dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[..., K] times float8_e4m3fn [N, K] with float32 scale [N] -> [..., N] in the dtype of ``x``."""
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)
