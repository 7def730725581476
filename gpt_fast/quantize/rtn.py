"""Rounding to nearest: weights alone decide, row by row, so any rows can be quantized without the others.

int8 and fp8 take a scale per output channel from its largest magnitude. int4 takes a scale and a zero per group, found
by search (the idea of llama.cpp's k-quants): several shrunken ranges are tried, each is refined by least squares over
the codes it leads to, and the one with the least squared error stays. The squared error of normally distributed weights
is about an eighth less than with the plain minimum and maximum. Then the few values of scale and zero that can be
stored near it are tried, so that storing them in a byte each costs nothing that could be measured.

The search is much arithmetic for each weight. Where the C++ kernels run, they do it, and round to int8
(kernels/cpu/quantizing.py); what stands here is their plain twin, with the same bits on a CPU: the search's sums have
an order that torch does not choose (``_sum``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.kernels.cpu import library, quantizing
from gpt_fast.kernels.cpu.packing import nibbles
from gpt_fast.quantize.scheme import Scheme

LEVELS = 15  # the largest code of int4
LARGEST = 255  # scale or zero
ZERO_STEPS = 8  # of a zero, in one code
_FP8_MAX = 448.0  # of float8_e4m3fn
_SHRINKS = (1.0, 0.93, 0.86, 0.8, 0.73)  # parts of a group's range that are tried
_TINY = 1e-30  # the least scale of a group
_CHUNK = 1 << 18  # weights quantized at a time: with what the search needs beside them they fit a CPU's cache
_GPU_CHUNK = 1 << 22  # the same where a call costs more than its work

_Mean = Callable[[Tensor], Tensor]  # [group size, n, groups] -> [n, groups]


class Grid(NamedTuple):
    """Where the codes of each group lie (scheme.py)."""

    scale: Tensor  # uint8 [N, groups]
    zero: Tensor  # uint8 [N, groups]
    row_scale: Tensor  # float32 [N]

    def steps(self) -> Tensor:
        """What one code is worth, float32 [N, groups]."""
        return self.scale.float() * self.row_scale[:, None]

    def zeros(self) -> Tensor:
        """The code, and part of one, of the value 0, float32 [N, groups]."""
        return self.zero.float() / ZERO_STEPS


def quantized_pieces(
    stored: StoredTensor, scheme: Scheme, device: torch.device | str, report: Report = None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """``stored`` quantized on ``device``, a few rows at a time: the number of the first one, and the tensors."""
    chunk = _CHUNK if torch.device(device).type == "cpu" else _GPU_CHUNK
    num_rows = None if _in_cpp(scheme, device) else max(1, chunk // stored.shape[1])
    for begin, rows in stored.pieces(report, num_rows):
        yield begin, quantize_rows(rows.to(device), scheme)


def quantize_rows(rows: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """[n, K] of any floating dtype -> the tensors of ``scheme`` for these rows."""
    if _in_cpp(scheme, rows.device):
        if scheme.kind == "int8":
            return quantizing.quantize_int8(rows)
        return quantizing.quantize_int4(rows, scheme.group_size)
    _keep_memory()
    rows = rows.float()
    if scheme.kind == "int4":
        return plain_int4(rows, scheme.group_size)
    if scheme.kind == "int8":
        return plain_int8(rows)
    scaled, scale = _in_channels(rows, _FP8_MAX)
    return {"weight": scaled.to(torch.float8_e4m3fn), "scale": scale}


def _in_cpp(scheme: Scheme, device: torch.device | str) -> bool:
    return scheme.kind in ("int8", "int4") and torch.device(device).type == "cpu" and library.available()


def _in_channels(rows: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """``rows`` in units of each row's scale, which makes its largest magnitude ``most``; and the scales, [n]."""
    scale = rows.abs().amax(1) / most
    scale = torch.where(scale == 0, 1.0, scale)  # NaN stays, so that it is seen
    return (rows / scale[:, None]).clamp_(-most, most), scale


def plain_int8(rows: Tensor) -> dict[str, Tensor]:
    """``quantizing.quantize_int8`` in plain torch, on any device; ``rows`` float32 [n, K]."""
    scaled, scale = _in_channels(rows, 127.0)
    return {"weight": scaled.round_().nan_to_num_(0.0).to(torch.int8), "scale": scale}


def plain_int4(rows: Tensor, group_size: int) -> dict[str, Tensor]:
    """``quantizing.quantize_int4`` in plain torch, on any device; ``rows`` float32 [n, K]."""
    padded = pad_groups(rows, group_size)
    grid = find_grid(padded, group_size)
    return {"weight": nibbles(encode(padded, grid)), **grid._asdict()}


@functools.cache
def _keep_memory() -> None:
    """Let glibc keep freed memory of up to twice this size: faulting it in again was half of the search's time."""
    torch.empty(1 << 24, dtype=torch.uint8)


def pad_groups(rows: Tensor, group_size: int) -> Tensor:
    """[n, K] -> [n, P]: the last group filled with its own last value, which leaves its range as it is."""
    padding = -rows.shape[1] % group_size
    return F.pad(rows[None], (0, padding), mode="replicate")[0] if padding else rows


def find_grid(rows: Tensor, group_size: int, importance: Tensor | None = None) -> Grid:
    """The grid of each group of ``rows``, float32 [n, P], with the least squared error.

    ``importance``, float32 [P], weighs the columns' errors; None: all alike.
    """
    groups = rows.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    w = groups.permute(2, 0, 1).contiguous()  # [group size, n, groups]
    mean = _mean_of(importance, group_size)
    _, step, zero = functools.reduce(_better, _ranges(w, mean, low, high))
    row_scale = step.amax(1, keepdim=True) / LARGEST
    _, scale, zero = functools.reduce(_better, _storable(w, mean, step, zero, row_scale))
    return Grid(_bytes(scale), _bytes(zero * ZERO_STEPS), row_scale.flatten())


def encode(rows: Tensor, grid: Grid) -> Tensor:
    """Float32 [n, P] -> the nearest codes, uint8 [n, P]."""
    n, groups = grid.scale.shape
    w = rows.view(n, groups, -1)
    return _bytes(_codes(w / grid.steps()[..., None], grid.zeros()[..., None])).view(n, -1)


def to_zero(zero: Tensor) -> Tensor:
    """The nearest zeros that can be stored, in codes."""
    return (zero * ZERO_STEPS).round_().clamp_(0, LARGEST).div_(ZERO_STEPS)


def _bytes(values: Tensor) -> Tensor:
    """Whole numbers of 0 to 255 as uint8; NaN, for which the row's scale speaks, as 0."""
    return values.nan_to_num(0.0).to(torch.uint8)


class _Found(NamedTuple):
    error: Tensor  # of all, and of the rest: [n, groups]
    scale: Tensor
    zero: Tensor


def _better(old: _Found, new: _Found) -> _Found:
    better = new.error < old.error
    return _Found(*(torch.where(better, a, b) for a, b in zip(new, old, strict=True)))


def _ranges(w: Tensor, mean: _Mean, low: Tensor, high: Tensor) -> Iterator[_Found]:
    """Steps and zeros of the groups ``w`` that are tried, not rounded; with 0 they reach from ``low`` to ``high``."""
    middle, half = (low + high) / 2, (high - low) / 2
    for shrink in _SHRINKS:
        step = (2 * shrink * half / LEVELS).clamp_(min=_TINY)
        zero = ((shrink * half - middle) / step).clamp_(0, LEVELS)
        for _ in range(2):
            step, zero = _least_squares(w, _codes(w / step, zero), mean, step, zero)
        in_steps = w / step
        error = mean((_codes(in_steps, zero) - zero - in_steps).square_()) * step.square()
        yield _Found(error, step, zero)


def _storable(w: Tensor, mean: _Mean, step: Tensor, zero: Tensor, row_scale: Tensor) -> Iterator[_Found]:
    """Scales and zeros near ``step`` and ``zero``, as they can be stored."""
    for up in (0, 1):
        scale = ((step / row_scale).floor() + up).clamp_(1, LARGEST)
        storable = scale * row_scale
        in_steps, shifted = w / storable, zero * step / storable
        for _ in range(2):
            shifted = to_zero(shifted)
            codes = _codes(in_steps, shifted)
            error = mean((codes - shifted - in_steps).square_()) * scale.square()
            yield _Found(error, scale, shifted)
            shifted = mean(codes.sub_(in_steps))


def _codes(in_steps: Tensor, zero: Tensor) -> Tensor:
    return (in_steps + zero).round_().clamp_(0, LEVELS)


def _mean_of(importance: Tensor | None, group_size: int) -> _Mean:
    if importance is None:
        return lambda values: _sum(values) / group_size
    weigh = importance.view(-1, 1, group_size).permute(2, 1, 0).contiguous()
    total = _sum(weigh).clamp_(min=1e-30)
    return lambda values: _sum(weigh * values) / total


def _sum(values: Tensor) -> Tensor:
    """[group size, n, groups] -> [n, groups]: four sums side by side, of every fourth value each.

    torch's own order differs from CPU to CPU.
    """
    first, second, *others = values.unflatten(0, (-1, 4))
    four: Tensor = first + second
    for other in others:
        four += other
    halves = four[:2] + four[2:]
    return halves[0] + halves[1]


def _least_squares(w: Tensor, codes: Tensor, mean: _Mean, step: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Step and zero that fit ``codes`` to ``w`` best; where all codes are alike, those given."""
    q_mean, w_mean = mean(codes), mean(w)
    centred = codes - q_mean
    spread, product = mean(centred.square()), mean(centred * w)
    fitted = product / spread
    usable = (spread > 0) & (fitted > _TINY)
    fitted = torch.where(usable, fitted, step)
    found = torch.where(usable, q_mean - w_mean / fitted, zero)
    outside = (found < 0) | (found > LEVELS)
    if outside.any():  # the value 0 must have a place: then the step alone is fitted
        found = found.clamp_(0, LEVELS)
        deviation = codes - found
        alone = mean(deviation * w) / mean(deviation.square())
        fitted = torch.where(outside & (alone > _TINY), alone, fitted)
    return fitted, found
