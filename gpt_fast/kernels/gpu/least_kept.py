# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""Where top_k and top_p cut a row of logits off, without sorting it: one program for each row.

The cut is the smallest logit above which fewer than top_k tokens lie, or less than top_p of the probability. Both grow
as the logit falls, so it is searched for, in whole numbers that are ordered as the floats are. The row is read 16
times, each time for three candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 8192  # tokens looked at together
_LOWEST = -2139095041  # -infinity as ``_order`` has it


@triton.jit
def _flipped(bits):
    """The bits of a float32 <-> an int32 in the same order."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _order(x):
    return _flipped(x.to(tl.int32, bitcast=True))


@triton.jit
def _above(at, vocab, least, first, second, third, most, by_mass: tl.constexpr, width: tl.constexpr):
    """Of the tokens from ``least`` on, how many lie above each of three candidates, or ``by_mass`` the sums of their
    exponentials: float32 three times."""
    lane = tl.arange(0, width)
    sums = tl.zeros((width,), tl.float32), tl.zeros((width,), tl.float32), tl.zeros((width,), tl.float32)
    one, two, three = sums
    for begin in range(0, vocab, width):
        x = tl.load(at + begin + lane, mask=begin + lane < vocab, other=float("-inf"))
        key = _order(x)
        weight = tl.where(key >= least, tl.exp(x - most) if by_mass else 1.0, 0.0)
        one += tl.where(key > first, weight, 0.0)
        two += tl.where(key > second, weight, 0.0)
        three += tl.where(key > third, weight, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _cut(at, vocab, least, high, most, limit, by_mass: tl.constexpr, width: tl.constexpr):
    """The smallest number from ``least`` that has less than ``limit`` above it; nothing lies above ``high``."""
    low, high = least.to(tl.int64), high.to(tl.int64)
    while low < high:
        quarter = (high - low) // 4
        first, second, third = low + quarter, low + (high - low) // 2, low + 3 * quarter
        one, two, three = _above(
            at, vocab, least, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32), most, by_mass, width
        )
        low = tl.where(one < limit, low, tl.where(two < limit, first, tl.where(three < limit, second, third)) + 1)
        high = tl.where(one < limit, first, tl.where(two < limit, second, tl.where(three < limit, third, high)))
    return low.to(tl.int32)


@triton.jit
def least_kept_kernel(scaled, top_k, top_p, out, vocab, lowest, width: tl.constexpr):
    """The smallest logit of one row that its top_k and then its top_p keep."""
    row = tl.program_id(0)
    at = scaled + row.to(tl.int64) * vocab
    lane = tl.arange(0, width)
    greatest = tl.full((width,), float("-inf"), tl.float32)
    for begin in range(0, vocab, width):
        greatest = tl.maximum(greatest, tl.load(at + begin + lane, mask=begin + lane < vocab, other=float("-inf")))
    most = tl.max(greatest, 0)
    high = _order(most)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    least = tl.minimum(lowest, high)
    if count < vocab:
        least = _cut(at, vocab, least, high, most, count.to(tl.float32), False, width)
    if share < 1.0:
        whole, _, _ = _above(at, vocab, least, least - 1, high, high, most, True, width)
        least = _cut(at, vocab, least, high, most, share * whole, True, width)
    tl.store(out + row, _flipped(least).to(tl.float32, bitcast=True))


def least_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[R] float32: the smallest logit of each row of ``scaled`` [R, V] float32 that ``top_k`` [R] int32, V for none,
    and then ``top_p`` [R] float32, 1 for none, keep. Rows do not depend on each other."""
    scaled = scaled.contiguous()
    out = torch.empty(scaled.shape[0], device=scaled.device)
    least_kept_kernel[(scaled.shape[0],)](
        scaled, top_k, top_p, out, scaled.shape[1], _LOWEST, width=_WIDTH, num_warps=16
    )
    return out
