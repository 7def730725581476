# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The small Triton kernels of a step: what stands between the products (fused.py launches them)."""

from __future__ import annotations

import triton
import triton.language as tl

from gpt_fast.kernels.gpu.linear_kernel import UNIT


@triton.jit
def leave(value, row, column, inside, norm, weighted, squares, dim):
    """A row ``value`` [width] of float32 for the next norm: times its weight, and the sum of its squares."""
    own = value * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(weighted + row.to(tl.int64) * dim + column, own.to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(value * value, 0))


@triton.jit
def prepare_norm_kernel(
    x, norm, weighted, squares, table, tokens, scale, dim, width: tl.constexpr
):  # fmt: skip
    """One row of ``x`` times the norm's weight, and the sum of its squares. A ``table`` fills the row first. Without a
    ``norm`` that is all."""
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    if table is None:
        value = tl.load(x + row * dim + column, mask=inside, other=0.0)
    else:
        token = tl.load(tokens + row).to(tl.int64)
        value = tl.load(table + token * dim + column, mask=inside, other=0.0).to(x.dtype.element_ty)
        if scale is not None:
            value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(x + row * dim + column, value, mask=inside)
    if norm is not None:
        leave(value.to(tl.float32), row, column, inside, norm, weighted, squares, dim)


@triton.jit
def norm_kernel(
    x, norm, bias, add, out, next_norm, weighted, squares, x_stride, out_stride, dim, eps, centred: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """One row of ``x`` normed, by its root mean square or, ``centred``, as a layer norm does it; ``add`` is added.
    Without a ``norm`` that is all."""
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if centred:
        value = tl.where(inside, value - tl.sum(value, 0) / dim, 0.0)
    if norm is not None:
        value *= tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
        value *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if add is not None:
        value += tl.load(add + row.to(tl.int64) * dim + column, mask=inside, other=0.0).to(tl.float32)
    stored = value.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * out_stride + column, stored, mask=inside)
    if next_norm is not None:
        leave(stored.to(tl.float32), row, column, inside, next_norm, weighted, squares, dim)


@triton.jit
def _turned(source, start, norm, cos, sin, eps, rows_inside, half, low, high, pairs):
    """Heads at ``start`` [rows] of ``source``, normed where there is a ``norm``, then rotated.

    Gives what stands at ``low`` and at ``high`` [width], two times [rows, width] float32. ``pairs`` [width]: which of
    them exist.
    """
    inside = rows_inside[:, None] & pairs[None, :]
    first = tl.load(source + start[:, None] + low[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + start[:, None] + high[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        first *= scale * tl.load(norm + low, mask=pairs, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(norm + high, mask=pairs, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _in_steps(x, most):
    """x in 127ths of ``most``, rounded to the nearest whole number, ties to even: what a byte holds. Numbers so small
    that 127 / ``most`` is infinite count as zeros."""
    steps = tl.div_rn(127.0, tl.where(most == 0.0, 1.0, most))
    inverse = tl.where((most == 0.0) | (steps == float("inf")), 0.0, steps)
    return x * inverse + 12582912.0 - 12582912.0  # adding and taking 1.5 * 2 ** 23 rounds


@triton.jit
def _step_of(x, most):
    """A 127th of ``most`` [M], the largest magnitudes of the rows of x [M, N]. NaN where x has one, which a maximum
    loses."""
    return tl.where(tl.max((x != x).to(tl.int32), 1) == 1, float("nan"), tl.div_rn(most, 127.0))


@triton.jit
def _write_head(cache, scales, first, second, slot, kv_heads, head, half, low, high, pairs):
    """One head's key or value, both members of its pairs [1, width], into the cache; int8 with its scale."""
    place = slot * kv_heads + head
    if scales is not None:
        most = tl.maximum(tl.max(tl.max(tl.abs(first), 1), 0), tl.max(tl.max(tl.abs(second), 1), 0))
        broken = tl.where(first == first, second, first)  # NaN where one of both is
        tl.store(scales + place, tl.sum(_step_of(broken, most), 0))
        first, second = _in_steps(first, most), _in_steps(second, most)
    at = cache + place * 2 * half
    tl.store(at + low[None, :], first.to(cache.dtype.element_ty), mask=pairs[None, :])
    tl.store(at + high[None, :], second.to(cache.dtype.element_ty), mask=pairs[None, :])


@triton.jit
def rope_write_kernel(
    qkv, cos, sin, q_norm, k_norm, write_slots, q_out, k_cache, v_cache, k_scale, v_scale,
    heads, kv_heads, half, turned, eps,
    group: tl.constexpr, group_pad: tl.constexpr, width: tl.constexpr, partial: tl.constexpr,
):  # fmt: skip
    """One token and key-value head: its queries and its key normed and rotated, key and value into the cache.

    The first ``turned`` of the ``half`` pairs of a head rotate.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, width)
    pairs = d < half
    low, high = d, half + d
    if partial:  # the dimensions behind those that rotate make separate pairs, with an angle of 0
        low, high = tl.where(d < turned, d, turned + d), tl.where(d < turned, turned + d, half + d)
    angle_at = token * turned + d
    c = tl.load(cos + angle_at, mask=d < turned, other=1.0)[None, :]
    s = tl.load(sin + angle_at, mask=d < turned, other=0.0)[None, :]
    row = qkv + token * (heads + 2 * kv_heads) * 2 * half

    g = tl.arange(0, group_pad)
    start = (head * group + g) * 2 * half
    first, second = _turned(row, start, q_norm, c, s, eps, g < group, half, low, high, pairs)
    q_at = q_out + token * heads * 2 * half + start[:, None]
    inside = (g < group)[:, None] & pairs[None, :]
    tl.store(q_at + low[None, :], first.to(q_out.dtype.element_ty), mask=inside)
    tl.store(q_at + high[None, :], second.to(q_out.dtype.element_ty), mask=inside)

    one = tl.arange(0, 1)
    slot = tl.load(write_slots + token)
    start = (heads + head + one) * 2 * half
    first, second = _turned(row, start, k_norm, c, s, eps, one == 0, half, low, high, pairs)
    _write_head(k_cache, k_scale, first, second, slot, kv_heads, head, half, low, high, pairs)
    v_at = row + (heads + kv_heads + head) * 2 * half
    first = tl.load(v_at + low[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
    second = tl.load(v_at + high[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
    _write_head(v_cache, v_scale, first, second, slot, kv_heads, head, half, low, high, pairs)


@triton.jit
def round_kernel(x, values, scales, num_x, k_size, together: tl.constexpr):
    """One row's next ``together`` blocks of UNIT numbers as bytes: the largest magnitude of a block is 127."""
    m, first = tl.program_id(0), tl.program_id(1) * together
    b = first + tl.arange(0, together)
    k = b[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    at = m.to(tl.int64) * k_size + k
    value = tl.load(x + at, mask=k < k_size, other=0.0).to(tl.float32)
    size = tl.abs(value)
    most = tl.max(size, 1)
    tl.store(values + at, _in_steps(value, most[:, None]).to(tl.int8), mask=k < k_size)
    tl.store(scales + b * num_x + m, _step_of(value, most), mask=b * UNIT < k_size)
