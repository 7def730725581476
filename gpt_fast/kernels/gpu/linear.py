"""Products of rows of activations with bfloat16, float16, float32, int8, int4 or fp8 weights.

Decoding reads every weight once per step, so memory bounds the products. Each launch streams its weights once from
memory for up to 64 rows, and once more from the second-level cache for every further 64. It does on the way what would
otherwise take another launch and another trip to memory: the norm of its input, the bias, the activation, the gate of
SwiGLU, the residual, and what the next norm needs. linear_kernel.py says how the work is divided.

A norm in front of a product is spread over two launches (``Row``): the one that makes a row also multiplies it by the
norm's weight and leaves sums of its squares; the product divides its outputs by the root of their mean, because
``(x * weight / rms) @ W == ((x * weight) @ W) / rms``.

Activations are not quantized, and int8 and fp8 weights become their dtype exactly, int4 weights are rounded to it once.
Arithmetic bounds the rows of a prompt (``many``): there the matrix unit multiplies int8 weights with bytes, which is
twice as fast, and rows are rounded to bytes in blocks of 128 for it. A float8 would keep 4 bits of a row's numbers, too
few: fp8 weights are multiplied as 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cpu.packing import GROUP_SIZES, from_nibbles
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.fused_kernel import round_kernel
from gpt_fast.kernels.gpu.linear_kernel import SQUARES, UNIT, linear_kernel

# Rows of activations that a program takes: the least that hold all, else the last. The interpreter's products have
# other bits with other numbers of columns.
_COLUMNS = (16,) if launching.INTERPRETED else (8, 16, 32, 64)
_PROGRAMS = 512  # that fill a GPU of 132 multiprocessors
_MOST_SPLITS = 8
_KINDS = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}


class Weights(NamedTuple):
    """One linear layer as the kernel streams it (:func:`prepare`)."""

    kind: str  # dense, int8, int4, fp8
    data: Tensor  # dense, int8, fp8 (its bytes): [N, K]; int4: :func:`int4_chunks`
    out_features: int  # of experts, those of each
    in_features: int
    scale: Tensor | None = None  # float32 [N], for the outputs; dense weights have one by scaled() alone
    group_size: int = 0  # int4
    bias: Tensor | None = None  # [N]
    pairs: Tensor | None = None  # int4: int32 [P / group_size, N], two 16-bit floats each
    num_experts: int = 1  # whose rows lie one expert's behind the other's
    num_held: int = 0  # outputs of the layer where these are some of them (:func:`rows_of`)


class Routes(NamedTuple):
    """Which experts each of M rows goes to (experts.py): pairs of a row and one of its k experts."""

    weights: Tensor  # [M, k] float32
    order: Tensor  # [M k] int32: pairs sorted by expert. Pair i is row i // k
    starts: Tensor  # [experts + 1] int32: where each expert's pairs begin in ``order``. No expert has those behind


class Row(NamedTuple):
    """Rows that still wait for their norm: ``weighted`` [M, K] times 1 / rms, from ``squares`` [M, parts] float32."""

    weighted: Tensor
    squares: Tensor
    eps: float


class Rounded(NamedTuple):
    """Rows rounded to bytes (:func:`round_rows`): int8 [M, K], and the scale of each 128, float32 [K / 128, M]."""

    values: Tensor
    scale: Tensor


class Tiling(NamedTuple):
    """How one product is divided. ``splits`` decides the order of sums, so it never depends on the number of rows."""

    tile: int  # rows of weights a program owns, at least 32; of gate and up together in a gated product
    warps: int
    step: int  # values of K a program takes at a time; divides 128, int4: that
    splits: int  # parts of K, which programs compute side by side
    stages: int  # depth of the pipeline of loads


class Room(NamedTuple):
    """Where the parts of a product of at most MAX_TOKENS rows meet; one for all products that follow each other."""

    partial: Tensor  # float32
    arrivals: Tensor  # [_PROGRAMS] int32: zeros between launches


def prepare(
    data: Tensor,
    *,
    scale: Tensor | None = None,
    grid: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    in_features: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    """Weights in the format of quantize/scheme.py, or a float matrix [N, K], for activations of ``dtype``.

    ``scale`` [N] is for the outputs: int4's ``row_scale``, beside the scales and zeros of its groups, ``grid``, and
    ``in_features`` is K where its rows are padded. int4's codes are copied (:func:`int4_chunks`), all others kept as
    they are. Raises UnsupportedError for a group size that the kernels do not take.
    """
    kind, (n, width) = _KINDS.get(data.dtype, "dense"), data.shape
    data, bias = data.detach().contiguous(), None if bias is None else bias.detach().contiguous()
    scale = None if scale is None else scale.float()
    if grid is None:
        return Weights(kind, data.view(torch.uint8) if kind == "fp8" else data, n, width, scale, bias=bias)
    group_size = 2 * width // grid[0].shape[1]
    if group_size not in GROUP_SIZES:
        raise UnsupportedError(f"int4 weights with group_size {group_size}, which is not one of {GROUP_SIZES}")
    chunks = int4_chunks(data)
    return Weights(kind, chunks, n, in_features or 2 * width, scale, group_size, bias, _pairs(*grid, group_size, dtype))


def int4_chunks(codes: Tensor) -> Tensor:
    """uint8 [N, P / 2] in the order of quantize/scheme.py -> [ceil(P / 128), N, 64]: what a program takes together, of
    all its rows, lies side by side. A byte is values i and 64 + i of the 128; missing ones are 0."""
    n = len(codes)
    values = F.pad(from_nibbles(codes), (0, -2 * codes.shape[1] % UNIT.value)).view(n, -1, 2, UNIT.value // 2)
    return (values[:, :, 0] | values[:, :, 1] << 4).transpose(0, 1).contiguous()


def from_chunks(chunks: Tensor) -> Tensor:
    """The codes [n, ceil(P / 128) * 128] of rows of :func:`int4_chunks`, [ceil(P / 128), n, 64]."""
    codes: Tensor = torch.stack((chunks & 15, chunks >> 4), dim=2).permute(1, 0, 2, 3).flatten(1)
    return codes


def _pairs(scale: Tensor, zero: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """uint8 [N, groups] twice -> int32 [groups, N]: scale in the low half, in the high one how far 8 is from the zero.

    In the 16-bit float of ``dtype``, exactly: the kernel multiplies with it without a conversion. Groups fill up 128.
    """
    missing = -scale.shape[1] % max(1, UNIT.value // group_size)
    halves = [F.pad(t.T.to(launching.half(dtype)), (0, 0, 0, missing)) for t in (scale, 8 - zero / 8)]
    return torch.stack(halves, dim=-1).view(torch.int32).squeeze(-1)


def stacked(w: Weights, num_experts: int) -> Weights:
    """``w``, whose outputs are those of ``num_experts``, as their products take it. Raises UnsupportedError."""
    if num_experts > 1 and w.kind == "int4" and w.data.numel() >= 2**31:
        raise UnsupportedError(f"experts with {w.data.numel()} bytes of int4 weights in a layer, more than 2 GiB")
    return w._replace(out_features=w.out_features // num_experts, num_experts=num_experts)


def rows_of(w: Weights, rows: slice) -> Weights:
    """Some outputs of ``w``, where they lie."""
    columns = (slice(None), rows)  # of what int4 keeps
    return w._replace(
        data=w.data[columns if w.kind == "int4" else rows],
        out_features=rows.stop - rows.start,
        scale=None if w.scale is None else w.scale[rows],
        bias=None if w.bias is None else w.bias[rows],
        pairs=None if w.pairs is None else w.pairs[columns],
        num_held=w.num_held or w.out_features,
    )


def scaled(w: Weights, factor: float) -> Weights:
    """Weights whose products, biases included, are ``factor`` times those of ``w``."""
    if factor == 1.0:
        return w
    scale = torch.ones(w.out_features * w.num_experts, device=w.data.device) if w.scale is None else w.scale
    return w._replace(scale=scale * factor, bias=None if w.bias is None else w.bias.float() * factor)


def tiling(w: Weights, columns: int = 16, top_k: int = 1) -> Tiling:
    """The division that ``linear`` uses where a program takes ``columns`` rows of activations, as measured on an H100.

    ``splits`` fills the GPU, and divides K where it can: loads without masks are faster. ``top_k``: experts of a row,
    which are multiplied side by side.
    """
    tiles, k, splits = -(-w.out_features // 32) * top_k, w.in_features, 1
    while tiles * splits < _PROGRAMS and splits < _MOST_SPLITS and k >= 4 * splits * UNIT.value:
        if k % UNIT.value == 0 and k % (2 * splits * UNIT.value):
            break
        splits *= 2
    if w.kind != "int4":
        return Tiling(32, 2, 128, splits, 4) if columns <= 16 else Tiling(64, 2, 128, splits, 3)
    if columns > 16:
        return Tiling(64, 2, 128, splits, 3)
    return Tiling(64, 2, 128, splits, 4) if splits == 1 else Tiling(32, 2, 128, splits, 5)


def tiling_of_many(w: Weights, num_rows: int, dtype: torch.dtype, memory: int) -> tuple[int, Tiling]:
    """Rows of activations that a program takes, and the division, where ``num_rows`` are of prompts, of each expert, as
    measured on an H100; on a GPU with less ``memory`` for a program, bytes, what fits of it. One program has all of K:
    no bit of a row depends on what is chosen."""
    if launching.INTERPRETED:
        return 16, Tiling(32, 1, UNIT.value, 1, 1)
    tiles = -(-w.out_features // 128) * w.num_experts
    filled = -(-num_rows // 256) * tiles / launching.MULTIPROCESSORS  # by programs of 256 rows
    found: list[tuple[int, Tiling]] = []  # the first that fits is taken
    if w.kind == "int8":
        found = [(64, Tiling(128, 4, UNIT.value, 1, 4))]
    elif dtype == torch.float32:
        pass
    elif w.kind == "dense":
        found = [(256, Tiling(128, 8, 64, 1, 3))] if filled >= 1.5 else []
        found.append((128, Tiling(128, 4, 64, 1, 4)))
    else:
        found = [(256, Tiling(128, 8, 128, 1, 3))] if num_rows > 128 and filled >= 0.9 else []
        if num_rows > 64:
            found.append((128, Tiling(64, 4, 128, 1, 3) if w.kind == "int4" else Tiling(128, 8, 128, 1, 4)))
        found.append((64, Tiling(64, 4, 128, 1, 4)))
    for columns, t in found:
        for stages in range(t.stages, 1, -1):
            if _shared_bytes(w, columns, t._replace(stages=stages), dtype) <= memory:
                return columns, t._replace(stages=stages)
    return 32, Tiling(64, 4, UNIT.value if w.kind == "int4" else 32, 1, 2)


def _shared_bytes(w: Weights, columns: int, t: Tiling, dtype: torch.dtype) -> int:
    """What a program's loads take, or its sums where they are exchanged between threads."""
    own = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / max(1, w.group_size)}.get(w.kind, dtype.itemsize)
    of_x = 1 if w.kind == "int8" else dtype.itemsize
    # Weights that are converted leave for registers a stage before the product.
    held = t.stages if w.kind in ("dense", "int8") else t.stages - 1
    loads = t.step * (t.stages * columns * of_x + held * t.tile * own)
    return max(int(loads), 4 * t.tile * columns)


class _Division(NamedTuple):
    """How a product of some rows is launched."""

    columns: int  # rows of activations of a program
    tiling: Tiling
    blocks: int  # of rows
    tiles: int

    @property
    def serial(self) -> bool:
        """Whether a program computes all parts of its tile, because there are enough programs."""
        return self.tiling.splits > 1 and self.blocks * self.tiles >= _PROGRAMS

    @property
    def room(self) -> int:
        """Numbers of all parts that meet."""
        t = self.tiling
        return 0 if self.serial or t.splits == 1 else self.blocks * self.tiles * t.splits * t.tile * self.columns


def _divide(w: Weights, num_rows: int, top_k: int, given: Tiling | None = None) -> _Division:
    """A product of ``num_rows`` generated tokens, each with ``top_k`` of the experts of ``w``."""
    # An expert has at most all of them, and seldom twice as many as the mean.
    most = min(num_rows, 2 * -(-num_rows * top_k // w.num_experts))
    # Half as many rows of activations pay where instructions count, as for int4.
    columns = next((c for c in _COLUMNS if most <= c and (c > 8 or w.kind == "int4")), _COLUMNS[-1])
    t = given or tiling(w, columns, top_k)
    return _Division(columns, t, _num_blocks(w, num_rows, top_k, columns), -(-w.out_features // t.tile))


def _num_blocks(w: Weights, num_rows: int, top_k: int, columns: int) -> int:
    """The most blocks of ``columns`` pairs that the experts of ``w`` can have."""
    pairs = num_rows * top_k
    return (pairs + min(pairs, w.num_experts) * (columns - 1)) // columns


def make_room(products: Iterable[tuple[Weights, int]], num_rows: int, device: torch.device) -> Room:
    """Room for products of at most ``num_rows`` rows, each given by its weights and how many experts a row has."""
    shapes = {(w.kind, w.out_features, w.in_features, w.num_experts, k): w for w, k in products}
    most = max((_divide(w, n, key[-1]).room for key, w in shapes.items() for n in range(1, num_rows + 1)), default=0)
    return Room(torch.empty(most, device=device), torch.zeros(_PROGRAMS, dtype=torch.int32, device=device))


def linear(
    x: Tensor | Row,
    w: Weights,
    *,
    gated: bool = False,
    activation: str | None = None,
    cap: float | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    following: tuple[Tensor, Tensor, Tensor] | None = None,
    routes: Routes | None = None,
    many: bool = False,
    division: Tiling | None = None,
    room: Room | None = None,
) -> Tensor:
    """x [M, K], or rows that wait for their norm -> [M, N] of x's dtype.

    ``gated``: the weights are gate and up [2 F, K]; gives ``activation(gate) * up`` [M, F], by default with silu
    (SwiGLU, Shazeer 2020, arXiv 2002.05202). ``activation``: of model/description.py. ``cap``: ``cap * tanh(y / cap)``
    in the place of y. ``residual`` [M, N] is added. ``out``: what to fill and return, of any float dtype, columns side
    by side. ``following``: the next norm's weight, and the first two tensors of its ``Row`` to fill. ``many``: rows of
    prompts, which have other bits. ``room``: where the parts of at most MAX_TOKENS rows meet; else it is made for this
    call.

    ``routes``: by the experts of ``w``, without a residual. x has the rows that they are about, or one for each of
    their P pairs; gives [P, N], where the rows of pairs that no expert has are not written.

    No bit of a row depends on M. Raises ValueError for other columns than K, and rows that are not contiguous.
    """
    rows, squares, eps = x if isinstance(x, Row) else (x, None, 0.0)
    if rows.shape[1] != w.in_features or not rows.is_contiguous():
        raise ValueError(f"x must be contiguous and have {w.in_features} columns, not {tuple(rows.shape)}")
    num_x, kind, x_scale, dtype = rows.shape[0], w.kind, None, rows.dtype
    num_rows, top_k = (num_x, 1) if routes is None else routes.weights.shape
    num_out = w.out_features // (2 if gated else 1)
    out = rows.new_empty(num_rows * top_k, num_out) if out is None else out
    if num_rows == 0:
        return out
    if many:
        each = -(-num_rows * top_k // w.num_experts)
        columns, t = tiling_of_many(w, each, dtype, launching.shared_memory(rows.device))
        d = _Division(columns, t, _num_blocks(w, num_rows, top_k, columns), -(-w.out_features // t.tile))
        if kind == "int8":
            (rows, x_scale), kind = round_rows(rows), "rounded"
    else:
        d = _divide(w, num_rows, top_k, division)
    t = d.tiling
    num_squares = 0 if squares is None else squares.shape[1]
    num_held = w.num_held or w.out_features * w.num_experts
    parts: tuple[Tensor | None, ...] = (None, None)
    if d.room:
        if room is None or num_rows > launching.MAX_TOKENS:
            room = Room(rows.new_empty(d.room, dtype=torch.float32), rows.new_zeros(_PROGRAMS, dtype=torch.int32))
        parts = room
    linear_kernel[(d.blocks, d.tiles, 1 if d.serial else t.splits)](
        rows, x_scale, squares, w.data, w.scale, w.pairs, w.bias, residual, out, *(following or (None, None, None)),
        *parts, *((None, None, None) if routes is None else (routes.order, routes.starts, w.num_experts)),
        num_x, num_out, out.stride(0), w.in_features, num_held, num_squares, eps, cap,
        kind=kind, half_dtype=launching.triton_dtype(launching.half(dtype)), compute=launching.compute_dtype(dtype),
        group_size=w.group_size, gated=gated, activation=activation or ("silu" if gated else None), tile=t.tile,
        columns=d.columns, step=t.step, splits=t.splits, serial=d.serial,
        even=w.in_features % (t.splits * UNIT.value) == 0, squares_pad=launching.power_of_two(num_squares),
        experts_pad=launching.power_of_two(w.num_experts), sharing=num_rows * top_k // num_x,
        # float32 activations take twice the shared memory
        num_warps=t.warps, num_stages=2 if dtype == torch.float32 and kind != "rounded" else t.stages,
    )  # fmt: skip
    return out


def linear_residual(
    x: Tensor | Row, w: Weights, residual: Tensor, next_norm: Tensor, eps: float, room: Room | None = None
) -> tuple[Tensor, Row]:
    """``residual + x @ W`` [M, N], and the same rows waiting for the norm of weight ``next_norm`` [N] and ``eps``."""
    squares = residual.new_empty(residual.shape[0], -(-w.out_features // SQUARES.value), dtype=torch.float32)
    row = Row(torch.empty_like(residual), squares, eps)
    out = torch.empty_like(residual)
    following = (next_norm, row.weighted, squares)
    return linear(x, w, residual=residual, out=out, following=following, room=room), row


def round_rows(x: Tensor) -> Rounded:
    """x [M, K] in bytes. Each block of 128 as ``reference.quantize_activations`` does it; one with a number that is not
    finite has such a scale."""
    num_rows, k = x.shape
    blocks = -(-k // UNIT.value)
    values, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(blocks, num_rows, dtype=torch.float32)
    together = min(8, launching.power_of_two(blocks))
    round_kernel[(num_rows, -(-blocks // together))](x, values, scale, num_rows, k, together=together, num_warps=4)
    return Rounded(values, scale)


def product(x: Tensor, w: Weights) -> Tensor:
    """x [..., K] of any number of rows -> [..., N] of x's dtype, where no program runs the model.

    Torch multiplies with dequantized weights for more than 16 rows, and inside torch.compile, whose code cannot be
    relied on to launch the kernel.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= 16 and not torch.compiler.is_compiling():
        return linear(rows.contiguous(), w).view(*x.shape[:-1], w.out_features)
    out = F.linear(rows, dequantized(w, x.dtype))
    if w.scale is not None:
        out = (out * w.scale).to(x.dtype)
    return (out if w.bias is None else out + w.bias).view(*x.shape[:-1], w.out_features)


def dequantized(w: Weights, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``, without the scale that goes to the outputs."""
    if w.pairs is None:
        return (w.data.view(torch.float8_e4m3fn) if w.kind == "fp8" else w.data).to(dtype)
    halves = w.pairs.view(launching.half(dtype)).view(*w.pairs.shape, 2).to(dtype)
    scale, centre = halves.transpose(0, 1)[:, :, None].unbind(-1)  # [N, groups, 1]
    values = from_chunks(w.data).view(w.out_features, w.pairs.shape[0], -1).to(dtype)
    return ((values - 8 + centre) * scale).flatten(1)[:, : w.in_features]
