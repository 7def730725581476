"""How many drafts each sequence gets in the next step: as many as make the tokens per second of the whole batch
greatest, and none where none pay.

A step of n rows takes T(n) seconds, drafts cost D, and draft i of a sequence is taken with probability p_i, that all
up to it are right. B sequences gain B + the sum of p_i tokens in T(B + drafts) + D seconds. T and D are measured
(times.py), p is a running estimate for each request and position from what happened to drafts before.

Where no drafts pay nothing is learned about them, so now and then some are tried, for a small share of the time. Drafts
that cost nothing are judged without being verified: by the tokens that came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate.times import DraftTimes, StepTimes

_PRIOR, _PRIOR_DRAFTS = 0.6, 6.0  # that a draft is right before anything is known, and what that counts for
_OWN_STRENGTH = 6.0  # drafts that what is known of all requests counts for, beside those of one request
_BEFORE_STRENGTH = 6.0  # drafts that what is known of the draft before counts for
_STRENGTH = 2.0  # drafts that all before counts for where things may have changed
_OWN_MEMORY, _ALL_MEMORY = 0.97, 0.99  # what is kept of earlier drafts at each new one, of a request and of all
_CHANGED = 0.005  # probability of misses in a row from which what was known of a request is no longer true
_IDLE_MEMORY = 0.992  # at each step in which a request had none
_PAYS, _STILL_PAYS = 1.04, 1.01  # tokens/s against plain that turn drafts on, and that leave them on
_REST = 3  # steps for which a choice holds, where a step is shorter than _LONG_S seconds
_LONG_S = 2e-3
_PATIENCE = 16  # steps without drafts before rests, where guesses cost next to nothing
_SURE = 1.3  # tokens/s against plain from which it does not matter how long exactly a plain step takes
_UNSETTLED = 4  # plain steps after others that are not timed
_LARGE = 1e9
_TRIALS_SHARE = 0.018  # of the time, for drafts that are not expected to pay
_WRONG, _TRIALS = 3, 12  # drafts of one trial: until so many were wrong, and at most
_FIRST_WRONG, _FIRST_TRIALS = 6, 16  # of the first one: a draft model that is left later has to catch up
_HOPELESS = 4  # wrong drafts in a row that end a trial


class Asked(NamedTuple):
    """A sequence that could have drafts."""

    request: Request
    most: int  # drafts
    missing: int = 1  # tokens that the drafter has to compute before it can draw the first one
    steps_left: float = 64.0  # that this sequence will probably take part in


class Estimate:
    """How often draft i was right where those before it were, lately."""

    def __init__(self, positions: int, right: float = 0.0, tried: float = 0.0) -> None:
        """``right`` of ``tried`` first drafts count as known."""
        # What comes counts ``_unit``, which grows instead of all that came before being made less.
        later = [0.0] * (positions - 1)
        self._right, self._tried, self._unit = [right, *later], [tried, *later], 1.0
        self.step = 0  # the last one that had drafts
        self.misses, self.doubt = 0, 1.0  # first drafts in a row that were wrong, and how probable that was

    @property
    def weight(self) -> float:
        """How many drafts what is known counts for, of the position that was tried most."""
        return max(self._tried) / self._unit

    def note(self, drafted: int, right: int, memory: float) -> None:
        """The first ``right`` of ``drafted`` were right, and the next was wrong. ``memory``: share that is kept of what
        was noted before."""
        self.fade(memory)
        for i in range(min(drafted, right + 1)):
            self._tried[i] += self._unit
            if i < right:
                self._right[i] += self._unit

    def fade(self, memory: float) -> None:
        """Keep the share ``memory`` of what is known."""
        self._unit /= max(memory, 1 / _LARGE)  # a power of a share may be 0
        if self._unit > _LARGE:
            self._right = [x / self._unit for x in self._right]
            self._tried = [x / self._unit for x in self._tried]
            self._unit = 1.0

    def trust_less(self) -> None:
        """Keep so little of what is known that a few drafts can show that things have changed."""
        self.fade(min(1.0, _STRENGTH / self.weight))

    def chance(self, i: int, prior: float, strength: float) -> float:
        """That draft i is right if those before it are; ``prior`` counts for ``strength`` drafts."""
        counts = strength * self._unit
        return (self._right[i] + counts * prior) / (self._tried[i] + counts)


class Controller:
    """Chooses up to ``most`` drafts a sequence. ``drafting`` None: drafts cost nothing."""

    def __init__(self, most: int, steps: StepTimes, drafting: DraftTimes | None) -> None:
        self.most, self.steps, self.drafting = most, steps, drafting
        if drafting is not None:
            drafting.follow(steps)
        self._all = Estimate(most, _PRIOR * _PRIOR_DRAFTS, _PRIOR_DRAFTS)
        self._own: dict[Request, Estimate] = {}
        self._step = 0
        self._on = self._had_drafts = False
        self._plain_steps = 0  # in a row
        self._chosen_for: Sequence[Request] = ()
        self._chosen: list[int] = []
        self._resting = 0  # steps for which that still holds
        self._idle = 0  # looks since there were drafts
        self._saved = math.inf  # seconds that trials may take: the first one whatever it takes
        self._trial: Request | None = None
        self._wrong_left = self._trials_left = 0

    def again(self, requests: Sequence[Request]) -> list[int] | None:
        """The numbers of the last :meth:`choose` where they hold for ``requests`` in this step too; None: choose again.
        Where steps are short, looking at each would cost too much."""
        trying = self._trial is not None and self._wrong_left > 0 and self._trials_left > 0
        busy = trying if self.drafting is not None else self._idle < _PATIENCE
        if busy or not self._resting or self.steps[1] > _LONG_S or requests != self._chosen_for:
            self._resting, self._chosen_for = _REST, requests
            return None
        self._resting -= 1
        self._step += 1
        self._saved += _TRIALS_SHARE * self.steps[len(requests)]
        return self._chosen or [0] * len(requests)

    def choose(self, asked: Sequence[Asked], other_rows: int = 0) -> list[int]:
        """How many drafts each of ``asked`` gets, beside ``other_rows`` of prompts in the same step."""
        counts = self._choose(asked, other_rows)
        self._chosen = counts if self._on else []
        return counts

    def _choose(self, asked: Sequence[Asked], other_rows: int) -> list[int]:
        self._step += 1
        self._idle += 1
        if not asked:
            return []
        steps, drafting = self.steps, self.drafting
        rows = len(asked) + other_rows
        tokens, seconds = float(len(asked)), steps[rows]
        plain = tokens / seconds
        best, best_count = plain * (_STILL_PAYS if self._on else _PAYS), 0
        likeliest = sorted(((p, j) for j, a in enumerate(asked) for p in self.chances(a.request, a.most)), reverse=True)
        counts, level, drafting_s = [0] * len(asked), [0] * (self.most + 1), 0.0 if drafting is None else drafting.call
        for n, (p, j) in enumerate(likeliest[: max(0, steps.most - rows)], 1):
            if drafting is not None:
                i = counts[j]
                level[i] += 1
                drafting_s += drafting[level[i]] - drafting[level[i] - 1]
                if i == 0:
                    drafting_s += drafting.catching_up(asked[j].missing) / asked[j].steps_left
            counts[j] += 1
            tokens += p
            seconds = max(seconds, steps[rows + n])  # more rows never take less
            rate = tokens / (seconds + drafting_s)
            if rate > best:
                best, best_count = rate, n
        self._on = best_count > 0
        self._idle = 0 if self._on else self._idle
        if self._on and best < _SURE * plain and not steps.known(rows):
            return [0] * len(asked)  # it is a near thing: plain steps are timed first
        chosen = [0] * len(asked)
        for _, j in likeliest[:best_count]:
            chosen[j] += 1
        return chosen if self._on or drafting is None else self._try(asked, rows, chosen)

    def chances(self, request: Request, most: int) -> list[float]:
        """p_i of the first ``most`` drafts of ``request``."""
        own, prior, p = self._own.get(request), _PRIOR, 1.0
        if own is not None and own.step < self._step:
            own.fade(_IDLE_MEMORY ** (self._step - own.step))
            own.step = self._step
        chances = []
        for i in range(most):
            prior = self._all.chance(i, prior, _BEFORE_STRENGTH)
            p *= prior if own is None else own.chance(i, prior, _OWN_STRENGTH)
            chances.append(p)
        return chances

    def observe(self, rows: int, has_drafts: bool, seconds: float) -> None:
        """A step of ``rows`` took ``seconds`` beside drafting. The first ones with drafts, or without, after others do
        not count: they find the caches filled with something else."""
        self._plain_steps = 0 if has_drafts else self._plain_steps + 1
        if self._had_drafts if has_drafts else self._plain_steps > _UNSETTLED:
            self.steps.note(rows, seconds)
        self._had_drafts = has_drafts

    def note(self, request: Request, drafted: int, right: int) -> None:
        """The first ``right`` of ``drafted`` tokens were right."""
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = Estimate(self.most)
        first = own.chance(0, self._all.chance(0, _PRIOR, _BEFORE_STRENGTH), _OWN_STRENGTH)
        own.misses, own.doubt = (0, 1.0) if right else (own.misses + 1, own.doubt * (1 - first))
        own.note(drafted, right, _OWN_MEMORY)
        self._all.note(drafted, right, _ALL_MEMORY)
        if own.doubt < _CHANGED:
            self._forget(request, own.misses)
        self._own[request].step = self._step + 1
        hopeless = request is self._trial and own.misses >= _HOPELESS
        self._wrong_left = 0 if hopeless else self._wrong_left - (drafted > right)

    def _forget(self, request: Request, misses: int) -> None:
        """What was known no longer holds for ``request``, but for the last ``misses``; it may hold for nobody."""
        self._all.trust_less()
        self._own[request] = own = Estimate(self.most)
        for _ in range(misses):
            own.note(1, 0, 1.0)
            self._all.note(1, 0, 1.0)

    def end(self, request: Request) -> None:
        """``request`` has ended."""
        self._own.pop(request, None)
        self._trial = None if self._trial is request else self._trial
        self._chosen_for = ()

    def _try(self, asked: Sequence[Asked], rows: int, chosen: list[int]) -> list[int]:
        """One draft for one sequence if there is time for trials."""
        assert self.drafting is not None
        self._saved += _TRIALS_SHARE * self.steps[rows]
        able = [j for j, a in enumerate(asked) if a.most]
        if rows >= self.steps.most or not able:
            return chosen
        again = [j for j in able if asked[j].request is self._trial and self._wrong_left > 0 and self._trials_left > 0]
        j = again[0] if again else min(able, key=lambda j: asked[j].missing)
        more = self.steps[rows + 1] - self.steps[rows] + self.drafting.call + self.drafting[1]
        cost = more + self.drafting.catching_up(asked[j].missing)
        if not again:
            if self._saved < cost + (_WRONG - 1) * more:
                return chosen
            first = self._saved == math.inf
            self._begin_trial(asked[j].request, *((_FIRST_WRONG, _FIRST_TRIALS) if first else (_WRONG, _TRIALS)))
        self._saved = (0.0 if self._saved == math.inf else self._saved) - cost
        self._trials_left -= 1
        chosen[j] = 1
        return chosen

    def _begin_trial(self, request: Request, wrong: int, most: int) -> None:
        """Forget what was known of ``request``, and most of what was known of all."""
        self._trial, self._wrong_left, self._trials_left = request, wrong, most
        self._all.trust_less()
        self._own.pop(request, None)
