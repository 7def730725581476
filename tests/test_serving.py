"""The thread that talks to the server serves everybody: nothing that one request needs may keep it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeHandle, FakeLLM, Here
from test_handler import Batch, handler
from test_openai_protocol import byte_level

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Delta, TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.serve import session as serving
from gpt_fast.serve.lanes import Lanes
from gpt_fast.serve.protocol.native import parse_request
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.openai_completions import parse_completion
from gpt_fast.serve.session import LIGHT_BYTES

HANG_S = 60.0  # a test that waits longer than this hangs; it does not depend on anything being fast


class SlowLLM(FakeLLM):
    """Takes a request whose prompt begins with "slow" only once ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def submit(self, prompt: Any, params: SamplingParams, max_uncollected: int | None = None) -> FakeHandle:
        self.threads.append(threading.current_thread().name)
        if str(prompt).startswith("slow") or params.grammar_field:
            self.entered.set()
            assert self.gate.wait(HANG_S)
        return super().submit(prompt, params, max_uncollected)


@pytest.fixture
def slow() -> SlowLLM:
    return SlowLLM()


@pytest.fixture
def batch(slow: SlowLLM, tmp_path: Path) -> Batch:
    """A worker with real threads."""
    batch = Batch(slow, tmp_path)
    batch.handler.lanes = Lanes(ThreadPoolExecutor(1, "light"), ThreadPoolExecutor(2, "heavy"))
    return batch


def until_answered(batch: Batch, name: str, **bodies: object) -> list[tuple[int, bytes, str]]:
    """Calls as TorchServe makes them, until ``name`` is answered to its end."""
    said = []
    for _ in range(10_000):
        turn = batch.turn(**bodies)
        if name in turn:
            said.append(turn[name])
            if turn[name][2] != "true":
                return said
    raise AssertionError(f"{name} was never answered")


def whole(batch: Batch, body: object, route: str = "") -> Any:
    """The one message that answers ``body``: (id, content type, status, headers, text)."""
    for _ in range(1000):
        [(_, answers)] = batch.call({"a": body}, headers={"url_path": route})
        if answers:
            batch.forget()
            return answers[0]
    raise AssertionError("never answered")


LARGE = {"prompt": "slow " + "x" * LIGHT_BYTES, "max_new_tokens": 1}
GRAMMAR = {"prompt": "a", "max_new_tokens": 1, "regex": "[a-z]"}
OPENAI = OpenAIContext(models=("m",), max_model_len=100)


@pytest.mark.parametrize("body", [LARGE, GRAMMAR], ids=["large", "grammar"])
def test_what_takes_long_to_understand_keeps_nobody_waiting(batch: Batch, slow: SlowLLM, body: dict[str, Any]) -> None:
    slow.max_seq_len = 10**6
    quick = {"prompt": "b", "max_new_tokens": 3}
    said = until_answered(batch, "b", a=body, b=quick)
    assert b"".join(text for _, text, _ in said) == b" w0 w1 w2"
    assert slow.entered.wait(HANG_S)
    assert "a" in batch.handler.sessions
    slow.gate.set()
    assert until_answered(batch, "a", a=body)[-1][0] == 200
    assert threading.current_thread().name not in slow.threads


class Watched(threading.Condition):
    """Tells when somebody waits for it."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


@pytest.mark.parametrize("beside_a_stream", [False, True])
def test_a_request_that_is_understood_ends_the_wait(slow: SlowLLM, beside_a_stream: bool) -> None:
    """Beside a stream whose next piece is to wait a while, the wait is for first tokens and endings alone."""
    lock = threading.RLock()
    slow.engine.changed, slow.engine.begun_or_ended = awaited = Watched(lock), Watched(lock)
    real, facts = Lanes(ThreadPoolExecutor(1), ThreadPoolExecutor(1)), {"announce": True, "one_piece_s": HANG_S}
    prompts, sessions = {"slow": real} | ({"a": Lanes(Here(), Here())} if beside_a_stream else {}), []
    for prompt, lanes in prompts.items():
        read = functools.partial(parse_request, {"prompt": prompt})
        sessions.append(serving.Session(slow, read, lanes, 10, **facts))  # type: ignore[arg-type]
    assert sessions[-1].take() is not None or not beside_a_stream
    work = (slow.engine, sessions, 2 * HANG_S, 2 * HANG_S, time.monotonic())
    waiting = threading.Thread(target=serving.wait_for_news, args=work, daemon=True)
    waiting.start()
    assert awaited[beside_a_stream].waited_for.wait(HANG_S)
    slow.gate.set()
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    assert sessions[0].has_news


def test_one_of_several_sequences_is_enough_to_have_news() -> None:
    llm = FakeLLM()
    read = functools.partial(parse_completion, {"model": "m", "prompt": [[1], [2]], "stream": True}, OPENAI)
    session = serving.Session(llm, read, Lanes(Here(), Here()), 10, announce=True, one_piece_s=HANG_S)  # type: ignore[arg-type]
    session.take()
    for handle in llm.handles:
        handle.silent = True
    assert not session.has_news
    llm.handles[1].silent = False
    assert session.has_news


def test_hanging_up_while_the_request_is_understood_frees_it(batch: Batch, slow: SlowLLM) -> None:
    slow.max_seq_len = 10**6
    batch.turn(a=LARGE)
    assert slow.entered.wait(HANG_S)
    until_answered(batch, "b", b={"prompt": "b", "max_new_tokens": 1})
    assert batch.handler.sessions == {}
    slow.gate.set()
    batch.handler.lanes.heavy.shutdown()
    assert [handle.cancelled for handle in slow.handles] == [False, True]


def test_what_takes_too_long_to_understand_is_refused(
    batch: Batch, slow: SlowLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.max_seq_len = 10**6
    batch.turn(a=LARGE, b=GRAMMAR, c=LARGE)
    assert slow.entered.wait(HANG_S)
    monkeypatch.setattr(serving, "PARSE_S", 0.0)
    answers = {name: until_answered(batch, name, **{name: body})[-1] for name, body in (("a", LARGE), ("c", LARGE))}
    slow.gate.set()
    assert answers["a"][0] == 400
    assert json.loads(answers["a"][1])["error"]["code"] == "too_complex"
    assert answers["c"][0] in (400, 503), "it waited behind the others, or was being understood itself"


def test_large_bodies_that_wait_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MAX_UNANSWERED_BYTES", 3000)
    llm = FakeLLM(max_seq_len=10**6)
    llm.silent = True
    batch = Batch(llm, tmp_path)
    body = {"prompt": "x" * 2000}
    turn = batch.turn(a=body, b=body)
    assert turn["b"][0] == 503, "TorchServe sends the bodies of those that wait again with every call"
    assert json.loads(turn["b"][1])["error"]["retry_after"] == 1
    assert "a" not in turn


def test_one_request_alone_may_be_as_large_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MAX_UNANSWERED_BYTES", 10)
    batch = Batch(FakeLLM(), tmp_path)
    assert batch.turn(a={"prompt": "a", "max_new_tokens": 1})["a"][0] == 200


# ---- answers in one piece --------------------------------------------------------------------------------------------

ONE_PIECE = {
    "": {"prompt": "a", "stream": False},
    "v1/completions": {"model": "gpt-fast", "prompt": [1]},
}


@pytest.mark.parametrize("route", ONE_PIECE)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("secret"), 500, "internal_error"),
        (RequestError("the grammar is too complex", "regex", "unusable_grammar"), 400, "unusable_grammar"),
    ],
)
def test_a_failure_after_the_first_token_has_its_status(
    tmp_path: Path, route: str, error: Exception, status: int, code: str
) -> None:
    batch = Batch(FakeLLM(fail_after=2, error=error), tmp_path)
    answer = whole(batch, ONE_PIECE[route], route)
    assert (answer[1], answer[2], answer[3].get("ts_stream_next")) == ("application/json", status, None)
    assert json.loads(answer[4])["error"]["code"] == code
    assert b"secret" not in answer[4]


@pytest.mark.parametrize("route", ONE_PIECE)
def test_an_answer_whose_time_is_up_is_a_504(tmp_path: Path, route: str) -> None:
    batch = Batch(FakeLLM(abort_after=2), tmp_path)
    answer = whole(batch, ONE_PIECE[route], route)
    assert (answer[2], json.loads(answer[4])["error"]["code"]) == (504, "timeout")
    assert answer[3]["X-Should-Retry"] == "false", "it would take as long again"


def test_answers_in_one_piece_have_a_time_limit_and_streams_have_none(tmp_path: Path) -> None:
    llm = FakeLLM()
    batch = Batch(llm, tmp_path, one_piece_timeout_s=20)
    for body in (ONE_PIECE[""], {**ONE_PIECE[""], "timeout_s": 5}, {"prompt": "a"}):
        whole(batch, body)
    assert [params.timeout_s for _, params in llm.calls] == [20, 5, None]


class Noted(Here):
    count = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().submit(fn, *args, **kwargs)


def test_a_long_list_of_log_probabilities_is_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(FakeLLM(words=["a"] * 50), tmp_path)
    light, heavy = Noted(), Noted()
    batch.handler.lanes = Lanes(light, heavy)
    assert whole(batch, {"prompt": "a", "stream": False})[2] == 200
    assert (light.count, heavy.count) == (2, 0), "to understand, and to write the answer"
    monkeypatch.setattr(serving, "LIGHT_NUMBERS", -1)
    assert whole(batch, {"prompt": "a", "stream": False})[2] == 200
    assert (light.count, heavy.count) == (3, 1)


class ScoringLLM(FakeLLM):
    """Its answers have log probabilities of their prompts: of nothing, and of two tokens with one beside each."""

    def submit(self, prompt: Any, params: SamplingParams, max_uncollected: int | None = None) -> FakeHandle:
        handle = super().submit(prompt, params, max_uncollected)
        take, entry = handle.poll, TokenLogprobs(5, -1.0, ((7, -0.5),))

        def poll() -> Delta | None:
            delta = take()
            if delta is None or delta.completion is None:
                return delta
            handle.completion = dataclasses.replace(delta.completion, prompt_logprobs=(None, entry, entry))
            return dataclasses.replace(delta, completion=handle.completion)

        handle.poll = poll  # type: ignore[method-assign]
        return handle


@pytest.mark.parametrize(("most", "heavy"), [(4, 0), (3, 1)])
def test_log_probabilities_of_prompts_count_too(
    most: int, heavy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LIGHT_NUMBERS", most)
    batch = Batch(ScoringLLM(), tmp_path)
    batch.handler.lanes = lanes = Lanes(Noted(), Noted())
    answer = whole(batch, {"prompt": "abc", "stream": False, "max_new_tokens": 1, "prompt_logprobs": 1})
    found = {"token_id": 5, "logprob": -1.0, "top": [{"token_id": 7, "logprob": -0.5}]}
    assert (answer[2], json.loads(answer[4])["prompt_logprobs"]) == (200, [None, found, found])
    assert lanes.heavy.count == heavy  # type: ignore[attr-defined]


# ---- one request and the queue ---------------------------------------------------------------------------------------


def test_more_prompts_than_may_ever_be_queued_are_refused_for_good(tmp_path: Path) -> None:
    llm = FakeLLM()
    llm.engine.max_waiting = 128
    batch = Batch(llm, tmp_path)
    for prompts, status in ((137, 400), (65, 400), (64, 200)):
        body = {"model": "gpt-fast", "prompt": [[1]] * prompts, "max_tokens": 1}
        answer = whole(batch, body, "v1/completions")
        assert answer[2] == status
        if status == 400:
            error = json.loads(answer[4])["error"]
            assert error["param"] == "prompt"
            assert "at most 64" in error["message"], "half of the queue: the other half is for others"


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("", {"prompt": "a" * 900, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("v1/completions", {"prompt": [[1] * 60] * 15, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("v1/completions", {"prompt": [1] * 300, "n": 16, "echo": True, "logprobs": 20}, "logprobs"),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 900}], "prompt_logprobs": 20},
            "prompt_logprobs",
        ),
    ],
    ids=["native", "completions", "echo", "chat"],
)
def test_log_probabilities_that_cannot_be_sent_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], field: str
) -> None:
    llm: Any = FakeLLM()
    llm.tokenizer = byte_level()
    asked = {"max_tokens": 1, "stream": False} | body | ({"model": "gpt-fast"} if route else {})
    monkeypatch.setattr(serving, "MAX_PIECE_BYTES", 500_000)
    answer = whole(Batch(llm, tmp_path), asked, route)
    assert answer[2] == 400
    error = json.loads(answer[4])["error"]
    assert (error["param"], error["code"]) == (field, "answer_too_large")
    assert not llm.calls


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": 5},
        {"prompt": "x" * 5000},
        {"prompt": "a", "max_new_tokens": 2},
        {"prompt": "a", "max_new_tokens": 3, "stream": False},
        {"prompt": "a", "max_new_tokens": 9},
        {"prompt": "a", "max_new_tokens": 9, "stream": False},
    ],
    ids=["refused", "refused by the engine", "stream", "one piece", "failed stream", "failed in one piece"],
)
def test_what_has_been_answered_is_freed_at_once(tmp_path: Path, body: dict[str, Any]) -> None:
    batch = Batch(FakeLLM(fail_after=5), tmp_path)
    batch.handler.lanes = Lanes(ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    gc.collect()
    before = {id(o) for o in gc.get_objects()}
    gc.disable()  # cycles would wait for it, with all the bodies and grammars that hang on them
    try:
        for _ in range(3):
            until_answered(batch, "a", a=body)
            batch.forget()
        for lane in batch.handler.lanes:
            lane.shutdown()
        kinds = (serving.Session, Future, RequestError)
        assert [o for o in gc.get_objects() if isinstance(o, kinds) and id(o) not in before] == []
    finally:
        gc.enable()
