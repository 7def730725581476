"""Decides what each step computes. Clients take turns as they arrived; decodes every step, prefills in chunks beside.

The plan is a plain value: it can be sent to other ranks, which run it without deciding anything. No torch here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from gpt_fast.engine.pages import PageAllocator, page_digest
from gpt_fast.engine.request import Request, Status


@dataclass(frozen=True)
class SequencePlan:
    """One sequence's part in a step: compute ``tokens``, the first at position ``start``.

    Logits are wanted of the last ``num_logits`` of them: none in a prefill that goes on, one to sample the next
    token, k + 1 to verify k drafted ones. ``prompt_len`` serves dynamic rotary scaling (model.Rope).
    """

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    num_logits: int
    prompt_len: int


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in the order of its rows."""

    sequences: tuple[SequencePlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def num_logits(self) -> int:
        return sum(s.num_logits for s in self.sequences)


class Scheduler:
    """Owns the queue, the running set and the pages.

    ``prefill_chunk``: prompt tokens computed per step, over all sequences; a quarter of it while others decode, since
    they wait for the step. ``salt_by_length``: cached contents depend
    on the prompt's length (dynamic rotary scaling), so prefixes are shared between equal lengths only.
    """

    def __init__(self, pages: PageAllocator, max_batch: int, prefill_chunk: int, salt_by_length: int = 0) -> None:
        self.pages = pages
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self._salt_by_length = salt_by_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`schedule` could find something to compute."""
        return bool(self.waiting) or any(not r.held for r in self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def schedule(self, among: Collection[Request] | None = None) -> tuple[StepPlan, list[Request]]:
        """The next step and, for each sequence of its plan, the request it belongs to.

        ``among``: look at these requests alone. Planning again before the step is computed gives the same step.
        """
        chosen: list[tuple[Request, int]] = []  # request, tokens to compute
        decoding = any(r.num_tokens - r.num_computed == 1 and not r.held for r in self.running)
        budget = max(1, self.prefill_chunk // 4) if decoding else self.prefill_chunk
        num_waiting = len(self.waiting)
        for request in [r for r in self.running if among is None or r in among]:
            if request.status is not Status.RUNNING:
                continue  # preempted by an older one in this very loop
            if request.held:
                continue
            pending = request.num_tokens - request.num_computed
            count = 1 if pending == 1 else min(pending, budget)
            if count and self._reserve(request, request.num_computed + count):
                chosen.append((request, count))
                budget -= count if pending > 1 else 0
        preempted = len(self.waiting) > num_waiting  # then pages are short: admit nobody in this step
        while budget > 0 and len(self.running) < self.max_batch and not preempted:
            admitted = self._next(among)
            if admitted is None or not self._admit(admitted):
                break
            count = min(admitted.num_tokens - admitted.num_computed, budget)
            chosen.append((admitted, count))
            budget -= count
        plan = StepPlan(tuple(self._sequence_plan(r, n) for r, n in chosen))
        return plan, [r for r, _ in chosen]

    def _next(self, among: Collection[Request] | None) -> Request | None:
        """Whose turn it is: who was preempted, else the first to arrive of the groups that have the fewest running.

        So one client's many sequences do not keep another's single one waiting until the last of them.
        """
        if not self.waiting:
            return None
        running = Counter(r.group for r in self.running)
        waiting = (r for r in self.waiting if among is None or r in among)
        return min(waiting, key=lambda r: (r.first_scheduled is None, running[r.group]), default=None)

    def _sequence_plan(self, request: Request, count: int) -> SequencePlan:
        start = request.num_computed
        num_logits = 1 if start + count == request.num_tokens else 0
        if request.params.prompt_logprobs is not None and start < request.num_prompt:
            num_logits = count
        return SequencePlan(
            tokens=tuple(request.token_ids[start : start + count]),
            start=start,
            pages=tuple(request.pages),
            num_logits=num_logits,
            prompt_len=request.num_prompt,
        )

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pages.page_size)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` of ``request``, preempting the youngest sequences if need be.

        False when it was itself the youngest and is back in the queue.
        """
        missing = self._pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += pages
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its tokens are kept and computed again."""
        self.running.remove(request)
        self._drop_pages(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> bool:
        """Start a waiting request if the pages for all its tokens so far are there."""
        salt = self._salt(request)
        whole = request.params.prompt_logprobs is None  # else the logits of every prompt token are wanted
        found = self.pages.match(request.token_ids, salt) if whole else []
        fresh = self.pages.allocate(self._pages_for(request.num_tokens) - len(found))
        if fresh is None:
            self.pages.release(found)
            return False
        self.waiting.remove(request)
        self.running.append(request)
        num_found = len(found) * self.pages.page_size
        request.pages = found + fresh
        request.status = Status.RUNNING
        request.num_computed = num_found
        request.num_remembered, request.digest = 0, salt
        self._advance_digest(request, len(found))
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached = num_found
            self.pages.count_lookup(request.num_tokens, num_found)
        return True

    def _salt(self, request: Request) -> bytes:
        if not self._salt_by_length or request.num_prompt <= self._salt_by_length:
            return b""
        return request.num_prompt.to_bytes(8, "little")

    def _advance_digest(self, request: Request, num_pages: int) -> None:
        size = self.pages.page_size
        for i in range(request.num_remembered, num_pages):
            request.digest = page_digest(request.digest, request.token_ids[i * size : (i + 1) * size])
            self.pages.remember(request.pages[i], request.digest)
        request.num_remembered = max(request.num_remembered, num_pages)

    def computed(self, request: Request, count: int) -> None:
        """``count`` more tokens of ``request`` are in the cache; full pages become findable."""
        request.num_computed += count
        if self.pages.prefix_cache:
            self._advance_digest(request, request.num_computed // self.pages.page_size)

    def finish(self, request: Request) -> None:
        """Take ``request`` out, wherever it is, and give its pages back."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._drop_pages(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _drop_pages(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []
        request.num_computed = 0

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page is accounted for and only running requests hold pages."""
        self.pages.check_integrity(r.pages for r in self.running)
        if any(r.pages for r in self.waiting):
            raise RuntimeError("a waiting request holds pages")
