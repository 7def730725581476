"""What one request contains or breaks costs the others nothing: their answers are the same to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import FakeModelLLM, check_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt_fast import LLM, Completion, RequestError, SamplingParams
from gpt_fast.engine import compute
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.grammar import CompiledGrammar
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN, SamplingRow, sample
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.errors import EngineError, RequestFailedError
from gpt_fast.model.building import random_model
from gpt_fast.serve.protocol import native

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with FakeModelLLM() as llm:
        yield llm


INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, 2**31),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, 2**31),
    "n": (1, 16),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 100.0),
    "timeout_s": (0.0, 86400.0),
}


# ---- numbers --------------------------------------------------------------------------------------------------------


def numbers(name: str) -> st.SearchStrategy[float]:
    """Values that the field takes, as integers and as floats."""
    if name in INTEGERS:
        low, high = INTEGERS[name]
        high = {"max_tokens": 6, "min_tokens": 6}.get(name, high)
        whole = st.integers(max(low, -(2**53)), min(high, 2**53))  # what a float holds exactly
        return whole | whole.map(float)
    least, most = NUMBERS[name]
    least = {"timeout_s": 1000.0, "repetition_penalty": 0.5}.get(name, least + (0.01 if name == "top_p" else 0.0))
    floats = st.floats(least, most)
    return floats | st.integers(int(-(-least // 1)), int(most))


FIELDS = [name for name in (*INTEGERS, *NUMBERS) if name != "n"]
BODIES = st.fixed_dictionaries(
    {"prompt": st.lists(st.integers(3, 259), min_size=1, max_size=20)},
    optional={name: numbers(name) for name in FIELDS}
    | {
        "logit_bias": st.dictionaries(
            st.integers(0, 259).map(str), st.integers(-100, 100) | st.floats(-100, 100), max_size=4
        ),
        "stop_token_ids": st.lists(st.integers(0, 259), max_size=3),
    },
)


def respelled(value: Any) -> Any:
    """The same JSON with every integer outside the prompt as a float, and every whole float as an integer."""
    if isinstance(value, dict):
        return {k: v if k == "prompt" else respelled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [respelled(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return float(value) if isinstance(value, int) and abs(value) <= 2**53 else value


def parsed(body: dict[str, Any]) -> tuple[Any, SamplingParams]:
    """``body`` after its way through JSON and the protocol; short and seeded."""
    body = {"max_tokens": 6, "seed": 1, "stream": False, **body}
    if body.get("min_tokens", 0) > body["max_tokens"]:
        body["min_tokens"] = body["max_tokens"]
    request = native.parse_request(json.loads(json.dumps(body)))
    return request.prompts[0], request.params


def shown(done: Completion) -> tuple[Any, ...]:
    """Everything a client sees of a completion, to the last bit."""
    return done.text, done.token_ids, done.finish_reason, done.logprobs, done.prompt_logprobs


def finish(handle: Handle) -> tuple[Any, ...]:
    return [shown(delta.completion) for delta in handle if delta.completion is not None][-1]


NUMBERS_LLM: dict[str, LLM] = {}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BODIES, min_size=1, max_size=6))
def test_every_number_is_taken_as_integer_and_as_float_alone_and_in_company(
    bodies: list[dict[str, Any]],
) -> None:
    if not NUMBERS_LLM:
        NUMBERS_LLM["llm"] = FakeModelLLM(prefix_cache=False)
    llm = NUMBERS_LLM["llm"]
    requests = [parsed(body) for body in bodies]
    assert [parsed(respelled(body)) for body in bodies] == requests
    alone = [finish(llm.submit(*request)) for request in requests]
    together = llm.submit_all(requests)
    assert [finish(handle) for handle in together] == alone
    check_idle(llm)


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
@pytest.mark.parametrize("value", [True, "1", [1], float("nan"), float("inf"), 10**400, -(10**400), 1e308])
def test_what_is_no_such_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 200


def test_every_number_of_a_request_is_tested_here() -> None:
    hints = SamplingParams.__annotations__
    numbers = {name for name, hint in hints.items() if "int" in hint or "float" in hint}
    several = {"logit_bias", "stop_token_ids", "allowed_token_ids", "shown_special_tokens"}
    assert numbers - several - {"max_new_tokens"} == {*INTEGERS, *NUMBERS}
    for name in numbers:
        if name not in several:
            assert (refusal(**{name: None}) is None) == ("None" in hints[name])


def refusal(**fields: Any) -> RequestError | None:
    try:
        SamplingParams(**fields)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams)])
def test_a_refusal_is_short_whatever_it_refuses(name: str) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, {"a": nested}, "x" * 100_000, [nested], {"5": nested}, {"x" * 10_000: 1}):
        error = refusal(**{name: value})
        if error is None:  # these are looked at later, where they are compiled
            assert name in ("json_schema", "regex")
        else:
            assert len(str(error)) < 300
            assert error.param == name


def test_half_a_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"max_tokens must be a whole number from 1 to 2147483648, not 5\.5"):
        SamplingParams(max_tokens=5.5)  # type: ignore[arg-type]


def test_a_temperature_close_to_zero_is_greedy() -> None:
    assert SamplingParams(temperature=1e-300).resolved() == SamplingParams(temperature=0.0).resolved()


# ---- faults ---------------------------------------------------------------------------------------------------------

BAD_LENGTH = 23  # tokens in the prompt of the request that breaks, and of no other
NUM_TOP = 7  # log probabilities that it asks for, and no other does


def eight() -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds, the fourth of them the one that will break."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.0, "logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP},
        {"temperature": 0.0, "repetition_penalty": 1.5, "bad_words": ("ab", "x")},
        {"temperature": 1.3, "logit_bias": {5: -100, 7: 4}},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 1.0, "top_k": 5, "min_tokens": 4},
    ]
    return [
        (
            [3 + (7 * i + j) % 250 for j in range(BAD_LENGTH if i == 3 else 5 + 4 * i)],
            SamplingParams(max_tokens=12, seed=i, ignore_eos=True, **kind),
        )
        for i, kind in enumerate(kinds)
    ]


class Fault(Exception):  # noqa: N818
    """What is injected."""


def wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, breaks: Callable[..., bool], after: int = 0) -> None:
    """Let ``owner.name`` raise from its call number ``after`` on that ``breaks`` says yes to."""
    original = getattr(owner, name)
    calls = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if breaks(*args, **kwargs):
            calls.append(1)
            if len(calls) > after:
                raise Fault(f"in {name}" + " of a long message" * 1000)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def is_bad(request: Request) -> bool:
    return request.num_prompt == BAD_LENGTH


class BrokenGrammar:
    complete, along = False, CompiledGrammar.along

    def allowed(self) -> torch.Tensor:
        raise Fault("in allowed")

    def advance(self, token: int) -> None:
        raise AssertionError


STAGES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "admit": (Scheduler, "_admit", lambda self, request: is_bad(request)),
    "schedule": (Scheduler, "_sequence_plan", lambda self, request, count, drafts: is_bad(request)),
    "execute": (Runner, "execute", lambda self, plan: any(s.rope_len == BAD_LENGTH for s in plan.sequences)),
    "sample": (compute, "sample", lambda logits, rows: any(row.num_prompt == BAD_LENGTH for row in rows)),
    "logprobs": (compute, "logprobs", lambda logits, tokens, num_top: NUM_TOP in num_top),
    "advance": (Scheduler, "advance", lambda self, request, kept: is_bad(request)),
    "append": (Request, "append", lambda self, tokens, now: is_bad(self)),
    "emit": (Handle, "put", lambda self, text, tokens: is_bad(self.request)),
    "end": (Request, "completion", is_bad),
}


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("stage", [*STAGES, "grammar", "detokenize", "observer"])
def test_a_fault_at_any_stage_costs_the_others_not_a_byte(
    llm: LLM, stage: str, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [finish(llm.submit(*request)) for request in eight()]
    requests = [llm.prepare(*request) for request in eight()]
    if stage == "grammar":
        requests[3].grammar = BrokenGrammar()
    elif stage == "detokenize":
        wrap(monkeypatch, requests[3].text, "push", lambda *_, **__: True, after)
    elif stage == "observer":
        llm.engine.on_step = llm.engine.on_finish = lambda *_: 1 / 0  # type: ignore[assignment]
    else:
        owner, name, breaks = STAGES[stage]
        wrap(monkeypatch, owner, name, breaks, 0 if stage in ("admit", "end") else after)
    handles = llm.engine.add_all(requests)
    for i, handle in enumerate(handles):
        if i == 3 and stage != "observer":
            with pytest.raises(RequestFailedError) as caught:
                finish(handle)
            assert "in " in str(caught.value)
            assert len(str(caught.value)) < 400
        else:
            assert finish(handle) == expected[i], f"request {i}"
    assert max(len(record.getMessage()) for record in caplog.records) < 20_000
    check_idle(llm)
    monkeypatch.undo()
    assert finish(llm.submit(*eight()[3])) == expected[3], "the engine goes on"


@pytest.mark.parametrize("stage", ["sample", "append", "none"])
def test_a_request_that_has_ended_is_freed_at_once(llm: LLM, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage != "none":
        owner, name, breaks = STAGES[stage]
        wrap(monkeypatch, owner, name, breaks)
    gc.collect()
    gc.disable()  # cycles would wait for it, with the grammars that hang on them
    try:
        for _ in range(3):
            with contextlib.suppress(RequestFailedError):
                finish(llm.submit(*eight()[3]))
        llm.generate([5], SamplingParams(max_tokens=1))
        assert len([o for o in gc.get_objects() if isinstance(o, Request) and is_bad(o)]) == 0
    finally:
        gc.enable()


def test_several_at_fault_end_and_the_others_do_not(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [finish(llm.submit(*request)) for request in eight()]
    odd = {len(prompt) for i, (prompt, _) in enumerate(eight()) if i % 2}
    wrap(monkeypatch, compute, "sample", lambda logits, rows: any(row.num_prompt in odd for row in rows), 2)
    handles = llm.submit_all(eight())
    for i, handle in enumerate(handles):
        if i % 2:
            with pytest.raises(RequestFailedError):
                finish(handle)
        else:
            assert finish(handle) == expected[i]
    check_idle(llm)


def test_when_all_that_run_are_at_fault_the_next_is_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = finish(llm.submit([5, 6], SamplingParams(max_tokens=4)))
    wrap(monkeypatch, compute, "sample", lambda logits, rows: any(row.num_prompt == BAD_LENGTH for row in rows))
    with pytest.raises(RequestFailedError):
        finish(llm.submit(*eight()[3]))
    assert finish(llm.submit([5, 6], SamplingParams(max_tokens=4))) == expected


def test_when_all_that_compute_are_at_fault_a_paused_one_loses_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = ([5, 6] * 10, SamplingParams(max_tokens=60, ignore_eos=True))
    expected = finish(llm.submit(*paused))
    waits = llm.submit(*paused, max_uncollected=5)
    with llm.engine.changed:
        assert llm.engine.changed.wait_for(lambda: waits.request.paused, 60)
    wrap(monkeypatch, compute, "sample", lambda logits, rows: any(row.num_prompt == BAD_LENGTH for row in rows))
    with pytest.raises(RequestFailedError):
        finish(llm.submit(*eight()[3]))
    assert finish(waits) == expected


def test_the_engine_ends_when_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeModelLLM() as llm:
        wrap(monkeypatch, compute, "sample", lambda logits, rows: True)
        handles = llm.submit_all(eight())
        for handle in handles:
            with pytest.raises(EngineError, match="in sample"):
                finish(handle)
        with pytest.raises(EngineError, match="in sample"):
            llm.submit([5])


def test_all_of_several_requests_are_queued_or_none() -> None:
    with FakeModelLLM(max_waiting=4) as llm:
        engine: Engine = llm.engine
        with pytest.raises(RequestError) as caught:
            llm.submit_all([([3], SamplingParams(max_tokens=1))] * 5)
        assert (caught.value.status, caught.value.code) == (503, "queue_full")
        assert engine.num_waiting == 0
        assert len(llm.submit_all([([3], SamplingParams(max_tokens=1))] * 4)) == 4
        check_idle(llm)


# ---- numbers that the model computes --------------------------------------------------------------------------------


def test_a_row_without_a_finite_logit_has_no_token() -> None:
    logits = torch.zeros(5, 8)
    logits[1] = float("nan")
    logits[2, 3] = float("nan")
    logits[3] = float("-inf")
    logits[4, 2] = float("inf")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=0).resolved()
        tokens = sample(logits, [SamplingRow(params, 0, i) for i in range(5)]).tolist()
        assert tokens[1:] == [NO_TOKEN] * 4
        assert tokens[0] != NO_TOKEN


def test_a_model_that_computes_no_numbers_fails_its_requests_and_goes_on(data_dir: Path) -> None:
    from gpt_fast.checkpoint.checkpoint import Checkpoint

    model = random_model(Checkpoint.open(data_dir / "models" / "stories260K_hf").config, torch.float32)
    model.head.norm.weight.fill_(float("nan"))
    with LLM.from_model(model, compile=False, max_seq_len=64) as llm:
        ruled = SamplingParams(allowed_token_ids=(5, 6))  # which is not why no token can be drawn
        for params in (SamplingParams(), SamplingParams(temperature=1.0, logprobs=3), ruled):
            with pytest.raises(RequestError, match="not finite") as caught:
                llm.generate([5, 6], params)
            assert caught.value.status == 500
        assert llm.engine._thread is not None
        assert llm.engine._thread.is_alive()
        check_idle(llm)


def test_a_request_that_rules_out_every_token_is_told_so(llm: LLM) -> None:
    class OnlySeven(BrokenGrammar):
        def allowed(self) -> torch.Tensor:
            return torch.arange(llm.config.vocab_size) == 7

    request = llm.prepare([5, 6], SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=(7,)))
    request.grammar = OnlySeven()
    with pytest.raises(RequestError, match="min_tokens") as caught:
        finish(llm.engine.add_all([request])[0])
    assert caught.value.status == 400
