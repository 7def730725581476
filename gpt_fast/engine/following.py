"""Rank 0 decides what each step computes and tells the other ranks, which compute their shares of it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpt_fast.engine.model import Model
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import RankError
from gpt_fast.parallel.ranks import Ranks

_END = -1


class Leader:
    """Rank 0's side of the plans: each travels with a digest of itself and of all before it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._digest = ranks, 0

    def tell(self, plan: StepPlan) -> None:
        """Let the others run ``plan``. Raises RankError for one that is too long to be told, and is not missed."""
        numbers = numbers_of(plan)
        own = digest(numbers, self._digest)
        self._ranks.tell([own, *numbers])
        self._digest = own

    def end(self) -> None:
        """Let the others end."""
        self._ranks.tell([_END])


class LeadingRunner(Runner):
    """The runner of rank 0, which tells each plan before it is run. ``sizes``: see ``Runner``."""

    def __init__(self, ranks: Ranks, model: Model, **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self.leader = Leader(ranks)
        self.runs_ahead = self.draws_at_once = False  # the others run execute(), with tokens that they know

    def execute(self, plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        """See ``Runner``."""
        self.leader.tell(plan)
        return super().execute(plan, tokens)


def follow(runner: Runner, ranks: Ranks) -> None:
    """Run what rank 0 tells, to its end. Raises RankError where it is not what this rank expects."""
    own = 0
    while (message := ranks.hear())[0] != _END:
        told, *numbers = message
        own = digest(numbers, own)
        if own != told:
            raise RankError(f"rank 0's plan has the digest {told:08x}, and here it is {own:08x}: a message was lost")
        runner.execute(plan_of(numbers))


def digest(numbers: Sequence[int], before: int) -> int:
    """32 bits of ``numbers`` and of all that had the digest ``before``."""
    return zlib.crc32(array("q", numbers), before)


def numbers_of(plan: StepPlan) -> list[int]:
    """``plan`` as numbers: only what it changes in the page table, so as many after a million tokens as after ten."""
    numbers = [len(plan.sequences)]
    for s in plan.sequences:
        numbers += (s.slot, s.start, s.num_placed, s.num_logits, s.rope_len, s.is_prompt)
        numbers += (len(s.new_pages), len(s.tokens))
        numbers += s.new_pages
        numbers += s.tokens
    return numbers


def plan_of(numbers: Sequence[int]) -> StepPlan:
    """The inverse of :func:`numbers_of`."""
    sequences, at = [], 1
    for _ in range(numbers[0]):
        slot, start, num_placed, num_logits, rope_len, is_prompt, num_pages, num_tokens = numbers[at : at + 8]
        pages, at = tuple(numbers[at + 8 : at + 8 + num_pages]), at + 8 + num_pages
        tokens, at = tuple(numbers[at : at + num_tokens]), at + num_tokens
        sequences.append(SequencePlan(slot, tokens, start, num_placed, pages, num_logits, rope_len, bool(is_prompt)))
    return StepPlan(tuple(sequences))
