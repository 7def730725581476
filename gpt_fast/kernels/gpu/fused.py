"""What stands between the products of a decode step, each in one launch: embedding, a norm's preparation, heads."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.fused_kernel import embed_kernel, prepare_norm_kernel, rope_write_kernel
from gpt_fast.kernels.gpu.linear import Row


def embed(
    tokens: Tensor, table: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Row]:
    """Rows ``tokens`` [N] int64 of ``table`` [V, E] as ``dtype`` [N, E], and the same waiting for the first norm.

    They are multiplied by ``scale`` rounded to ``dtype``.
    """
    num_tokens, dim = tokens.shape[0], table.shape[1]
    out = torch.empty(num_tokens, dim, dtype=dtype, device=table.device)
    row = Row(torch.empty_like(out), torch.empty(num_tokens, 1, dtype=torch.float32, device=table.device), eps)
    width = launching.power_of_two(dim)
    embed_kernel[(num_tokens,)](
        tokens, table, norm, out, row.weighted, row.squares, dim,
        None if scale == 1.0 else torch.tensor(scale, dtype=dtype).item(),
        width=width, **launching.options(num_warps=8),
    )  # fmt: skip
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
    head 127. ``cos`` and ``sin`` [N, R / 2] float32: of the first R dimensions of a head, at most D, the first half is
    rotated against the second; the others stay as they are.
    ``write_slots`` [N] int64 as in ``StepLayout``.
    """
    num_tokens, (kv_heads, dim) = qkv.shape[0], cache.k.shape[2:]
    q = qkv.new_empty(num_tokens, num_heads, dim)
    group = num_heads // kv_heads
    rope_write_kernel[(num_tokens, kv_heads)](
        qkv, cos, sin, q_norm, k_norm, write_slots, q, *cache, num_heads, kv_heads, dim // 2, cos.shape[1], eps,
        group=group,
        group_pad=launching.power_of_two(group),
        width=launching.power_of_two(dim // 2),
        has_norm=q_norm is not None,
        partial=2 * cos.shape[1] < dim,
        **launching.options(num_warps=2),
    )  # fmt: skip
    return q
