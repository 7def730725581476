"""Transformers with memory for their weights: not yet written, or of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpt_fast.config import ModelConfig
from gpt_fast.model.transformer import Transformer

_REPEATED = 4_194_301  # elements, a prime: rows of a filled matrix are not copies of each other


class NoDraws(TorchFunctionMode):
    """Leaves out random initialisation: meta tensors have no values, and their ``normal_`` imports for two seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    column_major: bool = False,
    swap: Callable[[Transformer], object] | None = None,
    layer_devices: Sequence[torch.device] = (),
) -> Transformer:
    """A Transformer whose weights are allocated and not yet written. ``swap`` may exchange modules before that, by
    others on the meta device. ``layer_devices``: of each layer; (): all on ``device``, as is all else.

    ``column_major`` lays the matrices out transposed (their shape stays), which torch's float32 products on a CPU are
    faster with when there are few rows: docs/log.md. A head that is also the embedding table stays as it is.
    """
    with torch.device("meta"), NoDraws():
        model = Transformer(config)
    if swap:
        swap(model)
    for path, module in model.named_modules():
        part, _, rest = path.partition(".")
        on_layer = part == "layers" and rest and layer_devices
        where = layer_devices[int(rest.partition(".")[0])] if on_layer else device
        for name, parameter in list(module.named_parameters(recurse=False)):
            turned = column_major and isinstance(module, nn.Linear) and parameter.dim() == 2
            shape = parameter.shape[::-1] if turned else parameter.shape
            data = torch.empty(shape, dtype=dtype, device=where)
            data = data.t() if turned else data
            setattr(module, name, nn.Parameter(data, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Frequencies and slopes are float32 in every model, and made on the CPU; a quantized weight has a dtype.
            # empty_like of a meta tensor would import sympy: half a second.
            made = torch.empty(buffer.shape, dtype=buffer.dtype, device=where) if buffer.is_meta else buffer.to(where)
            setattr(module, name, made)
    model.tie()
    return model.eval()


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    column_major: bool = False,
) -> Transformer:
    """A model of the shape ``config`` with random weights (normal, standard deviation 0.02), for benchmarks.

    Matrices repeat one block of random numbers, because drawing billions takes minutes. The same seed gives the
    same weights on every device and in every layout.
    """
    model = empty_model(config, dtype, device, column_major)
    fill_randomly(model, seed)
    return model


@torch.no_grad()
def fill_randomly(model: Transformer, seed: int = 0) -> None:
    """Write the parameters of ``model``, in its dtype, as those of a :func:`random_model`."""
    largest = max(p.numel() for p in model.parameters())
    block = random_numbers(min(_REPEATED, largest), seed).to(model.device, model.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:  # a norm
            parameter.fill_(1.0)
        else:
            _repeat(block, parameter)


def random_numbers(count: int, seed: int = 0) -> torch.Tensor:
    """[count] float32 on the CPU, normal, of a standard deviation of 0.02."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


def _repeat(block: torch.Tensor, matrix: torch.Tensor) -> None:
    """Fill ``matrix`` with ``block``, shifted a little each time so that no row comes twice."""
    num_rows, width = matrix.shape
    step = max(1, block.numel() // width - 1)
    for i, begin in enumerate(range(0, num_rows, step)):
        count = min(step, num_rows - begin)
        shift = i * 37 % (block.numel() - count * width + 1)
        matrix[begin : begin + count].copy_(block[shift : shift + count * width].view(count, width))
