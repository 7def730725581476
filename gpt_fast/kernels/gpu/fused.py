"""What stands between the products of a decode step, each in one launch: embedding, norms, rotation and cache, gate."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.fused_kernel import (
    embed_kernel,
    prepare_norm_kernel,
    rms_norm_kernel,
    rope_write_kernel,
    silu_mul_kernel,
)
from gpt_fast.kernels.gpu.linear import Row

_STRETCH = 1024


def embed(tokens: Tensor, table: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Row]:
    """Rows ``tokens`` [N] int64 of ``table`` [V, E] as ``dtype`` [N, E], and the same waiting for the first norm."""
    num_tokens, dim = tokens.shape[0], table.shape[1]
    out = torch.empty(num_tokens, dim, dtype=dtype, device=table.device)
    row = Row(torch.empty_like(out), torch.empty(num_tokens, 1, dtype=torch.float32, device=table.device), eps)
    width = launching.power_of_two(dim)
    embed_kernel[(num_tokens,)](
        tokens, table, norm, out, row.weighted, row.squares, dim, width=width, **launching.options(num_warps=8)
    )
    return out, row


def prepare_norm(x: Tensor, norm: Tensor, eps: float) -> Row:
    """x [M, E] waiting for the norm of weight ``norm`` [E]: what a product takes."""
    x = x.contiguous()
    row = Row(torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32), eps)
    width = launching.power_of_two(x.shape[1])
    prepare_norm_kernel[(x.shape[0],)](
        x, norm, row.weighted, row.squares, x.shape[1], width=width, **launching.options(num_warps=8)
    )
    return row


def rms_norm(x: Tensor, norm: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, E] (+ residual) -> its norm times ``norm`` [E], and the sum (x itself without a residual).

    Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467), in float32, rounded once.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rms_norm_kernel[(x.shape[0],)](
        x,
        None if residual is None else residual.contiguous(),
        norm,
        None if residual is None else total,
        out,
        x.shape[1],
        eps,
        width=launching.power_of_two(x.shape[1]),
        **launching.options(num_warps=8),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [M, 2 F], gate and up side by side -> silu(gate) * up [M, F]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    silu_mul_kernel[(rows, -(-size // _STRETCH))](
        gate_up.contiguous(), out, size, width=_STRETCH, **launching.options(num_warps=4)
    )
    return out


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    cache: LayerCache,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """qkv [N, (H + 2 K) D] -> queries [N, H, D], normed (``q_norm`` [D]) and rotated.

    Keys, treated alike, and values go to the cache; to one of int8 as integers, the largest magnitude of a token and
    head 127. ``cos`` and ``sin`` [N, D / 2] float32: the first half of a head is rotated against the second.
    ``write_slots`` [N] int64 as in ``StepLayout``.
    """
    num_tokens, (kv_heads, dim) = qkv.shape[0], cache.k.shape[2:]
    q = qkv.new_empty(num_tokens, num_heads, dim)
    group = num_heads // kv_heads
    rope_write_kernel[(num_tokens, kv_heads)](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        write_slots,
        q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        num_heads,
        kv_heads,
        dim // 2,
        eps,
        group=group,
        group_pad=launching.power_of_two(group),
        width=launching.power_of_two(dim // 2),
        has_norm=q_norm is not None,
        **launching.options(num_warps=2),
    )
    return q
