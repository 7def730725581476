"""Who gets how many drafts in the next step, and from whom."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.outputs import Origin

log = logging.getLogger(__name__)


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
        self.num_drafts += drafted > 0
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for counts, count in ((self.drafted_per_position, drafted), (self.accepted_per_position, accepted)):
            counts += [0] * (drafted - len(counts))
            for i in range(count):
                counts[i] += 1


class Speculation:
    """Before each step asks ``drafter`` for at most ``count`` drafts for each sequence that decodes. ``when``: auto,
    always or never, see ``SPECULATE`` (config.py). Both may be changed while no request runs."""

    def __init__(self, drafter: Drafter, count: int, when: str = "always") -> None:
        self.drafter, self.count, self.when = drafter, count, when
        self.counts = DraftCounts()
        self.drafting_s = 0.0  # seconds that the drafts of the latest step took

    def propose(self, scheduler: Scheduler) -> None:
        """Set the drafts of running requests. A drafter that fails costs the drafts of one step and nothing else."""
        begin = time.perf_counter()
        if self.when != "never":
            self._propose(scheduler)
        self.drafting_s = time.perf_counter() - begin

    def _propose(self, scheduler: Scheduler) -> None:
        running = [r for r in scheduler.running if r.num_pending == 1 and not r.paused]
        wishes = [Wish(r, scheduler.room_for_drafts(r, self.count)) for r in running]
        wishes = [wish for wish in wishes if wish.most > 0]
        try:
            drafts = self.drafter.draft(wishes) if wishes else []
        except Exception:
            log.exception("drafting failed; this step goes on without drafts")
            return
        for wish, tokens in zip(wishes, drafts, strict=True):
            wish.request.drafts = tokens

    def note(self, request: Request, drafted: int, right: int, taken: int) -> None:
        """A step verified ``drafted`` tokens of ``request``; the first ``right`` were right, and with the token behind
        them ``taken`` tokens were taken: fewer where the answer ends."""
        accepted = min(right, taken)
        request.num_drafted += drafted
        request.num_accepted += accepted
        last: Origin = "plain" if not drafted else "bonus" if right == drafted else "corrected"
        request.origins.extend(["accepted"] * accepted)
        request.origins.extend([last] * (taken - accepted))
        self.counts.note(drafted, accepted)
