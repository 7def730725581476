# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""What several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_block(program, starts, num_groups, size: tl.constexpr, groups_pad: tl.constexpr):
    """Which rows ``program`` has where rows belong to groups, as tokens to sequences: its group, and the first of its
    rows there. Groups come in order, each in blocks of ``size`` rows.

    ``starts``: int32 [num_groups + 1], where each group begins and the last one ends. Only the device knows them. So as
    many programs are launched as any numbers need, and the group is ``num_groups`` for those with nothing to do.
    """
    g = tl.arange(0, groups_pad)
    begin = tl.load(starts + g, mask=g < num_groups, other=0)
    end = tl.load(starts + 1 + g, mask=g < num_groups, other=0)
    blocks = tl.where(g < num_groups, (end - begin + size - 1) // size, 0)
    past = tl.cumsum(blocks, 0)
    group = tl.sum(((past <= program) & (g < num_groups)).to(tl.int32), 0)
    before = tl.sum(tl.where(g < group, blocks, 0), 0)
    return group, (program - before) * size


@triton.jit
def tanh(x):
    """Of float32 numbers."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
