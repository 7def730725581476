"""Whole steps of a Llama-like model on a GPU: model.py's ``Transformer.step`` in six launches a layer.

    norm, qkv | q and k norm, rotation, cache | attention | wo, residual | norm, gate and up, SwiGLU | w2, residual

with one more where keys and values are stored otherwise than queries; each product leaves what the next norm needs
(linear.py). For steps of at most 16 new tokens: decoding, verifying, the end
of a prompt. Longer steps are bound by arithmetic, not by memory, and belong to ``Transformer.step`` with torch's
products (``GpuDecoder.takes``).

Every shape depends on the number of tokens alone and nothing is read on the host, so a CUDA graph can hold a step
(graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, check_cache
from gpt_fast.kernels.gpu.attention import attend, scratch
from gpt_fast.kernels.gpu.fused import embed, rope_write
from gpt_fast.kernels.gpu.linear import MAX_ROWS, Row, Weights, launch, linear, linear_residual, prepare
from gpt_fast.kernels.layers import LayerWeights, layer_weights

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # positions and lengths [N] -> cos and sin [N, D / 2] float32


class GpuDecoder:
    """Runs whole steps of at most 16 new tokens.

    ``embedding`` [V, E]; ``cache``: per layer keys and values, written in place; ``rope``: model.py's ``Rope``.
    Activations are of ``dtype``. Weights may differ in format from layer to layer. Nothing given is copied but the
    constants beside int4 weights. ``one_launch``: as in ``attention.attend``.
    """

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[LayerWeights[Weights]],
        norm: Tensor,
        output: Weights,
        cache: Sequence[LayerCache],
        rope: Rope,
        *,
        num_heads: int,
        eps: float,
        dtype: torch.dtype,
        one_launch: bool = True,
    ) -> None:
        check_cache(cache, len(layers))
        self.embedding, self.layers, self.norm, self.output = embedding, tuple(layers), norm, output
        self.cache, self.rope, self.num_heads, self.eps, self.dtype = tuple(cache), rope, num_heads, eps, dtype
        self.one_launch = one_launch
        kv_heads, head_dim = cache[0].k.shape[2:]
        self.device = embedding.device
        self._scratch = scratch(MAX_ROWS, num_heads, kv_heads, head_dim, self.device)

    @staticmethod
    def takes(num_tokens: int) -> bool:
        """Whether ``step`` runs so many new tokens; others are ``Transformer.step``'s."""
        return 1 <= num_tokens <= MAX_ROWS

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that one step streams, whatever its number of tokens."""
        blocks = (w for layer in self.layers for w in layer.linears())
        return self.output.num_bytes + sum(w.num_bytes for w in blocks)

    def step(
        self,
        tokens: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        lengths: Tensor,  # [N] int64: Transformer.step has it
        query_start: Tensor,  # the fields of attention.StepLayout
        context_len: Tensor,
        page_table: Tensor,
        write_slots: Tensor,
    ) -> Tensor:
        """Logits [N, V] float32 of all new tokens; their keys and values go into the cache.

        Tokens past ``query_start[-1]`` only pad: they must write to page 0, and their logits mean nothing. Raises
        ValueError for more than 16 tokens.
        """
        if not self.takes(tokens.shape[0]):
            raise ValueError(f"{tokens.shape[0]} new tokens; a step here takes 1 to {MAX_ROWS}")
        cos, sin = self.rope(positions, lengths)
        cos, sin = cos.contiguous(), sin.contiguous()
        x, row = embed(tokens, self.embedding, self.layers[0].attention_norm, self.eps, self.dtype)
        for i, (layer, cache) in enumerate(zip(self.layers, self.cache, strict=True)):
            after = self.layers[i + 1].attention_norm if i + 1 < len(self.layers) else self.norm
            qkv = self._qkv(layer, row)
            q = rope_write(qkv, cos, sin, write_slots, cache, self.num_heads, layer.q_norm, layer.k_norm, self.eps)
            heads = attend(
                q, cache, query_start, context_len, page_table, layer.window, self._scratch, self.one_launch
            )  # fmt: skip
            x, row = linear_residual(heads.flatten(1), layer.wo, x, layer.ffn_norm, self.eps)
            x, row = self._feed_forward(layer, x, row, after)
        return linear(row, self.output, out_dtype=torch.float32)

    def _qkv(self, layer: LayerWeights[Weights], row: Row) -> Tensor:
        if layer.wkv is None:
            return linear(row, layer.wqkv)
        split = layer.wqkv.out_features
        out = row.weighted.new_empty(row.weighted.shape[0], split + layer.wkv.out_features)
        launch(row, layer.wqkv, out[:, :split])
        launch(row, layer.wkv, out[:, split:])
        return out

    def _feed_forward(self, layer: LayerWeights[Weights], x: Tensor, row: Row, after: Tensor) -> tuple[Tensor, Row]:
        hidden = linear(row, layer.w13, gated=True)
        return linear_residual(hidden, layer.w2, x, after, self.eps)


def linear_weights(module: Any, dtype: torch.dtype) -> Weights:
    """An ``nn.Linear`` or a quantized layer (quantize/linear.py) as the kernels take it.

    Raises ValueError for int4 columns that are sorted (``order``): their inputs would have to be gathered.
    """
    scheme = getattr(module, "scheme", None)
    if scheme is None:
        return prepare("dense", module.weight, bias=module.bias)
    if getattr(module, "order", None) is not None:
        raise ValueError("int4 weights with sorted columns are not supported here")
    is_int4 = scheme.kind == "int4"
    return prepare(
        scheme.kind,
        module.weight,
        scale=module.row_scale if is_int4 else module.scale,
        grid=(module.scale, module.zero) if is_int4 else None,
        bias=module.bias,
        in_features=module.in_features,
        dtype=dtype,
    )


def decoder_of(model: Any, cache: Sequence[Any], one_launch: bool = True) -> GpuDecoder:
    """A decoder that shares the weights of ``model``, a ``Transformer`` of model.py, and its ``cache``.

    ``cache``: a ``LayerCache`` for each layer. Raises ValueError for weights that the kernels do not take.
    """
    dtype, config = model.norm.weight.dtype, model.config
    layers = [layer_weights(block, lambda module: linear_weights(module, dtype)) for block in model.layers]
    return GpuDecoder(
        model.tok_embeddings.weight.detach(),
        layers,
        model.norm.weight.detach(),
        linear_weights(model.output, dtype),
        list(cache),
        model.rope,
        num_heads=config.num_heads,
        eps=config.norm_eps,
        dtype=dtype,
        one_launch=one_launch,
    )
