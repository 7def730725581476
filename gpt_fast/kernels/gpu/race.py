# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The race that draws tokens (kernels/race.py), one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 4096  # tokens looked at together


@triton.jit
def _mix(x):
    """One round of lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def race_kernel(logits, keys, tokens, vocab, width: tl.constexpr):
    """The token of one row of ``logits`` whose time is over first; -1 where its greatest logit is not finite."""
    row = tl.program_id(0)
    low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    at = logits + row.to(tl.int64) * vocab
    lane = tl.arange(0, width)
    greatest = tl.full((width,), float("-inf"), tl.float32)
    wrong = tl.zeros((width,), tl.int32)
    for begin in range(0, vocab, width):
        x = tl.load(at + begin + lane, mask=begin + lane < vocab, other=float("-inf"))
        greatest = tl.maximum(greatest, x)
        wrong |= (x != x).to(tl.int32)
    most = tl.max(greatest, 0)
    best = tl.full((width,), float("inf"), tl.float32)
    winner = tl.full((width,), 0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab, width):
        token = begin + lane
        x = tl.load(at + token, mask=token < vocab, other=float("-inf"))
        hashed = _mix(_mix(token.to(tl.uint32, bitcast=True) ^ low) ^ high)
        u = tl.minimum(((hashed >> 1).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 1.0 / 16777216.0)
        rest = 1.0 - u
        lost = 1.0 - rest  # Kahan's ln(1 + x)
        noise = tl.where(lost > 0.0, -tl.log(rest) * u / tl.where(lost > 0.0, lost, 1.0), u)
        time = tl.where(x > float("-inf"), noise / tl.exp(x - most), float("inf"))
        sooner = time < best
        best = tl.where(sooner, time, best)
        winner = tl.where(sooner, token, winner)
    found = tl.min(tl.where(best == tl.min(best, 0), winner, 0x7FFFFFFF), 0)
    sound = (most > float("-inf")) & (most < float("inf")) & (tl.max(wrong, 0) == 0)
    tl.store(tokens + row, tl.where(sound, found, -1).to(tl.int64))


def race(logits: Tensor, keys: Tensor) -> Tensor:
    """``kernels.race.race`` on a GPU: logits [R, V] float32, keys [R, 2] int32 -> [R] int64."""
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    race_kernel[(logits.shape[0],)](logits, keys.contiguous(), tokens, logits.shape[1], width=_WIDTH, num_warps=8)
    return tokens
