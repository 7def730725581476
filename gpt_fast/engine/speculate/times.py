"""How long steps take: measured at start-up for some numbers of rows, and refreshed by what steps take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

_MEASURED = (1, 2, 4, 8, 3, 6, 16, 5, 12, 24, 32, 48, 64, 96, 128)  # rows; the first four always
_ALWAYS = 4
_BUDGET_S = 2.0  # for the others
_REPEATS = 3
_NEW = 0.1  # weight of the latest step in a running mean
_FADE = 0.99  # of what is known of a number of rows, at each step with another number
_OTHERS = 4.0  # steps that all other numbers of rows count for
_REFRESH = 8  # steps


class StepTimes:
    """Seconds of a step of 1 to ``most`` rows: ``times[rows]``.

    Between and beyond the ``measured`` numbers of rows times are interpolated. A machine that becomes slower, or
    contexts that grow, change all of them: each number of rows has its running ratio to what was measured, and those
    that were not seen lately follow the others.
    """

    def __init__(self, measured: Mapping[int, float], most: int) -> None:
        self.most = most
        self._first = _interpolated(measured, most)
        self._now = list(self._first)
        self._ratio, self._weight = [1.0] * (most + 1), [0.0] * (most + 1)
        self._all = 1.0
        self._noted = 0

    def __getitem__(self, rows: int) -> float:
        return self._now[rows] if rows <= self.most else self._now[-1] * rows / self.most

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        if rows > self.most:
            return
        ratio = min(4.0 * self._all, max(self._all / 4.0, seconds / self._first[rows]))  # a hiccup counts little
        self._all += _NEW * (ratio - self._all)
        weight = self._weight[rows]
        self._ratio[rows] += (ratio - self._ratio[rows]) / min(1.0 / _NEW, weight + 1.0)
        self._weight[rows] = min(1.0 / _NEW, weight + 1.0)
        self._now[rows] = self._first[rows] * self._blend(rows)
        self._noted += 1
        if self._noted % _REFRESH == 0:
            faded = _FADE**_REFRESH
            self._weight = [w * faded for w in self._weight]
            self._now = [first * self._blend(r) for r, first in enumerate(self._first)]

    def _blend(self, rows: int) -> float:
        own, weight = self._ratio[rows], self._weight[rows]
        return (own * weight + self._all * _OTHERS) / (weight + _OTHERS)


class DraftTimes:
    """Seconds that drafts cost: ``call`` once, ``times[rows]`` for one draft of each of ``rows`` sequences."""

    def __init__(self, call: float, steps: StepTimes) -> None:
        self._call, self._steps = call, steps
        self._ratio = 1.0  # of what drafts took lately to what was measured

    @property
    def call(self) -> float:
        return self._ratio * self._call

    def __getitem__(self, rows: int) -> float:
        return self._ratio * self._steps[rows] if rows else 0.0

    def catching_up(self, missing: int) -> float:
        """For ``missing`` tokens of one sequence that the draft model has not computed yet, beside the last of them."""
        return self[missing] - self[1] if missing > 2 else 0.0

    def note(self, counts: Sequence[int], missing: Sequence[int], seconds: float) -> None:
        """Drafts, ``counts`` of each sequence, took ``seconds``."""
        levels = (sum(count > i for count in counts) for i in range(max(counts)))
        expected = self.call + sum(self[level] for level in levels) + sum(map(self.catching_up, missing))
        self._ratio *= min(1.25, max(0.8, 1 + _NEW * (seconds / expected - 1)))


def measure(run: Callable[[int], object], most: int) -> dict[int, float]:
    """Seconds that ``run(rows)`` takes, the least of some times, for some numbers of rows up to ``most``."""
    found: dict[int, float] = {}
    end = time.perf_counter() + _BUDGET_S
    for i, rows in enumerate(_MEASURED):
        if rows > most or (i >= _ALWAYS and time.perf_counter() > end):
            continue
        run(rows)
        found[rows] = min(_seconds(run, rows) for _ in range(_REPEATS))
    return found


def _seconds(run: Callable[[int], object], rows: int) -> float:
    begin = time.perf_counter()
    run(rows)
    return time.perf_counter() - begin


def _interpolated(measured: Mapping[int, float], most: int) -> list[float]:
    """Seconds for 0 to ``most`` rows, never falling; those beyond the measured grow by the last slope."""
    known: Sequence[tuple[int, float]] = sorted(measured.items())
    if len(known) == 1:
        known = [*known, (2 * known[0][0], 2 * known[0][1])]
    times = []
    for rows in range(most + 1):
        (a, at_a), (b, at_b) = next((pair for pair in pairwise(known) if rows <= pair[1][0]), known[-2:])
        times.append(max(at_a if rows >= a else 0.0, at_a + (at_b - at_a) * (rows - a) / (b - a)))
        times[-1] = max(times[-1], times[-2]) if rows > 1 else times[-1]
    return times
