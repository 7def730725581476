"""Plain-torch twins of the kernels: the same semantics on plain weights, for tests and where nothing can be compiled.

Twins agree to rounding, not bit for bit: torch adds in another order. The quantized activations are the same integers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu.library import rounded_together
from gpt_fast.kernels.cpu.packing import from_nibbles


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] float32: dense weights, and integers where activations stay as they are."""
    return F.linear(x.float(), weight)


def rounded_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same with x rounded to 8 bits in blocks: what the integer kernels of this machine compute."""
    values, scales = quantize_activations(x, rounded_together())
    return F.linear((values * scales[..., None]).flatten(-2)[..., : x.shape[-1]], weight)


def quantize_activations(x: Tensor, together: int) -> tuple[Tensor, Tensor]:
    """x [..., K] -> values [..., blocks, together] int8 and scales [..., blocks] float32, blocks = ceil(K / together).

    Each block as :func:`quantize_heads` does it; missing values are zero.
    """
    return quantize_heads(F.pad(x.float(), (0, -x.shape[-1] % together)).unflatten(-1, (-1, together)))


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] to int8 values and float32 scales [...]: largest magnitude / 127, nearest value, ties to even."""
    most = x.float().abs().amax(-1)
    # Not 127 / most, which torch computes as 127 times a rounded reciprocal.
    inverse = torch.where(most == 0, most, torch.full_like(most, 127.0) / most)
    return (x.float() * inverse[..., None]).round().nan_to_num().to(torch.int8), most / 127


def dequantize_int4(data: Tensor, scale: Tensor, zero: Tensor, row_scale: Tensor) -> Tensor:
    """[N, K] float32: ``(q - zero / 8) * scale * row_scale`` of the plain bytes [N, K / 2] (packing.py)."""
    q = from_nibbles(data).unflatten(-1, (scale.shape[1], -1))
    values: Tensor = (q - zero[..., None] / 8) * (scale * row_scale[:, None])[..., None]
    return values.flatten(-2)
