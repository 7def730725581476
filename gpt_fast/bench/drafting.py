"""What became of drafts, what they cost, and whether they pay.

A step with k drafts takes k draft steps and one step of the target that verifies them. It brings the drafts that are
right and one token more, each of which would take a plain step. So speculation pays when

    (accepted + 1) x plain step > k x draft step + verification step

(Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with measured times in the place of a ratio of costs).

All times are means and leave nothing out, neither what a step cost the host nor the prompts that the draft model
computes before its first draft. So they add up to the time that tokens per second are about.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt_fast.engine.engine import Engine
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.engine.speculate.controller import Controller
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.outputs import Completion, Origin


@dataclass
class Tally:
    """What became of the drafts of some completions. A step here is the target's step for one sequence; the one that
    ends the prompt does not count, because it never has drafts."""

    origins: Counter[Origin] = field(default_factory=Counter)  # tokens by where they come from
    num_tokens: int = 0  # behind the first one of each completion
    num_steps: int = 0  # that made them
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, completion: Completion) -> None:
        """Count ``completion``. Without origins (no drafter is loaded) each of its tokens is a plain one."""
        plain: Origin = "plain"
        origins = completion.origins or (plain,) * len(completion.token_ids)
        if not origins:
            return
        self.origins.update(origins)
        self.num_tokens += len(origins) - 1
        # Each step ends with a token that is no draft, unless the answer ends before it.
        self.num_steps += sum(origin != "accepted" for origin in origins[1:]) + (origins[-1] == "accepted")
        self.num_drafted += completion.num_drafted
        self.num_accepted += completion.num_accepted

    def include(self, other: Tally) -> None:
        """Count what ``other`` has counted."""
        self.origins.update(other.origins)
        self.num_tokens += other.num_tokens
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were right; None without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean accepted length: tokens for each step of the target; None without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def drafts_per_step(self) -> float | None:
        return self.num_drafted / self.num_steps if self.num_steps else None


class DecodeStep(NamedTuple):
    """A step in which sequences decoded, and nothing else ran."""

    num_sequences: int
    num_drafts: int  # of all sequences together
    drafting_s: float
    target_s: float  # all the rest: the target's step, sampling, the host's work before the step and behind it


class StepLog:
    """Notes every decode step of ``engine`` in ``steps``, from now on and in the place of another observer."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[DecodeStep] = []
        self._engine = engine
        engine.on_step = self._note

    def _note(self, plan: StepPlan, seconds: float) -> None:
        if any(s.num_logits != len(s.tokens) for s in plan.sequences):
            return  # prompts were computed as well
        num_drafts = sum(s.num_logits - 1 for s in plan.sequences)
        speculation = self._engine.speculation
        # Without drafts in any step there is nothing to choose: what that takes is then the host's, and not drafting.
        drafting_s = speculation.drafting_s if speculation is not None and speculation.most else 0.0
        self.steps.append(DecodeStep(len(plan.sequences), num_drafts, drafting_s, seconds - drafting_s))


@contextlib.contextmanager
def speculating(speculation: Speculation, most: int, controller: Controller | None = None) -> Iterator[None]:
    """Inside, each step gets ``most`` drafts for each sequence, 0 for none, or as many as ``controller`` chooses. No
    request may run when it begins and ends."""
    before = speculation.most, speculation.controller
    speculation.most, speculation.controller = most, controller
    try:
        yield
    finally:
        speculation.most, speculation.controller = before


class BreakEven(NamedTuple):
    """The two sides of the inequality, for a step of a whole batch. Numbers are means for each sequence and step with
    drafts, times seconds."""

    drafts: float  # k
    accepted: float
    draft_s: float  # drafting, for each of the ``drafts``
    verify_s: float
    plain_s: float

    @property
    def plain_side_s(self) -> float:
        """What plain steps take for the same tokens."""
        return (self.accepted + 1) * self.plain_s

    @property
    def draft_side_s(self) -> float:
        """What drafts and verification take."""
        return self.drafts * self.draft_s + self.verify_s

    @property
    def speedup(self) -> float:
        """Tokens per second of steps with drafts over those of plain steps; speculation pays above 1."""
        return self.plain_side_s / self.draft_side_s

    @property
    def accepted_needed(self) -> float:
        """Accepted drafts at which both sides are equal."""
        return self.draft_side_s / self.plain_s - 1


def plain_step_s(steps: Iterable[DecodeStep], batch_size: int) -> float | None:
    """Seconds of a step without drafts in which ``batch_size`` sequences decode; None if there was none."""
    plain = [s.target_s for s in steps if s.num_sequences == batch_size and not s.num_drafts]
    return statistics.fmean(plain) if plain else None


def break_even(
    steps: Iterable[DecodeStep], acceptance: float | None, plain_s: float | None, batch_size: int
) -> BreakEven | None:
    """The inequality for those of ``steps`` in which ``batch_size`` sequences decode, some of them with drafts; None if
    there was none. ``acceptance``: share of the drafts that are right."""
    found = [s for s in steps if s.num_sequences == batch_size and s.num_drafts]
    if not found or acceptance is None or plain_s is None:
        return None
    drafts = sum(s.num_drafts for s in found) / (batch_size * len(found))
    draft_s = statistics.fmean(s.drafting_s for s in found) / drafts
    verify_s = statistics.fmean(s.target_s for s in found)
    return BreakEven(drafts, drafts * acceptance, draft_s, verify_s, plain_s)
