"""Decides what each step computes: all decodes, and chunks of prompts beside them. Clients take turns as they arrived.

The plan is a plain value: other ranks could run it without deciding anything. No torch here.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt_fast.engine.pages import PageAllocator, page_digest
from gpt_fast.engine.queue import Queue
from gpt_fast.engine.request import Request


class SequencePlan(NamedTuple):
    """One sequence's part in a step: compute ``tokens``, the first at position ``start``, in ``slot``. The last tokens
    may be drafts, which the request does not have yet. The slot's first ``num_placed`` pages are known from earlier
    steps; ``new_pages`` follow them. Logits are wanted of the last ``num_logits`` tokens: none in a prefill that goes
    on, one to sample the next token, k + 1 to verify k drafts. Rotary scaling takes the sequence to have at least
    ``rope_len`` tokens (model/rope.py). ``is_prompt``: the tokens are of its prompt, or several that it generated
    before it was preempted (parts.py)."""

    slot: int
    tokens: tuple[int, ...]
    start: int
    num_placed: int
    new_pages: tuple[int, ...]
    num_logits: int
    rope_len: int
    is_prompt: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in the order of its rows, which is the order of the slots."""

    sequences: tuple[SequencePlan, ...]

    def __post_init__(self) -> None:
        assert all(a.slot < b.slot for a, b in itertools.pairwise(self.sequences)), "sequences in order of their slots"

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)


def goes_on(part: tuple[Request, SequencePlan]) -> bool:
    """Whether the request of ``part``, of a step that was begun, still wants its token: else that is thrown away."""
    request, own = part
    return request.slot == own.slot and request.num_computed == own.start and not request.paused


class Scheduler:
    """Owns the queue, the running set, the slots and the pages.

    A request keeps one of ``max_batch`` slots while it runs. ``prefill_chunk``: prompt tokens computed per step, over
    all sequences; a quarter of it while others decode, since they wait for the step. ``long_from``: prompts of more
    tokens share prefixes only with those of equal length, because their cache depends on it (dynamic rotary scaling).
    ``computed_anew``: a sequence that grows beyond ``long_from`` is computed again (longrope). ``whole_prompts``: no
    prompt is divided among steps; the last one of a step may exceed what ``prefill_chunk`` leaves for it."""

    def __init__(
        self,
        pages: PageAllocator,
        max_batch: int,
        prefill_chunk: int,
        long_from: int = 0,
        computed_anew: bool = False,
        whole_prompts: bool = False,
    ) -> None:
        self.pages, self.max_batch, self.prefill_chunk = pages, max_batch, prefill_chunk
        self._long_from, self._computed_anew, self._whole_prompts = long_from, computed_anew, whole_prompts
        self.waiting = Queue()
        self.running: list[Request] = []  # in order of admission
        self._free_slots = list(range(max_batch))  # a heap: the lowest first
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether :meth:`schedule` could find something to compute."""
        return self._somebody_waits or any(not r.paused for r in self.running)

    @property
    def _somebody_waits(self) -> bool:
        return any(not r.paused for r in self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def schedule(self, among: Collection[Request] | None = None) -> tuple[StepPlan, list[Request]]:
        """The next step and the request of each sequence in its plan; the same again until the step is computed.
        ``among``: look at these requests alone."""
        chosen: list[tuple[Request, int, tuple[int, ...]]] = []  # request, how many of its tokens, and drafts
        decoding = any(r.num_pending == 1 and not r.paused for r in self.running)
        budget = max(1, self.prefill_chunk // 4) if decoding else self.prefill_chunk
        num_waiting = len(self.waiting)
        for request in [r for r in self.running if among is None or r in among]:
            if request.paused or request.slot < 0:  # preempted by an older one in this very loop
                continue
            if self._outgrew(request):
                self._preempt(request)
                continue
            pending = request.num_pending
            count = 1 if pending == 1 else self._part_of(pending, budget)
            drafts = request.drafts[: self.room_for_drafts(request, len(request.drafts))] if pending == 1 else ()
            if count and self._reserve(request, request.num_computed + count + len(drafts)):
                chosen.append((request, count, drafts))
                budget -= count if pending > 1 else 0
        preempted = len(self.waiting) > num_waiting  # then pages are short: admit nobody in this step
        while budget > 0 and not preempted and self._has_slot:
            admitted = self.waiting.next(self.running, among)
            if admitted is None or not self._admit(admitted):
                break
            chosen.append((admitted, self._part_of(admitted.num_pending, budget), ()))
            budget -= chosen[-1][1]
        chosen.sort(key=lambda choice: choice[0].slot)
        plan = StepPlan(tuple(self._sequence_plan(*choice) for choice in chosen))
        return plan, [request for request, _, _ in chosen]

    def behind(self, parts: Sequence[tuple[Request, SequencePlan]]) -> tuple[StepPlan, list[int]] | None:
        """The step behind one that is being computed and makes one token of each of ``parts``: its plan, where tokens
        that nobody knows yet are 0, and which of ``parts`` its sequences are. Requests that have all their tokens then
        are left out. None where anything else is due: somebody waits for a slot, a prompt goes on, one of ``parts`` is
        paused and throws its token away, or pages are short."""
        if sum(not request.paused for request in self.running) > len(parts):
            return None
        if self._has_slot and self._somebody_waits:
            return None
        index: list[int] = []
        for i, (request, own) in enumerate(parts):
            if not goes_on((request, own)):
                return None
            if self._computed_anew and request.rope_len <= self._long_from <= request.num_tokens:
                return None
            if request.num_output + 1 < request.max_tokens:
                index.append(i)
        going = [parts[i] for i in index]
        missing = sum(max(0, self._pages_for(own.end + 1) - len(request.pages)) for request, own in going)
        if not going or missing > self.pages.num_available:
            return None
        sequences = []
        for request, own in going:
            placed = len(request.pages)
            self._reserve(request, own.end + 1)  # preempts nobody: the pages are there
            new = tuple(request.pages[placed:])
            sequences.append(SequencePlan(own.slot, (0,), own.end, placed, new, 1, request.rope_len))
        return StepPlan(tuple(sequences)), index

    def take_back(self, parts: Sequence[tuple[Request, SequencePlan]]) -> None:
        """Undo :meth:`behind`, whose step did not begin."""
        for request, own in parts:
            self.pages.release(request.pages[own.num_placed :])
            del request.pages[own.num_placed :]

    def room_for_drafts(self, request: Request, most: int) -> int:
        """How many drafts, up to ``most``, the next step can verify: at most one less than the tokens to come, none in
        places that ``request`` is computed anew for, and in pages that are free, which ``request`` gets."""
        room = (len(request.pages) + self.pages.num_available) * self.pages.page_size - request.num_tokens
        if self._computed_anew and request.rope_len <= self._long_from:
            room = min(room, self._long_from - request.num_tokens)
        count = max(0, min(most, request.max_tokens - request.num_output - 1, room))
        if count:
            self._reserve(request, request.num_tokens + count)
        return count

    def _outgrew(self, request: Request) -> bool:
        """Whether ``request`` has become so long that all of it is computed anew."""
        return self._computed_anew and request.rope_len <= self._long_from < request.num_tokens

    def _part_of(self, pending: int, budget: int) -> int:
        """How many of ``pending`` tokens of a prompt a step computes that has ``budget`` left."""
        return pending if self._whole_prompts and budget > 0 else max(0, min(pending, budget))

    def _sequence_plan(self, request: Request, count: int, drafts: tuple[int, ...]) -> SequencePlan:
        start = request.num_computed
        num_logits = 1 if start + count == request.num_tokens else 0
        if request.params.prompt_logprobs is not None and start < request.num_prompt:
            num_logits = count
        return SequencePlan(
            slot=request.slot,
            tokens=(*request.token_ids[start : start + count], *drafts),
            start=start,
            num_placed=request.num_placed,
            new_pages=tuple(request.pages[request.num_placed :]),
            num_logits=num_logits + len(drafts),
            rope_len=request.rope_len,
            is_prompt=start < request.num_prompt or count > 1,
        )

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pages.page_size)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` of ``request``; preempts paused ones, then the youngest. False when that is
        ``request`` itself."""
        missing = self._pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            victim = self._youngest_paused() or self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += pages
        return True

    @property
    def _has_slot(self) -> bool:
        """Whether one more can run."""
        return bool(self._free_slots) or self._youngest_paused() is not None

    def _youngest_paused(self) -> Request | None:
        return next((request for request in reversed(self.running) if request.paused), None)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; its tokens are kept and computed again."""
        self._stop_running(request)
        self.num_preemptions += 1
        self.waiting.put_back(request)

    def _admit(self, request: Request) -> bool:
        """Start a waiting request if the pages for all its tokens so far are there. Paused ones give theirs, and their
        slots: whoever does not fetch tokens keeps nobody waiting."""
        if self._outgrew(request):  # in this step's turn, or before it gave its pages back for another reason
            request.rope_len = request.num_tokens
        salted = 0 < self._long_from < request.rope_len
        salt = request.rope_len.to_bytes(8, "little") if salted else b""
        whole = request.params.prompt_logprobs is None  # else the logits of every prompt token are wanted
        found = self.pages.match(request.token_ids, salt) if whole else []
        missing = self._pages_for(request.num_tokens) - len(found)
        while not self._free_slots or (fresh := self.pages.allocate(missing)) is None:
            if (paused := self._youngest_paused()) is None:
                self.pages.release(found)
                return False
            self._preempt(paused)
        self.waiting.remove(request)
        self.running.append(request)
        request.slot, request.num_placed = heapq.heappop(self._free_slots), 0
        request.num_admissions += 1
        request.pages, request.num_computed = found + fresh, len(found) * self.pages.page_size
        request.num_remembered, request.digest = len(found), self.pages.digest_of[found[-1]] if found else salt
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached = request.num_computed
            self.pages.queries += request.num_tokens
            self.pages.hits += request.num_cached
        return True

    def advance(self, request: Request, kept: int) -> None:
        """The first ``kept`` tokens of the plan for ``request`` stay in the cache, and full pages become findable. Call
        it when the request has its new tokens: drafts past its end do not count."""
        request.num_computed = min(request.num_computed + kept, request.num_tokens)
        request.num_placed = len(request.pages)
        request.drafts = ()
        size = self.pages.page_size
        for i in range(request.num_remembered, request.num_computed // size if self.pages.prefix_cache else 0):
            request.digest = page_digest(request.digest, request.token_ids[i * size : (i + 1) * size])
            self.pages.remember(request.pages[i], request.digest)
            request.num_remembered = i + 1

    def finish(self, request: Request) -> None:
        """Take ``request`` out, wherever it is, and give its pages back."""
        if request.slot >= 0:
            self._stop_running(request)
        else:
            self.waiting.remove(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        self.pages.release(request.pages)
        request.slot, request.num_computed, request.pages, request.drafts = -1, 0, [], ()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page and slot is accounted for and only running requests hold pages."""
        self.pages.check_integrity(r.pages for r in self.running)
        if any(r.pages for r in self.waiting):
            raise RuntimeError("a waiting request holds pages")
        if sorted([*self._free_slots, *(r.slot for r in self.running)]) != list(range(self.max_batch)):
            raise RuntimeError(f"free slots {self._free_slots}, used {[r.slot for r in self.running]}")
