"""Linear layers with quantized weights, in the place of ``nn.Linear``.

Their weights are buffers in the format of scheme.py. A product has one of two semantics. Exact: the stored weights
times the activations as they are (``reference.exact_product``). Rounded: times the activations rounded to 8 bits in
blocks of 32 (``reference.rounded_product``), which is what the C++ kernels compute; ``rounded`` makes a layer their
twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels import gpu
from gpt_fast.kernels.reference import dequantize_int4, exact_product, rounded_product
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import Scheme, Split

if TYPE_CHECKING:
    from gpt_fast.kernels.gpu.linear import Weights

ALL = slice(None)  # rows


class QuantizedLinear(nn.Module):
    """What the three kinds share: allocation, writing, the bias.

    The buffers are those of ``scheme.tensors``, on ``device``, not yet written.
    """

    weight: Tensor
    scale: Tensor
    bias: nn.Parameter | None
    rounded = False  # which of the two semantics; a test or a twin sets it

    def __init__(
        self, in_features: int, out_features: int, scheme: Scheme, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self._kernels = gpu.available()  # asked here, because torch.compile cannot trace the question
        self._gpu_weights: dict[torch.dtype, Weights] = {}
        for name, (dtype, shape) in scheme.tensors(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))
        self.register_parameter("bias", bias)

    def pieces(self) -> tuple[QuantizedLinear, ...]:
        """The layers that this one is made of: itself."""
        return (self,)

    def write(self, start: int, rows: Tensor) -> None:
        """Quantize ``rows`` [n, K] by rounding to nearest and store them as outputs [start, start + n)."""
        for name, tensor in quantize_rows(rows, self.scheme).items():
            self.get_buffer(name)[start : start + rows.shape[0]].copy_(tensor)

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """[..., K] -> [..., N] in the dtype of ``x``; ``rows``: some of the N outputs alone."""
        out = self._gpu_product(x) if rows is None and self._on_gpu(x) else self.product(x, rows or ALL)
        return out if self.bias is None else out + self.bias[rows or ALL]

    def _on_gpu(self, x: Tensor) -> bool:
        return self._kernels and x.device.type == "cuda"

    def product(self, x: Tensor, rows: slice = ALL) -> Tensor:
        """The output without the bias, in plain torch, float32 until it is whole."""
        return self._multiply(x, self.dequantized(rows))

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return (rounded_product if self.rounded else exact_product)(x, weight).to(x.dtype)

    def gpu_weights(self, dtype: torch.dtype) -> Weights:
        """These weights as Triton's kernels take them for activations of ``dtype``, made once.

        Raises UnsupportedError for those that the kernels do not take.
        """
        if dtype not in self._gpu_weights:
            self._gpu_weights[dtype] = self._prepared(dtype)
        return self._gpu_weights[dtype]

    def _prepared(self, dtype: torch.dtype) -> Weights:
        from gpt_fast.kernels.gpu.linear import prepare

        return prepare(self.weight, scale=self.scale, bias=self.bias)

    def _gpu_product(self, x: Tensor) -> Tensor:
        """:meth:`product` by Triton's kernels, for many rows by torch on weights widened for the moment."""
        from gpt_fast.kernels.gpu.linear import product

        return product(x, self.gpu_weights(x.dtype)._replace(bias=None))

    def dequantized(self, rows: slice = ALL) -> Tensor:
        """The weight that this layer multiplies with, float32 [N, K]."""
        return self.weight[rows].float() * self.scale[rows, None]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"


class Int8Linear(QuantizedLinear):
    """int8 with a scale per output channel."""


class Fp8Linear(QuantizedLinear):
    """float8_e4m3fn with a scale per output channel."""


class Int4Linear(QuantizedLinear):
    """int4 with a scale and a zero per group of inputs.

    ``order``: int64 [K] or None. Input ``order[i]`` is multiplied with column i: checkpoints of others may have sorted
    their columns (hub.py).
    """

    zero: Tensor
    row_scale: Tensor
    order: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, scheme: Scheme, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        super().__init__(in_features, out_features, scheme, bias, device)
        self.register_buffer("order", None)
        self.padding = scheme.padded(in_features) - in_features

    def _prepared(self, dtype: torch.dtype) -> Weights:
        from gpt_fast.kernels.gpu.linear import prepare

        if self.order is not None:
            raise UnsupportedError("int4 weights with sorted columns")
        return prepare(
            self.weight, scale=self.row_scale, grid=(self.scale, self.zero), bias=self.bias,
            in_features=self.in_features, dtype=dtype,
        )  # fmt: skip

    def _gpu_product(self, x: Tensor) -> Tensor:
        return self.product(x) if self.order is not None else super()._gpu_product(x)

    def product(self, x: Tensor, rows: slice = ALL) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return self._multiply(x, self._columns(rows))

    def dequantized(self, rows: slice = ALL) -> Tensor:
        columns = self._columns(rows)
        return columns if self.order is None else columns[:, self.order.argsort()]

    def _columns(self, rows: slice) -> Tensor:
        """The weight in the order of its columns, without padding."""
        stored = (self.weight[rows], self.scale[rows], self.zero[rows], self.row_scale[rows])
        return dequantize_int4(*stored)[:, : self.in_features]


class SplitLinear(nn.Module):
    """``wqkv`` in two layers: the outputs that are queries, and those that are keys and values."""

    def __init__(
        self, in_features: int, out_features: int, split: Split, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        n, rest = split.num_queries, out_features - split.num_queries
        ours, theirs = (None, None) if bias is None else map(nn.Parameter, bias.detach().split((n, rest)))
        self.queries = KINDS[split.queries.kind](in_features, n, split.queries, ours, device)
        self.keys_values = KINDS[split.keys_values.kind](in_features, rest, split.keys_values, theirs, device)

    def pieces(self) -> tuple[QuantizedLinear, ...]:
        """In the order of their outputs."""
        return self.queries, self.keys_values

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the dtype of ``x``."""
        return torch.cat((self.queries(x), self.keys_values(x)), dim=-1)

    def dequantized(self) -> Tensor:
        """The weight that this layer multiplies with, float32 [N, K]."""
        return torch.cat([piece.dequantized() for piece in self.pieces()])


KINDS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}
