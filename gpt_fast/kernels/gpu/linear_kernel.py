# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The Triton kernel behind every product of a decode step; linear.py launches it and documents its arguments.

Weights are the left operand of the matrix unit and a block of COLUMNS rows of activations the right one; the last block
is filled up with zeros. A program owns ``tile`` rows of the weights and one block. The programs of one tile are
neighbours in the grid, so they run at the same time, and all but the first find its weights in the second-level cache.
The reduction is dealt out to its warps (the leading dimension of the batched products here): warp g takes chunk g of
every ``warps`` chunks of K, so each warp streams its own weights into its own accumulator, and the warps meet once, at
the end, in a sum of fixed order. Nothing depends on how many rows of activations there are, nor on a row's place: its
result is the same bits alone and in a batch.

Every load of the loop is an asynchronous copy, ``num_stages`` deep in Triton's pipeline: each feeds the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpt_fast.kernels.gpu.launching import INTERPRETED

COLUMNS = tl.constexpr(16)  # rows of activations that a program takes
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

    Assembly treats four bytes at once; the plain form is its twin.
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
def _bytes_sum(
    x, w, m, n, num_x, k_size, kind: tl.constexpr, compute: tl.constexpr, tile: tl.constexpr, warps: tl.constexpr,
    chunk: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """[tile, COLUMNS] float32: rows ``n`` [tile] of ``w`` [*, K] times rows ``m`` [COLUMNS] of ``x`` [num_x, K].

    ``even``: K is a whole number of rounds, so no load of weights needs a mask.
    """
    k = tl.arange(0, warps)[:, None] * chunk + tl.arange(0, chunk)[None, :]  # [warps, chunk]
    w_at = w + n.to(tl.int64)[:, None, None] * k_size + k[None]
    x_at = x + m[:, None, None] * k_size + k[None]
    given = m[:, None, None] < num_x
    acc = tl.zeros((warps, tile, COLUMNS), tl.float32)
    for begin in range(0, k_size, warps * chunk):
        inside = ((begin + k < k_size) | even)[None]
        weights = tl.load(w_at + begin, mask=inside, other=0.0)
        inputs = tl.load(x_at + begin, mask=given & inside, other=0.0)
        values = _values(tl.permute(weights, (1, 0, 2)), compute, kind)
        acc = tl.dot(values, tl.permute(inputs.to(compute), (1, 2, 0)), acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _int4_sum(
    x, w, pairs, m, n, num_x, k_size, w_rows, num_groups, half_dtype: tl.constexpr, compute: tl.constexpr,
    group_size: tl.constexpr, tile: tl.constexpr, warps: tl.constexpr, unroll: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """As ``_bytes_sum`` for nibbles; a chunk is a group, ``pairs`` [groups, w_rows] what prepare() made of its grid.

    A weight is ``(q - 8) * scale + centre`` rounded to ``compute``, in which the product is taken.
    """
    half: tl.constexpr = group_size // 2  # bytes of a group
    byte = tl.arange(0, half)
    warp = tl.arange(0, warps)
    w_at = w + n.to(tl.int64)[:, None, None] * (num_groups * half) + (warp[:, None] * half + byte[None, :])[None]
    k = warp[:, None] * group_size + (byte // 16 * 32 + byte % 16)[None, :]  # of low nibbles; the high ones' is 16 more
    x_at = x + m[:, None, None] * k_size + k[None]
    pair_at = pairs + warp[:, None] * w_rows + n[None, :]
    given = m[:, None, None] < num_x
    acc = tl.zeros((warps, tile, COLUMNS), tl.float32)
    for begin in range(0, num_groups, warps * unroll):
        for step in tl.static_range(unroll):
            first = begin + step * warps
            exists = (first + warp < num_groups) | even
            left = k_size - first * group_size
            low_inside, high_inside = ((k < left) | even)[None], ((k + 16 < left) | even)[None]
            packed = tl.load(w_at + first * half, mask=exists[None, :, None], other=0)
            pair = tl.load(pair_at + first * w_rows, mask=exists[:, None], other=0)
            low_x = tl.load(x_at + first * group_size, mask=given & low_inside, other=0.0)
            high_x = tl.load(x_at + first * group_size + 16, mask=given & high_inside, other=0.0)
            low, high = _nibbles(tl.permute(packed, (1, 0, 2)), compute)
            scale = (pair & 0xFFFF).to(tl.int16).to(half_dtype, bitcast=True).to(compute)[:, :, None]
            centre = (pair >> 16).to(tl.int16).to(half_dtype, bitcast=True).to(compute)[:, :, None] * scale
            low = low * scale + centre
            high = high * scale + centre
            acc = tl.dot(low, tl.permute(low_x.to(compute), (1, 2, 0)), acc, input_precision="ieee")
            acc = tl.dot(high, tl.permute(high_x.to(compute), (1, 2, 0)), acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["num_x"])  # one program for any number of rows: the same bits
def linear_kernel(
    x, squares, w, scale, pairs, bias, residual, out, next_norm, weighted, next_squares,
    num_x, num_out, out_stride, k_size, num_groups, num_squares, eps,
    kind: tl.constexpr, half_dtype: tl.constexpr, compute: tl.constexpr, group_size: tl.constexpr, gated: tl.constexpr,
    tile: tl.constexpr, warps: tl.constexpr, chunk: tl.constexpr, unroll: tl.constexpr, even: tl.constexpr,
    squares_pad: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One tile of outputs for one block of rows of ``x``; see linear.py's ``linear``."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
    block, owned = tl.program_id(0), tl.program_id(1)
    outputs: tl.constexpr = tile // 2 if gated else tile
    r = tl.arange(0, tile)
    inner = tl.minimum(owned * outputs + r % outputs, num_out - 1)
    n = inner + r // outputs * num_out  # gate rows and, behind them, the same outputs' rows of up
    m = block * COLUMNS + tl.arange(0, COLUMNS)
    if overlap:
        tl.extra.cuda.gdc_wait()
    if kind == "int4":
        w_rows = num_out * (2 if gated else 1)
        acc = _int4_sum(
            x, w, pairs, m, n, num_x, k_size, w_rows, num_groups, half_dtype, compute, group_size, tile, warps, unroll,
            even,
        )  # fmt: skip
    else:
        acc = _bytes_sum(x, w, m, n, num_x, k_size, kind, compute, tile, warps, chunk, even)
    if scale is not None:
        acc *= tl.load(scale + n)[:, None]
    if squares is not None:
        part = tl.arange(0, squares_pad)
        inside = (m < num_x)[:, None] & (part < num_squares)[None, :]
        total = tl.sum(tl.load(squares + m[:, None] * num_squares + part[None, :], mask=inside, other=0.0), 1)
        acc *= tl.rsqrt(total / k_size + eps)[None, :]
    if bias is not None:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    if gated:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, outputs, COLUMNS)), (1, 2, 0)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    n = owned * outputs + tl.arange(0, outputs)
    at = m[None, :] * num_out + n[:, None]
    inside = (m < num_x)[None, :] & (n < num_out)[:, None]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + m[None, :] * out_stride + n[:, None], value, mask=inside)
    if next_norm is not None:
        value = tl.where(inside, value.to(tl.float32), 0.0)
        norm = tl.load(next_norm + n, mask=n < num_out, other=0.0).to(tl.float32)
        tl.store(weighted + at, (value * norm[:, None]).to(weighted.dtype.element_ty), mask=inside)
        tl.store(next_squares + m * tl.num_programs(1) + owned, tl.sum(value * value, 0), mask=m < num_x)
