"""Linear layers with quantized weights, in the place of ``nn.Linear``.

A product has one of two semantics. Exact: the stored weights times the activations as they are
(``reference.exact_product``). Rounded: times the activations rounded to 8 bits in blocks
(``reference.rounded_product``), which is what the C++ kernels compute; ``rounded`` makes a layer their twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels import gpu
from gpt_fast.kernels.cpu.packing import nibbles
from gpt_fast.kernels.reference import dequantize_int4, exact_product, rounded_product
from gpt_fast.quantize.scheme import Scheme, Split

if TYPE_CHECKING:
    from gpt_fast.kernels.gpu.linear import Weights

_ALL = slice(None)  # rows


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are the tensors of ``scheme``: buffers on ``device``, not yet written.

    ``order``: int64 [K] or None. Input ``order[i]`` is multiplied with column i: checkpoints of others may have sorted
    their columns (hub.py).
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor  # this and row_scale: int4 alone
    row_scale: Tensor
    order: Tensor | None
    bias: nn.Parameter | None
    rounded = False  # which of the two semantics; a test sets it

    def __init__(
        self, in_features: int, out_features: int, scheme: Scheme, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.padding = scheme.padded(in_features) - in_features
        self._kernels = gpu.available()  # asked here, because torch.compile cannot trace the question
        self._gpu_weights: dict[torch.dtype, Weights] = {}  # by the dtype of activations, each made once
        for name, (dtype, shape) in scheme.tensors(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))
        self.register_buffer("order", None)
        self.register_parameter("bias", bias)

    def pieces(self) -> tuple[QuantizedLinear, ...]:
        """The layers that this one is made of: itself."""
        return (self,)

    def store(self, start: int, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors`` of the scheme, of n outputs, as outputs [start, start + n)."""
        for name, tensor in tensors.items():
            self.get_buffer(name)[start : start + len(tensor)].copy_(tensor)

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """[..., K] -> [..., N] in the dtype of ``x``; ``rows``: some of the N outputs alone."""
        if self._on_gpu(x):
            from gpt_fast.kernels.gpu.linear import product, rows_of

            weights = self.gpu_weights(x.dtype)._replace(bias=None)
            out = product(x, weights if rows is None else rows_of(weights, rows))
        else:  # in plain torch, float32 until the product is whole
            ordered = x if self.order is None else x.index_select(-1, self.order)
            weight = self._columns(rows or _ALL)
            found = (
                rounded_product(ordered, weight, self.scheme.kind) if self.rounded else exact_product(ordered, weight)
            )
            out = found.to(x.dtype)
        return out if self.bias is None else out + self.bias[rows or _ALL]

    def _on_gpu(self, x: Tensor) -> bool:
        return self._kernels and x.device.type == "cuda" and self.order is None

    def _columns(self, rows: slice) -> Tensor:
        """The weight in the order of its columns, without padding, float32 [N, K]."""
        if self.scheme.kind != "int4":
            return self.weight[rows].float() * self.scale[rows, None]
        stored = (self._codes(rows), self.scale[rows], self.zero[rows], self.row_scale[rows])
        return dequantize_int4(*stored)[:, : self.in_features]

    def _codes(self, rows: slice) -> Tensor:
        """int4's, in the order of the scheme. :meth:`gpu_weights` leaves them in the order of Triton's kernels."""
        if self.weight.dim() == 2:
            return self.weight[rows]
        from gpt_fast.kernels.gpu.linear import from_chunks

        return nibbles(from_chunks(self.weight[:, rows])[:, : self.in_features + self.padding])

    def gpu_weights(self, dtype: torch.dtype) -> Weights:
        """As Triton's kernels take them for activations of ``dtype``; this layer keeps no others. Raises
        UnsupportedError for what they do not take."""
        if dtype not in self._gpu_weights:
            from gpt_fast.kernels.gpu.linear import prepare

            if self.order is not None:
                raise UnsupportedError("int4 weights with sorted columns")
            int4 = self.scheme.kind == "int4"
            self._gpu_weights[dtype] = found = prepare(
                self._codes(_ALL) if int4 else self.weight, scale=self.row_scale if int4 else self.scale,
                grid=(self.scale, self.zero) if int4 else None, bias=self.bias, in_features=self.in_features,
                dtype=dtype,
            )  # fmt: skip
            if int4:
                self.weight = found.data
        return self._gpu_weights[dtype]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"


class SplitLinear(nn.Module):
    """``wqkv`` in two layers: the outputs that are queries, and those that are keys and values."""

    def __init__(
        self, in_features: int, out_features: int, split: Split, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        super().__init__()
        sizes = (split.num_queries, out_features - split.num_queries)
        ours, theirs = (None, None) if bias is None else map(nn.Parameter, bias.detach().split(sizes))
        self.queries = QuantizedLinear(in_features, sizes[0], split.queries, ours, device)
        self.keys_values = QuantizedLinear(in_features, sizes[1], split.keys_values, theirs, device)

    def pieces(self) -> tuple[QuantizedLinear, ...]:
        """In the order of their outputs."""
        return self.queries, self.keys_values

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.queries(x), self.keys_values(x)), dim=-1)
