"""What stands between the products of a decode step, each in one launch: embedding, a norm's preparation, heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.fused_kernel import norm_kernel, prepare_norm_kernel, rope_write_kernel
from gpt_fast.kernels.gpu.linear import Row

Following = tuple[Tensor, float]  # the next norm's weight and eps
Table = Tensor | Callable[[Tensor], Tensor]  # [V, E], or what gives the rows [N, E] of tokens [N]
_Source = tuple[Tensor | None, Tensor | None, float | None]  # table, tokens, scale


def embed(
    tokens: Tensor, table: Table, following: Following | None, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Row | None]:
    """Rows ``tokens`` [N] int64 of ``table`` [V, E] as ``dtype`` [N, E], and the same waiting for the norm that is
    ``following``, if there is one. A ``table`` that ranks share finds its rows itself.

    They are multiplied by ``scale`` rounded to ``dtype``.
    """
    rounded = None if scale == 1.0 else torch.tensor(scale, dtype=dtype).item()
    if not isinstance(table, Tensor):
        out = table(tokens).to(dtype)
        return add(out if rounded is None else out * rounded, None, following)
    out = torch.empty(tokens.shape[0], table.shape[1], dtype=dtype, device=table.device)
    return out, _prepared(out, following, (table, tokens, rounded))


def prepare_norm(x: Tensor, norm: Tensor, eps: float) -> Row:
    """x [M, E] waiting for the norm of weight ``norm`` [E]: what a product takes."""
    row = _prepared(x.contiguous(), (norm, eps), (None, None, None))
    assert row is not None
    return row


def _prepared(x: Tensor, following: Following | None, source: _Source) -> Row | None:
    row, waiting = row_of(x, following)
    prepare_norm_kernel[(x.shape[0],)](
        x, *waiting, *source, x.shape[1], width=launching.power_of_two(x.shape[1]), num_warps=8
    )
    return row


def row_of(x: Tensor, following: Following | None) -> tuple[Row | None, tuple[Tensor | None, ...]]:
    """For a kernel that makes whole rows x [M, E]: the same waiting for the norm ``following``, to be filled, and the
    kernel's arguments for it. Nothing where no norm follows."""
    if following is None:
        return None, (None, None, None)
    norm, eps = following
    row = Row(torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32), eps)
    return row, (norm, row.weighted, row.squares)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool = False,
    add: Tensor | None = None,
    out: Tensor | None = None,
    following: Following | None = None,
) -> tuple[Tensor, Row | None]:
    """The root-mean-square norm of x [M, E], or ``centred`` the layer norm, with ``add`` [M, E] added; and the same
    waiting for the norm that is ``following``, if there is one. ``out``: what to fill. Its columns and those of x lie
    side by side."""
    out = torch.empty_like(x) if out is None else out
    row, waiting = row_of(out, following)
    norm_kernel[(x.shape[0],)](
        x, weight, bias, add, out, *waiting, x.stride(0), out.stride(0), x.shape[1], eps, centred=centred,
        width=launching.power_of_two(x.shape[1]), num_warps=8,
    )  # fmt: skip
    return out, row


def add(x: Tensor, residual: Tensor | None, following: Following | None) -> tuple[Tensor, Row | None]:
    """``residual + x`` [M, E], or x itself, and the same waiting for the norm that is ``following``, if there is
    one."""
    if residual is None and following is None:
        return x, None
    out = torch.empty_like(x)
    row, waiting = row_of(out, following)
    norm_kernel[(x.shape[0],)](
        x, None, None, residual, out, *waiting, x.stride(0), out.stride(0), x.shape[1], 0.0, centred=False,
        width=launching.power_of_two(x.shape[1]), num_warps=8,
    )  # fmt: skip
    return out, row


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

    Keys, treated alike, and values go to the ``write_slots`` [N] int64 of the cache (see ``StepLayout``); to one of
    int8 as integers, the largest magnitude of a token and head 127. ``cos`` and ``sin`` [N, R / 2] float32: of the
    first R dimensions of a head, at most D, the first half is rotated against the second; the others stay.
    """
    num_tokens, (kv_heads, dim) = qkv.shape[0], cache.k.shape[2:]
    q = qkv.new_empty(num_tokens, num_heads, dim)
    group = num_heads // kv_heads
    rope_write_kernel[(num_tokens, kv_heads)](
        qkv, cos, sin, q_norm, k_norm, write_slots, q, *cache, num_heads, kv_heads, dim // 2, cos.shape[1], eps,
        group=group, group_pad=launching.power_of_two(group), width=launching.power_of_two(dim // 2),
        partial=2 * cos.shape[1] < dim, num_warps=2,
    )  # fmt: skip
    return q
