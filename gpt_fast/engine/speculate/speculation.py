"""Who gets how many drafts in the next step, and from whom."""

from __future__ import annotations

import logging

from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.speculate.drafter import Drafter, Wish

log = logging.getLogger(__name__)


class Speculation:
    """Before each step asks ``drafter`` for ``count`` drafts for each sequence that decodes."""

    def __init__(self, drafter: Drafter, count: int) -> None:
        self.drafter, self.count = drafter, count

    def propose(self, scheduler: Scheduler) -> None:
        """Set the drafts of running requests. A drafter that fails costs the drafts of one step and nothing else."""
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
