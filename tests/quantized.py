"""What a quantized layer stands for, by the definition of its format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_fast.kernels.reference import dequantize_int4
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear


def dequantized(layer: nn.Module) -> Tensor:
    """The weight that ``layer`` multiplies with, float32 [N, K]."""
    if isinstance(layer, SplitLinear):
        return torch.cat([dequantized(piece) for piece in layer.pieces()])
    assert isinstance(layer, QuantizedLinear)
    if layer.scheme.kind == "int4":
        columns = dequantize_int4(layer.weight, layer.scale, layer.zero, layer.row_scale)[:, : layer.in_features]
    else:
        columns = layer.weight.float() * layer.scale[:, None]
    return columns if layer.order is None else columns[:, layer.order.argsort()]
