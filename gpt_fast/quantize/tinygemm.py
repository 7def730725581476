"""Weights of 4 bits as gpt-fast stores them, packed for tinygemm: torch's product of bfloat16 with int4.

A linear layer ``X`` of N outputs and K inputs, in groups of G inputs:

======================  ===================================================================================
``X.weight``            the codes, 0 to 15: int32 [N / 8, K / 16 T, 32, T / 2] (T tiles of K), or uint8 [N, K / 2]
``X.scales_and_zeros``  bfloat16 [K / G, N, 2]; ``value = (code - 8) * scale + zero``
======================  ===================================================================================

Inputs that do not fill whole groups and tiles are padded to a multiple of 1024. The codes lie as the machine that
packed them multiplies (PyTorch's ATen/native/cuda/int4mm.cu and ATen/native/cpu/int4mm_kernel.cpp), and nothing in the
file says which machine that was. The values say it: the weights of a group lie about 0, so the mean of its codes is
near the code that its scale and zero give the value 0. In a wrong order codes meet the scales and zeros of others.

Codes stay as they are. A scale becomes the nearest of 255 parts of the greatest in its row, a zero the nearest eighth
of a code; a row for whose groups that is not enough is rounded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.errors import CheckpointError
from gpt_fast.kernels.cpu.packing import GROUP_SIZES, nibbles
from gpt_fast.model.description import Part
from gpt_fast.quantize.formats import Format, Specs, Tensors, beside
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import LARGEST, LEVELS, ZERO_STEPS, quantize_rows, to_zero
from gpt_fast.quantize.scheme import QuantConfig, Scheme

GRIDS = ".scales_and_zeros"
_WEIGHT = ".weight"
MIDDLE = 8  # the code that stands for ``zero``, and where a format has no zero for 0
_PADDING = 1024  # inputs
_GROUPS = (*GROUP_SIZES, 256)  # sizes that gpt-fast writes
_ROWS = 64  # outputs that are unpacked together: whole tiles of every order
_CHUNK = 1 << 21  # codes converted at a time
_SAMPLES = 8  # weights that are looked at to find the order
_CLEARLY = 1.5  # times as far from 0 as in the right order; 4 and more were seen in trained and in normal weights


class Order(NamedTuple):
    """How codes lie in a packed weight. ``unpack``: (bytes, N, K, T) -> codes uint8 [N, K], of whole tiles."""

    name: str
    unpack: Callable[[Tensor, int, int, int], Tensor]
    on_gpu: bool = False


def _unpack_gpu(data: Tensor, n: int, k: int, inner_tiles: int) -> Tensor:
    """The operand B of the tensor cores' m16n8k16 product. Thread t of 32 holds, of output t / 4, the inputs 2 (t % 4)
    and the next, of each half of two tiles of 16 inputs: eight codes in an int32, even inputs in its low half."""
    words = data.view(torch.int32).view(n // 8, k // (16 * inner_tiles), 8, 4, inner_tiles // 2, 1)
    even_and_odd = (words >> torch.arange(0, 16, 4, dtype=torch.int32)) & 0x000F000F  # of each half of each tile
    pairs = (even_and_odd | even_and_odd >> 8).to(torch.int16)  # a byte for each input
    # tile of outputs, tiles of inputs, output, pair of inputs, two tiles, half of one
    return pairs.permute(0, 2, 1, 4, 5, 3).contiguous().view(torch.uint8).view(n, k)


def _unpack_cpu(data: Tensor, n: int, k: int, tile: int, halves: bool) -> Tensor:
    """Tiles of ``tile`` outputs, input by input. A byte holds outputs that are half a tile apart, or, with ``halves``
    False and in a last tile that is not full, neighbours."""
    whole = n // tile * tile
    tiles = data[: whole * k // 2].view(-1, k, tile // 2).transpose(1, 2)
    rest = data[whole * k // 2 :].view(k, (n - whole) // 2).t()
    codes = torch.stack((tiles & 15, tiles >> 4), dim=1 if halves else 2).reshape(whole, k)
    return torch.cat((codes, torch.stack((rest & 15, rest >> 4), dim=1).reshape(n - whole, k)))


ORDERS = (
    Order("a GPU", _unpack_gpu, on_gpu=True),
    Order("a CPU with AVX-512", lambda data, n, k, _: _unpack_cpu(data, n, k, 64, halves=True)),
    Order("a CPU with AVX2", lambda data, n, k, _: _unpack_cpu(data, n, k, 32, halves=True)),
    Order("a CPU without vectors", lambda data, n, k, _: _unpack_cpu(data, n, k, 32, halves=False)),
)


class PackedCodes(StoredTensor):
    """A packed weight read as its codes, uint8 [N, K]. ``weight``: int32 [N / 8, K / 16 T, 32, T / 2] or uint8
    [N, K / 2], packed in ``order``; K with its padding."""

    def __init__(self, weight: StoredTensor, order: Order) -> None:
        n, k, self._inner_tiles = _sizes(weight)
        super().__init__(weight.data.contiguous().view(-1).view(torch.uint8).view(n, k // 2), mapped=weight.mapped)
        self.shape, self.order, self._unpack = (n, k), torch.arange(n), order.unpack

    def block(self, index: int) -> Tensor:
        """Rows [64 ``index``, 64 ``index`` + 64) of the packed weight, fewer at its end."""
        data = self.data[_ROWS * index : _ROWS * (index + 1)]
        return self._unpack(data.flatten(), len(data), self.shape[1], self._inner_tiles)

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), uint8."""
        assert self.order is not None
        wanted = self.order[begin:end]
        blocks, place = (wanted // _ROWS).unique(return_inverse=True)
        codes = torch.cat([self.block(index) for index in blocks.tolist()])
        return codes.index_select(0, place * _ROWS + wanted % _ROWS)


def _sizes(weight: StoredTensor) -> tuple[int, int, int]:
    """N, K and T of a packed weight; zeros for what is none."""
    if weight.dtype == torch.int32 and len(weight.shape) == 4 and weight.shape[2] == 32:
        tiles, outer, _, halves = weight.shape
        return 8 * tiles, 32 * outer * halves, 2 * halves
    if weight.dtype == torch.uint8 and len(weight.shape) == 2 and weight.shape[0] % 8 == 0:
        return weight.shape[0], 2 * weight.shape[1], 0
    return 0, 0, 0


def unpacked(state: Mapping[str, StoredTensor], where: str) -> tuple[dict[str, StoredTensor], int]:
    """``state``, the tensors of the file ``where``, with its packed weights as :class:`PackedCodes` and their grids as
    [N, groups, 2]; and the size of the groups. Raises CheckpointError for weights that cannot be read."""
    out, packed, sizes = dict(state), {}, set[int]()
    for name in [name for name in state if name.endswith(GRIDS)]:
        layer, grids = name.removesuffix(GRIDS), state[name]
        weight = state.get(layer + _WEIGHT)
        n, k, _ = _sizes(weight) if weight is not None else (0, 0, 0)
        if not n or len(grids.shape) != 3 or grids.shape[1:] != (n, 2) or not grids.shape[0] or k % grids.shape[0]:
            shapes = f"{list(weight.shape) if weight is not None else 'missing'} and {list(grids.shape)}"
            raise CheckpointError(f"{where}: {layer} is not packed as gpt-fast does it: weight and grid are {shapes}")
        assert weight is not None
        sizes.add(k // grids.shape[0])
        packed[layer + _WEIGHT] = weight
        out[name] = StoredTensor(grids.data.transpose(0, 1), mapped=grids.mapped)
    if len(sizes) != 1 or not sizes <= set(_GROUPS):
        known = ", ".join(map(str, _GROUPS))
        raise CheckpointError(f"{where}: groups of {sorted(sizes)} inputs are not supported, only one of {known}")
    (group_size,) = sizes
    order = find_order([(weight, out[name.removesuffix(_WEIGHT) + GRIDS]) for name, weight in packed.items()], where)
    return out | {name: PackedCodes(weight, order) for name, weight in packed.items()}, group_size


def find_order(packed: list[tuple[StoredTensor, StoredTensor]], where: str) -> Order:
    """The order of packed weights, of each its grid [N, groups, 2] beside it. Raises CheckpointError where none is
    clearly the likeliest."""
    samples = sorted(packed, key=lambda pair: -pair[0].num_bytes)[:_SAMPLES]
    possible = [order for order in ORDERS if not order.on_gpu or all(_sizes(weight)[2] for weight, _ in samples)]
    squares = {order: _distance_from_zero(samples, order) for order in possible}
    best, second = sorted(squares, key=lambda order: squares[order])[:2]
    if not _CLEARLY * squares[best] < squares[second]:
        raise CheckpointError(
            f"{where}: its 4-bit weights lie in an order that is not known here. Make them again from the unquantized "
            "checkpoint: gpt-fast quantize --checkpoint DIR --mode int4 --out OUT"
        )
    return best


def _distance_from_zero(packed: list[tuple[StoredTensor, StoredTensor]], order: Order) -> float:
    """The mean square, in steps, of the means of the groups in the first rows of ``packed``, read in ``order``."""
    squares = []
    for weight, grid in packed:
        codes = PackedCodes(weight, order).block(0).float()
        step, middle = grid.rows(0, len(codes)).float().unbind(-1)
        groups = codes.unflatten(1, (step.shape[1], -1))
        means = groups.mean(-1) - MIDDLE + middle / step
        squares.append(means[groups.amin(-1) < groups.amax(-1)].square())  # padding has one code alone
    return float(torch.cat(squares).mean())


class TinygemmFormat(Format):
    """The tensors that :func:`unpacked` gives, in groups of ``group_size``: every linear layer but routers."""

    method, has_values = "gpt-fast int4", False

    def __init__(self, group_size: int, tensors: Tensors) -> None:
        scheme = Scheme("int4", min(group_size, max(GROUP_SIZES)))
        super().__init__(QuantConfig(scheme, scheme))
        self._group_size, self._tensors = group_size, tensors

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """Codes and grids, with their padding where they have it."""
        if scheme is None:
            return super().tensors(part, None)
        n, k = part.shape
        found = self._tensors.get(part.source)
        padded = -(-k // _PADDING) * _PADDING
        if found is not None and found.shape == (n, padded):
            k = padded
        grids = (torch.bfloat16, (n, k // self._group_size, 2))
        return {part.source: (torch.uint8, (n, k)), beside(part, GRIDS[1:]): grids}

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        # As RoundedFormat does: a rank that has columns reads whole rows, whose greatest scale decides.
        codes, grids = (cut.rows_of(tensors[name]) for name in (part.source, beside(part, GRIDS[1:])))
        size = layer.scheme.group_size
        width = layer.scheme.padded(part.shape[1] * cut.num_columns)
        for begin, rows in codes.pieces(report, max(1, _CHUNK // codes.shape[1])):
            grid = grids.rows(begin, begin + len(rows)).repeat_interleave(self._group_size // size, dim=1)
            found = regrid(rows[:, :width], grid[:, : width // size], layer.scheme)
            layer.store(part.start + begin, {name: cut.columns_of(tensor) for name, tensor in found.items()})
        grids.release(0, grids.num_rows)


def dequantized(codes: Tensor, grid: Tensor) -> Tensor:
    """The values that ``codes`` [n, K] and ``grid`` [n, groups, 2] stand for, float32 [n, K]."""
    scale, zero = grid.float().unsqueeze(2).unbind(-1)
    values: Tensor = (codes.unflatten(1, (grid.shape[1], -1)).float() - MIDDLE) * scale + zero
    return values.flatten(1)


def regrid(codes: Tensor, grid: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of ``scheme`` for ``codes`` uint8 [n, P] in the groups of ``grid``, floating [n, groups, 2]."""
    step, middle = grid.float().unbind(-1)
    row_scale = (step.amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = (step / row_scale[:, None]).round_()
    # The zero that leaves the middle of the codes where it was, so that the rounded scale errs as little at both ends.
    half = LEVELS / 2
    zero = half - ((half - MIDDLE) * step + middle) / (scale * row_scale[:, None])
    storable = ((zero >= 0) & (ZERO_STEPS * zero <= LARGEST) & (scale >= 1)).all(1)  # False for NaN too
    bytes_of = {"scale": scale, "zero": ZERO_STEPS * to_zero(zero)}
    found = {"weight": nibbles(codes), **{n: t.to(torch.uint8) for n, t in bytes_of.items()}, "row_scale": row_scale}
    if not storable.all():
        anew = quantize_rows(dequantized(codes[~storable], grid[~storable]), scheme)
        for name, rows in anew.items():
            found[name][~storable] = rows
    return found
