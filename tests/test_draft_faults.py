"""Drafts where something ends, breaks, waits or leaves: the books stay right, and nobody's answer changes."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModelLLM, check_idle
from test_drafts import drafting, plans_of, seen
from test_engine import by_steps, mixed_requests, wait_until
from test_speculation import DRAFTERS, Asked, ask, near_model, same_model
from torch import Tensor
from waiting import HANG_S

from gpt_fast import LLM, SamplingParams
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.engine.speculate.drafter import Wish
from gpt_fast.engine.speculate.lookup import LookupDrafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.errors import RequestFailedError

pytestmark = pytest.mark.usefixtures("one_thread")

ENDLESS = SamplingParams(max_tokens=None, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with FakeModelLLM(max_batch=1, prefix_cache=False) as llm:
        return [seen(done) for done in ask(llm, mixed_requests())]


def drafter_of(llm: LLM) -> Any:
    assert llm.engine.speculation is not None
    return llm.engine.speculation.drafter


# ---- who leaves or waits ----


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_arrivals_cancellations_and_shortages_keep_the_books(drafter: str, seed: int, plain: list[Any]) -> None:
    draw, requests = random.Random(seed), mixed_requests()
    chosen = [draw.randrange(len(requests)) for _ in range(25)]
    handles: list[Handle] = []
    actions: list[tuple[int, Callable[[], object]]] = []
    with FakeModelLLM(drafter=DRAFTERS[drafter], max_batch=5, num_pages=11, prefill_chunk=24) as llm:
        for i, which in enumerate(chosen):
            actions.append((draw.choice([0, 1, 3]), lambda which=which: handles.append(llm.submit(*requests[which]))))
            gone = draw.randint(0, 2 * i)
            if gone <= i:
                actions.append((draw.choice([0, 1]), lambda gone=gone: handles[gone].cancel()))
        by_steps(llm, actions)
        for which, handle in zip(chosen, handles, strict=True):
            tokens = tuple(token for delta in handle for token in delta.token_ids)
            assert handle.completion is not None
            expected = plain[which][1]
            if handle.completion.finish_reason == "abort":
                expected = expected[: len(tokens)]
            assert tokens == expected
            assert len(handle.completion.origins) == len(tokens)
        check_idle(llm)


def test_a_paused_request_gets_no_drafts_and_the_others_go_on() -> None:
    first, second = ([5, 6, 7], ENDLESS), ([8, 9], dataclasses.replace(ENDLESS, seed=2))
    with FakeModelLLM() as llm:
        expected = [seen(done) for done in ask(llm, [first, second])]
    with FakeModelLLM(drafter=same_model) as llm:
        wishes: list[Wish] = []
        draft = drafter_of(llm).draft
        drafter_of(llm).draft = lambda some: (wishes.extend(some), draft(some))[1]
        paused = llm.submit(*first, max_uncollected=3)
        wait_until(llm, lambda: paused.request.paused)
        wishes.clear()
        assert seen(llm.generate(*second)) == expected[1]
        assert wishes
        assert all(wish.request is not paused.request for wish in wishes)
        assert paused.request.paused
        assert seen([delta.completion for delta in paused][-1]) == expected[0]  # type: ignore[arg-type]
        check_idle(llm)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_is_known_of_a_request_goes_with_it(drafter: str) -> None:
    """Maps by request are empty when requests have ended, and the map of pages knows no more pages than there are."""
    with FakeModelLLM(drafter=DRAFTERS[drafter], max_batch=4, num_pages=24) as llm:
        for turn in range(20):
            handles = [llm.submit(prompt, dataclasses.replace(params, seed=turn))
                       for prompt, params in mixed_requests()[:12]]  # fmt: skip
            handles[turn % 12].cancel()
            for handle in handles:
                list(handle)
            check_idle(llm)
        del handle, handles
        maps = drafter_of(llm).__dict__
        by_request = [maps[name] for name in ("_automata", "_known") if name in maps]
        assert len(by_request) == 1
        for _ in range(int(HANG_S / 0.05)):  # the engine's thread leaves its last step
            gc.collect()
            if not by_request[0]:
                break
            time.sleep(0.05)
        assert not by_request[0]
        assert len(maps.get("_contents", ())) <= 24


# ---- what breaks ----


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_steps_that_fail_now_and_then_are_tried_again_without_a_trace(drafter: str, plain: list[Any]) -> None:
    with FakeModelLLM(drafter=DRAFTERS[drafter]) as llm:
        run, calls = llm.engine.runner.execute, []

        def execute(plan: StepPlan) -> Tensor:
            calls.append(plan)
            if len(calls) % 5 == 0 and len(plan.sequences) > 1:
                raise RuntimeError("out of luck")
            return run(plan)

        llm.engine.runner.execute = execute  # type: ignore[method-assign]
        assert [seen(done) for done in ask(llm, mixed_requests())] == plain
        check_idle(llm)


def test_timing_that_fails_costs_no_answer_anything(plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a step of no time")

    monkeypatch.setattr(Speculation, "observe", fail)
    with FakeModelLLM(drafter=same_model) as llm:
        assert [seen(done) for done in ask(llm, mixed_requests())] == plain
        check_idle(llm)


def test_a_request_whose_drafts_break_the_step_ends_alone(plain: list[Any]) -> None:
    requests = mixed_requests()
    bad = next(i for i, (_, params) in enumerate(requests) if (params.max_tokens or 0) > 12)
    with drafting(requests) as llm:
        run, handles = llm.engine.runner.execute, []

        def execute(plan: StepPlan) -> Tensor:
            if any(part.num_logits > 1 and part.slot == handles[bad].request.slot for part in plan.sequences):
                raise RuntimeError("no room for drafts")
            return run(plan)

        with llm.engine.changed:  # the engine waits until all are here
            handles += [llm.submit(*request) for request in requests]
            llm.engine.runner.execute = execute  # type: ignore[method-assign]
        for i, handle in enumerate(handles):
            if i == bad:
                with pytest.raises(RequestFailedError, match="no room for drafts"):
                    list(handle)
            else:
                assert seen([delta.completion for delta in handle][-1]) == plain[i]  # type: ignore[arg-type]
        check_idle(llm)


class Nonsense(LookupDrafter):
    """Guesses more than it was asked for, and tokens that are not the model's."""

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [tuple(range(most + 7)) for _, most in wishes]


def test_a_drafter_that_guesses_too_much_costs_no_answer_anything(plain: list[Any]) -> None:
    with FakeModelLLM(drafter=lambda *_: Nonsense()) as llm:
        assert [seen(done) for done in ask(llm, mixed_requests())] == plain


# ---- where sequences end ----


@pytest.mark.parametrize("num_drafts", [1, 4, 15])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_stop_at_the_end_of_the_context(drafter: str, num_drafts: int) -> None:
    requests: list[Asked] = [([7] * length, ENDLESS) for length in (1, 30, 38, 39)]
    with FakeModelLLM(max_seq_len=40) as llm:
        expected = [seen(done) for done in ask(llm, requests)]
    with FakeModelLLM(drafter=DRAFTERS[drafter], num_drafts=num_drafts, max_seq_len=40) as llm:
        plans = plans_of(llm)
        done = ask(llm, requests)
        assert [seen(d) for d in done] == expected
        assert [len(d.token_ids) for d in done] == [39, 10, 2, 1]
        assert max(part.end for plan in plans for part in plan.sequences) <= 39, "what the last token is drawn from"
        check_idle(llm)


def test_a_draft_model_of_a_shorter_context_drafts_up_to_its_end() -> None:
    """``near_model`` has 60 positions, the target 128."""
    requests: list[Asked] = [([7] * 20, ENDLESS), ([8] * 70, ENDLESS)]
    with FakeModelLLM() as llm:
        expected = [seen(done) for done in ask(llm, requests)]
    with FakeModelLLM(drafter=near_model) as llm:
        plans: list[StepPlan] = []
        run = drafter_of(llm).runner.execute
        drafter_of(llm).runner.execute = lambda plan: (plans.append(plan), run(plan))[1]
        done = ask(llm, requests)
        assert [seen(d) for d in done] == expected
        ends = [part.end for plan in plans for part in plan.sequences]
        assert max(ends) <= 60
        assert max(ends) > 50
        origins = done[0].origins
        assert set(origins[41:]) == {"plain"}, "20 and 41 tokens are more than 60"
        assert set(origins[1:38]) >= {"accepted", "corrected"}
        assert set(done[1].origins) == {"plain"}


@pytest.mark.parametrize("names", [("stories260K_hf", "llama2xs_280K_hf"), ("llama2xs_280K_hf", "stories260K_hf")])
def test_two_checkpoints_of_different_contexts(names: tuple[str, str], data_dir: Path) -> None:
    target, draft = (data_dir / "models" / name for name in names)  # contexts of 512 and 256 tokens
    params = [SamplingParams(max_tokens=300, temperature=t, seed=i, ignore_eos=True, logprobs=1)
              for i, t in enumerate((0.0, 0.7, 1.0))]  # fmt: skip
    prompts = ["Once upon a time", "The cat sat. The cat sat. The cat sat.", "Lily"]
    with LLM(target, dtype="float32", max_batch=1, prefix_cache=False) as llm:
        expected = [seen(llm.generate(prompt, own)) for prompt, own in zip(prompts, params, strict=True)]  # type: ignore[arg-type]
    with LLM(target, dtype="float32", draft=str(draft), speculate="always", speculate_k=5) as llm:
        done = llm.generate(prompts, params)
        assert isinstance(done, list)
        assert [seen(d) for d in done] == expected
        assert all(d.num_accepted > 20 for d in done)


def test_origins_and_counts_agree_where_answers_end_inside_drafts() -> None:
    prompt = [70, 71, 72]
    with FakeModelLLM() as llm:
        answer = llm.generate(prompt, ENDLESS).token_ids
    stops = [dataclasses.replace(ENDLESS, stop_token_ids=(token,)) for token in answer[1:12]]
    stops = [params for i, params in enumerate(stops, 1) if answer.index(params.stop_token_ids[0]) == i]
    with FakeModelLLM(drafter=same_model, num_drafts=5) as llm:
        plans = plans_of(llm)
        for params in stops:
            plans.clear()
            done = llm.generate(prompt, params)
            count = 1 + answer.index(params.stop_token_ids[0])
            assert done.token_ids == answer[:count]
            pattern = (["accepted"] * 5 + ["bonus"]) * 3
            assert list(done.origins) == ["plain", *pattern[: count - 1]]
            assert done.num_accepted == done.origins.count("accepted")
            check_idle(llm)
            assert len(plans) == 1 + -(-(count - 1) // 6)
    assert len(stops) > 5
