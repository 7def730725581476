"""A Transformer on own kernels: its linear layers packed as the C++ kernels stream them, whole steps in one call.

``pack_model`` exchanges the modules of a loaded model, so that no weight is held twice; ``fast_step`` gives the
function that takes the place of ``Transformer.step``. The packed modules compute the same by themselves (``forward``),
which is how whole sequences without a cache run, and what the step is tested against.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast import kernels
from gpt_fast.kernels import gpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.decoder import Decoder, LinearWeights
from gpt_fast.kernels.cpu.library import CACHE_FORMATS
from gpt_fast.kernels.layers import layer_weights
from gpt_fast.model.attention import StepLayout
from gpt_fast.model.transformer import KVCache, Transformer
from gpt_fast.quantize.linear import Int4Linear, Int8Linear, SplitLinear

if TYPE_CHECKING:
    from gpt_fast.kernels.gpu.step import GpuStep

log = logging.getLogger(__name__)

_BLOCK_LINEARS = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class PackedLinear(nn.Module):
    """A linear layer with packed weights; x [..., K] -> [..., N] in the dtype of x.

    K is ``in_features``, or for int4 less: what fills up its last group may be left out of x.
    Buffers: ``weight`` as packing.py lays it out, ``scale`` float32 [N] of integers. ``bias`` float32 [N] or None.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, w: LinearWeights) -> None:
        super().__init__()
        self.kind, self.group_size = w.kind, w.group_size
        self.out_features, self.in_features = w.out_features, w.in_features
        self.register_buffer("weight", w.data)
        self.register_buffer("scale", w.scale)
        self.register_buffer("bias", None if w.bias is None else w.bias.detach().float())

    def weights(self) -> LinearWeights:
        """What the decoder is made of."""
        return LinearWeights(
            self.kind, self.weight, self.out_features, self.in_features, self.scale, self.group_size, self.bias
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "int8":
            assert self.scale is not None
            out = kernels.linear_int8(x, self.weight, self.scale)
        elif self.kind == "int4":
            assert self.scale is not None
            x = F.pad(x, (0, self.in_features - x.shape[-1]))
            out = kernels.linear_int4(x, kernels.Int4Weights(self.weight, None, None, self.scale))
        else:
            out = kernels.linear_dense(x, self.weight, self.out_features)
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


class PackedEmbedding(nn.Module):
    """The embedding table of a model whose head shares it: tokens [...] -> [..., E] from the head's packed weights."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.register_buffer("weight", head.weight)
        self.weight: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        return packing.dense_rows(self.weight, tokens)


def takes_model(model: Transformer) -> bool:
    """Whether ``pack_model`` can take ``model``: shape, device and every weight are of kinds that the kernels know."""
    table = model.tok_embeddings.weight
    if not kernels.takes_shape(model.config, table.dtype, table.device):
        return False
    return all(_known(module) for module in _linears(model).values())


def pack_model(model: Transformer) -> bool:
    """Exchange the linear layers of ``model`` for packed ones, in place, where the kernels can run it; else False.

    Each weight is let go of as soon as it is packed. The model is for inference from then on.
    """
    if isinstance(model.output, PackedLinear):
        return True
    if not takes_model(model):
        return False
    for name, module in _linears(model).items():
        packed = PackedLinear(_pack(module))
        if name == "output" and model.config.tie_embeddings:
            setattr(model, "tok_embeddings", PackedEmbedding(packed))  # noqa: B010, declared an nn.Embedding
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed)
    return True


def fast_step(model: Transformer, cache: KVCache, page_table: Tensor) -> FastStep | GpuStep | None:
    """``Transformer.step`` by own kernels, for a packed model or one on a GPU; None where they do not run it.

    ``page_table`` [S, P] int32, updated in place, is that of every step's layout.
    """
    if isinstance(model.output, PackedLinear) and cache[0].k.dtype in CACHE_FORMATS:
        return FastStep(model, cache)
    if cache[0].k.device.type == "cuda" and gpu.available():
        from gpt_fast.kernels.gpu.step import GpuStep

        try:
            return GpuStep(model, cache, page_table)
        except ValueError as why:
            log.warning("the GPU kernels do not take this model, plain torch runs it and slower: %s", why)
    return None


class FastStep:
    """Steps on a CPU. Called as ``Transformer.step`` is, always with the cache that it was made for."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        table: Tensor | LinearWeights = model.tok_embeddings.weight
        if isinstance(model.tok_embeddings, PackedEmbedding):
            table = _weights(model.output)
        config = model.config
        self._rope, self._cache = model.rope, cache
        self._decoder = Decoder(
            table,
            [layer_weights(block, _weights) for block in model.layers],
            model.norm.weight,
            _weights(model.output),
            cache,
            num_heads=config.num_heads,
            eps=config.norm_eps,
        )

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Nothing: the library is built."""

    def takes(self, num_tokens: int) -> bool:
        """Always."""
        return True

    def __call__(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, cache: KVCache, layout: StepLayout, rows: Tensor
    ) -> Tensor:
        """Logits [R, V] float32. See ``Transformer.step``."""
        assert cache is self._cache
        cos, sin = self._rope(positions, lengths)
        with torch.profiler.record_function("gpt_fast::decoder_step"):
            return self._decoder.step(tokens, cos, sin, *layout, rows)


def _linears(model: Transformer) -> dict[str, nn.Module]:
    """Every product of the model by its module's name, the head last."""
    out: dict[str, nn.Module] = {}
    for name in (*(f"layers.{i}.{name}" for i in range(len(model.layers)) for name in _BLOCK_LINEARS), "output"):
        module = model.get_submodule(name)
        if isinstance(module, SplitLinear):
            out |= {f"{name}.{piece}": part for piece, part in module.named_children()}
        else:
            out[name] = module
    return out


def _known(module: nn.Module) -> bool:
    if isinstance(module, Int4Linear):
        # Columns that only fill up a group must end with the block that they are in: activations come in whole blocks.
        return module.order is None and module.padding < packing.BLOCK
    if isinstance(module, nn.Linear):
        return module.weight.dtype in _DTYPES
    return isinstance(module, Int8Linear)


def _pack(module: nn.Module) -> LinearWeights:
    with torch.no_grad():
        if isinstance(module, Int8Linear):
            kind, data, scale, group_size = "int8", packing.pack_int8(module.weight), module.scale, 0
        elif isinstance(module, Int4Linear):
            data = packing.pack_int4_plain(module.weight, module.scale, module.zero)
            kind, scale, group_size = "int4", module.row_scale, module.scheme.group_size
        else:
            assert isinstance(module, nn.Linear)
            kind, scale, group_size = _DTYPES[module.weight.dtype], None, 0
            data = packing.pack_dense(module.weight)
    in_features = module.in_features + (module.padding if isinstance(module, Int4Linear) else 0)
    return LinearWeights(kind, data, module.out_features, in_features, scale, group_size, module.bias)


def _weights(module: nn.Module) -> LinearWeights:
    assert isinstance(module, PackedLinear)
    return module.weights()
