"""Products of up to 16 rows of activations with bfloat16, float16, float32, int8, int4 or fp8 weights, for decoding.

Decoding reads every weight once per step, so the products are bound by memory: each launch streams its weights once
and does on the way what else would be a launch of its own and another trip to memory: the norm of its input, the bias,
the gate of SwiGLU, the residual, and what the next norm needs. linear_kernel.py says how the work is divided.

A norm in front of a product is spread over two launches (``Row``): whoever makes a row also multiplies it by the norm's
weight and leaves sums of its squares; the product divides its outputs by the root of their mean, for
``(x * weight / rms) @ W == ((x * weight) @ W) / rms``.

Activations are not quantized; int8 and fp8 weights meet them exactly, int4 weights are rounded to their dtype once.
Outputs do not depend, in any bit, on the number of rows of a call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.linear_kernel import linear_kernel

MAX_ROWS = 16
KINDS = ("dense", "int8", "int4", "fp8")


class Weights(NamedTuple):
    """One linear layer as the kernel streams it (:func:`prepare`)."""

    kind: str  # of KINDS
    data: Tensor  # dense, int8, fp8 (its bytes): [N, K]; int4: [N, P / 2] bytes in the order of quantize/scheme.py
    out_features: int
    in_features: int
    scale: Tensor | None = None  # float32 [N], for the outputs; dense weights have one by scaled() alone
    group_size: int = 0  # int4
    bias: Tensor | None = None  # [N]
    pairs: Tensor | None = None  # int4: int32 [P / group_size, N], two 16-bit floats each

    @property
    def num_bytes(self) -> int:
        """What one product streams."""
        tensors = (self.data, self.scale, self.bias, self.pairs)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Row(NamedTuple):
    """Rows that still wait for their norm: ``weighted`` [M, K] times 1 / rms, from ``squares`` [M, parts] float32."""

    weighted: Tensor
    squares: Tensor
    eps: float


class Tiling(NamedTuple):
    """How one product is divided; never by the number of activation rows."""

    tile: int  # rows of weights a program owns; of gate and up together in a gated product
    warps: int  # parts of K side by side in a program
    chunk: int  # values of K a warp takes at a time; int4: a group
    unroll: int  # int4: chunks a round
    stages: int  # depth of the pipeline of loads


def prepare(
    kind: str,
    data: Tensor,
    *,
    scale: Tensor | None = None,
    grid: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    in_features: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    """Weights in the format of quantize/scheme.py (``dense``: a float matrix [N, K]) for activations of ``dtype``.

    ``scale`` [N] is for the outputs: int4's ``row_scale``, beside the scales and zeros of its groups, ``grid``, and
    ``in_features`` is K where its rows are padded. ``data`` is kept as it is, not copied. Raises UnsupportedError
    for a group size that the kernels do not take, ValueError for a kind that is not known.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    n, width = data.shape
    data, bias = data.detach().contiguous(), None if bias is None else bias.detach().contiguous()
    if kind == "dense":
        return Weights(kind, data, n, width, bias=bias)
    assert scale is not None
    scale = scale.float()
    if kind != "int4":
        return Weights(kind, data.view(torch.uint8) if kind == "fp8" else data, n, width, scale, bias=bias)
    assert grid is not None
    group_size = 2 * width // grid[0].shape[1]
    if group_size not in (32, 64, 128):
        raise UnsupportedError(f"int4 weights with group_size {group_size}, which is not one of 32, 64, 128")
    return Weights(kind, data, n, in_features or 2 * width, scale, group_size, bias, _pairs(*grid, dtype))


def _pairs(scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [N, groups] twice -> int32 [groups, N]: scale in the low half, in the high one how far 8 is from the zero.

    As bfloat16 for activations of that dtype, else as float16: what the kernel multiplies with, without a conversion.
    Both are exact in either.
    """
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    both = torch.stack((scale.to(half), (8 - zero / 8).to(half)), dim=-1).transpose(0, 1).contiguous()
    return both.view(torch.int32).squeeze(-1)


def scaled(w: Weights, factor: float) -> Weights:
    """Weights whose products, biases included, are ``factor`` times those of ``w``."""
    if factor == 1.0:
        return w
    scale = torch.ones(w.out_features, device=w.data.device) if w.scale is None else w.scale
    return w._replace(scale=scale * factor, bias=None if w.bias is None else w.bias.float() * factor)


def tiling(w: Weights, gated: bool = False) -> Tiling:
    """The division that ``linear`` uses: a whole number of rounds over K where there is one, some hundred programs."""
    n, k = w.out_features, w.in_features
    tile = 32 if n >= 3072 or gated else 16
    if w.kind == "int4":
        groups = 2 * w.data.shape[1] // w.group_size
        unroll = 2 if w.group_size == 32 and groups % 16 == 0 else 1
        return Tiling(tile, 8, w.group_size, unroll, 4)
    most = 64 if w.kind != "dense" or w.data.element_size() == 1 else 32
    chunk = next((c for c in (most, most // 2, 16) if k % (8 * c) == 0), 16)
    return Tiling(tile, 8, chunk, 1, 4)


def linear(
    x: Tensor | Row,
    w: Weights,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    division: Tiling | None = None,
) -> Tensor:
    """x [M, K], M at most 16, or rows that wait for their norm -> [M, N] of x's dtype, or ``out_dtype``.

    ``gated``: the weights are gate and up [2 F, K]; gives ``silu(gate) * up`` [M, F] (SwiGLU, Shazeer 2020, arXiv
    2002.05202). ``residual`` [M, N] is added. Raises ValueError for more rows.
    """
    rows = x.weighted if isinstance(x, Row) else x
    out = rows.new_empty(rows.shape[0], w.out_features // (2 if gated else 1), dtype=out_dtype or rows.dtype)
    launch(x, w, out, gated=gated, residual=residual, division=division)
    return out


def linear_residual(
    x: Tensor | Row, w: Weights, residual: Tensor, next_norm: Tensor, eps: float, division: Tiling | None = None
) -> tuple[Tensor, Row]:
    """``residual + x @ W`` [M, N], and the same rows waiting for the norm of weight ``next_norm`` [N] and ``eps``."""
    programs = -(-w.out_features // (division or tiling(w)).tile)
    out, weighted = torch.empty_like(residual), torch.empty_like(residual)
    squares = residual.new_empty(residual.shape[0], programs, dtype=torch.float32)
    row = Row(weighted, squares, eps)
    launch(x, w, out, residual=residual, next_norm=next_norm, row=row, division=division)
    return out, row


def product(x: Tensor, w: Weights) -> Tensor:
    """x [..., K] of any number of rows -> [..., N] of x's dtype: a prompt's products, and a step's outside a program.

    Torch multiplies with dequantized weights for more than 16 rows, and inside torch.compile, whose code cannot be
    relied on to launch the kernel.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= MAX_ROWS and not torch.compiler.is_compiling():
        return linear(rows.contiguous(), w).view(*x.shape[:-1], w.out_features)
    out = F.linear(rows, dequantized(w, x.dtype))
    if w.scale is not None:
        out = (out * w.scale).to(x.dtype)
    return (out if w.bias is None else out + w.bias).view(*x.shape[:-1], w.out_features)


def dequantized(w: Weights, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``, without the scale that goes to the outputs."""
    if w.kind == "fp8":
        return w.data.view(torch.float8_e4m3fn).to(dtype)
    if w.kind != "int4":
        return w.data.to(dtype)
    assert w.pairs is not None
    halves = w.pairs.view(torch.int16).view(*w.pairs.shape, 2).transpose(0, 1)  # [N, groups, 2]
    halves = halves.contiguous().view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    codes = w.data.view(w.out_features, -1, 16)  # 32 values each
    values = torch.stack((codes & 15, codes >> 4), dim=2).view(w.out_features, w.pairs.shape[0], -1)
    values = (values.to(dtype) - 8 + halves[..., 1:].to(dtype)) * halves[..., :1].to(dtype)
    return values.flatten(1)[:, : w.in_features]


def launch(
    x: Tensor | Row,
    w: Weights,
    out: Tensor,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    row: Row | None = None,
    division: Tiling | None = None,
) -> None:
    """The kernel on given outputs: ``out`` [M, N or F], columns side by side; with ``next_norm`` also ``row``."""
    rows, squares, eps = x if isinstance(x, Row) else (x, None, 0.0)
    if rows.shape[0] > MAX_ROWS:
        raise ValueError(f"{rows.shape[0]} rows; the products take at most {MAX_ROWS}")
    if rows.shape[1] != w.in_features or not rows.is_contiguous():
        raise ValueError(f"x must be contiguous and have {w.in_features} columns, not {tuple(rows.shape)}")
    t = division or tiling(w, gated)
    num_out = w.out_features // (2 if gated else 1)
    num_groups = 0 if w.pairs is None else w.pairs.shape[0]
    whole = num_groups % (t.warps * t.unroll) == 0 and w.in_features == num_groups * w.group_size
    even = whole if w.kind == "int4" else w.in_features % (t.warps * t.chunk) == 0
    num_squares = 0 if squares is None else squares.shape[1]
    outputs = t.tile // 2 if gated else t.tile
    linear_kernel[(-(-num_out // outputs),)](
        rows, squares, w.data, w.scale, w.pairs, w.bias, residual, out, next_norm,
        None if row is None else row.weighted,
        None if row is None else row.squares,
        rows.shape[0], num_out, out.stride(0), w.in_features, num_groups, num_squares, eps,
        kind=w.kind,
        half_dtype=launching.half_dtype(rows.dtype),
        compute=launching.compute_dtype(rows.dtype),
        group_size=w.group_size, gated=gated, tile=t.tile, columns=MAX_ROWS, warps=t.warps, chunk=t.chunk,
        unroll=t.unroll, even=even,
        squares_pad=launching.power_of_two(num_squares),
        assembly=not launching.INTERPRETED,
        # float32 activations take twice the shared memory
        **launching.options(num_warps=t.warps, num_stages=2 if rows.dtype == torch.float32 else t.stages),
    )  # fmt: skip
