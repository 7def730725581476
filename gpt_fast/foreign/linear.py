"""The linear layers of a model of transformers: in int8, and by our kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cpu.library import runs
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.model import description as d
from gpt_fast.model.cpu_model import pack_rows
from gpt_fast.quantize.apply import swap_layers
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.scheme import Scheme


def round_linears(model: nn.Module) -> None:
    """Round the linear layers of ``model`` to int8, in place, as far as :func:`_exchange` does."""

    def rounded(linear: nn.Module) -> nn.Module:
        around = nn.Sequential(linear)
        swap_layers(around, lambda _: Scheme("int8"), next(linear.parameters()).device, rounded=True)
        return around[0]

    _exchange(model, rounded)


def use_kernels(model: nn.Module) -> None:
    """Let the C++ kernels compute the linear layers of ``model``, where they run, as far as :func:`_exchange` does."""
    parameter = next(model.parameters())
    if runs(parameter.dtype, parameter.device):
        _exchange(model, lambda linear: KernelLinear(linear, parameter.dtype))


@torch.inference_mode()
def _exchange(model: Any, make: Callable[[nn.Module], nn.Module]) -> None:
    """Put what ``make`` makes of them in the place of linear layers.

    A head that is the embedding table stays as it is, and so do layers whose weights the model's code reads by itself:
    the first layer of each kind is tried on a few tokens. Names of one kind differ only in numbers.
    """
    kinds: dict[str, list[str]] = {}
    for name in _linears(model):
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    tokens = torch.arange(3, device=next(model.parameters()).device)[None]
    wanted = model(input_ids=tokens, use_cache=False).logits.float()

    def works(tried: Iterable[str]) -> bool:
        firsts = {kinds[kind][0]: model.get_submodule(kinds[kind][0]) for kind in tried}
        try:
            for name, linear in firsts.items():
                model.set_submodule(name, make(linear))
            found = model(input_ids=tokens, use_cache=False).logits.float()
        except Exception:  # whatever the model's code does with a weight that it does not know
            return False
        finally:
            for name, linear in firsts.items():
                model.set_submodule(name, linear)
        return bool((found - wanted).abs().mean() < 0.3 * wanted.std())

    for kind in list(kinds) if works(kinds) else [kind for kind in kinds if works([kind])]:
        for name in kinds[kind]:
            model.set_submodule(name, make(model.get_submodule(name)))


def _linears(model: nn.Module) -> list[str]:
    """The names of linear layers whose weights are no embedding table."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds = (nn.Linear, QuantizedLinear)
    return [name for name, m in model.named_modules() if type(m) in kinds and id(m.weight) not in tables]


class _Gone(NamedTuple):
    """A weight that was packed. No tensor, so that what computes with it fails."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class KernelLinear(nn.Module):
    """``linear``, whose weights it packs, by the C++ kernels: [..., K] -> [..., N] in the dtype of the input.

    ``weight`` says what was there, for code that asks for its ``dtype``; its values are not there.
    """

    def __init__(self, linear: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear | QuantizedLinear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed: PackedWeights = pack_rows(linear, slice(0, linear.out_features))
        self.weight = _Gone(dtype, torch.Size((self.out_features, self.in_features)), packed.data.device)
        self.bias = linear.bias
        self.register_buffer("packed", packed.data, persistent=True)
        weights = Weights({"w": (packed,)}, splits={"w": "whole"})
        product = d.Product("in", "out", "w")
        self._program = Program([((product,), weights)], "out", input=("in", self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise UnsupportedError(f"inputs of {x.shape[-1]} numbers, not {self.in_features}")
        flat = x.reshape(-1, self.in_features).float()
        rows = torch.arange(len(flat))
        out = self._program.run(rows, rows, [], None, rows, flat)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"
