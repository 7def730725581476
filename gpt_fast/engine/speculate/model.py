"""Drafts by a second model with the same vocabulary, or by the target itself in fewer bits.

Its cache has the pages of the target's: same numbers, same slots, one allocator. It computes what it lacks when drafts
are asked for, so one that is not asked costs nothing; it finds again what it knows of shared prefixes. It draws with
the noise of the token that the target will draw, so both draw the same one most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.engine.compute import sampling_row
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN, sample
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate.drafter import Wish


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
        active = self._catch_up([d for d in drafts if d.count > 0])
        while active:
            active = self._extend(active)
        return [tuple(d.tokens) for d in drafts]

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

    def _catch_up(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Compute tokens that are not in the cache yet, in chunks as the target does, and draw the first draft of those
        that are complete, which are returned while they want more."""
        budget, chosen = self.runner.prefill_chunk, []
        for d in drafts:
            start, grammar = d.known.num_computed, d.request.grammar
            d.allowed = None if grammar is None else grammar.allowed()
            tokens = d.request.token_ids[start : start + max(1, budget)]
            budget -= len(tokens) if len(tokens) > 1 else 0
            chosen.append((d, tuple(tokens), start))
        return self._run(chosen)

    def _extend(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Compute each one's last draft and draw the next."""
        return self._run([(d, (d.tokens[-1],), d.request.num_tokens + len(d.tokens) - 1) for d in drafts])

    def _run(self, parts: Sequence[tuple[_Draft, tuple[int, ...], int]]) -> list[_Draft]:
        """Compute ``tokens`` from position ``start`` for each draft; returns those that got a draft and want more."""
        parts = sorted(parts, key=lambda part: part[0].request.slot)
        if not parts:
            return []
        try:
            logits = self.runner.execute(StepPlan(tuple(self._plan(*part) for part in parts)))
        except Exception:
            self._known.clear()  # what is in the cache is not certain any more
            self._contents.clear()
            raise
        complete = [d for d, tokens, start in parts if start + len(tokens) >= d.request.num_tokens]
        rows = [sampling_row(d.request, tuple(d.tokens), d.allowed) for d in complete]
        drawn: list[int] = sample(self._widened(logits), rows).tolist() if complete else []
        going_on = []
        for d, token in zip(complete, drawn, strict=True):
            if token == NO_TOKEN:
                continue
            d.tokens.append(token)
            d.known.ahead = tuple(d.tokens[:-1])
            if len(d.tokens) < d.count and token not in d.request.end_ids and self._may_follow(d):
                going_on.append(d)
        return going_on

    def _plan(self, d: _Draft, tokens: tuple[int, ...], start: int) -> SequencePlan:
        request, known, end = d.request, d.known, start + len(tokens)
        for page in request.pages[start // self._pages.page_size : -(-end // self._pages.page_size)]:
            self._contents.pop(page, None)
        new = tuple(request.pages[known.num_placed :])
        plan = SequencePlan(
            slot=request.slot, tokens=tokens, start=start, num_placed=known.num_placed, new_pages=new,
            num_logits=int(end >= request.num_tokens), rope_len=request.rope_len,
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

    def _widened(self, logits: Tensor) -> Tensor:
        """[R, V] for the target's V: what the draft model does not have is ruled out, what it has more is cut off."""
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]
