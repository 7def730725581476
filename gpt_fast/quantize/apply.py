"""Puts quantized layers in the place of linear ones: in a model under construction, or in one that is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpt_fast.errors import ConfigError
from gpt_fast.model.description import Part
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.linear import KINDS, QuantizedLinear, SplitLinear
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split

_CHUNK = 1 << 18  # weights quantized at a time: with what the search needs beside them they fit a cache

SchemeOf = Callable[[str], Scheme | Split | None]  # how a linear layer is stored, by the module's name in Transformer


def quantized_part(part: Part, scheme_of: SchemeOf) -> tuple[Part, Scheme | None]:
    """``part`` as the quantized model holds it, and the scheme of the linear weight that it is of, else None."""
    module, _, kind = part.target.rpartition(".")
    scheme = scheme_of(module)
    if isinstance(scheme, Split) and part.start < scheme.num_queries:
        part, scheme = part._replace(target=f"{module}.queries.{kind}"), scheme.queries
    elif isinstance(scheme, Split):
        start = part.start - scheme.num_queries
        part, scheme = part._replace(target=f"{module}.keys_values.{kind}", start=start), scheme.keys_values
    return part, scheme if kind == "weight" and len(part.shape) == 2 else None


def swap_layers(model: nn.Module, scheme_of: SchemeOf, device: torch.device | str) -> None:
    """Replace the linear layers that have a scheme by quantized ones on ``device``, not yet written.

    For a model whose weights are not there yet (``empty_model``): theirs are not looked at. Biases stay.
    """
    for name, module in list(model.named_modules()):
        scheme = scheme_of(name) if isinstance(module, nn.Linear) else None
        if scheme is not None:
            assert isinstance(module, nn.Linear)
            _replace(model, name, _like(module, scheme, device))


def quantize_model(model: Transformer, config: QuantConfig) -> None:
    """Round the weights of ``model``, in memory, to nearest, in place; each is let go of as soon as it is done."""
    quantize_layers(model, lambda name: config.scheme(name, model.config))


def quantize_layers(model: nn.Module, scheme_of: SchemeOf) -> None:
    """Round those linear layers of ``model`` that ``scheme_of`` has one for, as :func:`quantize_model` does."""
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            scheme = scheme_of(name) if isinstance(module, nn.Linear) else None
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


def check_device(quant: QuantConfig | None, device: torch.device) -> None:
    """Raise ConfigError when ``device`` cannot multiply with weights that are stored as ``quant`` says.

    fp8 needs CUDA with compute capability 8.9, or ROCm. Elsewhere int8 has the same size and a smaller error.
    """
    if quant is None or "fp8" not in [scheme.kind for scheme in (quant.blocks, quant.head) if scheme]:
        return
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 9)):
        return
    raise ConfigError(f"quantize: fp8 is not supported on {device}, which cannot multiply in it; use int8")


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
