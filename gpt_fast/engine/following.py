"""Rank 0 decides what each step computes and tells the other ranks, which compute their shares of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.parallel.group import Group

_END = [-1]


class LeadingRunner(Runner):
    """The runner of rank 0: each plan goes to ``group`` before it is run."""

    group: Group

    def execute(self, plan: StepPlan) -> Tensor:
        """See ``Runner``."""
        self.group.tell(numbers_of(plan))
        return super().execute(plan)

    def close(self) -> None:
        """Let the others end."""
        self.group.tell(_END)


def follow(runner: Runner, group: Group) -> None:
    """Run what rank 0 says, to its end."""
    while (numbers := group.hear()) != _END:
        runner.execute(plan_of(numbers))


def numbers_of(plan: StepPlan) -> list[int]:
    """``plan`` as numbers: only what it changes in the page table, so as many after a million tokens as after ten."""
    numbers = [len(plan.sequences)]
    for s in plan.sequences:
        numbers += (s.slot, s.start, s.num_placed, s.num_logits, s.rope_len, len(s.new_pages), len(s.tokens))
        numbers += s.new_pages
        numbers += s.tokens
    return numbers


def plan_of(numbers: Sequence[int]) -> StepPlan:
    """The inverse of :func:`numbers_of`."""
    sequences, at = [], 1
    for _ in range(numbers[0]):
        slot, start, num_placed, num_logits, rope_len, num_pages, num_tokens = numbers[at : at + 7]
        pages, at = tuple(numbers[at + 7 : at + 7 + num_pages]), at + 7 + num_pages
        tokens, at = tuple(numbers[at : at + num_tokens]), at + num_tokens
        sequences.append(SequencePlan(slot, tokens, start, num_placed, pages, num_logits, rope_len))
    return StepPlan(tuple(sequences))
