"""Rounding to nearest: weights alone decide, row by row, so any rows can be quantized without the others.

int8 and fp8 take a scale per output channel from its largest magnitude. int4 takes a scale and a minimum per group,
found by search: of several shrunken ranges, each refined by least squares over the codes it leads to (the idea of
llama.cpp's k-quants), the one with the least squared error stays. Against the plain minimum and maximum that takes
about an eighth off the squared error of normally distributed weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.quantize.reference import pack_int4
from gpt_fast.quantize.scheme import Scheme

LEVELS = 15  # the largest code of int4
_FP8_MAX = 448.0  # of float8_e4m3fn
_SHRINKS = (1.0, 0.93, 0.86, 0.8, 0.73)  # parts of a group's range that are tried
_TINY = 2.0**-24  # the least positive float16


class Grid(NamedTuple):
    """Range of each group: ``value = q * scale + minimum``; float16 [N, groups] both."""

    scale: Tensor
    minimum: Tensor


def quantize_rows(rows: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """[n, K] of any floating dtype -> the tensors of ``scheme`` for these rows."""
    rows = rows.float()
    if scheme.kind == "int4":
        padded = pad_groups(rows, scheme.group_size)
        grid = find_grid(padded, scheme.group_size)
        return {"weight": pack_int4(encode(padded, grid)), "scale": grid.scale, "min": grid.minimum}
    scale = rows.abs().amax(1) / (127.0 if scheme.kind == "int8" else _FP8_MAX)
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = rows / scale[:, None]
    if scheme.kind == "int8":
        return {"weight": scaled.round_().clamp_(-127, 127).to(torch.int8), "scale": scale}
    return {"weight": scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), "scale": scale}


def pad_groups(rows: Tensor, group_size: int) -> Tensor:
    """[n, K] -> [n, P]: the last group filled with its own last value, which leaves its range as it is."""
    padding = -rows.shape[1] % group_size
    return F.pad(rows[None], (0, padding), mode="replicate")[0] if padding else rows


def find_grid(rows: Tensor, group_size: int, importance: Tensor | None = None) -> Grid:
    """The range of each group of ``rows``, float32 [n, P], with the least squared error.

    ``importance``, float32 [P], weighs the columns' errors; None: all alike.
    """
    w = rows.unflatten(1, (-1, group_size))  # [n, groups, group size]
    weigh = None if importance is None else importance.view(-1, group_size).expand_as(w)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in _SHRINKS:
        scale, minimum = to_float16(2 * shrink * half / LEVELS, middle - shrink * half)
        for _ in range(2):
            scale, minimum = _least_squares(w, _codes(w, scale, minimum), weigh, scale, minimum)
        error = (_codes(w, scale, minimum) * scale + minimum).sub_(w).square_()
        error = (error if weigh is None else error.mul_(weigh)).sum(-1, keepdim=True)
        if best is None:
            best = error, scale, minimum
        else:
            better = error < best[0]
            old = zip((error, scale, minimum), best, strict=True)
            best = tuple(torch.where(better, a, b) for a, b in old)  # type: ignore[assignment]
    assert best is not None
    return Grid(best[1].squeeze(-1).half(), best[2].squeeze(-1).half())


def encode(rows: Tensor, grid: Grid) -> Tensor:
    """Float32 [n, P] -> the nearest codes, uint8 [n, P]."""
    n, groups = grid.scale.shape
    w = rows.view(n, groups, -1)
    codes = _codes(w, grid.scale.float()[..., None], grid.minimum.float()[..., None])
    return codes.to(torch.uint8).view(n, -1)


def _codes(w: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((w - minimum) / scale).round_().clamp_(0, LEVELS)


def to_float16(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded as they will be stored, as float32; a scale of 0 (a constant group) becomes the least one there is."""
    limit = torch.finfo(torch.float16).max
    return scale.clamp(_TINY, limit).half().float(), minimum.clamp(-limit, limit).half().float()


def _least_squares(
    w: Tensor, codes: Tensor, weigh: Tensor | None, scale: Tensor, minimum: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and minimum that fit ``codes`` to ``w`` best; where all codes are alike, those given."""
    total: Tensor | float
    if weigh is None:
        total, q_mean, w_mean = 1.0, codes.mean(-1, keepdim=True), w.mean(-1, keepdim=True)
    else:
        total = weigh.sum(-1, keepdim=True).clamp(min=1e-30)
        q_mean = (codes * weigh).sum(-1, keepdim=True) / total
        w_mean = (w * weigh).sum(-1, keepdim=True) / total
    centred = codes - q_mean
    weighed = centred if weigh is None else centred * weigh
    spread = (weighed * centred).sum(-1, keepdim=True)
    fitted = (weighed * w).sum(-1, keepdim=True) / spread
    usable = (spread > 0) & (fitted > _TINY)
    fitted = torch.where(usable, fitted, scale)
    return to_float16(fitted, torch.where(usable, w_mean - fitted * q_mean, minimum))
