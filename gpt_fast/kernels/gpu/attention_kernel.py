# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-calls=false
"""The Triton kernel of paged attention; attention.py launches it and documents its arguments.

A program takes a few new tokens of one sequence, the query heads that share one key-value head, and one part of the
sequence. Where it lies is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpt_fast.kernels.gpu.common_kernel import find_block, tanh

LOG2E = tl.constexpr(1.4426950408889634)  # scores are in bits: weights are powers of 2


@triton.jit
def _combine(partial, stats, at, active, used, rows: tl.constexpr, width: tl.constexpr, splits: tl.constexpr):
    """Parts 0..active-1 of the row group ``at`` in one, the first ``used`` rows. Gives what ``_attend_part`` gives.

    Read past the first-level cache, which does not know of other programs' stores.
    """
    r = tl.arange(0, rows)
    d = tl.arange(0, width)
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, width), tl.float32)
    for part in range(0, active):
        place = at * splits + part
        given = r < used
        its_most = tl.load(stats + place * 2 * rows + r, mask=given, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(stats + place * 2 * rows + rows + r, mask=given, other=0.0, cache_modifier=".cg")
        its_at = partial + (place * rows + r[:, None]) * width + d[None, :]
        its_acc = tl.load(its_at, mask=given[:, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(most, its_most)
        base = tl.where(new == float("-inf"), 0.0, new)
        old_share, share = tl.exp2(most - base), tl.exp2(its_most - base)
        acc = acc * old_share[:, None] + its_acc * share[:, None]
        total = total * old_share + its_total * share
        most = new
    return most, total, acc


@triton.jit
def _mean(most, total, acc, sinks):
    """The weighted sum over the sum of weights [rows, width]. ``sinks`` [rows]: scores that take weight and give
    nothing."""
    if sinks is not None:
        new = tl.maximum(most, sinks)
        share = tl.exp2(most - new)
        total = total * share + tl.exp2(sinks - new)
        acc *= share[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _places(token, head, count, heads, dim, group: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    """Where ``count`` queries from ``token`` on begin in [N, H, D], and which of their numbers exist [rows, width].

    row = query * group + head within the group
    """
    r = tl.arange(0, rows)
    d = tl.arange(0, width)
    at = ((token + r // group) * heads + head * group + r % group).to(tl.int64) * dim
    return at[:, None], (r < count * group)[:, None] & (d < dim)[None, :]


@triton.jit
def _attend_part(
    own, own_position, k_cache, v_cache, k_scale, v_scale, pages, head, start, stop, scale, window, cap, slopes,
    page_size: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, compute: tl.constexpr, rows: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Queries ``own`` [rows, width] against positions start..stop-1.

    Gives the greatest score and the sum of weights [rows], and the weighted sum of values [rows, width].
    """
    t = tl.arange(0, block)
    d = tl.arange(0, width)
    in_dim = d < dim
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, width), tl.float32)
    for first in range(start, stop, block):
        key = first + t
        valid = key < stop
        page = tl.load(pages + key // page_size, mask=valid, other=0)
        row = (page.to(tl.int64) * page_size + key % page_size) * kv_heads + head
        inside = valid[:, None] & in_dim[None, :]
        keys = tl.load(k_cache + row[:, None] * dim + d[None, :], mask=inside, other=0).to(compute)
        values = tl.load(v_cache + row[:, None] * dim + d[None, :], mask=inside, other=0).to(compute)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale
        if k_scale is not None:
            scores *= tl.load(k_scale + row, mask=valid, other=0.0)[None, :]
        if cap is not None:
            scores = cap * tanh(scores / cap)
        if slopes is not None:
            scores += slopes[:, None] * (key[None, :] - own_position[:, None]).to(tl.float32)
        seen = valid[None, :] & (key[None, :] <= own_position[:, None])
        if window > 0:
            seen &= key[None, :] > own_position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a row may see nothing of this block
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(most - base)
        total = total * keep + tl.sum(weights, 1)
        if v_scale is not None:
            weights *= tl.load(v_scale + row, mask=valid, other=0.0)[None, :]
        acc = acc * keep[:, None] + tl.dot(weights.to(compute), values, input_precision="ieee")
        most = new
    return most, total, acc


@triton.jit
def attend_kernel(
    q, k_cache, v_cache, k_scale, v_scale, query_start, context_len, page_table, out, partial, stats, arrivals,
    slopes, sinks, num_slots, pages_per_slot, scale, window, cap,
    page_size: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, compute: tl.constexpr,
    group: tl.constexpr, queries: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, splits: tl.constexpr,
    block: tl.constexpr, slots_pad: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries of one sequence over one part of its tokens; the last part to end combines."""
    program, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = tl.arange(0, rows)
    d = tl.arange(0, width)
    slot, first_query = find_block(program, query_start, num_slots, queries, slots_pad)
    if slot >= num_slots:
        # A token past the last sequence's (queries == 1 alone counts programs by tokens): zeros.
        if queries == 1 and part == 0:
            at, inside = _places(program, head, 1, heads, dim, group, rows, width)
            tl.store(out + at + d[None, :], tl.zeros((rows, width), out.dtype.element_ty), mask=inside)
        return
    begin, end = tl.load(query_start + slot), tl.load(query_start + slot + 1)
    token = begin + first_query
    count = tl.minimum(end - token, queries)
    position = tl.load(context_len + slot) - (end - token)  # of the first query
    length = position + count
    lowest = tl.maximum(position - window + 1, 0) if window > 0 else 0
    if queries > 1:  # where the block of queries begins depends on company: where a block of keys does must not
        lowest = lowest // block * block
    # Parts depend on this block alone: the same row gives the same bits in any batch.
    share = tl.cdiv(tl.cdiv(length - lowest, splits), block) * block
    active = tl.cdiv(length - lowest, share)
    if part >= active:
        return
    start = lowest + part * share
    stop = tl.minimum(start + share, length)

    at, inside = _places(token, head, count, heads, dim, group, rows, width)
    own = tl.load(q + at + d[None, :], mask=inside, other=0.0)
    if slopes is not None:
        slopes = tl.load(slopes + head * group + r % group) * LOG2E
    if sinks is not None:
        sinks = tl.load(sinks + head * group + r % group).to(tl.float32) * LOG2E
    most, total, acc = _attend_part(
        own.to(compute), position + r // group, k_cache, v_cache, k_scale, v_scale,
        page_table + slot * pages_per_slot, head, start, stop, scale, window, cap, slopes, page_size, kv_heads, dim,
        compute, rows, width, block,
    )  # fmt: skip

    if splits == 1:
        tl.store(out + at + d[None, :], _mean(most, total, acc, sinks), mask=inside)
    else:
        cell = program * kv_heads + head
        place = cell * splits + part
        used = count * group
        tl.store(partial + (place * rows + r[:, None]) * width + d[None, :], acc, mask=(r < used)[:, None])
        tl.store(stats + place * 2 * rows + r, most, mask=r < used)
        tl.store(stats + place * 2 * rows + rows + r, total, mask=r < used)
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        before = tl.atomic_add(arrivals + cell, 1, sem="acq_rel")
        if before == active - 1:
            most, total, acc = _combine(partial, stats, cell, active, used, rows, width, splits)
            tl.store(out + at + d[None, :], _mean(most, total, acc, sinks), mask=inside)
            tl.store(arrivals + cell, 0)  # ready for the next launch
