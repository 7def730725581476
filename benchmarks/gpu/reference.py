"""Plain twins for checks of single kernels: a product with all that is fused to it, and decoding, in float32.

The twins of whole steps, of attention in any step and of rotation are in gpt_fast/model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x [M, K], dequantized weight [N, K] -> [M, N or N / 2] float32: norm, product, bias, SwiGLU, residual."""
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    out = F.linear(x, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual.float()


def decode(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, length: int, window: int) -> Tensor:
    """The last token q [H, D] of a sequence of ``length`` in ``pages`` [P] -> [H, D]; k and v [num_pages, G, K, D]."""
    low = max(0, length - window) if window else 0
    keys, values = (t[pages.long()].flatten(0, 1)[low:length].float().transpose(0, 1) for t in (k, v))  # [K, T, D]
    return F.scaled_dot_product_attention(q.float()[:, None], keys, values, enable_gqa=True)[:, 0]
