"""A mixture of experts in plain torch: each expert's tokens are gathered, computed together and added back.

Only the experts that tokens are routed to are read, whether one token decodes or a prompt's are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearRows(Protocol):
    """A quantized linear layer, of which some outputs can be computed alone."""

    out_features: int

    def __call__(self, x: Tensor, rows: slice) -> Tensor: ...


Linear = nn.Linear | LinearRows


def run_experts(
    x: Tensor,  # [..., E]
    weights: Tensor,  # [..., k] float32: of each token's experts
    chosen: Tensor,  # [..., k] int64: which they are
    up: Linear,  # a linear layer of all experts' rows, one expert's below the other's
    down: Linear,
    num_experts: int,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weighted sum of each token's experts, [..., E]. A token's sum is taken in the order of ``chosen``."""
    rows, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)  # pairs of token and expert, by expert
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    parts = rows.new_empty(flat.shape[0], x.shape[-1])
    first = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[first : first + count]
            inner = activation(_product(up, rows[pairs // k], expert, num_experts))
            parts[pairs] = _product(down, inner, expert, num_experts)
            first += count
    out = (parts.view(-1, k, x.shape[-1]).float() * weights.reshape(-1, k, 1)).sum(1)
    return out.to(x.dtype).view(x.shape)


def _product(layer: Linear, x: Tensor, expert: int, num_experts: int) -> Tensor:
    """x [n, K] times the rows of ``layer`` that are ``expert``'s."""
    n = layer.out_features // num_experts
    rows = slice(expert * n, (expert + 1) * n)
    if isinstance(layer, nn.Linear):
        return F.linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])
    return layer(x, rows)
