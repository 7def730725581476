"""Steps that begin before the tokens of the step before them are known: they change no answer and cost nobody anything.

test_engine.py has them in any company; here is what ends, fails or waits while one is on its way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_model import EOS, FakeModelLLM, check_idle
from torch import Tensor

from gpt_fast import SamplingParams
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.engine.tensors import Fetched
from gpt_fast.engine.text import TextStream
from gpt_fast.errors import RequestError
from gpt_fast.tokenizer import IncrementalDetokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched:
    """Stands for a runner's ``execute``: which steps had their tokens on the device alone."""

    def __init__(self, llm: FakeModelLLM) -> None:
        self.execute, self.ahead = llm.engine.runner.execute, list[bool]()
        self.rows: list[int] = []

    def __call__(self, plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        self.ahead.append(tokens is not None)
        self.rows.append(plan.num_tokens)
        return self.execute(plan, tokens)


@pytest.fixture
def llm() -> Iterator[FakeModelLLM]:
    with FakeModelLLM() as llm:
        llm.engine.runner.runs_ahead = True
        yield llm


@pytest.fixture
def watched(llm: FakeModelLLM, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(llm)
    monkeypatch.setattr(llm.engine.runner, "execute", watched)
    return watched


def plainly(prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    with FakeModelLLM() as llm:
        return [completion.token_ids for completion in llm.generate(prompts, params)]


def test_every_step_but_the_first_begins_ahead(llm: FakeModelLLM, watched: Watched) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=3, ignore_eos=True)
    assert llm.generate([5, 6, 7], params).token_ids == plainly([[5, 6, 7]], params)[0]
    assert watched.ahead == [False] + 8 * [True], "and none behind the last token, whose number is known"
    check_idle(llm)


def test_what_stops_early_has_no_token_more(llm: FakeModelLLM, watched: Watched) -> None:
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [[i, i + 1] for i in range(3, 9)]
    stops = {tokens[4] for tokens in plainly(prompts, long)}
    params = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=tuple(stops))
    found = [completion.token_ids for completion in llm.generate(prompts, params)]
    assert found == plainly(prompts, params)
    assert max(map(len, found)) <= 5
    assert sum(watched.rows) > sum(map(len, found)), "rows behind a stop were computed and thrown away"
    check_idle(llm)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 3.0}},
        {"min_tokens": 4},
        {"allowed_token_ids": (8, 9, 10, 11)},
        {"choice": ("abc", "abd")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_where_the_host_has_a_part_in_a_token_it_is_waited_for(
    fields: dict[str, Any], llm: FakeModelLLM, watched: Watched
) -> None:
    if "choice" in fields:
        pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=4, **fields)
    assert llm.generate([5, 6], params).token_ids == plainly([[5, 6]], params)[0]
    assert not any(watched.ahead)


def test_the_others_wait_with_it(llm: FakeModelLLM, watched: Watched) -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True)]
    found = [completion.token_ids for completion in llm.generate([[5], [6]], params)]
    assert found == [plainly([[n]], p)[0] for n, p in zip((5, 6), params, strict=True)]
    assert not any(watched.ahead[:4])
    assert all(watched.ahead[7:])


def test_a_step_ahead_that_fails_is_computed_again(
    llm: FakeModelLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params, execute, calls = SamplingParams(max_tokens=40, ignore_eos=True), llm.engine.runner.execute, [0]

    def sometimes(plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        calls[0] += 1
        if tokens is not None and calls[0] % 3 == 0:
            raise RuntimeError("no memory for a moment")
        return execute(plan, tokens)

    monkeypatch.setattr(llm.engine.runner, "execute", sometimes)
    with caplog.at_level(logging.ERROR, "gpt_fast"):
        found = [completion.token_ids for completion in llm.generate([[5], [6, 7]], params)]
    assert found == plainly([[5], [6, 7]], params)
    assert "a step ahead failed; it is computed again" in caplog.text
    check_idle(llm)


def test_numbers_that_are_not_finite_end_their_request_alone(
    llm: FakeModelLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = llm.engine.runner.execute

    def damaged(plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        logits = execute(plan, tokens).clone()
        for row, sequence in enumerate(plan.sequences):
            if sequence.slot == 1 and sequence.end > 6:
                logits[row] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine.runner, "execute", damaged)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    good, bad, other = llm.submit_all([([5], params), ([6], params), ([7], params)])
    with pytest.raises(RequestError, match="not finite"):
        list(bad)
    for handle, prompt in ((good, [5]), (other, [7])):
        assert tuple(t for delta in handle for t in delta.token_ids) == plainly([prompt], params)[0]
    check_idle(llm)


def test_who_comes_waits_for_one_step(llm: FakeModelLLM, watched: Watched) -> None:
    first = llm.submit([5], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=3)
    with llm.engine.changed:
        assert llm.engine.changed.wait_for(lambda: first.request.paused, 60)
    second = SamplingParams(max_tokens=3, ignore_eos=True)
    assert llm.generate([6], second).token_ids == plainly([[6]], second)[0]
    assert len(first._tokens) == 3, "who is paused gets no token that was on its way"
    tokens = tuple(t for delta in first for t in delta.token_ids)
    assert tokens == plainly([[5]], SamplingParams(max_tokens=100, ignore_eos=True))[0]
    check_idle(llm)


def test_who_is_paused_beside_others_waits_and_goes_on_with_them(
    llm: FakeModelLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no step but the one that had begun, and takes no pages, nor the next slot's part of the page table."""
    engine, execute, for_nothing = llm.engine, llm.engine.runner.execute, [0]
    prompt, few = [5] * (llm.max_seq_len - 14), SamplingParams(max_tokens=12, ignore_eos=True)

    def counted(plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        for_nothing[0] += slow.request.paused and slow.request.slot in [own.slot for own in plan.sequences]
        return execute(plan, tokens)

    many = SamplingParams(max_tokens=llm.max_seq_len - 4, ignore_eos=True)
    with engine.changed:
        slow = llm.submit(prompt, few, max_uncollected=3)
        other = llm.submit([6], many)
    monkeypatch.setattr(engine.runner, "execute", counted)
    with engine.changed:
        assert engine.changed.wait_for(lambda: slow.request.paused and other.request.num_output > 80, 60)
        assert for_nothing[0] <= 1
        assert len(slow.request.pages) <= engine.runner.pages_per_sequence
        assert len(slow._tokens) == 3
    assert tuple(t for delta in slow for t in delta.token_ids) == plainly([prompt], few)[0]
    assert tuple(t for delta in other for t in delta.token_ids) == plainly([[6]], many)[0]
    check_idle(llm)


def test_who_waits_gets_the_slot_of_a_paused_one_and_the_engine_sleeps_when_all_are_paused(llm: FakeModelLLM) -> None:
    engine, steps = llm.engine, [0]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    paused = [llm.submit([5 + i], params, max_uncollected=3) for i in range(engine.scheduler.max_batch)]
    with engine.changed:
        assert engine.changed.wait_for(lambda: all(handle.request.paused for handle in paused), 60)
    first = llm.submit([50], params)
    assert tuple(t for delta in first for t in delta.token_ids) == plainly([[50]], params)[0]
    schedule = engine.scheduler.schedule

    def counted(*args: Any) -> Any:
        steps[0] += 1
        return schedule(*args)

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    assert paused[0].request.paused
    time.sleep(0.3)
    assert steps[0] < 3, "one of the paused waits, and there is nothing to do for it"
    for handle in paused:
        tokens = tuple(t for delta in handle for t in delta.token_ids)
        assert tokens == plainly([handle.request.token_ids[: handle.request.num_prompt]], params)[0]
    check_idle(llm)


# --- the scheduler's side -------------------------------------------------------------------------------------------


def request(tokens: int, max_tokens: int = 50) -> Request:
    text = TextStream(IncrementalDetokenizer(None))
    params = SamplingParams().resolved()
    return Request("r", [7] * tokens, params, seed=0, max_tokens=max_tokens, end_ids=frozenset({EOS}), text=text)


def scheduler(num_pages: int = 9, max_batch: int = 2, **options: Any) -> Scheduler:
    return Scheduler(PageAllocator(num_pages, 4), max_batch, 64, **options)


def test_the_plan_behind_takes_pages_as_the_next_one_would() -> None:
    s, r = scheduler(), request(4)
    s.add(r)
    plan, requests = s.schedule()
    following = s.behind([*zip(requests, plan.sequences, strict=True)])
    assert following is not None
    (own,) = following[0].sequences
    assert (own.slot, own.tokens, own.start, own.num_placed, own.num_logits) == (r.slot, (0,), 4, 1, 1)
    assert own.new_pages == tuple(r.pages[1:])
    assert following[1] == [0]
    s.take_back([(r, own)])
    assert len(r.pages) == 1
    s.check_integrity()


@pytest.mark.parametrize("why", ["a free slot", "a prompt goes on", "no page", "computed anew", "the last token"])
def test_when_no_step_can_be_planned_behind_another(why: str) -> None:
    options: dict[str, Any] = {"computed anew": {"long_from": 4, "computed_anew": True}}.get(why, {})
    s = scheduler(num_pages=2 if why == "no page" else 40, **options)
    first = request(4, max_tokens=1 if why == "the last token" else 50)
    s.add(first)
    if why == "a prompt goes on":
        s.add(request(70))
    plan, requests = s.schedule()
    if why == "a free slot":
        s.add(request(1))
    parts = [part for part in zip(requests, plan.sequences, strict=True) if part[0] is first]
    assert s.behind(parts) is None
    s.check_integrity()


def test_what_is_fetched_is_what_was_there() -> None:
    assert Fetched(torch.tensor([3, -1, 2**40])).tolist() == [3, -1, 2**40]
