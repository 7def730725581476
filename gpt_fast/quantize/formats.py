"""How checkpoints hold their linear weights: as they are, quantized here, or (hub.py) quantized by others.

A format says which stored tensors a part of the model needs, and fills rows of a quantized layer from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.model.describing import parts
from gpt_fast.model.description import Layout, Part
from gpt_fast.quantize.apply import quantized_part
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import quantized_pieces
from gpt_fast.quantize.scheme import METHOD, QuantConfig, Scheme, Split

Specs = dict[str, tuple[torch.dtype | None, tuple[int, ...]]]  # dtype (None: any floating one) and shape by name
Tensors = Mapping[str, StoredTensor]  # of a checkpoint, by name


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


def in_order(stored: StoredTensor, layout: Layout) -> StoredTensor:
    """``stored``, whose rows have ``layout``, its rows in the parameter's order."""
    if layout.kind == "transposed":
        return stored.transposed()
    return stored if layout.kind == "plain" else stored.picked(row_order(layout, stored.num_rows))


def plain_weight(part: Part, tensors: Tensors) -> StoredTensor:
    """The unquantized tensor that ``part`` is read from, its rows in the parameter's order."""
    return in_order(tensors[part.source], part.layout)


def beside(part: Part, name: str) -> str:
    """What the stored tensor ``name`` of the linear layer is called whose weight is ``part``."""
    return part.source.removesuffix("weight") + name


class Format:
    """Weights as they are. ``quant``: of the formats that are made here."""

    method: str | None = None  # quant_method of the checkpoint's config.json
    has_values = True  # the tensors of the checkpoint can be read as the weights' values, and rounded anew
    dtype: torch.dtype | None = None  # of what is not quantized; None: as it is stored

    def __init__(self, quant: QuantConfig | None = None) -> None:
        self.quant = quant

    def scheme(self, module: str, config: ModelConfig) -> Scheme | Split | None:
        """How the model of ``config`` holds the linear layer ``module``; None: unquantized."""
        return self.quant.scheme(module, config) if self.quant is not None else None

    def held(self, part: Part, config: ModelConfig) -> tuple[Part, Scheme | None]:
        """``part`` as the model of ``config`` holds it, and its scheme (``quantized_part``)."""
        return quantized_part(part, lambda module: self.scheme(module, config))

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """The stored tensors that ``part``, of a layer with ``scheme``, is made of."""
        return {part.source: (None, part.stored_shape)}

    def specs(self, config: ModelConfig) -> Specs:
        """Every tensor that a checkpoint of ``config`` holds."""
        found: Specs = {}
        for part in parts(config):
            found |= self.tensors(*self.held(part, config))
        return found

    def weight(self, part: Part, tensors: Tensors) -> StoredTensor:
        """The tensor of an unquantized ``part``, its rows in the parameter's order."""
        return plain_weight(part, tensors)

    def load(self, model: nn.Module, part: Part, tensors: Tensors, cut: Cut, report: Report = None) -> None:
        """Write ``part``, the share ``cut`` of what is stored, into ``model``, whose layers have their schemes."""
        name, _, kind = part.target.rpartition(".")
        module = model.get_submodule(name)
        if kind == "weight" and isinstance(module, QuantizedLinear):
            self.fill(module, part, tensors, cut, report)
        else:
            target = module.get_parameter(kind)[part.start : part.start + part.shape[0]]
            cut.of(self.weight(part, tensors)).copy_to(target, report)

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        """Write ``part``, the share ``cut`` of what is stored, as rows [``part.start``, ...) of ``layer``."""
        raise NotImplementedError


class RoundedFormat(Format):
    """Weights as they are, quantized while they are read.

    A few rows at a time, so that no matrix is ever held in full precision. A rank that has columns reads whole rows:
    their largest value decides the scale, and ranks together hold what one alone would.
    """

    def pieces(
        self, stored: StoredTensor, scheme: Scheme, device: torch.device | str, report: Report = None
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """``stored`` as the tensors of ``scheme``, a few rows at a time: the number of the first one, and the tensors.
        Here it is rounded to nearest."""
        return quantized_pieces(stored, scheme, device, report)

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        stored = cut.rows_of(plain_weight(part, tensors))
        for begin, rows in self.pieces(stored, layer.scheme, layer.weight.device, report):
            layer.store(part.start + begin, {name: cut.columns_of(tensor) for name, tensor in rows.items()})


class OwnFormat(Format):
    """Weights in the tensors that scheme.py declares; rows of all tensors in the parameters' order."""

    method, has_values = METHOD, False

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        if scheme is None:
            return {part.source: (None, part.shape)}
        return {beside(part, name): spec for name, spec in scheme.tensors(*part.shape).items()}

    def weight(self, part: Part, tensors: Tensors) -> StoredTensor:
        return tensors[part.source]

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        for name, buffer in layer.named_buffers():
            target = buffer[part.start : part.start + part.shape[0]]
            cut.of(tensors[beside(part, name)]).copy_to(target, report)
