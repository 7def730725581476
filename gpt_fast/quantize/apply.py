"""Puts quantized layers in the place of linear ones: in a model under construction, or in one that is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.model.building import empty_model, fill_randomly, random_numbers
from gpt_fast.model.description import Part
from gpt_fast.model.transformer import Transformer, weight_bytes
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear
from gpt_fast.quantize.rtn import quantize_rows, quantized_pieces
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split

_REPEATED_ROWS = 1024
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


def swap_layers(model: nn.Module, scheme_of: SchemeOf, device: torch.device | str, *, rounded: bool = False) -> None:
    """Replace the linear layers that have a scheme by quantized ones on ``device``. Biases stay.

    ``rounded``: their weights are rounded to nearest, and each is let go of as soon as that is done. Otherwise the new
    layers are not yet written, and the old weights are not looked at: they may be those of an ``empty_model``.
    """
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        scheme, old = scheme_of(name), model.get_submodule(name)
        if scheme is None:
            continue
        assert isinstance(old, nn.Linear)
        new: QuantizedLinear | SplitLinear
        if isinstance(scheme, Split):
            new = SplitLinear(old.in_features, old.out_features, scheme, old.bias, device)
        else:
            new = QuantizedLinear(old.in_features, old.out_features, scheme, old.bias, device)
        if rounded:
            sizes = [piece.out_features for piece in new.pieces()]
            for piece, weight in zip(new.pieces(), old.weight.detach().split(sizes), strict=True):
                for begin, tensors in quantized_pieces(StoredTensor(weight), piece.scheme, device):
                    piece.store(begin, tensors)
        model.set_submodule(name, new)


def quantize_model(model: Transformer, config: QuantConfig) -> None:
    """Round the weights of ``model``, in memory, to nearest, in place. Raises ConfigError for one that has linear
    layers quantized otherwise; those that are as ``config`` says stay."""
    for block in (model.embed, *model.layers, model.head):
        for matrix in block.block.matrices:
            module = block.get_submodule(matrix.name)
            if isinstance(module, (QuantizedLinear, SplitLinear)):
                scheme = config.scheme(block.block.prefix + matrix.name, model.config)
                wanted = [scheme.queries, scheme.keys_values] if isinstance(scheme, Split) else [scheme]
                if [piece.scheme for piece in module.pieces()] != wanted:
                    raise ConfigError("quantize: the weights of this model are quantized already; leave it out")
    _swap_all(model, config, model.device, rounded=True)


def random_quantized(config: ModelConfig, dtype: torch.dtype, device: torch.device, quant: QuantConfig) -> Transformer:
    """A model of the shape ``config`` with random weights stored as ``quant`` says, for benchmarks. Its linear layers
    are never whole in ``dtype``, so it needs no more memory than it keeps. Their rows repeat the first ones."""
    model = empty_model(config, dtype, device, swap=lambda made: _swap_all(made, quant, "meta"))
    fill_randomly(model)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            count = min(_REPEATED_ROWS, layer.out_features)
            rows = random_numbers(count * layer.in_features).view(count, -1).to(device, dtype)
            tensors = quantize_rows(rows, layer.scheme)
            for begin in range(0, layer.out_features, count):
                left = min(count, layer.out_features - begin)
                layer.store(begin, {name: tensor[:left] for name, tensor in tensors.items()})
    return model


def bytes_of(config: ModelConfig, dtype: torch.dtype, quant: QuantConfig | None) -> int:
    """What the weights of a model of ``config`` take that is in ``dtype`` but for what ``quant`` says."""
    swap = None if quant is None else lambda made: _swap_all(made, quant, "meta")
    return weight_bytes(empty_model(config, dtype, "meta", swap=swap))


def _swap_all(model: Transformer, quant: QuantConfig, device: torch.device | str, *, rounded: bool = False) -> None:
    swap_layers(model, lambda name: quant.scheme(name, model.config), device, rounded=rounded)


def check_device(quant: QuantConfig | None, device: torch.device, option: str = "quantize") -> None:
    """Raise ConfigError, which names ``option``, when ``device`` cannot multiply with weights that are stored as
    ``quant`` says.

    fp8 needs CUDA with compute capability 8.9, or ROCm. Elsewhere int8 has the same size and a smaller error.
    """
    kinds = [scheme.kind for scheme in (quant.blocks, quant.head) if scheme] if quant else []
    if "fp8" in kinds and not (
        device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 9))
    ):
        todo = "use int8, and for a checkpoint that is stored in fp8 the unquantized one"
        raise ConfigError(f"{option}: fp8 is not supported on {device}, which cannot multiply in it; {todo}")
