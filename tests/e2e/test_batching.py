"""Many clients at once through a real TorchServe: each gets its own answer, whoever else comes, goes or misbehaves."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from brake import Brake
from serving import HANG_S, ROOT, Reply, Server, serve, wait_for

from gpt_fast import LLM, Completion, SamplingParams
from gpt_fast.serve.archive import build_archive

CONFIG = """\
minWorkers: 1
maxWorkers: 1
continuousBatching: true
batchSize: 64
maxBatchDelay: 1
responseTimeout: 300
startupTimeout: 300
handler:
    compile: false
    dtype: float32
    device: cpu
    max_batch: {max_batch}
    max_waiting: {max_waiting}
"""
MODELS = {"gpt-fast": (8, 56), "narrow": (1, 2)}


@pytest.fixture(scope="module")
def brakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Brake]:
    folder = tmp_path_factory.mktemp("brakes")
    return {name: Brake(folder, name) for name in MODELS}


@pytest.fixture(scope="module")
def server(checkpoint: Path, brakes: dict[str, Brake], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("model_store")
    config = store.parent / "model_config.yaml"
    for name, (max_batch, max_waiting) in MODELS.items():
        config.write_text(CONFIG.format(max_batch=max_batch, max_waiting=max_waiting))
        handler = brakes[name].handler((ROOT / "handler.py").read_text())
        build_archive(checkpoint, name=name, config=config, handler=handler, output=store, by_reference=True)
    with serve(store, {name: name for name in MODELS}) as running:
        for name in MODELS:
            running.wait_ready(name)
        yield running


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, compile=False, dtype="float32", device="cpu") as engine:
        yield engine


def mixed(count: int) -> list[dict[str, Any]]:
    """Requests of every kind: long and short, greedy and seeded, streamed and in one piece."""
    draw = random.Random(0)
    words = [
        "Once", "upon", "a", "time", "there", "was", "little", "girl", "named", "Lily",
        "she", "saw", "big", "red", "ball", "and", "her", "mom", "said",
    ]  # fmt: skip
    requests = []
    for i in range(count):
        prompt = " ".join(draw.choice(words) for _ in range(draw.randrange(1, 40)))
        body: dict[str, Any] = {"prompt": prompt, "max_new_tokens": draw.randrange(1, 60)}
        if i % 3:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": i}
        if i % 4 == 0:
            body["stream"] = False
        requests.append(body)
    return requests


def truth(llm: LLM, body: dict[str, Any]) -> str:
    fields = {k: v for k, v in body.items() if k not in ("prompt", "stream")}
    done = llm.generate(body["prompt"], SamplingParams(**fields))
    assert isinstance(done, Completion)
    return done.text


def text_of(reply: Reply, body: dict[str, Any]) -> str:
    assert reply.status == 200, reply.text
    return str(reply.json()["text"]) if body.get("stream") is False else reply.text


def get(server: Server, route: str, model: str = "gpt-fast") -> Reply:
    return server.request("GET", f"/predictions/{model}/1.0/{route}")


def health(server: Server, model: str = "gpt-fast") -> dict[str, Any]:
    status: dict[str, Any] = get(server, "health", model).json()
    return status


def idle(server: Server, model: str = "gpt-fast") -> None:
    """Wait until nothing runs, and no page is in use."""

    def rests() -> bool:
        status = health(server, model)
        return not (status["running"] or status["waiting"] or status["pages_used"])

    wait_for(rests)


def test_forty_clients_at_once_each_get_their_own_answer(server: Server, llm: LLM) -> None:
    requests = mixed(40)
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(server.predict, requests))
    for body, reply in zip(requests, replies, strict=True):
        assert text_of(reply, body) == truth(llm, body)
    idle(server)


def test_streams_run_side_by_side(server: Server, brakes: dict[str, Brake]) -> None:
    body = {"prompt": "Once", "max_new_tokens": 120, "ignore_eos": True}
    begun = [threading.Event() for _ in range(4)]
    idle(server)
    with ThreadPoolExecutor(4) as pool, brakes["gpt-fast"].held(0):
        replies = [pool.submit(server.predict, body, begun=event) for event in begun]
        wait_for(lambda: (status := health(server))["running"] + status["waiting"] == 4)
        brakes["gpt-fast"].allow(40)
        assert all(event.wait(HANG_S) for event in begun)
        assert not any(reply.done() for reply in replies), "nobody has had 120 steps"
    assert len({reply.result().text for reply in replies}) == 1


def hang_up(server: Server, body: dict[str, Any], after_bytes: int) -> None:
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        head = f"PUT /predictions/gpt-fast HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw)
        if after_bytes:
            client.recv(after_bytes)


def test_half_the_clients_hang_up_and_the_pages_come_back(server: Server, llm: LLM) -> None:
    requests = mixed(24)
    draw = random.Random(1)
    with ThreadPoolExecutor(48) as pool:
        gone = [
            pool.submit(hang_up, server, {**r, "max_new_tokens": 400, "ignore_eos": True}, draw.choice([0, 100, 400]))
            for r in requests
        ]
        replies = list(pool.map(server.predict, requests))
        for future in gone:
            future.result()
    for body, reply in zip(requests, replies, strict=True):
        assert text_of(reply, body) == truth(llm, body)
    idle(server)


def test_a_full_queue_is_told_with_the_time_to_come_back(server: Server, brakes: dict[str, Brake]) -> None:
    body = {"prompt": "Once", "max_new_tokens": 60, "ignore_eos": True}
    idle(server, "narrow")
    with ThreadPoolExecutor(3) as pool, brakes["narrow"].held(0):
        served = [pool.submit(server.predict, body, "narrow")]
        wait_for(lambda: health(server, "narrow")["running"] == 1)
        served += [pool.submit(server.predict, body, "narrow") for _ in range(2)]
        wait_for(lambda: health(server, "narrow")["waiting"] == 2)
        for _ in range(3):
            reply = server.predict(body, "narrow")
            assert reply.status == 503
            assert reply.error["code"] == "queue_full"
            assert reply.error["retry_after"] == 1
            assert reply.headers["retry-after"] == "1"
    assert {future.result().status for future in served} == {200}
    assert len({future.result().text for future in served}) == 1
    idle(server, "narrow")


def test_a_deadline_in_the_queue_is_a_504_and_in_mid_stream_a_word_in_the_text(
    server: Server, brakes: dict[str, Brake]
) -> None:
    long = {"prompt": "Once", "max_new_tokens": 400, "ignore_eos": True}
    idle(server, "narrow")
    for timeout_s in (2.0, 60.0):  # the longer one where no token comes in two seconds
        begun = threading.Event()
        with ThreadPoolExecutor(2) as pool, brakes["narrow"].held(3):
            first = pool.submit(server.predict, {**long, "timeout_s": timeout_s}, "narrow", begun=begun)
            wait_for(lambda begun=begun, first=first: begun.is_set() or first.done())
            second = pool.submit(server.predict, {**long, "timeout_s": 0.01}, "narrow")
            wait_for(lambda second=second: health(server, "narrow")["waiting"] == 1 or second.done())
            time.sleep(timeout_s)  # now it is over for both, and neither can have ended
        assert second.result().status == 504
        assert second.result().error["code"] == "timeout"
        if begun.is_set():
            break
    reply = first.result()
    assert reply.status == 200
    assert json.loads(reply.text.rsplit("\n", 2)[-2])["error"]["code"] == "timeout"


def test_bad_requests_do_not_touch_their_neighbours(server: Server, llm: LLM) -> None:
    good = mixed(12)
    bad: list[Any] = [
        b"{",
        b"",
        {"prompt": 5},
        {"prompt": "a", "colour": 1},
        {"prompt": [99999]},
        {"prompt": "a " * 3000},
    ]
    with ThreadPoolExecutor(24) as pool:
        refused = [pool.submit(server.predict, body) for body in bad * 2]
        replies = list(pool.map(server.predict, good))
    for body, reply in zip(good, replies, strict=True):
        assert text_of(reply, body) == truth(llm, body)
    assert {future.result().status for future in refused} == {400}


def call(server: Server, method: str, body: Any) -> str:
    """What one call over gRPC is answered, as curl shows it: its messages, and the status behind them."""

    def field(number: int, data: bytes) -> bytes:
        """As protobuf has it: the number, the length in seven bits a byte, the data."""
        return bytes([number << 3 | 2, len(data) & 127 | 128, len(data) >> 7]) + data

    model, data = 1, 3  # of PredictionsRequest
    message = field(model, b"gpt-fast") + field(data, field(1, b"data") + field(2, json.dumps(body).encode()))
    command = ["curl", "-s", "--http2-prior-knowledge", "-D", "-", "-m", str(HANG_S), "--data-binary", "@-"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += [f"http://127.0.0.1:{server.grpc_port}/org.pytorch.serve.grpc.inference.InferenceAPIsService/{method}"]
    sent = b"\0" + len(message).to_bytes(4, "big") + message
    return subprocess.run(command, input=sent, capture_output=True, check=True).stdout.decode(errors="replace")


def curl_speaks_http2() -> bool:
    curl = shutil.which("curl")
    return curl is not None and b"HTTP2" in subprocess.run([curl, "--version"], capture_output=True, check=True).stdout


@pytest.mark.skipif(not curl_speaks_http2(), reason="no curl that speaks HTTP/2")
def test_a_call_over_grpc_is_answered_and_the_worker_lives(server: Server, llm: LLM) -> None:
    [worker] = server.workers("gpt-fast")
    body = {"prompt": "Once upon a time", "max_new_tokens": 100}
    for method in ("Predictions", "StreamPredictions"):
        assert truth(llm, body) in (answer := call(server, method, body))
        assert "grpc-status: 0" in answer
        assert '"finish_reason": "length"' in call(server, method, body | {"stream": False})
        assert "prompt must be a string" in (answer := call(server, method, {"prompt": 5}))
        assert "grpc-status: 0" in answer
    assert server.workers("gpt-fast")[0]["pid"] == worker["pid"]


def test_a_worker_killed_in_mid_stream_ends_its_clients_and_comes_back(
    server: Server, brakes: dict[str, Brake]
) -> None:
    [worker] = server.workers("narrow")
    body = {"prompt": "Once", "max_new_tokens": 480, "ignore_eos": True}
    begun = threading.Event()
    idle(server, "narrow")
    with ThreadPoolExecutor(3) as pool, brakes["narrow"].held(3):
        running = [pool.submit(outcome, server, body, begun)]
        assert begun.wait(HANG_S)
        running += [pool.submit(outcome, server, body) for _ in range(2)]
        wait_for(lambda: health(server, "narrow")["waiting"] == 2)
        os.kill(worker["pid"], signal.SIGKILL)
        for future in running:
            future.result(timeout=HANG_S / 2)  # an end or an error, but no silence
    wait_for(lambda: server.workers("narrow")[0]["pid"] not in (worker["pid"], -1))
    server.wait_ready("narrow")
    assert server.predict({"prompt": "Once", "max_new_tokens": 5}, "narrow").status == 200


def outcome(server: Server, body: dict[str, Any], begun: threading.Event | None = None) -> object:
    try:
        return server.predict(body, "narrow", begun=begun).status
    except (OSError, ValueError) as error:  # a connection or a body cut short
        return error


def test_metrics_page_and_endpoint(server: Server) -> None:
    idle(server)
    page = get(server, "metrics").text
    assert 'vllm:num_requests_running{model_name="gpt-fast"' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page


# ---- OpenAI's own client --------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    base = f"http://127.0.0.1:{server.port}/predictions/gpt-fast/1.0/v1"
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=HANG_S)


def test_openai_completions_plain_and_streamed(client: Any, server: Server, llm: LLM, brakes: dict[str, Brake]) -> None:
    expected = truth(llm, {"prompt": "Once upon", "max_tokens": 20, "temperature": 0.0})
    fields = {"model": "gpt-fast", "prompt": "Once upon", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**fields)
    assert whole.choices[0].text == expected
    assert whole.usage.completion_tokens == 20
    idle(server)
    with brakes["gpt-fast"].held(5):
        stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        first = next(stream)  # before the others are generated
    pieces = [first, *stream]
    assert "".join(p.choices[0].text for p in pieces if p.choices) == expected
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(pieces) > 2
    several = client.completions.create(
        **{**fields, "prompt": ["Once upon", "Lily"], "n": 2, "temperature": 1, "seed": 1}
    )
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert len({c.text for c in several.choices}) == 4


def test_openai_chat_plain_and_streamed(client: Any) -> None:
    fields: dict[str, Any] = {
        "model": "gpt-fast",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    pieces = list(client.chat.completions.create(**fields, stream=True))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "play"}}])
def test_openai_tools_whole_and_streamed(client: Any, choice: Any) -> None:
    pytest.importorskip("llguidance")
    toy = {"type": "object", "properties": {"toy": {"enum": ["ball", "car"]}}, "required": ["toy"]}
    fields: dict[str, Any] = {
        "model": "gpt-fast",
        "messages": [{"role": "user", "content": "Tom has a ball."}],
        "tools": [{"type": "function", "function": {"name": "play", "parameters": toy}}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    [call] = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == ("tool_calls", None, "play")
    assert json.loads(call.function.arguments)["toy"] in ("ball", "car")
    with client.chat.completions.stream(**fields) as stream:
        again = stream.get_final_completion().choices[0]
    assert again.message.tool_calls[0].function.arguments == call.function.arguments
    assert again.finish_reason == "tool_calls"


def test_openai_models(client: Any) -> None:
    assert client.models.list().data[0].id == "gpt-fast"


def test_openai_errors(client: Any) -> None:
    import openai

    message = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="gpt-fast", messages=message, extra_body={"wings": 2})
    assert caught.value.param == "wings"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="gpt-fast", prompt="Once " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
