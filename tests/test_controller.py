"""The number of drafts: near the best fixed number in simulated time, and never much slower than none."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate.controller import Asked, Controller, Estimate
from gpt_fast.engine.speculate.times import DraftTimes, StepTimes, measure, measured_rows
from gpt_fast.engine.text import TextStream
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import IncrementalDetokenizer

MOST = 8
MAX_ROWS = 64


def request() -> Request:
    text = TextStream(IncrementalDetokenizer(None))
    return Request("r", [0], SamplingParams().resolved(), seed=0, max_tokens=10**9, end_ids=frozenset(), text=text)


class World:
    """A machine: a step of n rows takes ``step(n)`` milliseconds, a draft of n sequences ``draft(n)``, or nothing."""

    def __init__(
        self,
        step: Callable[[int], float],
        draft: Callable[[int], float] | None,
        noise: float = 0.05,
        seed: int = 0,
        drift: float = 0.0,
    ) -> None:
        self.step, self.noise, self.random = lambda rows: 1e-3 * step(rows), noise, random.Random(seed)
        self.draft = None if draft is None else lambda rows: 1e-3 * draft(rows)
        self.drift = drift  # how much the whole machine is faster and slower for some tens of steps
        self.seconds = 0.0
        self.plain_seconds = 0.0  # that the same tokens would have taken without drafts

    def controller(self) -> Controller:
        def times(of: Callable[[int], float]) -> StepTimes:
            return StepTimes({n: of(n) for n in (1, 2, 4, 8, 16, 32, 64)}, MAX_ROWS)

        return Controller(MOST, times(self.step), None if self.draft is None else DraftTimes(0.0, times(self.draft)))

    def run(
        self,
        steps: int,
        batch: Callable[[int], int],
        acceptance: Callable[[int, int], float],
        choose: Controller | int,
    ) -> float:
        """How many times as fast ``steps`` steps are as without drafts. Of ``batch(step)`` sequences draft by draft
        ``acceptance(step, sequence)`` are right. ``choose``: who chooses, or a fixed number."""
        requests: list[Request] = []
        missing: list[int] = []
        wave = 0.0
        for step in range(steps):
            wave = 0.97 * wave + 0.24 * self.random.gauss(0, self.drift)  # of standard deviation ``drift``
            slower = math.exp(wave)
            size = batch(step)
            requests, missing = requests[:size], missing[:size]
            requests += [request() for _ in range(size - len(requests))]
            missing += [1] * (size - len(missing))
            if isinstance(choose, Controller):
                asked = [Asked(r, MOST, m, 200) for r, m in zip(requests, missing, strict=True)]
                again = choose.again(requests)
                counts = choose.choose(asked) if again is None else again
            else:
                counts = [min(choose, MAX_ROWS // size - 1)] * size
            rows = size + sum(counts)
            seconds = self.step(rows) * slower * self.random.lognormvariate(0, self.noise)
            drafting = 0.0
            if self.draft is not None and any(counts):
                levels = [sum(c > i for c in counts) for i in range(max(counts))]
                drafting = sum(self.draft(level) for level in levels)
                drafting += sum(
                    self.draft(m) - self.draft(1) for m, c in zip(missing, counts, strict=True) if c and m > 2
                )
                drafting *= slower * self.random.lognormvariate(0, self.noise)
            for i, (r, count) in enumerate(zip(requests, counts, strict=True)):
                wrong = (self.random.random() >= acceptance(step, i) for _ in range(MOST))
                right = sum(1 for _ in itertools.takewhile(lambda w: not w, wrong))
                self.plain_seconds += (1 + min(right, count)) * slower * self.step(size) / size
                missing[i] = 1 if count else missing[i] + 1
                if isinstance(choose, Controller) and (count or self.draft is None):
                    drafted = count or MOST  # what costs nothing is judged all the same
                    choose.note(r, drafted, min(right, drafted))
            self.seconds += seconds + drafting
            if isinstance(choose, Controller):
                choose.observe(rows, rows > size, seconds)
                if choose.drafting is not None and any(counts):
                    asked_for = [(c, m) for c, m in zip(counts, missing, strict=True) if c]
                    choose.drafting.note([c for c, _ in asked_for], [1 for _ in asked_for], drafting)
        return self.plain_seconds / self.seconds


# Milliseconds of the 1.1B shape on two cores, by rows: as a line beyond 4 rows.
def int8(rows: int) -> float:
    return 28.0 * (1 + 0.09 * (rows - 1)) if rows <= 4 else 28.0 * (1.27 + 0.16 * (rows - 4))


def bfloat16(rows: int) -> float:
    return 72.0 * (1 + 0.08 * (rows - 1)) if rows <= 4 else 72.0 * (1.24 + 0.13 * (rows - 4))


def int4(rows: int) -> float:
    return 24.0 * (1 + 0.11 * (rows - 1)) if rows <= 4 else 24.0 * (1.33 + 0.17 * (rows - 4))


MACHINES: dict[str, tuple[Callable[[int], float], Callable[[int], float] | None]] = {
    "lookup": (int8, None),
    "the model in int4": (bfloat16, int4),
    "a small model": (int8, lambda rows: 3.0 + 0.3 * rows),
    "a small model, small target": (lambda rows: 0.4 + 0.06 * rows, lambda rows: 0.05 + 0.01 * rows),
}


def rates(
    machine: str, steps: int, batch: Callable[[int], int], acceptance: Callable[[int, int], float]
) -> tuple[float, Sequence[float]]:
    """Speeds against plain: with the controller, and with 0 to MOST drafts."""
    world = [World(*MACHINES[machine], seed=3) for _ in range(MOST + 2)]
    fixed = [world[k].run(steps, batch, acceptance, k) for k in range(MOST + 1)]
    return world[-1].run(steps, batch, acceptance, world[-1].controller()), fixed


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_it_is_as_fast_as_the_best_fixed_number(machine: str, size: int) -> None:
    cells = [rates(machine, 600, lambda step: size, lambda step, i, p=p: p) for p in (0.0, 0.4, 0.7, 0.9, 1.0)]
    assert min(found / fixed[0] for found, fixed in cells) > 0.96
    shares = [found / max(fixed) for found, fixed in cells]  # learning counts: a run of 600 steps is short
    assert min(shares) > 0.88
    assert sum(shares) / len(shares) > 0.96


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_is_not_equally_fast_all_the_time_confuses_nobody(machine: str) -> None:
    for p in (0.0, 0.5, 0.9):
        worlds = [World(*MACHINES[machine], seed=5, drift=0.15) for _ in range(MOST + 2)]
        fixed = [worlds[k].run(1000, lambda step: 4, lambda step, i, p=p: p, k) for k in range(MOST + 1)]
        found = worlds[-1].run(1000, lambda step: 4, lambda step, i, p=p: p, worlds[-1].controller())
        assert found > 0.95 * fixed[0]
        assert found > 0.92 * max(fixed)


def waves(step: int) -> int:
    return (1, 2, 4, 8, 16, 8, 4, 2, 1)[step // 100 % 9]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [lambda step: 1, waves], ids=["one", "one to sixteen and back"])
def test_it_follows_what_changes(machine: str, batch: Callable[[int], int]) -> None:
    found, fixed = rates(machine, 1200, batch, lambda step, i: 0.9 if step // 300 % 2 else 0.05)
    assert found > 0.97 * fixed[0]
    if machine == "lookup":  # judged at every step, whatever it does: it is faster than any number that stays
        assert found > 1.05 * max(fixed)


def test_requests_that_differ_get_what_each_of_them_is_worth() -> None:
    world = World(*MACHINES["lookup"])
    controller = world.controller()
    found = world.run(600, lambda step: 4, lambda step, i: 0.95 if i == 0 else 0.05, controller)
    fixed = [
        World(*MACHINES["lookup"]).run(600, lambda s: 4, lambda s, i: 0.95 if i == 0 else 0.05, k) for k in range(9)
    ]
    assert found > 1.1 * max(fixed)


def test_prompts_beside_make_drafts_dear() -> None:
    controller = World(*MACHINES["lookup"]).controller()
    one = request()
    for _ in range(20):
        controller.note(one, MOST, MOST)
    assert controller.choose([Asked(one, MOST)]) == [MOST]
    assert controller.choose([Asked(one, 3)]) == [3]
    assert controller.choose([Asked(one, MOST)], other_rows=MAX_ROWS) == [0]
    assert controller.choose([]) == []


def test_what_a_draft_model_has_not_computed_yet_must_pay_as_well() -> None:
    controller = World(*MACHINES["a small model"]).controller()
    one = request()
    for _ in range(20):
        controller.note(one, MOST, MOST)
    controller.choose([Asked(one, 0)])
    assert sum(controller.choose([Asked(one, MOST, missing=6000, steps_left=3000)])) > 1
    assert sum(controller.choose([Asked(one, MOST, missing=6000, steps_left=2)])) <= 1  # a trial at most


def test_times_follow_the_machine_and_every_number_of_rows() -> None:
    times = StepTimes({1: 1.0, 4: 1.3, 8: 1.7}, 16)
    assert [times[n] for n in (1, 4, 8, 16)] == pytest.approx([1.0, 1.3, 1.7, 2.5])
    assert 1.0 < times[2] < times[3] < 1.3
    for _ in range(200):
        times.note(1, 2.0)  # everything takes twice the time
    assert times[1] == pytest.approx(2.0, rel=0.01)
    assert times[4] == pytest.approx(2.6, rel=0.05)
    for _ in range(200):
        times.note(4, 3.9)
        times.note(1, 2.0)
    assert times[4] == pytest.approx(3.9, rel=0.1)
    assert times[1] == pytest.approx(2.0, rel=0.1)
    times.note(1, 100.0)  # a hiccup
    assert times[1] < 3.0
    assert times[17] > times[16]


def test_times_between_what_was_measured_in_any_order() -> None:
    measured = {8: 1.7, 1: 1.0, 2: 1.4, 4: 1.3}  # what took longer than more rows do counts as much as those
    assert [StepTimes(measured, 8)[n] for n in range(1, 9)] == pytest.approx([1, 1.3, 1.3, 1.3, 1.4, 1.5, 1.6, 1.7])
    assert [StepTimes({2: 0.5}, 4)[n] for n in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])


@pytest.mark.parametrize(
    ("step_s", "calls"),
    [
        (1.0, {1: 2, 2: 2, 4: 2, 8: 2}),  # the time for all is over, and these four are always measured
        (0.01, dict.fromkeys((1, 2, 4, 8, 3, 6, 5), 1 + 4)),
        (1e-5, dict.fromkeys((1, 2, 4, 8, 3, 6, 5), 1 + 40)),
    ],
)
def test_measuring_takes_its_time(step_s: float, calls: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now, called = [0.0], list[int]()

    def run(rows: int) -> None:
        called.append(rows)
        now[0] += step_s * rows * (1 + (len(called) == len(set(called))))  # the first run of each takes longer

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert measured_rows(8) == [1, 2, 4, 8, 3, 6, 5]
    assert measure(run, measured_rows(8)) == pytest.approx({rows: step_s * rows for rows in calls})
    assert Counter(called) == calls


def test_a_few_right_first_drafts_are_enough_to_try_later_ones() -> None:
    """What the first is worth says what the next are worth, until something else is known of them."""

    def step(rows: int) -> float:
        return {4: 39, 8: 49}.get(rows, 49 + 3.25 * (rows - 8) if rows > 8 else 10 * rows)

    controller, requests = World(step, None, noise=0).controller(), [request() for _ in range(4)]
    asked = [Asked(r, 4) for r in requests]
    for _ in range(8):
        controller.observe(4, has_drafts=False, seconds=0.039)
    assert sum(controller.choose(asked)) == 4
    for i in range(20):  # of first drafts nine in ten are right
        controller.note(requests[i % 4], 1, i % 10 > 0)
    assert sum(controller.choose(asked)) > 8  # with a guess of 0.6 for each of the later ones it would be 8


def test_a_request_whose_drafts_are_suddenly_wrong_costs_little() -> None:
    world = World(int8, None)
    controller = world.controller()
    world.run(300, lambda step: 1, lambda step, i: 0.9, controller)
    r = request()
    for _ in range(60):
        controller.choose([Asked(r, MOST)])
        controller.note(r, MOST, MOST)
    rows = []
    for _ in range(40):
        drafts = sum(controller.choose([Asked(r, MOST)]))
        controller.note(r, drafts or MOST, 0)  # what is not verified is judged all the same
        rows.append(1 + drafts)
    assert sum(map(world.step, rows)) < 1.12 * 40 * world.step(1), rows


def test_an_estimate_is_the_share_that_was_right_lately() -> None:
    """What counts grows with each draft and is made small again now and then: that must not show."""
    rng, own, right, tried = random.Random(0), Estimate(2), 0.0, 0.0
    for i in range(5000):
        good = rng.random() < (0.2 if i // 500 % 2 else 0.9)
        own.note(1, int(good), memory=0.98)
        right, tried = 0.98 * right + good, 0.98 * tried + 1
        assert own.chance(0, 0.5, 3.0) == pytest.approx((right + 1.5) / (tried + 3))
    assert own.chance(1, 0.5, 3.0) == 0.5, "no second draft was tried"


def test_a_request_that_was_forgotten_is_as_all_others() -> None:
    controller = Controller(4, StepTimes({1: 1e-3, 2: 1.1e-3}, 8), None)
    old: Any = object()
    controller.note(old, 2, 0)
    controller._step += 10**6  # a share to the power of so many steps is 0
    new: Any = object()
    assert controller.chances(old, 4) == pytest.approx(controller.chances(new, 4))


def test_a_first_trial_without_a_right_draft_ends_early() -> None:
    """At 72 ms a step and 32 ms a draft each wrong one costs half a token, and a server's first answer pays."""
    world = World(lambda rows: 72 + 8 * (rows - 1), lambda rows: 32, noise=0)
    controller, one, drafted = world.controller(), request(), 0
    for _ in range(60):
        (count,) = controller.choose([Asked(one, MOST)])
        drafted += count
        if count:
            controller.note(one, count, 0)
    assert 3 <= drafted <= 6
