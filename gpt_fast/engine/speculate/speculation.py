"""Drafts before each step, and what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.engine.speculate.controller import Asked, Controller
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.engine.speculate.times import StepTimes, measure, measured_rows
from gpt_fast.outputs import Origin

log = logging.getLogger(__name__)

MAX_ROWS = 48  # of a step with drafts that are chosen; the GPU kernels take no more
_EXPECTED_TOKENS = 128  # of an answer that may be longer


@dataclass
class DraftCounts:
    """What became of all drafts since the start, for metrics. A request's own counts are in ``Request``."""

    num_drafts: int = 0  # times that a sequence had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)  # first drafts, second ones, ...
    accepted_per_position: list[int] = field(default_factory=list)  # and those of them that were right

    def note(self, drafted: int, accepted: int) -> None:
        """Of one step's ``drafted`` tokens for one sequence the first ``accepted`` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for counts, count in ((self.drafted_per_position, drafted), (self.accepted_per_position, accepted)):
            counts += [0] * (drafted - len(counts))
            for i in range(count):
                counts[i] += 1


class Speculation:
    """Before each step asks ``drafter`` for up to ``most`` drafts for each sequence that decodes: as many as the
    ``controller`` chooses, or ``most`` where it is None. All methods are called by the engine's thread."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self.drafter, self.most = drafter, most
        self.controller: Controller | None = None
        self.counts = DraftCounts()
        self.drafting_s = 0.0  # seconds that the drafts of the latest step took
        self._unverified: dict[Request, tuple[int, tuple[int, ...]]] = {}

    def control(self, run: Callable[[int], object], max_batch: int, max_rows: int) -> None:
        """Choose the number of drafts from now on. ``run(rows)`` runs a step that verifies rows - 1 drafts; it and the
        drafter are timed. No step with drafts will have more than ``max_rows`` rows."""
        most = min(MAX_ROWS, max_rows, max_batch * (1 + self.most))
        steps = StepTimes(measure(run, measured_rows(most)), most)
        self.controller = Controller(self.most, steps, self.drafter.measure())

    def propose(self, scheduler: Scheduler) -> None:
        """Set the drafts of running requests. A drafter that fails costs the drafts of one step and nothing else."""
        begin = time.perf_counter()
        self._propose(scheduler)
        self.drafting_s = time.perf_counter() - begin

    def _propose(self, scheduler: Scheduler) -> None:
        running = [r for r in scheduler.running if r.num_pending == 1 and not r.paused]
        if not running:
            return
        try:
            if self.controller is None:
                self._draft(scheduler, running, [self.most] * len(running))
            elif (counts := self.controller.again(running)) is not None:
                self._draft(scheduler, running, counts)
            elif self.controller.drafting is None:
                self._choose_from_guesses(self.controller, scheduler, running)
            else:
                asked = [self._asked(r) for r in running]
                counts = self.controller.choose(asked, _other_rows(scheduler))
                self._draft(scheduler, running, counts, [each.missing for each in asked])
        except Exception:
            log.exception("drafting failed; this step goes on without drafts")

    def _asked(self, request: Request) -> Asked:
        left = request.max_tokens - request.num_output
        steps_left = min(left, max(_EXPECTED_TOKENS, request.num_output))
        return Asked(request, min(self.most, left - 1), self.drafter.missing(request), steps_left)

    def _draft(
        self, scheduler: Scheduler, running: Sequence[Request], counts: Sequence[int], missing: Sequence[int] = ()
    ) -> None:
        """Have ``counts`` drafts made, or as many as there is room for. ``missing``: what the drafter has to compute
        for each of ``running`` first, where it is to be timed."""
        begin = time.perf_counter()
        wishes = [Wish(r, scheduler.room_for_drafts(r, n)) for r, n in zip(running, counts, strict=True)]
        lacking = [n for wish, n in zip(wishes, missing, strict=False) if wish.most]
        wishes = [wish for wish in wishes if wish.most]
        if not wishes:
            return
        drafts = self.drafter.draft(wishes)
        if self.controller is not None and self.controller.drafting is not None:
            seconds = time.perf_counter() - begin
            self.controller.drafting.note([wish.most for wish in wishes], lacking, seconds)
        for wish, tokens in zip(wishes, drafts, strict=True):
            wish.request.drafts = tokens

    def _choose_from_guesses(self, controller: Controller, scheduler: Scheduler, running: Sequence[Request]) -> None:
        """Guesses that cost nothing are made for everyone; those that are not worth a row are judged by what comes."""
        guesses = self.drafter.draft([Wish(r, min(self.most, r.max_tokens - r.num_output - 1)) for r in running])
        for request in list(self._unverified):
            self._judge(controller, request)
        if not any(guesses):
            controller.choose([])
            return
        asked = [Asked(r, len(guess)) for r, guess in zip(running, guesses, strict=True)]
        counts = controller.choose(asked, _other_rows(scheduler))
        for request, guess, count in zip(running, guesses, counts, strict=True):
            request.drafts = guess[: scheduler.room_for_drafts(request, count)] if count else ()
            if guess and not request.drafts:
                self._unverified.setdefault(request, (request.num_tokens, guess))

    def _judge(self, controller: Controller, request: Request) -> None:
        """Note how far an unverified guess was right, once it was wrong or its last token is known."""
        begin, guess = self._unverified[request]
        came = request.token_ids[begin : begin + len(guess)]
        right = next((i for i, token in enumerate(came) if token != guess[i]), len(came))
        if right < len(came) or right == len(guess):
            controller.note(request, len(guess), right)
            del self._unverified[request]

    def end(self, request: Request) -> None:
        """``request`` has ended."""
        self._unverified.pop(request, None)
        if self.controller is not None:
            self.controller.end(request)
        self.drafter.end(request)

    def note(self, request: Request, drafted: int, right: int, taken: int) -> None:
        """A step verified ``drafted`` tokens of ``request``; the first ``right`` were right, and with the token behind
        them ``taken`` tokens were taken: fewer where the answer ends."""
        if not drafted:
            request.origins.extend(["plain"] * taken)
            return
        accepted = min(right, taken)
        request.num_drafted += drafted
        request.num_accepted += accepted
        last: Origin = "bonus" if right == drafted else "corrected"
        request.origins.extend(["accepted"] * accepted)
        request.origins.extend([last] * (taken - accepted))
        self.counts.note(drafted, accepted)
        if self.controller is not None:
            self.controller.note(request, drafted, right)
            self._unverified.pop(request, None)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took ``seconds`` with drafting."""
        controller = self.controller  # the requests of the step may have ended, and then it may be changed
        if controller is not None and all(s.num_logits == len(s.tokens) for s in plan.sequences):
            has_drafts = plan.num_tokens > len(plan.sequences)
            controller.observe(plan.num_tokens, has_drafts, seconds - self.drafting_s)


def _other_rows(scheduler: Scheduler) -> int:
    """Prompt tokens that the next step will probably compute."""
    pending = sum(r.num_pending for r in scheduler.running if r.num_pending > 1 and not r.paused)
    if len(scheduler.running) < scheduler.max_batch:
        pending += sum(r.num_tokens for r in scheduler.waiting)
    return min(pending, max(1, scheduler.prefill_chunk // 4))
