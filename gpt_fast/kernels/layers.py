"""The weights of one block, as decoders of whole steps take them: C++ and Triton alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

Linear = TypeVar("Linear")


@dataclass(frozen=True)
class LayerWeights(Generic[Linear]):
    """One block of the decoder; norms of any floating dtype. ``Linear``: a linear layer as the decoder holds it."""

    attention_norm: Tensor
    wqkv: Linear
    wo: Linear
    ffn_norm: Tensor
    w13: Linear
    w2: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0


def layer_weights(block: Any, linear: Callable[[Any], Linear]) -> LayerWeights[Linear]:
    """Of a ``Block`` of model.py; ``linear`` converts its linear layers."""
    attention, feed_forward = block.attention, block.feed_forward
    return LayerWeights(
        attention_norm=block.attention_norm.weight.detach(),
        wqkv=linear(attention.wqkv),
        wo=linear(attention.wo),
        ffn_norm=block.ffn_norm.weight.detach(),
        w13=linear(feed_forward.w13),
        w2=linear(feed_forward.w2),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight.detach(),
        k_norm=None if attention.k_norm is None else attention.k_norm.weight.detach(),
        window=attention.window,
    )
