"""Drafts by a second model with the same vocabulary, or by the target itself in fewer bits.

Its cache has the pages of the target's: same numbers, same slots, one allocator. It computes what it lacks when drafts
are asked for, so one that is not asked costs nothing; it finds again what it knows of shared prefixes. It draws with
the noise of the token that the target will draw, so both draw the same one most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.engine.compute import sampling_row
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN, SamplingRow, draw_of, only_drawn, sample
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate.drafter import Wish
from gpt_fast.engine.speculate.times import DraftTimes, StepTimes, measure, measured_rows
from gpt_fast.kernels.race import Draw, race_key

_MEASURED_ROWS = 128  # of a step; longer ones are extrapolated
_MORE_DRAFTS = 4
_LEAST_SHARE = 0.05  # of a call with one draft that the draft itself takes


@dataclass
class _Known:
    """What the draft model's cache holds of one request."""

    admission: int  # of the request, since when
    num_computed: int = 0  # its first tokens, of which keys and values are there
    ahead: tuple[int, ...] = ()  # and drafts behind them, if they turned out right
    num_placed: int = 0  # pages in the runner's table
    num_noted: int = 0  # pages noted in ModelDrafter._contents


@dataclass
class _Draft:
    """A draft in the making."""

    request: Request
    known: _Known
    count: int
    tokens: list[int] = field(default_factory=list)
    allowed: Tensor | None = None  # what the grammar allows behind them

    @property
    def ended(self) -> bool:
        """Whether the answer ends behind the last draft, if all are right."""
        return bool(self.tokens) and self.tokens[-1] in self.request.end_ids


class _Part(NamedTuple):
    """Tokens of a sequence that the draft model computes in one step, the first at position ``start``."""

    draft: _Draft
    tokens: tuple[int, ...]
    start: int

    @property
    def complete(self) -> bool:
        """Whether the next draft can be drawn behind it."""
        return self.start + len(self.tokens) >= self.draft.request.num_tokens


class ModelDrafter:
    """Drafts by the model of ``runner``, whose cache is laid out as the target's; ``pages`` are the target's. Sequences
    of ``max_seq_len`` tokens or more get no drafts. ``vocab_size``: the target's, of which each may fill up the end."""

    def __init__(self, runner: Runner, pages: PageAllocator, vocab_size: int, max_seq_len: int) -> None:
        self.runner, self._pages, self._vocab_size, self._max_seq_len = runner, pages, vocab_size, max_seq_len
        self._known: dict[Request, _Known] = {}
        self._contents: dict[int, bytes] = {}  # the digest of every full page that is in this cache, too

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See ``Drafter``."""
        drafts = [_Draft(r, self._find(r), min(most, self._max_seq_len - r.num_tokens)) for r, most in wishes]
        parts = self._catching_up([d for d in drafts if d.count > 0])
        at_once: list[_Part] = []
        one_by_one: list[_Part] = []
        for part in parts:
            (at_once if self._draws_at_once(part.draft.request) else one_by_one).append(part)
        try:
            if at_once:
                self._draw_at_once(at_once)
            while one_by_one:
                one_by_one = self._draw_one(one_by_one)
        except Exception:
            self._known.clear()  # what is in the cache is not certain any more
            self._contents.clear()
            raise
        return [tuple(d.tokens) for d in drafts]

    def missing(self, request: Request) -> int:
        """See ``Drafter``."""
        known = self._known.get(request)
        if known is None or known.admission != request.num_admissions:
            known = self._find(request)
        return request.num_tokens - known.num_computed - len(known.ahead)

    def measure(self) -> DraftTimes:
        """See ``Drafter``."""
        room = self.runner.pages_per_sequence * self._pages.page_size
        rows = min(_MEASURED_ROWS, self._max_seq_len, room - 1)
        more = _MORE_DRAFTS if room >= 2 + _MORE_DRAFTS else 1

        def run(number: int) -> None:
            """So many tokens and a draft behind them, or for 0 one token and ``more`` drafts than one."""
            self._run_chain(number or 1, 1 if number else 1 + more)

        steps = measure(run, [0, *measured_rows(rows)])
        one = max((steps.pop(0) - steps[1]) / more, _LEAST_SHARE * steps[1])
        call = steps[1] - one
        return DraftTimes(call, StepTimes({n: max(one, seconds - call) for n, seconds in steps.items()}, rows))

    def _run_chain(self, num_tokens: int, num_draws: int) -> None:
        """Compute tokens that nobody needs, in slot 0 and page 0."""
        pages = (0,) * -(-(num_tokens + num_draws) // self._pages.page_size)
        plan = SequencePlan(0, (0,) * num_tokens, 0, 0, pages, num_logits=1, rope_len=num_tokens)
        self.runner.chain(StepPlan((plan,)), [[Draw()] * num_draws])

    def end(self, request: Request) -> None:
        """See ``Drafter``."""
        self._known.pop(request, None)

    def _find(self, request: Request) -> _Known:
        """What is known of ``request`` by now: drafts that were right count, and shared pages when it is new."""
        known, size = self._known.get(request), self._pages.page_size
        if known is None or known.admission != request.num_admissions:
            known = self._known[request] = _Known(request.num_admissions)
            for page in request.pages[: (request.num_tokens - 1) // size]:
                digest = self._pages.digest_of.get(page)
                if digest is None or self._contents.get(page) != digest:
                    break
                known.num_computed += size
            known.num_noted = known.num_computed // size
        for token in known.ahead:
            if known.num_computed >= request.num_tokens - 1 or request.token_ids[known.num_computed] != token:
                break
            known.num_computed += 1
        known.ahead = ()
        for i in range(known.num_noted, known.num_computed // size):
            digest = self._pages.digest_of.get(request.pages[i])
            if digest is not None:
                self._contents[request.pages[i]] = digest
        known.num_noted = known.num_computed // size
        return known

    def _catching_up(self, drafts: Sequence[_Draft]) -> list[_Part]:
        """What each draft needs to have computed first, in chunks as the target does, in order of the slots."""
        budget, parts = self.runner.prefill_chunk, []
        for d in drafts:
            start = d.known.num_computed
            tokens = d.request.token_ids[start : start + max(1, budget)]
            budget -= len(tokens) if len(tokens) > 1 else 0
            parts.append(_Part(d, tuple(map(self._read_as, tokens)), start))
        return sorted(parts, key=lambda part: part.draft.request.slot)

    def _read_as(self, token: int) -> int:
        """``token``, or 0 where the draft model's vocabulary ends before it: then drafts are only worse."""
        return token if token < self.runner.vocab_size else 0

    def _draws_at_once(self, request: Request) -> bool:
        """Whether all drafts of ``request`` can be drawn in one call."""
        return only_drawn(sampling_row(request, (), None)) and request.grammar is None

    def _draw_at_once(self, parts: Sequence[_Part]) -> None:
        """Compute ``parts``, and all drafts of those that are complete by then."""
        drawing = [part.draft for part in parts if part.complete]
        draws = [_draws(d.request, d.count) for d in drawing]
        plan = StepPlan(tuple(self._plan(part, part.draft.count if part.complete else 1) for part in parts))
        if not drawing:
            self.runner.execute(plan)
            return
        for d, tokens in zip(drawing, self.runner.chain(plan, draws), strict=True):
            for token in tokens:
                if not 0 <= token < self._vocab_size or d.ended:
                    break
                d.tokens.append(token)
            d.known.ahead = tuple(d.tokens[:-1])

    def _draw_one(self, parts: Sequence[_Part]) -> list[_Part]:
        """Compute ``parts``, and one draft of those that are complete by then. Returns what is to be computed next."""
        for d in (part.draft for part in parts if part.draft.request.grammar is not None and not part.draft.tokens):
            assert d.request.grammar is not None
            d.allowed = d.request.grammar.allowed()
        logits = self.runner.execute(StepPlan(tuple(self._plan(part, 1) for part in parts)))
        complete = [part.draft for part in parts if part.complete]
        rows = [sampling_row(d.request, tuple(d.tokens), d.allowed) for d in complete]
        drawn: list[int] = sample(widened(logits, self._vocab_size), rows).tolist() if complete else []
        going_on = []
        for d, token in zip(complete, drawn, strict=True):
            if token == NO_TOKEN:
                continue
            d.tokens.append(token)
            d.known.ahead = tuple(d.tokens[:-1])
            if len(d.tokens) < d.count and not d.ended and self._may_follow(d):
                going_on.append(_Part(d, (token,), d.request.num_tokens + len(d.tokens) - 1))
        return going_on

    def _plan(self, part: _Part, num_draws: int) -> SequencePlan:
        """``part`` for the runner, and what is known when it is computed with all but the last of ``num_draws``."""
        request, known, end = part.draft.request, part.draft.known, part.start + len(part.tokens)
        size = self._pages.page_size
        for page in request.pages[part.start // size : -(-(end + num_draws - 1) // size)]:
            self._contents.pop(page, None)
        plan = SequencePlan(
            slot=request.slot, tokens=part.tokens, start=part.start, num_placed=known.num_placed,
            new_pages=tuple(request.pages[known.num_placed :]), num_logits=int(part.complete),
            rope_len=request.rope_len,
        )  # fmt: skip
        known.num_placed = len(request.pages)
        known.num_computed = min(end, request.num_tokens)
        return plan

    def _may_follow(self, d: _Draft) -> bool:
        """Whether the grammar goes on behind all drafts; sets what it allows there."""
        if d.request.grammar is None:
            return True
        masks = d.request.grammar.along(d.tokens)
        d.allowed = masks[-1]
        return len(masks) == len(d.tokens) + 1


def _draws(request: Request, count: int) -> list[Draw]:
    """How ``count`` drafts are drawn, one behind the other."""
    first = draw_of(SamplingRow(request.params, request.seed, request.num_tokens))
    if not first.temperature:
        return [first] * count
    keys = (race_key(request.seed, request.num_tokens + i) for i in range(1, count))
    return [first, *(Draw(*first[:4], *key) for key in keys)]


def widened(logits: Tensor, vocab_size: int) -> Tensor:
    """[..., vocab_size], the target's: what the draft model does not have is ruled out, what it has more is cut off."""
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]
