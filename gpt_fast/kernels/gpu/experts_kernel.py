# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The Triton kernels around the products of experts: who goes where, and what becomes of it (experts.py launches them).

Rows past the last sequence's only fill up a recorded step. They go to no expert, so no weights are read for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpt_fast.kernels.gpu.fused_kernel import leave


@triton.jit
def route_kernel(
    scores, weights, chosen, query_start, num_slots, num_experts, top_k: tl.constexpr, renormalize: tl.constexpr,
    experts_pad: tl.constexpr, top_pad: tl.constexpr,
):  # fmt: skip
    """The ``top_k`` experts of one row with the greatest scores, of equal ones the first, and their weights.

    A row of no sequence has the expert ``num_experts``, which is none.
    """
    row = tl.program_id(0)
    e, j = tl.arange(0, experts_pad), tl.arange(0, top_pad)
    real = row < tl.load(query_start + num_slots)
    score = tl.load(scores + row * num_experts + e, mask=e < num_experts, other=float("-inf")).to(tl.float32)
    unsound = tl.max((score != score).to(tl.int32), 0) == 1
    score = tl.where(score != score, float("-inf"), score)
    most = tl.max(score, 0)
    free = e < num_experts
    found = tl.zeros((top_pad,), tl.int32) + num_experts
    own = tl.zeros((top_pad,), tl.float32)
    for i in tl.static_range(top_k):
        best = tl.max(tl.where(free, score, float("-inf")), 0)
        expert = tl.min(tl.where(free & (score == best), e, experts_pad), 0)
        free &= e != expert
        found = tl.where((j == i) & real, expert, found)
        own = tl.where(j == i, tl.exp(best - most), own)
    total = tl.sum(own, 0) if renormalize else tl.sum(tl.exp(score - most), 0)
    own = tl.where(unsound, float("nan"), own / total)
    tl.store(weights + row * top_k + j, own, mask=j < top_k)
    tl.store(chosen + row * top_k + j, found, mask=j < top_k)


@triton.jit
def order_kernel(
    chosen, order, starts, num_pairs, num_experts, pair_programs, block: tl.constexpr, experts: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """Where ``block`` pairs stand when all are sorted by expert, those of one expert in their order. Programs behind
    ``pair_programs`` count: where the pairs of ``experts`` experts begin.

    Each pair is compared with every other: there is no sort, and nothing depends on which program is first.
    """
    program = tl.program_id(0)
    c = tl.arange(0, chunk)
    if program < pair_programs:
        i = program * block + tl.arange(0, block)
        own = tl.load(chosen + i, mask=i < num_pairs, other=num_experts)
        before = tl.zeros((block,), tl.int32)
        for first in range(0, num_pairs, chunk):
            at = first + c
            other = tl.load(chosen + at, mask=at < num_pairs, other=num_experts + 1)
            earlier = (other[None, :] == own[:, None]) & (at[None, :] < i[:, None])
            before += tl.sum((earlier | (other[None, :] < own[:, None])).to(tl.int32), 1)
        tl.store(order + before, i, mask=i < num_pairs)
    else:
        e = (program - pair_programs) * experts + tl.arange(0, experts)
        below = tl.zeros((experts,), tl.int32)
        for first in range(0, num_pairs, chunk):
            other = tl.load(chosen + first + c, mask=first + c < num_pairs, other=num_experts + 1)
            below += tl.sum((other[None, :] < e[:, None]).to(tl.int32), 1)
        tl.store(starts + e, below, mask=e <= num_experts)


@triton.jit
def gather_kernel(
    y, weights, add, shared, by, query_start, out, next_norm, weighted, squares, num_slots, dim, top_k: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """One row: the weighted sum of what its experts made (``y`` [M k, dim]), ``add``, and ``shared`` times the sigmoid
    of ``by`` [M, 1]. Rows of no sequence have no experts."""
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < dim
    made = column < tl.where(row < tl.load(query_start + num_slots), dim, 0)
    at = row.to(tl.int64) * dim + column
    value = tl.zeros((width,), tl.float32)
    for i in tl.static_range(top_k):
        pair = row.to(tl.int64) * top_k + i
        its = tl.load(y + pair * dim + column, mask=made, other=0.0).to(tl.float32)
        value += its * tl.load(weights + pair)
    if add is not None:
        value += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    if by is not None:
        gate = 1.0 / (1.0 + tl.exp(-tl.load(by + row).to(tl.float32)))
        value += gate * tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    stored = value.to(out.dtype.element_ty)
    tl.store(out + at, stored, mask=inside)
    if next_norm is not None:
        leave(stored.to(tl.float32), row, column, inside, next_norm, weighted, squares, dim)
