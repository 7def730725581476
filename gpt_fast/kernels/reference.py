"""Plain-torch twins of the kernels: the same semantics on plain weights, for tests and where nothing can be compiled.

Twins agree to rounding, not bit for bit: torch adds in another order. The quantized activations are the same integers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu.library import rounded_by_powers, rounded_in_pairs, rounded_together
from gpt_fast.kernels.cpu.packing import from_nibbles


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] float32: dense weights, and integers where activations stay as they are."""
    return F.linear(x.float(), weight)


def rounded_product(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """The same with x rounded to 8 bits in blocks: what this machine's kernels for weights of ``kind``, int8 or int4,
    compute."""
    in_pairs = kind == "int8" and rounded_in_pairs()
    values, scales = quantize_activations(x, rounded_together(), in_pairs, rounded_by_powers())
    return F.linear((values * scales[..., None]).flatten(-2)[..., : x.shape[-1]], weight)


def quantize_activations(
    x: Tensor, together: int, in_pairs: bool = False, by_powers: bool = False
) -> tuple[Tensor, Tensor]:
    """x [..., K] -> values [..., blocks, together] int8 and scales [..., blocks] float32, blocks = ceil(K / together).

    Each block as :func:`quantize_heads` does it; missing values are zero. ``in_pairs``: the largest magnitude is that
    of an element, or of a sum of elements 2 i and 2 i + 1. ``by_powers``: the scale is the least power of two with
    which the largest magnitude is at most 127, as in MXINT8 (OCP Microscaling Formats 1.0, which lets it be up to 128
    and cuts it off); NaN from 2^111 on, and all values zero below 2^-120.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % together)).unflatten(-1, (-1, together))
    most = blocks.abs().amax(-1)
    if in_pairs:
        most = torch.maximum(most, blocks.unflatten(-1, (-1, 2)).sum(-1).abs().amax(-1))
    if not by_powers:
        return _rounded(blocks, most)
    fraction, exponent = torch.frexp(most)  # most = fraction * 2^exponent, fraction from 1/2 to 1
    exponent = exponent + (fraction > 127 / 128)
    scales = torch.where((exponent <= 111) & most.isfinite(), torch.exp2(exponent.float() - 7), torch.nan)
    inverse = torch.where(exponent < -119, 0, torch.exp2(7 - exponent.float()))
    return (blocks * inverse[..., None]).round().nan_to_num().to(torch.int8), scales


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] to int8 values and float32 scales [...]: largest magnitude / 127, nearest value, ties to even."""
    return _rounded(x.float(), x.float().abs().amax(-1))


def _rounded(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] float32 as multiples of a scale [...], 127 of which are ``most``. Numbers so small that 127 / ``most``
    is infinite count as zeros."""
    steps = torch.full_like(most, 127.0) / most  # not 127 / most, which torch computes by a rounded reciprocal
    inverse = steps.masked_fill(steps.isinf(), 0)
    return (x * inverse[..., None]).round().nan_to_num().to(torch.int8), most / 127


def dequantize_int4(data: Tensor, scale: Tensor, zero: Tensor, row_scale: Tensor) -> Tensor:
    """[N, K] float32: ``(q - zero / 8) * scale * row_scale`` of the plain bytes [N, K / 2] (packing.py)."""
    q = from_nibbles(data).unflatten(-1, (scale.shape[1], -1))
    values: Tensor = (q - zero[..., None] / 8) * (scale * row_scale[:, None])[..., None]
    return values.flatten(-2)
