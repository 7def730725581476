"""How long steps take: measured at start-up for some numbers of rows, and refreshed by what steps take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

_MEASURED = (1, 2, 4, 8, 3, 6, 16, 5, 12, 24, 32, 48, 64, 96, 128)  # rows; the first four always
_ALWAYS = 4
_BUDGET_S = 2.0  # for the others
_REPEATS = 4
_MORE_REPEATS, _MORE_S = 40, 0.25  # where steps are short: up to so many, in so many seconds
_NEW = 0.1  # weight of the latest step in a running mean
_OWN_PRIOR, _OWN_WEIGHT = 4.0, 30.0  # steps that what was measured counts for, and all that were seen at most
_MOST = 1.5  # times what is expected, or its inverse: what a hiccup counts at most
_LEAST_RATIO = 0.1
_KEPT = 0.995  # of what is known of a number of rows, at each step
_FRESH = 0.5  # steps, faded, from which a number of rows counts as known
_REFRESH = 16  # steps between two looks at all numbers of rows


class StepTimes:
    """Seconds of a step of 1 to ``most`` rows: ``times[rows]``.

    Between and beyond the ``measured`` numbers of rows times are interpolated. Steps of all sizes share one running
    ratio to what was measured (``ratio``): a machine that becomes slower does so for all, and steps of different sizes,
    which are seen at different times, must not differ by that. Besides, each number of rows has a ratio that follows
    slowly, since contexts that grow change each in its way; those that were not seen lately have one between those that
    were.
    """

    def __init__(self, measured: Mapping[int, float], most: int) -> None:
        self.most = most
        self._first = _interpolated(measured, most)
        self._now = list(self._first)  # without the ratio that all share
        self._ratio, self._weight = [1.0] * (most + 1), [0.0] * (most + 1)
        self.ratio = 1.0  # that all share
        self._noted = 0

    def __getitem__(self, rows: int) -> float:
        seconds = self._now[rows] if rows <= self.most else self._now[-1] * rows / self.most
        return self.ratio * seconds

    def known(self, rows: int) -> bool:
        """Whether steps of so many rows were seen lately."""
        return rows > self.most or self._weight[rows] >= _FRESH

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        if rows > self.most:
            return
        wrong = min(_MOST, max(1 / _MOST, seconds / self[rows])) - 1
        self.ratio *= 1 + _NEW * wrong
        self._weight[rows] = min(_OWN_WEIGHT, self._weight[rows] + 1.0)
        self._ratio[rows] = self._now[rows] / self._first[rows] * (1 + wrong / (_OWN_PRIOR + self._weight[rows]))
        self._now[rows] = self._first[rows] * self._ratio[rows]
        self._noted += 1
        if self._noted % _REFRESH == 0:
            self._weight = [w * _KEPT**_REFRESH for w in self._weight]
            self._now = [first * ratio for first, ratio in zip(self._first, self._ratios(), strict=True)]

    def _ratios(self) -> list[float]:
        """Of each number of rows: its own ratio where that is known, else one between those of its neighbours."""
        known = [rows for rows in range(self.most + 1) if self._weight[rows] >= _FRESH]
        known = known or [max(range(self.most + 1), key=self._weight.__getitem__)]
        ratios = [self._ratio[known[0]]] * known[0]
        for below, above in pairwise(known):
            step = (self._ratio[above] - self._ratio[below]) / (above - below)
            ratios += [self._ratio[below] + step * i for i in range(above - below)]
        return ratios + [self._ratio[known[-1]]] * (self.most + 1 - known[-1])


class DraftTimes:
    """Seconds that drafts cost: ``call`` once, ``times[rows]`` for one draft of each of ``rows`` sequences. Both have a
    running ratio to what was measured, beside that which the target's steps have."""

    def __init__(self, call: float, steps: StepTimes) -> None:
        self._call, self._steps = call, steps
        self._call_ratio = self._ratio = 1.0
        self._target: StepTimes | None = None

    def follow(self, target: StepTimes) -> None:
        """When the steps of the target take longer, drafts do as well."""
        self._target = target

    @property
    def call(self) -> float:
        return self._call_ratio * self._unit * self._call

    def __getitem__(self, rows: int) -> float:
        return self._ratio * self._unit * self._steps[rows] if rows else 0.0

    @property
    def _unit(self) -> float:
        return 1.0 if self._target is None else self._target.ratio

    def catching_up(self, missing: int) -> float:
        """For ``missing`` tokens of one sequence that the draft model has not computed yet, beside the last of them."""
        return self[missing] - self[1] if missing > 2 else 0.0

    def note(self, counts: Sequence[int], missing: Sequence[int], seconds: float) -> None:
        """Drafts, ``counts`` of each sequence, took ``seconds``. What was not expected is shared among the two ratios
        by the squares of what they stand for (least mean squares, normalised)."""
        levels = (sum(count > i for count in counts) for i in range(max(counts)))
        steps = (sum(self[level] for level in levels) + sum(map(self.catching_up, missing))) / self._ratio
        call = self._call * self._unit
        expected = self._call_ratio * call + self._ratio * steps
        wrong = _NEW * (min(_MOST * expected, max(expected / _MOST, seconds)) - expected)
        self._call_ratio = max(_LEAST_RATIO, self._call_ratio + wrong * call / (call**2 + steps**2))
        self._ratio = max(_LEAST_RATIO, self._ratio + wrong * steps / (call**2 + steps**2))


def measured_rows(most: int) -> list[int]:
    """The numbers of rows up to ``most`` that are timed at start-up, the most important ones first."""
    return [rows for rows in _MEASURED if rows <= most]


def measure(run: Callable[[int], object], numbers: Sequence[int]) -> dict[int, float]:
    """Seconds that ``run(number)`` takes, the least of some times; of all ``numbers`` but the first ones only if there
    is time."""
    found: dict[int, float] = {}
    begin = time.perf_counter()
    for i in range(_MORE_REPEATS):  # all numbers in turns: the machine is not equally fast all the time
        if i >= _REPEATS and time.perf_counter() > begin + _MORE_S:
            break
        for place, number in enumerate(numbers):
            if time.perf_counter() > begin + _BUDGET_S and (i or place >= _ALWAYS):
                continue
            if not i:
                run(number)
            found[number] = min(found.get(number, math.inf), _seconds(run, number))
    return found


def _seconds(run: Callable[[int], object], number: int) -> float:
    begin = time.perf_counter()
    run(number)
    return time.perf_counter() - begin


def _interpolated(measured: Mapping[int, float], most: int) -> list[float]:
    """Seconds for 0 to ``most`` rows, never falling; those beyond the measured grow by the last slope."""
    known: Sequence[tuple[int, float]] = sorted(measured.items())
    known = [(rows, min(seconds for _, seconds in known[i:])) for i, (rows, _) in enumerate(known)]
    if len(known) == 1:
        known = [*known, (2 * known[0][0], 2 * known[0][1])]
    times = []
    for rows in range(most + 1):
        (a, at_a), (b, at_b) = next((pair for pair in pairwise(known) if rows <= pair[1][0]), known[-2:])
        times.append(max(at_a if rows >= a else 0.0, at_a + (at_b - at_a) * (rows - a) / (b - a)))
    return times
