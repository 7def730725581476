"""Several tokens in one step: whatever is drafted, the answers are those of one token at a time.

The drafter knows the true answers, and errs as often as a test wants.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import EOS, VOCAB_SIZE, FakeModelLLM, check_idle, hit_rate
from test_engine import mixed_requests

from gpt_fast import LLM, Completion, SamplingParams
from gpt_fast.engine.compute import Computed, Outcome, sample_tokens
from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.engine.speculate.speculation import Speculation

Asked = tuple[list[int], SamplingParams]
DEMO = Path(__file__).parents[1] / "model_store" / "demo" / "target"


class Knowing(Drafter):
    """Drafts the true tokens, but each of them is wrong with ``error_rate``.

    ``truth``: by prompt and seed, the answer as it goes on past every end.
    """

    def __init__(self, truth: dict[tuple[Any, ...], Sequence[int]], error_rate: float) -> None:
        self.truth, self.error_rate, self.draw = truth, error_rate, random.Random(0)

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [tuple(map(self._spoiled, self._next(r)[:count])) for r, count in wishes]

    def _next(self, r: Request) -> Sequence[int]:
        return self.truth[(*r.token_ids[: r.num_prompt], r.params.seed)][r.num_output :]

    def _spoiled(self, token: int) -> int:
        return self.draw.randrange(VOCAB_SIZE) if self.draw.random() < self.error_rate else token


def drafting(requests: Sequence[Asked], error_rate: float = 0.0, num_drafts: int = 3, **options: Any) -> FakeModelLLM:
    """An LLM whose drafter knows what ``requests`` get."""
    with FakeModelLLM() as llm:
        endless = {"stop": (), "stop_token_ids": (), "ignore_eos": True, "min_tokens": 0, "logprobs": None}
        wanted = [dataclasses.replace(params, **endless, max_tokens=60) for _, params in requests]
        answers = llm.generate([prompt for prompt, _ in requests], wanted)
    known = {(*prompt, params.seed): done.token_ids
             for (prompt, params), done in zip(requests, answers, strict=True)}  # fmt: skip
    return FakeModelLLM(drafter=lambda *_: Knowing(known, error_rate), num_drafts=num_drafts, **options)


def answers(llm: FakeModelLLM, requests: Sequence[Asked]) -> list[tuple[Any, ...]]:
    """All that a caller sees of each."""
    done = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    check_idle(llm)
    return [seen(d) for d in done]


def seen(done: Completion) -> tuple[Any, ...]:
    return done.text, done.token_ids, done.finish_reason, done.logprobs, done.prompt_logprobs


def plans_of(llm: LLM) -> list[StepPlan]:
    """The plan of every step from now on; that of a request's last step is there when its completion is."""
    plans: list[StepPlan] = []
    runner = llm.engine.runner

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(plan: StepPlan, *more: Any) -> Any:
            plans.append(plan)
            return run(plan, *more)

        return noted

    runner.execute, runner.draw = noting(runner.execute), noting(runner.draw)  # type: ignore[method-assign]
    return plans


@pytest.fixture(scope="module")
def expected() -> list[tuple[Any, ...]]:
    with FakeModelLLM(max_batch=1, prefix_cache=False) as llm:
        return answers(llm, mixed_requests())


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_drafts": 9, "page_size": 4, "prefill_chunk": 7},
        {"max_batch": 16, "num_pages": 13},  # sequences are preempted all the time
        {"max_batch": 3, "page_size": 1, "num_drafts": 1},
    ],
    ids=["batch", "chunks", "preemption", "pages of one"],
)
def test_drafts_change_no_answer(options: dict[str, Any], error_rate: float, expected: list[tuple[Any, ...]]) -> None:
    with drafting(mixed_requests(), error_rate, **options) as llm:
        assert answers(llm, mixed_requests()) == expected
        if "num_pages" in options:
            assert llm.engine.scheduler.num_preemptions > 0


def test_drafts_that_are_right_save_steps_and_arrive_together() -> None:
    request = ([5, 6, 7], SamplingParams(max_tokens=25, temperature=1.0, seed=4, ignore_eos=True))
    with FakeModelLLM() as llm:
        plain = llm.generate(*request)
    with drafting([request], num_drafts=5) as llm:
        plans = plans_of(llm)
        deltas = list(llm.submit(*request, max_uncollected=1))
        assert [token for delta in deltas for token in delta.token_ids] == list(plain.token_ids)
        assert [len(delta.token_ids) for delta in deltas] == [1, 6, 6, 6, 6]
    assert len(plans) == 5


class NeverRight(Knowing):
    """Drafts the token behind the true one in the vocabulary."""

    def _spoiled(self, token: int) -> int:
        return (token + 1) % VOCAB_SIZE


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7, 15])
@pytest.mark.parametrize("model", ["fake", "demo"])
def test_never_right_gives_a_token_a_step_and_always_right_all_drafts_and_one(model: str, num_drafts: int) -> None:
    count = 1 + 2 * (num_drafts + 1)  # the first step computes the prompt, and one token
    requests = [([70, 71, i], SamplingParams(max_tokens=count, temperature=i / 2, seed=i, ignore_eos=True))
                for i in range(3)]  # fmt: skip
    with LLM(DEMO, dtype="float32", max_seq_len=96) if model == "demo" else FakeModelLLM() as llm:
        plain = [llm.generate(*request) for request in requests]
        longer = [llm.generate(prompt, dataclasses.replace(params, max_tokens=60)) for prompt, params in requests]
        truth = {(*prompt, params.seed): done.token_ids
                 for (prompt, params), done in zip(requests, longer, strict=True)}  # fmt: skip
        plans = plans_of(llm)
        for drafter, steps in ((NeverRight(truth, 0.0), count), (Knowing(truth, 0.0), 3)):
            llm.engine.speculation = Speculation(drafter, num_drafts)
            for request, expected in zip(requests, plain, strict=True):
                plans.clear()
                done = llm.generate(*request)
                assert seen(done) == seen(expected)
                check_idle(llm)
                assert len(plans) == steps
                assert done.num_accepted == (0 if steps == count else 2 * num_drafts)
                assert done.num_drafted >= 2 * num_drafts


ENDS = {
    "length": {"max_tokens": 7},
    "end of text": {"stop_token_ids": ()},  # by number 4 of the answer
    "least": {"stop_token_ids": (), "min_tokens": 4},
    "stop": {"stop": ()},  # by characters 4 and 5 of the answer
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    "biases": {"logit_bias": {7: 5.0, 9: -100.0}},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "allowed tokens": {"logit_bias": {}, "allowed_token_ids": tuple(range(40, 52))},
    "bad words": {"logit_bias": {}, "allowed_token_ids": tuple(range(40, 44)), "bad_words": ("(", "*+", "++)")},
    "stop in the text": {"stop": (), "include_stop_str_in_output": True},
    "logprobs of one prompt token": {"logprobs": 1, "prompt_logprobs": 0, "max_tokens": 9},
    "all": {"logprobs": 2, "stop_token_ids": (), "stop": (), "repetition_penalty": 1.4, "min_tokens": 3},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", ENDS)
def test_ends_and_numbers_are_right_when_several_tokens_come_at_once(case: str, temperature: float) -> None:
    fields = {"max_tokens": 20, "temperature": temperature, "ignore_eos": True, **ENDS[case]}
    prompt = [70] if "one prompt token" in case else [70, 71, 72]
    biases = {token: -100 for token in range(VOCAB_SIZE) if not 32 <= token < 127}  # so every token is a character
    requests = []
    with FakeModelLLM() as llm:
        for seed in range(6):
            params = SamplingParams(**{"logit_bias": biases, **fields, "seed": seed})
            answer = llm.generate(prompt, params)
            if "stop_token_ids" in fields:
                params = dataclasses.replace(params, stop_token_ids=(answer.token_ids[4],))
            if "stop" in fields:
                params = dataclasses.replace(params, stop=(answer.text[4:6],))
            requests.append((prompt, params))
        plain = answers(llm, requests)
    for num_drafts in (1, 2, 3, 4, 8):
        with drafting(requests, num_drafts=num_drafts) as llm:
            assert answers(llm, requests) == plain
    reasons = {reason for _, _, reason, _, _ in plain}
    assert ("stop" in reasons) == ("stop" in fields or "stop_token_ids" in fields)


@pytest.mark.parametrize("error_rate", [0.0, 0.2])
def test_a_grammar_follows_the_tokens_that_are_kept(error_rate: float) -> None:
    pytest.importorskip("llguidance")
    shapes = [{"regex": r"[0-9]{3}-[a-f]{2,6}z"}, {"choice": ("red fox", "red ox", "blue fish")},
              {"json_schema": {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}},
                               "required": ["age"], "additionalProperties": False}}]  # fmt: skip
    requests = [([70, i], SamplingParams(max_tokens=30, temperature=1.0, seed=i, **shape))
                for i, shape in enumerate(3 * shapes)]  # fmt: skip
    with FakeModelLLM() as llm:
        plain = answers(llm, requests)
    assert {reason for _, _, reason, _, _ in plain} == {"stop"}
    for num_drafts in (1, 3, 8):
        with drafting(requests, error_rate, num_drafts) as llm:
            llm.engine.speculation.drafter.truth = {  # type: ignore[union-attr]
                (*prompt, params.seed): [*done[1], EOS, 7, 7]
                for (prompt, params), done in zip(requests, plain, strict=True)
            }
            assert answers(llm, requests) == plain


def test_what_drafts_left_in_the_cache_is_not_found_again() -> None:
    prompt = [65, 66, 67]
    first = (prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    with drafting([first], error_rate=0.5, page_size=4) as llm:
        done = llm.generate(*first)
    longer = ([*prompt, *done.token_ids[:33]], first[1])
    with FakeModelLLM() as llm:
        plain = answers(llm, [longer])
    with drafting([first, longer], error_rate=0.5, page_size=4) as llm:
        llm.generate(*first)
        assert answers(llm, [longer]) == plain
        assert hit_rate(llm) > 0.4


def test_a_row_behind_a_draft_that_has_no_token_is_left_to_the_next_step() -> None:
    with FakeModelLLM() as llm:
        request = llm.prepare([5, 6, 7], SamplingParams(temperature=0.0))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 9], logits[1] = 1.0, float("nan")
    plan = SequencePlan(0, (7, 9), 2, 1, (), num_logits=2, rope_len=3)
    (outcome,) = sample_tokens([Computed(request, plan, logits)])
    assert outcome == Outcome(1, [], [9], [])
