"""A ``Transformer`` as a program of the Triton kernels, which shares its weights. Imported on a GPU alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, check_cache
from gpt_fast.kernels.gpu.fused import Table
from gpt_fast.kernels.gpu.linear import Weights, prepare, stacked
from gpt_fast.kernels.gpu.program import BlockWeights, GpuProgram, Joined
from gpt_fast.model import description as d
from gpt_fast.model.shares import Collectives, joined_logits
from gpt_fast.model.transformer import Block, KVCache, Transformer
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear


def gpu_program(model: Transformer, cache: KVCache, ranks: Collectives | None = None) -> GpuProgram:
    """The steps of ``model`` over ``cache``. ``ranks``: it is the share of one of them, joined with the others'
    (shares.py). Raises UnsupportedError for what the kernels do not run."""
    modules: Sequence[Block] = (model.embed, *model.layers, model.head)
    caches: Sequence[LayerCache | None] = (None, *cache, None)
    shared = ranks is not None
    weights = [_block_weights(module, c, model.dtype, shared) for module, c in zip(modules, caches, strict=True)]
    check_cache(cache)
    joined = None if ranks is None else Joined(ranks.sum, joined_logits(ranks, model.config.vocab_size))
    return GpuProgram(model.description, weights, list(model.ropes), model.dtype, joined)


def _block_weights(module: Block, cache: LayerCache | None, dtype: torch.dtype, shared: bool) -> BlockWeights:
    def parameter(name: str, kind: str = "weight") -> torch.Tensor:
        return module.get_parameter(f"{name}.{kind}").detach()

    def pieces(name: str) -> list[Weights]:
        return _pieces(module.get_submodule(name), block.prefix + name, dtype)

    def table(t: d.Table) -> Table:
        return module.get_submodule(t.name) if shared and t.split == "rows" else parameter(t.name)

    block = module.block
    return BlockWeights(
        {m.name: [stacked(piece, m.num_experts or 1) for piece in pieces(m.name)] for m in block.matrices},
        {v.name: parameter(v.name) for v in block.vectors},
        {t.name: table(t) for t in block.tables},
        cache,
        {v.name: parameter(v.name, "bias") for v in block.vectors if v.bias},
        module.slopes,
        [m.name for m in block.matrices if shared and m.split == "columns"],
    )


def _pieces(module: nn.Module, name: str, dtype: torch.dtype) -> list[Weights]:
    if isinstance(module, SplitLinear):
        return [piece.gpu_weights(dtype) for piece in module.pieces()]
    if isinstance(module, QuantizedLinear):
        return [module.gpu_weights(dtype)]
    if isinstance(module, nn.Linear):
        return [prepare(module.weight, bias=module.bias)]
    raise UnsupportedError(f"{type(module).__name__} ({name})")
