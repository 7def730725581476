"""A step of many tokens in parts: sequences with few new tokens, as many together as a recorded step holds, and others.

A generated token is then computed by the same kernels whatever prompts are beside it: an answer does not depend on
company. Each part reads the weights once more, which for a part of generated tokens takes as long as a step of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.cache import StepLayout

FEW = 16  # new tokens of a sequence that decodes: one, and drafts to verify


class StepInputs(NamedTuple):
    """What a step of a ``Transformer`` takes, on the host but for the page table; tokens may lie anywhere."""

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    layout: StepLayout
    rows: Tensor


def share_out(counts: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """The slots of a step with ``counts`` new tokens each: groups of those with 1 to FEW, in order and of at most
    ``most`` tokens together, and those with more. ``most`` is at least FEW."""
    groups: list[list[int]] = []
    room = 0
    for slot, count in enumerate(counts):
        if not 1 <= count <= FEW:
            continue
        if count > room:
            groups.append([])
            room = most
        groups[-1].append(slot)
        room -= count
    return groups, [slot for slot, count in enumerate(counts) if count > FEW]


def run_in_parts(
    step: StepInputs, most: int, few: Callable[[StepInputs], Tensor], many: Callable[[StepInputs], Tensor]
) -> Tensor:
    """Logits [R, V] of ``step`` in new memory: each group of :func:`share_out` by ``few``, the other slots together by
    ``many``. Both return logits of their rows."""
    starts = step.layout.query_start.tolist()
    groups, long = share_out([end - begin for begin, end in itertools.pairwise(starts)], most)
    if not groups:
        return many(step)
    parts = [_part(step, starts, slots) for slots in [*groups, long] if slots]
    found = [few(part) for part, _ in parts[: len(groups)]] + [many(part) for part, _ in parts[len(groups) :]]
    out = found[0].new_empty(len(step.rows), found[0].shape[1])
    for (_, places), logits in zip(parts, found, strict=True):
        out.index_copy_(0, places.to(out.device, non_blocking=True), logits)
    return out


def _part(step: StepInputs, starts: Sequence[int], slots: Sequence[int]) -> tuple[StepInputs, Tensor]:
    """The step of ``slots`` alone, and which of the whole step's rows are its rows [r] int64."""
    index = torch.cat([torch.arange(starts[slot], starts[slot + 1]) for slot in slots])
    own = set(slots)
    counts = [end - begin if slot in own else 0 for slot, (begin, end) in enumerate(itertools.pairwise(starts))]
    layout = StepLayout(
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        step.layout.context_len,
        step.layout.page_table,
        step.layout.write_slots[index],
    )
    new = torch.full((starts[-1],), -1)  # where each token of the whole step stands in the part
    new[index] = torch.arange(len(index))
    places = (new[step.rows] >= 0).nonzero()[:, 0]
    tokens = step.tokens[index.to(step.tokens.device, non_blocking=True)]
    return StepInputs(tokens, step.positions[index], step.lengths[index], layout, new[step.rows[places]]), places
