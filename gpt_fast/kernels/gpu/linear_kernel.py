# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The Triton kernel behind every product of a step; linear.py launches it and documents its arguments.

Weights are the left operand of the matrix unit and a block of ``columns`` rows of activations the right one; the last
block is filled up with zeros. A program owns ``tile`` rows of the weights, one block, and one of ``splits`` parts of
the reduction: a matrix of few rows would not fill the GPU otherwise, and small programs, many on each multiprocessor,
hide each other's waiting. The last of a tile's parts to end adds them up, in order (``serial``: one program does all
of them, one after the other). The parts, and the steps in which a part goes along K, depend on the weights alone, and
an output is summed for itself: a row's result is the same bits alone and in a batch, in whatever tile and block.

With experts (``order``) the rows of activations are pairs of a token and an expert, sorted by expert. A block has pairs
of one expert and multiplies with that one's rows of the weights.

Every load of the loop is an asynchronous copy, ``num_stages`` deep in Triton's pipeline: each feeds the product.

Rows of prompts that were rounded to bytes (``kind`` "rounded") are multiplied with int8 weights as bytes, UNIT of K at
a time, which is what a scale of ``x`` is for. The same kernel does it, because all that follows a product is the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpt_fast.kernels.gpu.common_kernel import find_block, tanh
from gpt_fast.kernels.gpu.launching import INTERPRETED

UNIT = tl.constexpr(128)  # values of K: parts are whole numbers of them, and steps divide them
SQUARES = tl.constexpr(32)  # outputs whose squares are added for the next norm
_ASSEMBLY = tl.constexpr(not INTERPRETED)
_SPLIT_BF16 = tl.constexpr("""{ .reg .b32 low, high;
prmt.b32 low, $4, 0x43434343, 0x4140; prmt.b32 high, $4, 0x43434343, 0x4342;
and.b32 $0, low, 0xFF0FFF0F; and.b32 $1, high, 0xFF0FFF0F;
shr.u32 high, $4, 4;
prmt.b32 low, high, 0x43434343, 0x4140; prmt.b32 high, high, 0x43434343, 0x4342;
and.b32 $2, low, 0xFF0FFF0F; and.b32 $3, high, 0xFF0FFF0F; }""")
_SPLIT_FP16 = tl.constexpr(_SPLIT_BF16.value.replace("0x43434343", "0x64646464"))
_FP8_TO_BF16 = tl.constexpr("""{ .reg .b32 low, high;
prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;
shr.u32 $0, low, 4; shr.u32 $1, high, 4;
lop3.b32 $0, $0, 0x07F007F0, 0, 0xC0; lop3.b32 $1, $1, 0x07F007F0, 0, 0xC0;
lop3.b32 $0, low, 0x80008000, $0, 0xEA; lop3.b32 $1, high, 0x80008000, $1, 0xEA; }""")
_FP8_TO_FP16 = tl.constexpr(_FP8_TO_BF16.value.replace("0x07F007F0", "0x3F803F80").replace(", 4;", ", 1;"))


@triton.jit
def _nibbles(packed, dtype: tl.constexpr):
    """Bytes -> both halves minus 8, exactly, as ``dtype``: the bits go into a mantissa, without a conversion.

    Assembly treats four bytes at once, each for itself: which four they are is the compiler's choice. The plain form is
    its twin.
    """
    one: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400  # the bits of 128 or 1024
    eight: tl.constexpr = 136.0 if dtype == tl.bfloat16 else 1032.0
    if dtype == tl.float32:
        low = (packed & 15).to(tl.float32) + 1024.0
        high = (packed >> 4).to(tl.float32) + 1024.0
    elif _ASSEMBLY:
        code: tl.constexpr = _SPLIT_BF16 if dtype == tl.bfloat16 else _SPLIT_FP16
        low, high = tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r", [packed], (dtype.value, dtype.value), True, 4)
    else:
        low = ((packed & 15).to(tl.int16) | one).to(dtype, bitcast=True)
        high = ((packed >> 4).to(tl.int16) | one).to(dtype, bitcast=True)
    return low - eight, high - eight


@triton.jit
def _scaled(values, pair, half_dtype: tl.constexpr, dtype: tl.constexpr):
    """Nibbles minus 8 [N, 64] and the pairs of their groups [N, groups] -> ``(q - 8) * scale + centre`` rounded to
    ``dtype``."""
    scale = (pair & 0xFFFF).to(tl.int16).to(half_dtype, bitcast=True).to(dtype)
    centre = (pair >> 16).to(tl.int16).to(half_dtype, bitcast=True).to(dtype) * scale
    groups: tl.constexpr = pair.shape[1]
    grouped = tl.reshape(values, (values.shape[0], groups, values.shape[1] // groups))
    return tl.reshape(grouped * scale[:, :, None] + centre[:, :, None], values.shape)


@triton.jit
def _int4_values(
    w, pairs, n, exists, first, w_rows, half_dtype: tl.constexpr, dtype: tl.constexpr, group_size: tl.constexpr
):  # fmt: skip
    """Rows ``n`` of 128 weights from ``first`` of K on: the first 64 and the others, as ``dtype``. A weight is
    ``(q - 8) * scale + centre`` rounded once."""
    half: tl.constexpr = UNIT // 2
    groups: tl.constexpr = half // group_size if group_size < half else 1
    behind: tl.constexpr = half // group_size  # from a group of the first half to its fellow in the other
    g = first // group_size + tl.arange(0, groups)
    w_at = w + first // UNIT * (w_rows * half) + n[:, None] * half + tl.arange(0, half)[None, :]
    packed = tl.load(w_at, mask=exists, other=0)
    at = pairs + g[None, :] * w_rows + n[:, None]
    low_pair = tl.load(at, mask=exists, other=0)
    high_pair = low_pair
    if behind > 0:
        high_pair = tl.load(at + behind * w_rows, mask=exists, other=0)
    low, high = _nibbles(packed, dtype)
    return _scaled(low, low_pair, half_dtype, dtype), _scaled(high, high_pair, half_dtype, dtype)


@triton.jit
def _values(weights, dtype: tl.constexpr, kind: tl.constexpr):
    """Stored weights as ``dtype``, exactly. fp8 comes as bytes: its bits are a float's but for the exponent's bias."""
    if kind != "fp8":
        return weights.to(dtype)
    unbias: tl.constexpr = 2.0**120 if dtype == tl.bfloat16 else 256.0  # the biases are 127, 15 and fp8's 7
    if _ASSEMBLY and dtype != tl.float32:
        code: tl.constexpr = _FP8_TO_BF16 if dtype == tl.bfloat16 else _FP8_TO_FP16
        return tl.inline_asm_elementwise(code, "=&r,=&r,r", [weights], dtype.value, True, 4) * unbias
    bits = weights.to(tl.int16)
    if dtype == tl.bfloat16:
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * unbias
    return ((((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * unbias).to(dtype)


@triton.jit
def _sum_in_any_order(x, axis: tl.constexpr, count: tl.constexpr):
    """The sum over ``axis`` of ``count`` float32 numbers, none negative: the same bits in any order.

    Another number of rows gives tensors another layout, and ``tl.sum`` another order. So whole numbers are added.
    """
    most = tl.max(x, axis)
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of 2, at most ``most``
    unit = tl.maximum(power, 1e-20) * (count / 1073741824.0)
    return tl.sum((x / tl.expand_dims(unit, axis)).to(tl.int32), axis).to(tl.float32) * unit


@triton.jit
def _bytes_sum(
    x, w, m, given, n, begin, stop, k_size, kind: tl.constexpr, compute: tl.constexpr, tile: tl.constexpr,
    columns: tl.constexpr, step: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """[tile, columns] float32: rows ``n`` [tile] of ``w`` [*, K] times rows ``m`` [columns] of ``x`` [*, K] that are
    ``given``, over ``begin`` to ``stop`` of K. ``even``: that is a whole number of steps, so no load of weights needs a
    mask."""
    k = tl.arange(0, step)
    w_at = w + n.to(tl.int64)[:, None] * k_size + k[None, :]
    x_at = x + m.to(tl.int64)[:, None] * k_size + k[None, :]
    given = given[:, None]
    acc = tl.zeros((tile, columns), tl.float32)
    for first in range(begin, stop, step):
        inside = ((first + k < k_size) | even)[None, :]
        weights = tl.load(w_at + first, mask=inside, other=0.0)
        inputs = tl.load(x_at + first, mask=given & inside, other=0.0)
        acc = tl.dot(_values(weights, compute, kind), tl.trans(inputs.to(compute)), acc, input_precision="ieee")
    return acc


@triton.jit
def _rounded_sum(
    x, x_scale, w, m, given, n, num_x, k_size, tile: tl.constexpr, columns: tl.constexpr, even: tl.constexpr
):  # fmt: skip
    """[tile, columns] float32: int8 rows ``n`` [tile] of ``w`` [*, K] times those int8 rows ``m`` [columns] of ``x``
    [num_x, K] that are ``given``. Their scales are ``x_scale`` [K / UNIT, num_x] float32. No sum of UNIT products
    overflows."""
    k = tl.arange(0, UNIT)
    w_at = w + n.to(tl.int64)[:, None] * k_size + k[None, :]
    x_at = x + m.to(tl.int64)[:, None] * k_size + k[None, :]
    acc = tl.zeros((columns, tile), tl.float32)
    scale = tl.load(x_scale + m, mask=given, other=0.0)
    for first in range(0, k_size, UNIT):
        inside = ((first + k < k_size) | even)[None, :]
        inputs = tl.load(x_at + first, mask=given[:, None] & inside, other=0)
        weights = tl.load(w_at + first, mask=inside, other=0)
        # The next scale is asked for before the product: it would be waited for behind it.
        x_scale += num_x
        following = tl.load(x_scale + m, mask=given & (m * 0 + first + UNIT < k_size), other=0.0)
        acc += tl.dot(inputs, tl.trans(weights), out_dtype=tl.int32).to(tl.float32) * scale[:, None]
        scale = following
    return tl.trans(acc)


@triton.jit
def _int4_sum(
    x, w, pairs, m, given, n, begin, stop, k_size, w_rows, half_dtype: tl.constexpr, compute: tl.constexpr,
    group_size: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """As ``_bytes_sum`` for nibbles, ``w`` [P / 128, w_rows, 64] and ``pairs`` [P / group_size, w_rows] as prepare()
    made them."""
    half: tl.constexpr = UNIT // 2
    k = tl.arange(0, half)
    x_at = x + m.to(tl.int64)[:, None] * k_size + k[None, :]
    given = given[:, None]
    acc = tl.zeros((tile, columns), tl.float32)
    for first in range(begin, stop, UNIT):
        left = k_size - first
        low_inside, high_inside = ((k < left) | even)[None, :], ((k + half < left) | even)[None, :]
        exists = ((n * 0 < left) | even)[:, None]
        low_x = tl.load(x_at + first, mask=given & low_inside, other=0.0)
        high_x = tl.load(x_at + first + half, mask=given & high_inside, other=0.0)
        low, high = _int4_values(w, pairs, n, exists, first, w_rows, half_dtype, compute, group_size)
        acc = tl.dot(low, tl.trans(low_x.to(compute)), acc, input_precision="ieee")
        acc = tl.dot(high, tl.trans(high_x.to(compute)), acc, input_precision="ieee")
    return acc


@triton.jit
def _part_sum(
    x, w, pairs, m, given, n, part, k_size, w_rows, kind: tl.constexpr, half_dtype: tl.constexpr,
    compute: tl.constexpr, group_size: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
    splits: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """One part of the reduction; the last ones may be empty."""
    share = tl.cdiv(tl.cdiv(k_size, splits), UNIT) * UNIT
    begin = tl.multiple_of(part * share, UNIT)
    stop = begin + share if even else tl.minimum(begin + share, k_size)
    if kind == "int4":
        acc = _int4_sum(
            x, w, pairs, m, given, n, begin, stop, k_size, w_rows, half_dtype, compute, group_size, tile, columns, even
        )  # fmt: skip
    else:
        acc = _bytes_sum(x, w, m, given, n, begin, stop, k_size, kind, compute, tile, columns, step, even)
    return acc


@triton.jit
def _activated(x, kind: tl.constexpr):
    """``kind`` (model/description.py) of each number."""
    if kind == "silu":
        return x / (1.0 + tl.exp(-x))
    elif kind == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return tl.where(x < 0.0, 0.0, x)  # relu


@triton.jit
def _gated(gate, up, kind: tl.constexpr):
    """``kind`` of ``gate``, times ``up``."""
    if kind == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return _activated(gate, kind) * up


@triton.jit(do_not_specialize=["num_x"])  # one program for any number of rows of a block
def linear_kernel(
    x, x_scale, squares, w, scale, pairs, bias, residual, out, next_norm, weighted, next_squares, partial, arrivals,
    order, starts, num_experts, num_x, num_out, out_stride, k_size, w_rows, num_squares, eps, cap,
    kind: tl.constexpr, half_dtype: tl.constexpr, compute: tl.constexpr, group_size: tl.constexpr, gated: tl.constexpr,
    activation: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, splits: tl.constexpr,
    serial: tl.constexpr, even: tl.constexpr, squares_pad: tl.constexpr, experts_pad: tl.constexpr,
    sharing: tl.constexpr,
):  # fmt: skip
    """One tile of outputs for one block of rows of ``x``; see linear.py's ``linear``."""
    block, owned, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs: tl.constexpr = tile // 2 if gated else tile
    r, c = tl.arange(0, tile), tl.arange(0, columns)
    inner = tl.minimum(owned * outputs + r % outputs, num_out - 1)
    n = inner + r // outputs * num_out  # gate rows and, behind them, the same outputs' rows of up
    # Of the block's columns: which exist, the rows of x, and those of the output.
    if order is None:
        m = block * columns + c
        given = m < num_x
        source = m
    else:
        expert, first = find_block(block, starts, num_experts, columns, experts_pad)
        if expert >= num_experts:
            return
        at = tl.load(starts + expert) + first + c
        given = at < tl.load(starts + expert + 1)
        m = tl.load(order + at, mask=given, other=0)
        source = m // sharing
        n += expert * (w_rows // num_experts)
    if kind == "rounded":
        acc = _rounded_sum(x, x_scale, w, source, given, n, num_x, k_size, tile, columns, even)
    else:
        acc = _part_sum(
            x, w, pairs, source, given, n, part, k_size, w_rows, kind, half_dtype, compute, group_size, tile, columns,
            step, splits, even,
        )  # fmt: skip
    if serial:
        for behind in range(1, splits):
            acc += _part_sum(
                x, w, pairs, source, given, n, behind, k_size, w_rows, kind, half_dtype, compute, group_size, tile,
                columns, step, splits, even,
            )  # fmt: skip
    elif splits > 1:
        cell = block * tl.num_programs(1) + owned
        at = cell.to(tl.int64) * splits * tile * columns + r[:, None] * columns + c[None, :]
        stored = given[None, :]
        tl.store(partial + at + part * tile * columns, acc, mask=stored)
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        before = tl.atomic_add(arrivals + cell, 1, sem="acq_rel")
        if before < splits - 1:
            return
        # Read past the first-level cache, which does not know of other programs' stores.
        acc = tl.load(partial + at, mask=stored, other=0.0, cache_modifier=".cg")
        for behind in range(1, splits):
            acc += tl.load(partial + at + behind * tile * columns, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + cell, 0)  # ready for the next launch
    if scale is not None:
        acc *= tl.load(scale + n)[:, None]
    if squares is not None:
        s = tl.arange(0, squares_pad)
        inside = given[:, None] & (s < num_squares)[None, :]
        own = tl.load(squares + source[:, None] * num_squares + s[None, :], mask=inside, other=0.0)
        acc *= tl.rsqrt(_sum_in_any_order(own, 1, squares_pad) / k_size + eps)[None, :]
    if bias is not None:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    if gated:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, outputs, columns)), (1, 2, 0)))
        acc = _gated(gate, up, activation)
    elif activation is not None:
        acc = _activated(acc, activation)
    if cap is not None:
        acc = cap * tanh(acc / cap)
    n = owned * outputs + tl.arange(0, outputs)
    at = m.to(tl.int64)[None, :] * num_out + n[:, None]
    inside = given[None, :] & (n < num_out)[:, None]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + m.to(tl.int64)[None, :] * out_stride + n[:, None], value, mask=inside)
    if next_norm is not None:
        value = tl.where(inside, value.to(tl.float32), 0.0)
        norm = tl.load(next_norm + n, mask=n < num_out, other=0.0).to(tl.float32)
        tl.store(weighted + at, (value * norm[:, None]).to(weighted.dtype.element_ty), mask=inside)
        parts: tl.constexpr = outputs // SQUARES
        sums = _sum_in_any_order(tl.reshape(value * value, (parts, SQUARES, columns)), 1, SQUARES)
        part = owned * parts + tl.arange(0, parts)
        at = m[None, :] * tl.cdiv(num_out, SQUARES) + part[:, None]
        tl.store(next_squares + at, sums, mask=given[None, :] & (part * SQUARES < num_out)[:, None])
