# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The small Triton kernels of a decode step: what stands between the products (fused.py launches them)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed_kernel(tokens, table, norm, out, weighted, squares, dim, width: tl.constexpr, overlap: tl.constexpr):
    """One token: its row of the table, the same times the first norm's weight, and the sum of its squares."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(table + token * dim + column, mask=inside, other=0.0).to(out.dtype.element_ty)
    tl.store(out + row * dim + column, value, mask=inside)
    _leave_for_norm(value, norm, weighted, squares, row, column, dim, inside)


@triton.jit
def _leave_for_norm(value, norm, weighted, squares, row, column, dim, inside):
    value = value.to(tl.float32)
    scaled = value * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(weighted + row * dim + column, scaled.to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(value * value, 0))


@triton.jit
def prepare_norm_kernel(x, norm, weighted, squares, dim, width: tl.constexpr, overlap: tl.constexpr):
    """As ``embed_kernel`` for rows that are there."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    value = tl.load(x + row * dim + column, mask=inside, other=0.0)
    _leave_for_norm(value, norm, weighted, squares, row, column, dim, inside)


@triton.jit
def rms_norm_kernel(x, residual, norm, total, out, dim, eps, width: tl.constexpr, overlap: tl.constexpr):
    """One row: ``total = x + residual``, ``out`` its norm; without ``residual`` the norm of x."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    value = tl.load(x + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * dim + column, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(total.dtype.element_ty)
        tl.store(total + row * dim + column, kept, mask=inside)
        value = kept.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    value *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, size, width: tl.constexpr, overlap: tl.constexpr):
    """One stretch of one row of gate and up [2 F]: ``silu(gate) * up``."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _halves(source, start, norm, cos, sin, eps, rows_inside, half, width: tl.constexpr, has_norm: tl.constexpr):
    """Heads at ``start`` [rows] of ``source``: normed where asked, then rotated; both halves [rows, width] float32."""
    d = tl.arange(0, width)
    inside = rows_inside[:, None] & (d < half)[None, :]
    first = tl.load(source + start[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + start[:, None] + half + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        first *= scale * tl.load(norm + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(norm + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _write_head(cache, scales, first, second, slot, kv_heads, head, half, width: tl.constexpr):
    """One head's key or value, in halves [1, width], into the cache; int8 with its scale."""
    d = tl.arange(0, width)[None, :]
    place = slot * kv_heads + head
    if scales is not None:
        most = tl.maximum(tl.max(tl.max(tl.abs(first), 1), 0), tl.max(tl.max(tl.abs(second), 1), 0))
        tl.store(scales + place, most / 127.0)
        inverse = tl.where(most == 0.0, 0.0, 127.0 / tl.where(most == 0.0, 1.0, most))
        # Adding and taking 1.5 * 2 ** 23 rounds to the nearest integer, ties to even.
        first = first * inverse + 12582912.0 - 12582912.0
        second = second * inverse + 12582912.0 - 12582912.0
    tl.store(cache + place * 2 * half + d, first.to(cache.dtype.element_ty), mask=d < half)
    tl.store(cache + place * 2 * half + half + d, second.to(cache.dtype.element_ty), mask=d < half)


@triton.jit
def rope_write_kernel(
    qkv, cos, sin, q_norm, k_norm, write_slots, q_out, k_cache, v_cache, k_scale, v_scale,
    heads, kv_heads, half, eps,
    group: tl.constexpr, group_pad: tl.constexpr, width: tl.constexpr, has_norm: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One token and key-value head: its queries normed and rotated, its key too, and key and value into the cache."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, width)
    angle_at = token * half + d
    c = tl.load(cos + angle_at, mask=d < half, other=0.0)[None, :]
    s = tl.load(sin + angle_at, mask=d < half, other=0.0)[None, :]
    row = qkv + token * (heads + 2 * kv_heads) * 2 * half

    g = tl.arange(0, group_pad)
    start = (head * group + g) * 2 * half
    first, second = _halves(row, start, q_norm, c, s, eps, g < group, half, width, has_norm)
    q_at = q_out + token * heads * 2 * half + start[:, None] + d[None, :]
    inside = (g < group)[:, None] & (d < half)[None, :]
    tl.store(q_at, first.to(q_out.dtype.element_ty), mask=inside)
    tl.store(q_at + half, second.to(q_out.dtype.element_ty), mask=inside)

    one = tl.arange(0, 1)
    slot = tl.load(write_slots + token)
    first, second = _halves(
        row, (heads + head + one) * 2 * half, k_norm, c, s, eps, one == 0, half, width, has_norm
    )  # fmt: skip
    _write_head(k_cache, k_scale, first, second, slot, kv_heads, head, half, width)
    v_at = row + (heads + kv_heads + head) * 2 * half + d[None, :]
    first = tl.load(v_at, mask=(d < half)[None, :], other=0.0).to(tl.float32)
    second = tl.load(v_at + half, mask=(d < half)[None, :], other=0.0).to(tl.float32)
    _write_head(v_cache, v_scale, first, second, slot, kv_heads, head, half, width)
