"""Puts quantized layers in the place of linear ones: in a model under construction, or in one that is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpt_fast.checkpoint.families import Part
from gpt_fast.checkpoint.loading import Slice
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.linear import KINDS, QuantizedLinear, SplitLinear
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split

_CHUNK = 1 << 18  # weights quantized at a time: with what the search needs beside them they fit a cache

Choose = Callable[[str], Scheme | Split | None]  # by the module's name in Transformer


def chooser(quant: QuantConfig, config: ModelConfig) -> Choose:
    """``quant.scheme`` for models of ``config``."""
    return lambda module: quant.scheme(module, config)


def locate(part: Part, choose: Choose) -> tuple[Part, Scheme | None]:
    """``part`` as the quantized model holds it, and the scheme of the linear weight that it is of, else None."""
    module, _, kind = part.target.rpartition(".")
    scheme = choose(module)
    if isinstance(scheme, Split) and part.start < scheme.num_queries:
        part, scheme = part._replace(target=f"{module}.queries.{kind}"), scheme.queries
    elif isinstance(scheme, Split):
        start = part.start - scheme.num_queries
        part, scheme = part._replace(target=f"{module}.keys_values.{kind}", start=start), scheme.keys_values
    return part, scheme if kind == "weight" and len(part.shape) == 2 else None


def swap_layers(model: nn.Module, choose: Choose, device: torch.device | str) -> None:
    """Replace the linear layers that ``choose`` has a scheme for by quantized ones on ``device``, not yet written.

    For a model whose weights are not there yet (``checkpoint.build``): theirs are not looked at. Biases stay.
    """
    for name, module in list(model.named_modules()):
        scheme = choose(name) if isinstance(module, nn.Linear) else None
        if scheme is not None:
            assert isinstance(module, nn.Linear)
            _replace(model, name, _like(module, scheme, device))


def quantize_model(model: Transformer, config: QuantConfig) -> None:
    """Round the weights of ``model``, in memory, to nearest, in place; each is let go of as soon as it is done."""
    quantize_layers(model, chooser(config, model.config))


def quantize_layers(model: nn.Module, choose: Choose) -> None:
    """Round those linear layers of ``model`` that ``choose`` has a scheme for, as :func:`quantize_model` does."""
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            scheme = choose(name) if isinstance(module, nn.Linear) else None
            if scheme is None:
                continue
            assert isinstance(module, nn.Linear)
            layer = _like(module, scheme, module.weight.device)
            first = 0
            for piece in layer.pieces():
                step = chunk_rows(piece.in_features)
                for begin in range(0, piece.out_features, step):
                    piece.write(begin, module.weight[first + begin : first + min(begin + step, piece.out_features)])
                first += piece.out_features
            _replace(model, name, layer)


def row_writer(
    model: Transformer,
) -> Callable[[Part, StoredTensor, Slice | None, Callable[[int], object] | None], bool]:
    """What ``checkpoint.fill`` hands weights to: those of quantized layers are rounded as they are read.

    A few rows at a time, so that no matrix is ever held in full precision.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}

    def store(
        part: Part, tensor: StoredTensor, take: Slice | None, report: Callable[[int], object] | None = None
    ) -> bool:
        name, _, kind = part.target.rpartition(".")
        layer = layers.get(name)
        if layer is None or kind != "weight":
            return False
        low, high = (take.start, take.start + take.length) if take and take.axis == 0 else (0, tensor.num_rows)
        for begin in range(low, high, chunk_rows(tensor.shape[1])):
            end = min(begin + chunk_rows(tensor.shape[1]), high)
            rows = tensor.rows(begin, end)
            if take and take.axis == 1:
                rows = rows[:, take.start : take.start + take.length]
            layer.write(part.start + begin - low, rows.to(layer.weight.device))
            tensor.release(begin, end)
            if report:
                report((end - begin) * tensor.row_bytes)
        return True

    return store


def chunk_rows(width: int) -> int:
    """Rows of ``width`` to quantize at a time."""
    return max(1, _CHUNK // width)


def _like(module: nn.Linear, scheme: Scheme | Split, device: torch.device | str) -> QuantizedLinear | SplitLinear:
    if isinstance(scheme, Split):
        return SplitLinear(module.in_features, module.out_features, scheme, module.bias, device)
    return KINDS[scheme.kind](module.in_features, module.out_features, scheme, module.bias, device)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
