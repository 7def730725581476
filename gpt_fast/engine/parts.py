"""A plan in parts, where a model computes generated tokens by other kernels than prompts.

Which kernels compute a token then depends on what it is, and never on what is beside it: an answer does not depend on
company. Each part reads the weights once more, which for a part of generated tokens takes as long as a step of them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from gpt_fast.engine.scheduler import StepPlan

FEW = 16  # new tokens of a sequence that decodes, at most: one, and drafts to verify


class Part(NamedTuple):
    """Some sequences of a step."""

    plan: StepPlan
    prompts: bool  # else generated tokens
    tokens: list[int]  # which of the whole step's tokens and rows of logits are theirs
    rows: list[int]


def parts_of(plan: StepPlan, most: int) -> list[Part]:
    """Generated tokens in groups of at most ``most``, which is at least FEW, in order; then the prompts together."""
    groups: list[list[int]] = []
    prompts: list[int] = []
    room = 0
    for i, sequence in enumerate(plan.sequences):
        count = len(sequence.tokens)
        if sequence.is_prompt or count > FEW:
            prompts.append(i)
            continue
        if count > room:
            groups.append([])
            room = most
        groups[-1].append(i)
        room -= count
    first_token = [0, *itertools.accumulate(len(s.tokens) for s in plan.sequences)]
    first_row = [0, *itertools.accumulate(s.num_logits for s in plan.sequences)]

    def part(which: list[int], prompts: bool) -> Part:
        tokens = [token for i in which for token in range(first_token[i], first_token[i + 1])]
        rows = [row for i in which for row in range(first_row[i], first_row[i + 1])]
        return Part(StepPlan(tuple(plan.sequences[i] for i in which)), prompts, tokens, rows)

    return [part(group, False) for group in groups] + ([part(prompts, True)] if prompts else [])
