"""The engine under load: answers do not depend on company, nothing leaks, one request's fault stays its own.

All on a fake model, and what a real one could change on a real one as well.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import families_table
import numpy as np
import pytest
import torch
from fake_model import EOS, VOCAB_SIZE, FakeModel, FakeModelLLM, check_idle, hit_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S, eventually

from gpt_fast import LLM, Completion, RequestError, SamplingParams, loading
from gpt_fast.checkpoint.generation import GenerationDefaults
from gpt_fast.config import EngineConfig
from gpt_fast.engine.grammar import CompiledGrammar
from gpt_fast.engine.handle import Handle
from gpt_fast.errors import ConfigError, EngineError, RequestFailedError
from gpt_fast.outputs import Delta

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = 5  # tokens; a request that may not run further ahead of its reader cannot end before the test goes on


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    families_table.FAMILIES["llama"]().save_pretrained(directory)
    return directory


def load(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, **{"dtype": "float32", "compile": False, "max_seq_len": 128, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[FakeModelLLM]:
    with FakeModelLLM() as llm:
        yield llm


def mixed_requests(count: int = 40) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 70 tokens, many with a common beginning; every third greedy, the others seeded."""
    draw = random.Random(0)
    common = [draw.randrange(3, 260) for _ in range(48)]
    requests = []
    for i in range(count):
        prompt = common[: draw.choice([0, 0, 16, 40, 48])] + [
            draw.randrange(3, 260) for _ in range(draw.randrange(1, 22))
        ]
        temperature = 0.0 if i % 3 == 0 else 1.0
        top_p = 0.9 if i % 3 == 1 else None
        params = SamplingParams(
            max_tokens=draw.randrange(1, 30), temperature=temperature, top_p=top_p, seed=i, ignore_eos=True
        )
        requests.append((prompt, params))
    return requests


def by_steps(llm: LLM, actions: Sequence[tuple[int, Callable[[], object]]]) -> None:
    """Each action so many of the engine's steps after the one before, or at once when nothing runs.

    Time in steps is the same on every machine. The actions run between two steps.
    """
    remaining, done = deque(actions), threading.Event()
    countdown, before = 0, llm.engine.on_step

    def act(plan: Any = None, seconds: float = 0.0) -> None:
        nonlocal countdown
        with llm.engine.changed:
            countdown -= 1
            while remaining and (countdown <= 0 or not (llm.engine.num_waiting or llm.engine.scheduler.has_work)):
                remaining.popleft()[1]()
                countdown = remaining[0][0] if remaining else 0
        if not remaining:
            done.set()

    llm.engine.on_step = act
    try:
        for _ in range(int(HANG_S / 0.05)):
            with llm.engine.changed:
                if not llm.engine._handles:  # at the beginning, and when all that ran was cancelled: no step comes
                    act()
            if done.wait(0.05):
                return
        raise AssertionError("the engine stands still")
    finally:
        llm.engine.on_step = before


def wait_until(llm: LLM, condition: Callable[[], bool]) -> None:
    """Wait for something that the engine does."""
    with llm.engine.changed:
        assert llm.engine.changed.wait_for(condition, HANG_S), "it did not happen"


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[int, ...]]:
    """All of them, arriving while others run."""
    draw = random.Random(1)
    handles: list[Handle] = []
    arrivals = [(draw.choice([0, 0, 1, 3]), lambda request=request: handles.append(llm.submit(*request)))
                for request in requests]  # fmt: skip
    by_steps(llm, arrivals)
    found = [[d.completion for d in handle if d.completion is not None][-1] for handle in handles]
    check_idle(llm)
    return [completion.token_ids for completion in found]


def alone(llm: LLM) -> list[tuple[int, ...]]:
    """The truth: one request at a time, nothing cached, prompts in one piece."""
    with llm:
        return [one(llm, prompt, params).token_ids for prompt, params in mixed_requests()]


@pytest.fixture(scope="module")
def real_alone(checkpoint: Path) -> list[tuple[int, ...]]:
    return alone(load(checkpoint, max_batch=1, prefix_cache=False))


@pytest.fixture(scope="module")
def fake_alone() -> list[tuple[int, ...]]:
    return alone(FakeModelLLM(max_batch=1, prefix_cache=False))


def one(llm: LLM, prompt: list[int], params: SamplingParams | list[SamplingParams]) -> Completion:
    completion = llm.generate(prompt, params)
    assert isinstance(completion, Completion)
    return completion


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"prefill_chunk": 7, "page_size": 4},
        {"max_batch": 16, "num_pages": 13},  # 208 tokens for all: sequences are preempted all the time
        {"max_batch": 3, "page_size": 1},
    ],
    ids=["batch", "no prefix cache", "chunks", "preemption", "pages of one"],
)
@pytest.mark.parametrize("kind", ["fake", "real"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_the_same_answers_in_any_company(
    kind: str, ahead: bool, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    make = FakeModelLLM if kind == "fake" else partial(load, request.getfixturevalue("checkpoint"))
    with make(**options) as llm:
        llm.engine.runner.runs_ahead = ahead
        assert answers(llm, mixed_requests()) == request.getfixturevalue(f"{kind}_alone")
        if "num_pages" in options:
            assert llm.engine.scheduler.num_preemptions > 0
        if options.get("prefix_cache", True):
            assert hit_rate(llm) > 0.05


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_arrivals_cancellations_and_shortages_keep_the_books(
    fake_alone: list[tuple[int, ...]], data: st.DataObject
) -> None:
    requests = mixed_requests()
    if not BOOKS:
        BOOKS["llm"] = FakeModelLLM(max_batch=5, num_pages=11, prefill_chunk=24)
    llm = BOOKS["llm"]
    llm.engine.runner.runs_ahead = data.draw(st.booleans())
    chosen = data.draw(st.lists(st.integers(0, len(requests) - 1), min_size=1, max_size=10))
    handles: list[Handle] = []
    actions: list[tuple[int, Callable[[], object]]] = []
    for i, which in enumerate(chosen):
        steps = data.draw(st.sampled_from([0, 1, 3]))
        actions.append((steps, lambda which=which: handles.append(llm.submit(*requests[which]))))
        if data.draw(st.booleans()):
            gone = data.draw(st.integers(0, i))
            actions.append((data.draw(st.sampled_from([0, 1])), lambda gone=gone: handles[gone].cancel()))
    by_steps(llm, actions)
    for which, handle in zip(chosen, handles, strict=True):
        tokens = [token for delta in handle for token in delta.token_ids]
        assert handle.completion is not None
        expected = fake_alone[which]
        if handle.completion.finish_reason == "abort":
            expected = expected[: len(tokens)]
        assert tuple(tokens) == expected
    check_idle(llm)


BOOKS: dict[str, LLM] = {}


def test_cancelling_stops_within_a_step_and_frees_the_pages(llm: LLM) -> None:
    handle = llm.submit([5] * 20, SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=FEW)
    assert handle.wait(HANG_S) is not None
    handle.cancel()
    last = list(handle)[-1]
    assert last.finish_reason == "abort"
    assert last.completion is not None
    assert len(last.completion.token_ids) < 100
    check_idle(llm)


def test_leaving_a_stream_early_cancels(llm: LLM) -> None:
    for _ in llm.stream([5] * 20, SamplingParams(max_tokens=100, ignore_eos=True)):
        break
    check_idle(llm)


def test_leaving_generate_early_cancels_all_of_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Handle] = []
    submit, take = llm.submit_all, Handle.wait
    monkeypatch.setattr(llm, "submit_all", lambda parts: handles.extend(submit(parts)) or handles)

    def interrupted(handle: Handle, timeout_s: float | None = None) -> Delta | None:
        if handle is handles[1]:
            raise KeyboardInterrupt
        return take(handle, timeout_s)

    monkeypatch.setattr(Handle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5] * 20] * 3, SamplingParams(max_tokens=100, ignore_eos=True))
    assert [handle.cancelled for handle in handles] == [True] * 3
    check_idle(llm)


def test_what_is_asked_for_together_is_one_group_of_the_queue(llm: LLM) -> None:
    together = [handle for n in (2, 3) for handle in llm.submit_all([([5], SamplingParams(max_tokens=1))] * n)]
    first, *_, last = groups = [handle.request.group for handle in together]
    assert groups == [first] * 2 + [last] * 3
    assert first != last
    check_idle(llm)


def test_what_a_request_leaves_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({llm.prepare([5]).seed for _ in range(3)}) == 3, "no two seeds are equal"
    assert [llm.prepare([5], SamplingParams(seed=seed)).seed for seed in (0, 7)] == [0, 7]
    for length, asked, room in ((100, 10, 10), (100, None, 28), (100, 29, 28), (127, 10, 1)):
        assert llm.prepare([5] * length, SamplingParams(max_tokens=asked)).max_tokens == room
    with pytest.raises(RequestError, match="the prompt has 128 tokens; at most 127") as caught:
        llm.prepare([5] * 128)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert llm.prepare([5], SamplingParams(stop_token_ids=[9])).end_ids == {EOS, 9}
    assert llm.prepare([5], SamplingParams(stop_token_ids=[9], ignore_eos=True)).end_ids == {9}
    monkeypatch.setattr(llm, "defaults", GenerationDefaults((7, 8), None, SamplingParams()))
    assert llm.prepare([5]).end_ids == {7, 8}, "the checkpoint's own"


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [VOCAB_SIZE]}, {"logit_bias": {VOCAB_SIZE: 1.0}}, {"allowed_token_ids": [VOCAB_SIZE]}]
)
def test_ids_that_the_model_does_not_have_are_refused(fields: dict[str, Any], llm: LLM) -> None:
    [name] = fields
    with pytest.raises(RequestError, match=f"token id {VOCAB_SIZE} in {name} is not between 0") as caught:
        llm.prepare([5], SamplingParams(**fields))
    assert caught.value.param == name


def test_options_reach_the_parts_of_the_engine(checkpoint: Path) -> None:
    sizes = {"max_batch": 2, "page_size": 8, "prefill_chunk": 24, "num_pages": 17}
    with load(checkpoint, **sizes, max_waiting=3, prefix_cache=False, kernels=False) as llm:
        scheduler, pages = llm.engine.scheduler, llm.engine.scheduler.pages
        found = {"max_batch": scheduler.max_batch, "page_size": pages.page_size, "num_pages": pages.num_pages - 1}
        assert found | {"prefill_chunk": scheduler.prefill_chunk} == sizes
        assert (llm.engine.max_waiting, pages.prefix_cache) == (3, False)


def test_small_models_have_one_thread_unless_asked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wished: list[int] = []
    monkeypatch.setattr(loading, "usable_threads", lambda threads: wished.append(threads) or 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for options, least in (({}, 2**25), ({"threads": 5}, 2**25), ({}, 0)):
        monkeypatch.setattr(loading, "SMALL_MODEL_BYTES", least)
        with load(checkpoint, kernels=False, max_batch=1, **options):
            pass
    assert wished == [1, 5, 7]


def test_a_model_that_is_packed_is_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match="quantize: the weights of this model are packed already"):
        loading.adopt(FakeModel(), EngineConfig(quantize="int8"))  # type: ignore[arg-type]


def test_dropping_a_stream_before_its_first_piece_cancels(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Handle] = []
    submit = llm.submit

    def noted(*asked: Any) -> Handle:
        handles.append(submit(*asked))
        return handles[0]

    monkeypatch.setattr(llm, "submit", noted)
    pieces = llm.stream([5] * 20, SamplingParams(max_tokens=100, ignore_eos=True))
    assert not handles[0].cancelled
    del pieces
    assert handles[0].cancelled
    check_idle(llm)


def test_a_deadline_aborts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.engine.engine.ABANDONED_S", HANG_S)  # nobody fetches, and that alone ends nothing
    handle = llm.submit([5], SamplingParams(max_tokens=120, ignore_eos=True, timeout_s=0.01), max_uncollected=FEW)
    wait_until(llm, lambda: handle.finished)
    assert handle.completion is not None
    assert handle.completion.finish_reason == "abort"
    assert len(handle.completion.token_ids) <= FEW
    check_idle(llm)


def test_nobody_fetching_pauses_the_request_and_not_the_others(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    ignored = llm.submit([7, 8], params, max_uncollected=5)
    whole = one(llm, [7, 8], params)
    assert len(whole.token_ids) == 60
    assert ignored.request.num_output == 5
    assert tuple(t for d in ignored for t in d.token_ids) == whole.token_ids  # and it goes on when fetched


def test_what_nobody_fetches_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.engine.engine.ABANDONED_S", 0.1)
    handle = llm.submit([7, 8], SamplingParams(max_tokens=60, ignore_eos=True), max_uncollected=5)
    wait_until(llm, lambda: handle.finished)
    with pytest.raises(RequestError, match=r"nobody fetched its tokens for 0\.1 s") as caught:
        handle.poll()
    assert caught.value.status == 504
    check_idle(llm)


def test_the_time_since_the_last_step_tells_an_engine_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeModelLLM() as llm:
        engine, execute, allowed = llm.engine, llm.engine.runner.execute, threading.Semaphore(0)
        engine._moved -= 1000  # it has been idle for long
        assert engine.since_last_step_s == 0

        def braked(plan: Any) -> Any:
            assert allowed.acquire(timeout=HANG_S)
            return execute(plan)

        monkeypatch.setattr(engine.runner, "execute", braked)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        with engine.changed:  # the engine's thread cannot have woken
            handles = [llm.submit([3], params)]
            assert engine.since_last_step_s < 500, "the idle time counts as well"
        eventually(lambda: bool(engine.scheduler.running))
        engine._moved -= 1000  # as if this step had begun so long ago
        handles.append(llm.submit([3], params))
        assert engine.since_last_step_s >= 1000, "a request that comes is no step"
        for _ in range(2):
            allowed.release()
        wait_until(llm, lambda: handles[1].has_begun)
        assert engine.since_last_step_s < 500, "the first step has ended"
        for _ in range(10):
            allowed.release()
        assert all(list(handle)[-1].finish_reason == "length" for handle in handles)
        check_idle(llm)
        assert engine.since_last_step_s == 0


@pytest.mark.parametrize("how", ["add", "fetch", "cancel", "close"])
def test_an_engine_that_sleeps_is_woken_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes once a second by itself; here it would sleep on."""
    with FakeModelLLM() as llm:
        engine, asleep, wait = llm.engine, threading.Event(), llm.engine.changed.wait

        def long_wait(timeout_s: float | None = None) -> bool:
            if threading.current_thread() is engine._thread:
                asleep.set()
            return wait(HANG_S)

        monkeypatch.setattr(engine.changed, "wait", long_wait)
        handle = llm.submit([7], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=FEW)
        assert asleep.wait(HANG_S)
        assert handle.request.paused
        begin = time.monotonic()
        if how == "add":
            assert list(llm.submit([8], SamplingParams(max_tokens=3, ignore_eos=True)))[-1].finish_reason == "length"
        elif how == "fetch":
            assert len(list(handle)) > 1
        elif how == "cancel":
            handle.cancel()
            eventually(lambda: handle.finished)
        else:
            engine.close()
        assert time.monotonic() - begin < HANG_S / 2


def test_requests_that_nobody_fetches_are_no_engine_that_stands_still(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt_fast.engine.engine.ABANDONED_S", HANG_S)
    handle = llm.submit([7, 8], SamplingParams(max_tokens=60, ignore_eos=True), max_uncollected=FEW)
    eventually(lambda: handle.request.paused)
    for _ in range(2):  # the first time a step may just be ending
        llm.engine._moved -= 1000
        eventually(lambda: llm.engine.since_last_step_s < 500)  # the engine wakes once a second
    handle.cancel()
    check_idle(llm)


def test_queue_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeModelLLM(max_batch=1, max_waiting=2) as llm:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        slow = [llm.submit([3], params, max_uncollected=FEW) for _ in range(2)]
        for handle in slow:
            wait_until(llm, lambda handle=handle: handle.request.paused)  # type: ignore[misc]
        execute, allowed = llm.engine.runner.execute, threading.Event()

        def braked(plan: Any) -> Any:
            assert allowed.wait(HANG_S)
            return execute(plan)

        monkeypatch.setattr(llm.engine.runner, "execute", braked)
        first = llm.submit([3], params)
        eventually(lambda: first.request.slot >= 0)
        waiting = [llm.submit([3], params) for _ in range(2)]  # paused ones take nobody's place in the queue
        with pytest.raises(RequestError) as caught:
            llm.submit([3], params)
        assert caught.value.status == 503
        assert caught.value.code == "queue_full"
        allowed.set()
        for handle in (first, *waiting, *slow):
            assert list(handle)[-1].finish_reason == "length"


def test_a_fault_in_one_request_ends_that_one_alone(llm: LLM) -> None:
    class Broken:
        complete, along = False, CompiledGrammar.along

        def allowed(self) -> torch.Tensor:
            raise ValueError("this grammar is broken")

        def advance(self, token: int) -> None:
            raise AssertionError

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = one(llm, [9, 9], params).token_ids
    request = llm.prepare([9, 9], params)
    request.grammar = Broken()
    bad, good = llm.engine.add_all([request])[0], llm.submit([9, 9], params)
    with pytest.raises(RequestFailedError, match="this grammar is broken"):
        list(bad)
    assert tuple(t for d in good for t in d.token_ids) == expected
    check_idle(llm)


def test_when_the_engine_dies_everyone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeModelLLM() as llm:
        handle = llm.submit([3], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=FEW)

        def broken(plan: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(llm.engine.runner, "execute", broken)
        with pytest.raises(EngineError, match="the device is gone"):
            list(handle)
        with pytest.raises(EngineError, match="the device is gone"):
            llm.submit([3])


def test_closing_ends_what_runs() -> None:
    llm = FakeModelLLM()
    handle = llm.submit([3], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=FEW)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        list(handle)


def test_an_llm_that_nobody_holds_ends_its_thread_and_frees_its_model(checkpoint: Path) -> None:
    llm = load(checkpoint)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = one(llm, [7, 8], params).token_ids
    thread, model = llm.engine._thread, weakref.ref(llm.model)
    assert thread is not None
    handle = llm.submit([7, 8], params)
    del llm
    gc.collect()
    assert tuple(t for delta in handle for t in delta.token_ids) == expected, "its request runs to the end"
    gc.collect()
    thread.join(HANG_S)
    assert not thread.is_alive()
    gc.collect()
    assert model() is None


def test_a_signal_handler_may_close_in_the_middle_of_a_wait() -> None:
    llm = FakeModelLLM()
    handle = llm.submit([3], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=FEW)

    def interrupted() -> None:
        with llm.engine.changed:  # as Handle.wait holds it when the signal comes
            llm.close()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    with pytest.raises(EngineError, match="closed"):
        list(handle)


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_logprobs_of_prompt_and_completion(kind: str, request: pytest.FixtureRequest) -> None:
    prompt = [5, 6, 7, 8, 9] * 9
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with FakeModelLLM() if kind == "fake" else load(request.getfixturevalue("checkpoint")) as llm:
        for _ in range(2):  # the second time the prefix is cached, and must be computed all the same
            done = one(llm, prompt, params)
            with torch.no_grad():
                tokens = torch.tensor([[*prompt, *done.token_ids]])
                table = llm.model.forward(tokens)[0].log_softmax(-1)
            expected = [float(table[i, t]) for i, t in enumerate([*prompt, *done.token_ids][1:])]
            assert done.prompt_logprobs is not None
            assert done.logprobs is not None
            assert done.prompt_logprobs[0] is None
            entries = [*done.prompt_logprobs[1:], *done.logprobs]
            assert [e.token for e in entries if e] == [*prompt, *done.token_ids][1:]
            assert [e.logprob for e in entries if e] == pytest.approx(expected, abs=1e-4)
            assert all(e.top[0][0] == e.token for e in done.logprobs)  # greedy


def test_several_samples_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)
    several = llm.generate([5, 6], params)
    assert isinstance(several, list)
    assert len({c.token_ids for c in several}) == 3
    single = one(llm, [5, 6], SamplingParams(max_tokens=8, temperature=1.0, seed=4, ignore_eos=True))
    assert several[1].token_ids == single.token_ids


def test_token_ids_come_in_lists_arrays_and_tensors(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = [done.token_ids for done in cast(list[Completion], llm.generate([[5, 6], [7, 8]], params))]
    array = np.array([[5, 6], [7, 8]])
    for several in (array, torch.tensor(array), list(array), [[np.int64(5), 6], (7, 8)]):
        made = cast(list[Completion], llm.generate(cast(Any, several), params))
        assert [done.token_ids for done in made] == expected
        assert one(llm, cast(Any, several[0]), params).token_ids == expected[0]
    for wrong in (None, 7, b"abc", {5: 6}, [None], [1.5], [True], np.array([1.5]), torch.tensor(5), iter([5])):
        with pytest.raises(RequestError, match=r"^prompts? must be a string(,| or) a list of token ids") as caught:
            llm.generate(cast(Any, wrong), params)
        assert caught.value.code == "invalid_type"


def test_options_may_be_objects_of_torch_and_paths(checkpoint: Path) -> None:
    words = {"device": "cpu", "dtype": "float32", "draft": str(checkpoint), "kv_cache_dtype": "bfloat16"}
    things = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "draft": checkpoint,
        "kv_cache_dtype": torch.bfloat16,
    }
    made = []
    for options in (words, things):
        with LLM(checkpoint, max_seq_len=64, max_batch=1, threads=1, kernels=False, compile=False, **options) as model:
            made.append(model.engine_config)
    assert made[0] == made[1]
    with pytest.raises(ConfigError, match=r"cuda:7 of device_map in LLM\(\)"):
        LLM(checkpoint, device_map={torch.device("cuda", 7): "all", "cpu": 1})


def test_chats_become_prompts(tmp_path: Path) -> None:
    folder = shutil.copytree(Path(__file__).parents[1] / "model_store" / "demo" / "target", tmp_path / "demo")
    chat = [{"role": "user", "content": "</s>Hi"}, {"role": "assistant", "content": "Well"}]
    options: dict[str, Any] = {"max_seq_len": 64, "max_batch": 1, "kernels": False, "compile": False}
    with LLM(folder, **options) as model, pytest.raises(RequestError, match="this checkpoint has no chat template"):
        model.encode_chat(chat)
    written = "{% for m in messages %}{{ bos_token }}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant{{ mood }}{% endif %}"
    named = [{"name": "default", "template": written + asked}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    with LLM(folder, **options) as model:
        assert model.tokenizer is not None

        def text(**more: Any) -> str:
            return model.tokenizer.decode(model.encode_chat(chat, **more), skip_special=False)

        ends = [token for token in model.encode_chat(chat) if token in model.tokenizer.eos_token_ids]
        assert len(ends) == 2, "what the user wrote ends no turn"
        assert text() == "<s>user </s>Hi</s><s>assistant Well</s>assistant"
        assert text(add_generation_prompt=False).endswith("Well</s>")
        assert text(continue_final_message=True).endswith("assistant Well")
        assert text(mood=", gladly:").endswith("Well</s>assistant, gladly:")
        assert text(tools=[{"name": "weather"}]) == "weather"
        assert one(model, model.encode_chat(chat), SamplingParams(max_tokens=3)).num_prompt_tokens > 9
        for wrong in ([], "Hi", ["Hi"], [{"content": "Hi"}], None):
            with pytest.raises(RequestError, match=r"^messages must be a list of messages, each with a role"):
                model.encode_chat(cast(Any, wrong))


def test_one_sampling_params_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    short, long = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5))
    prompts = [[5, 6], [7, 8]]
    each = llm.generate(prompts, [short, long])
    assert isinstance(each, list)
    assert [len(done.token_ids) for done in each] == [2, 5]
    both = llm.generate(prompts, long)
    assert isinstance(both, list)
    assert [done.token_ids for done in both] == [one(llm, prompt, long).token_ids for prompt in prompts]
    assert both[0].token_ids[:2] == each[0].token_ids
    several = llm.generate(prompts, [short, dataclasses.replace(long, n=3)])
    assert isinstance(several, list)
    assert [len(done.token_ids) for done in several] == [2, 5, 5, 5]
    assert one(llm, prompts[0], [short]).token_ids == each[0].token_ids
    for wrong in ([], [short], [short] * 3):
        with pytest.raises(RequestError, match=rf"^{len(wrong)} sampling parameters for 2 prompts") as caught:
            llm.generate(prompts, wrong)
        assert caught.value.param == "params"


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, [{"max_tokens": 3}], "greedy", 3, {}])
def test_what_is_no_sampling_params_is_refused_by_name(wrong: Any, llm: LLM) -> None:
    for ask in (llm.generate, llm.stream, llm.submit):
        with pytest.raises(RequestError, match=r"^params must be SamplingParams") as caught:
            ask([5, 6], wrong)
        assert caught.value.param == "params"


def test_one_handle_does_not_take_several_samples(llm: LLM) -> None:
    for ask in (llm.stream, llm.submit):
        with pytest.raises(RequestError, match=r"^n must be 1 here, not 2: generate alone") as caught:
            ask([5, 6], SamplingParams(max_tokens=2, n=2))
        assert caught.value.param == "n"
