"""The weights of one block, as decoders of whole steps take them: C++ and Triton alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

Linear = TypeVar("Linear")


@dataclass(frozen=True)
class LayerWeights(Generic[Linear]):
    """One block of the decoder; norms of any floating dtype. ``Linear``: a linear layer as the decoder holds it.

    ``wqkv``: queries, keys and values, or queries alone where keys and values, stored otherwise, are ``wkv``.
    """

    attention_norm: Tensor
    wqkv: Linear
    wo: Linear
    ffn_norm: Tensor
    w13: Linear
    w2: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0
    wkv: Linear | None = None

    def linears(self) -> list[Linear]:
        """In the order that they run."""
        return [w for w in (self.wqkv, self.wkv, self.wo, self.w13, self.w2) if w is not None]


def layer_weights(block: Any, linear: Callable[[Any], Linear]) -> LayerWeights[Linear]:
    """Of a ``Block`` of model.py; ``linear`` converts its linear layers."""
    attention, feed_forward = block.attention, block.feed_forward
    wqkv, wkv = attention.wqkv, None
    if hasattr(wqkv, "keys_values"):  # quantize/linear.py's SplitLinear
        wqkv, wkv = wqkv.queries, wqkv.keys_values
    return LayerWeights(
        attention_norm=block.attention_norm.weight.detach(),
        wqkv=linear(wqkv),
        wkv=None if wkv is None else linear(wkv),
        wo=linear(attention.wo),
        ffn_norm=block.ffn_norm.weight.detach(),
        w13=linear(feed_forward.w13),
        w2=linear(feed_forward.w2),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight.detach(),
        k_norm=None if attention.k_norm is None else attention.k_norm.weight.detach(),
        window=attention.window,
    )
