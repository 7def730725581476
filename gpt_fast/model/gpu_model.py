"""A ``Transformer`` as a program of the Triton kernels, which shares its weights. Imported on a GPU alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, check_cache
from gpt_fast.kernels.gpu.linear import Weights, prepare, stacked
from gpt_fast.kernels.gpu.program import BlockWeights, GpuProgram
from gpt_fast.model.transformer import Block, KVCache, Transformer
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear


def gpu_program(model: Transformer, cache: KVCache) -> GpuProgram:
    """The steps of ``model`` over ``cache``. Raises UnsupportedError for what the kernels do not run."""
    modules: Sequence[Block] = (model.embed, *model.layers, model.head)
    caches: Sequence[LayerCache | None] = (None, *cache, None)
    weights = [_block_weights(module, c, model.dtype) for module, c in zip(modules, caches, strict=True)]
    check_cache(cache)
    return GpuProgram(model.description, weights, list(model.ropes), model.dtype)


def _block_weights(module: Block, cache: LayerCache | None, dtype: torch.dtype) -> BlockWeights:
    def parameter(name: str, kind: str = "weight") -> torch.Tensor:
        return module.get_parameter(f"{name}.{kind}").detach()

    def pieces(name: str) -> list[Weights]:
        return _pieces(module.get_submodule(name), block.prefix + name, dtype)

    block = module.block
    return BlockWeights(
        {m.name: [stacked(piece, m.num_experts or 1) for piece in pieces(m.name)] for m in block.matrices},
        {v.name: parameter(v.name) for v in block.vectors},
        {t.name: parameter(t.name) for t in block.tables},
        cache,
        {v.name: parameter(v.name, "bias") for v in block.vectors if v.bias},
    )


def _pieces(module: nn.Module, name: str, dtype: torch.dtype) -> list[Weights]:
    if isinstance(module, SplitLinear):
        return [piece.gpu_weights(dtype) for piece in module.pieces()]
    if isinstance(module, QuantizedLinear):
        return [module.gpu_weights(dtype)]
    if isinstance(module, nn.Linear):
        return [prepare(module.weight, bias=module.bias)]
    raise UnsupportedError(f"{type(module).__name__} ({name})")
