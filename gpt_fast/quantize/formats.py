"""How checkpoints hold their linear weights: as they are, quantized here, or (hub.py) quantized by others.

A format says which stored tensors a part of the model needs, and fills rows of a quantized layer from them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.model.description import Layout, Part
from gpt_fast.quantize.apply import chunk_rows
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import METHOD, QuantConfig, Scheme, Split

Specs = dict[str, tuple[torch.dtype | None, tuple[int, ...]]]  # dtype (None: any floating one) and shape by name


def row_order(layout: Layout, num_rows: int) -> torch.Tensor:
    """int64 [num_rows]: where the rows of a parameter stand in a stored tensor of ``layout``."""
    rows = torch.arange(num_rows)
    if layout.kind == "heads":
        heads = rows.view(layout.groups, -1, layout.head_dim)  # a group: its queries, its key, its value
        return torch.cat([heads[:, :-2].flatten(), heads[:, -2].flatten(), heads[:, -1].flatten()])
    if layout.kind == "pairs":
        heads = rows.view(-1, layout.head_dim)
        turning = heads[:, : layout.pairs].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return torch.cat([turning, heads[:, layout.pairs :]], dim=1).flatten()
    return rows


def plain_weight(part: Part, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """The unquantized tensor that ``part`` is read from, its rows in the parameter's order."""
    stored = tensors[part.source]
    if part.layout.kind == "transposed":
        return stored.transposed()
    return stored if part.layout.kind == "plain" else stored.picked(row_order(part.layout, stored.num_rows))


class Format:
    """Weights as they are. ``method``: ``quant_method`` of the checkpoint's ``config.json``."""

    method: str | None = None
    quant: QuantConfig | None = None  # of the formats that are made here
    can_be_divided = True  # between tensor-parallel ranks

    def scheme(self, module: str, config: ModelConfig) -> Scheme | Split | None:
        """How the model of ``config`` holds the linear layer ``module``; None: unquantized."""
        return self.quant.scheme(module, config) if self.quant is not None else None

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """The stored tensors that ``part``, of a layer with ``scheme``, is made of."""
        return {part.source: (None, part.stored_shape)}

    def weight(self, part: Part, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
        """The tensor of an unquantized ``part``, its rows in the parameter's order."""
        return plain_weight(part, tensors)

    def fill(
        self, layer: QuantizedLinear, part: Part, tensors: Mapping[str, StoredTensor], cut: Cut, report: Report
    ) -> None:
        """Write ``part``, the share ``cut`` of what is stored, as rows [``part.start``, ...) of ``layer``."""
        raise NotImplementedError


class RoundedFormat(Format):
    """Weights as they are, rounded to nearest while they are read.

    A few rows at a time, so that no matrix is ever held in full precision. A rank that has columns reads whole rows:
    their largest value decides the scale, and ranks together hold what one alone would.
    """

    def __init__(self, quant: QuantConfig) -> None:
        self.quant = quant

    def fill(
        self, layer: QuantizedLinear, part: Part, tensors: Mapping[str, StoredTensor], cut: Cut, report: Report
    ) -> None:
        """Round and write."""
        stored = cut.rows_of(plain_weight(part, tensors))
        step = chunk_rows(stored.shape[1])
        for begin in range(0, stored.num_rows, step):
            end = min(begin + step, stored.num_rows)
            rows = stored.rows(begin, end).to(layer.weight.device)
            for name, tensor in quantize_rows(rows, layer.scheme).items():
                layer.get_buffer(name)[part.start + begin : part.start + end].copy_(cut.columns_of(tensor))
            stored.release(begin, end)
            if report:
                report((end - begin) * stored.row_bytes)


class OwnFormat(Format):
    """Weights in the tensors that scheme.py declares, and all others too in the parameters' order of rows."""

    method = METHOD

    def __init__(self, quant: QuantConfig) -> None:
        self.quant = quant

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """Those of the scheme, beside each other under the weight's name."""
        if scheme is None:
            return {part.source: (None, part.shape)}
        prefix = part.source.removesuffix("weight")
        return {prefix + name: spec for name, spec in scheme.tensors(*part.shape).items()}

    def weight(self, part: Part, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
        """As it is."""
        return tensors[part.source]

    def fill(
        self, layer: QuantizedLinear, part: Part, tensors: Mapping[str, StoredTensor], cut: Cut, report: Report
    ) -> None:
        """Copy."""
        prefix = part.source.removesuffix("weight")
        for name, buffer in layer.named_buffers():
            target = buffer[part.start : part.start + part.shape[0]]
            cut.of(tensors[prefix + name]).copy_to(target, report)
