"""The handler with TorchServe's own context and wire format, but without a server and without a model."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_llm import FakeLLM, Here

from gpt_fast.errors import ConfigError, EngineError, RequestError
from gpt_fast.serve import closing, last_words, only_worker
from gpt_fast.serve.lanes import Lanes
from gpt_fast.serve.protocol.native import NativeRequest
from gpt_fast.serve.session import MAX_PIECE_BYTES
from gpt_fast.tokenizer import load_tokenizer

pytest.importorskip("ts", reason="torchserve is not installed")

from ts.context import Context, RequestProcessor
from ts.service import Service
from ts.utils.util import list_classes_from_module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # handler.py is not part of the package
handler: Any = importlib.import_module("handler")
handler.LAST_WORDS_S = 0.0  # there is no TorchServe here that must hear them
handler.Metrics = type("Metrics", (handler.Metrics,), {"start": lambda self, emit: None})  # nor read its metrics
CONTINUOUS = {"continuousBatching": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 8}


class Wire:
    """The socket to TorchServe: decodes what it is given into (code, [(id, type, status, headers, body)])."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, list[tuple[str, str, int, dict[str, str], bytes]]]] = []

    def sendall(self, message: bytes) -> None:
        self._data, self._at = bytes(message), 0
        code = self._int()
        self._bytes()  # a text nobody shows
        answers = []
        while (length := self._int()) != -1:
            request_id = self._take(length).decode()
            content_type, status = self._bytes().decode(), self._int()
            self._bytes()  # reason phrase
            headers = {self._bytes().decode(): self._bytes().decode() for _ in range(self._int())}
            answers.append((request_id, content_type, status, headers, self._bytes()))
        self.messages.append((code, answers))

    def _take(self, length: int) -> bytes:
        self._at += length
        return self._data[self._at - length : self._at]

    def _int(self) -> int:
        return int(struct.unpack("!i", self._take(4))[0])

    def _bytes(self) -> bytes:
        return self._take(self._int())


class Worker:
    """A TorchServe worker around the handler: the real service loop, one message in, messages out."""

    def __init__(self, llm: FakeLLM, tmp_path: Path, yaml: dict[str, Any] | None = None, **keys: Any) -> None:
        (tmp_path / "model.safetensors").touch()
        config = {"handler": keys, **(yaml or {})}
        self.handler = handler.GPTFastHandler()
        self.handler.build = lambda checkpoint, options: llm
        self.handler.hold = lambda connection: None
        self.handler.lanes = Lanes(Here(), Here())
        metrics = type("Metrics", (), {"request_ids": None, "add_time": lambda *_: None})()
        self.service = Service("gpt-fast", str(tmp_path), None, self.handler.handle, None, 1, True, metrics)
        self.service.context.model_yaml_config = config
        self.handler.initialize(self.service.context)
        self.wire = Wire()
        self.service.set_cl_socket(self.wire)

    def predict(self, *bodies: object, name: str = "body", headers: dict[str, str] | None = None) -> Any:
        """Messages that one batch leads to; the last is the one that TorchServe takes for its end."""
        return self.call({f"id-{i}": body for i, body in enumerate(bodies)}, name, headers)

    def call(self, bodies: dict[str, object], name: str = "body", headers: dict[str, str] | None = None) -> Any:
        """The same for requests with ids. They come over HTTP, those without any ``headers`` ({}) over gRPC."""
        batch = []
        for request_id, body in bodies.items():
            value = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent = {} if headers == {} else {"Content-Length": str(len(value)), **(headers or {})}
            batch.append(
                {
                    "requestId": request_id.encode(),
                    "headers": [{"name": k.encode(), "value": v.encode()} for k, v in sent.items()],
                    "parameters": [{"name": name, "contentType": "", "value": value}],
                }
            )
        self.wire.messages.clear()
        self.wire.sendall(self.service.predict(batch))
        return self.wire.messages

    def without_body(self, headers: dict[str, str]) -> Any:
        """The same for one request of which the headers alone have come."""
        named = [{"name": k.encode(), "value": v.encode()} for k, v in headers.items()]
        self.wire.messages.clear()
        self.wire.sendall(self.service.predict([{"requestId": b"id", "headers": named, "parameters": []}]))
        return self.wire.messages

    def one(self, body: object, **kwargs: Any) -> tuple[int, str, bytes, list[str]]:
        """(status, content type, body, ts_stream_next of each message) of a single request."""
        messages = self.predict(body, **kwargs)
        assert {code for code, _ in messages} == {200}
        answers = [answer for _, [answer] in messages]
        assert {a[0] for a in answers} == {"id-0"}
        nexts = [a[3].get("ts_stream_next", "") for a in answers]
        return answers[0][2], answers[0][1], b"".join(a[4] for a in answers), nexts


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def worker(llm: FakeLLM, tmp_path: Path) -> Worker:
    return Worker(llm, tmp_path)


def test_torchserve_finds_exactly_one_class() -> None:
    assert list_classes_from_module(handler) == [handler.GPTFastHandler]
    assert not hasattr(handler, "handle"), "TorchServe would take the function for the entry point"


def test_every_piece_is_sent_as_it_comes(worker: Worker) -> None:
    status, content_type, body, nexts = worker.one({"prompt": "a", "max_new_tokens": 4})
    assert (status, content_type, body) == (200, "text/plain; charset=utf-8", b" w0 w1 w2 w3")
    assert nexts == ["true", "true", "true", "false"]


def test_a_stream_of_one_piece_is_a_plain_answer(worker: Worker) -> None:
    status, content_type, body, nexts = worker.one({"prompt": "a", "max_new_tokens": 1})
    assert (status, content_type, body, nexts) == (200, "text/plain; charset=utf-8", b" w0", [""])


def test_pieces_without_text_are_not_sent(tmp_path: Path) -> None:
    worker = Worker(FakeLLM(words=["", "é", "", "🙂", ""]), tmp_path)
    status, _, body, nexts = worker.one({"prompt": "a"})
    assert (status, body.decode(), nexts) == (200, "é🙂", ["true", "true", "false"])


def test_without_stream_there_is_one_json_answer(worker: Worker) -> None:
    status, content_type, body, nexts = worker.one(
        {"prompt": "abc", "max_new_tokens": 2, "stream": False, "return_token_ids": True}
    )
    assert (status, content_type, nexts) == (200, "application/json", [""])
    assert json.loads(body) == {
        "text": " w0 w1",
        "token_ids": [0, 1],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0},
    }


def test_the_yaml_sets_the_defaults_of_requests(llm: FakeLLM, tmp_path: Path) -> None:
    worker = Worker(llm, tmp_path, stream=False, max_new_tokens=3, max_body_bytes=50)
    assert json.loads(worker.one({"prompt": "a"})[2])["text"] == " w0 w1 w2"
    assert worker.one({"prompt": "a" * 50})[0] == 413


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"nonsense", 400, None, "invalid_json"),
        (b"", 400, None, "empty_body"),
        ({"prompt": 5}, 400, "prompt", "invalid_type"),
        ({"prompt": "a", "colour": 1}, 400, "colour", "unknown_field"),
        ({"prompt": "a" * 2000}, 400, "prompt", "context_length_exceeded"),
    ],
)
def test_refusals_are_answers_of_their_own(worker: Worker, body: object, status: int, param: str, code: str) -> None:
    got, content_type, text, nexts = worker.one(body)
    error = json.loads(text)["error"]
    assert (got, content_type, nexts) == (status, "application/json", [""])
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert worker.one({"prompt": "a", "max_new_tokens": 2})[2] == b" w0 w1", "the next request is served"


def test_a_refusal_does_not_touch_its_neighbour(worker: Worker) -> None:
    messages = worker.predict({"prompt": "a", "max_new_tokens": 1}, {"prompt": None})
    [(code, answers)] = messages
    assert code == 200
    assert [(a[0], a[2]) for a in answers] == [("id-0", 200), ("id-1", 400)]


def test_an_unknown_route_is_404(worker: Worker) -> None:
    assert worker.one({"prompt": "a"}, headers={"url_path": "v2/unheard-of"})[0] == 404
    assert worker.one({"prompt": "a"}, headers={"url_path": ""})[0] == 200


def test_pages_need_no_model(worker: Worker) -> None:
    status, content_type, body, _ = worker.one({}, headers={"url_path": "health"})
    assert (status, content_type) == (200, "application/json")
    assert json.loads(body)["status"] == "ready"
    status, content_type, body, _ = worker.one({}, headers={"url_path": "metrics"})
    assert content_type.startswith("text/plain")
    assert b"vllm:num_requests_running" in body
    assert json.loads(worker.one({}, headers={"url_path": "v1/models"})[2])["data"][0]["id"] == "gpt-fast"


def test_the_routes_of_tokens(llm: FakeLLM, tmp_path: Path) -> None:
    llm.tokenizer = load_tokenizer(ROOT / "model_store" / "demo" / "target")  # type: ignore[assignment]
    ask = Worker(llm, tmp_path).one
    found = json.loads(ask({"prompt": "Once"}, headers={"url_path": "tokenize"})[2])
    assert found["tokens"] == llm.tokenizer.encode("Once")  # type: ignore[attr-defined]
    assert found["token_strs"] is None, "nobody asked for them"
    back = ask({"tokens": found["tokens"][1:]}, headers={"url_path": "detokenize"})[2]
    assert json.loads(back) == {"prompt": "Once"}


def test_predict_is_one_string(worker: Worker) -> None:
    body = {"prompt": "a", "max_new_tokens": 2}
    status, content_type, answer, _ = worker.one(body, headers={"url_path": "predict"})
    assert (status, content_type, json.loads(answer)) == (200, "application/json", "a w0 w1")


@pytest.mark.parametrize("yaml", [None, CONTINUOUS], ids=["one by one", "continuous"])
def test_a_call_over_grpc_is_answered_by_one_message(
    yaml: dict[str, Any] | None, tmp_path: Path, exits: list[int]
) -> None:
    """TorchServe ends the worker over a message to StreamPredictions that does not say that it is the last, and a call
    of Predictions at its first message."""
    worker = Worker(FakeLLM(), tmp_path, yaml)

    def told(body: object) -> list[tuple[int, bytes, str]]:
        messages: list[Any] = []
        while not messages:
            messages = [answer for _, answers in worker.predict(body, name="data", headers={}) for answer in answers]
        return [(status, text, headers["ts_stream_next"]) for _, _, status, headers, text in messages]

    assert told({"prompt": "a", "max_new_tokens": 3}) == [(200, b" w0 w1 w2", "false")]
    assert worker.handler.llm.calls[0][1].timeout_s == 600  # nobody tells whether the client is there
    for body, code in (({"prompt": 5}, "invalid_type"), (b"", "empty_body"), ({"prompt": "a", "stream": False}, None)):
        [(_, text, stream_next)] = told(body)
        assert (json.loads(text).get("error", {}).get("code"), stream_next) == (code, "false")
    worker.handler.llm.fail_after, worker.handler.llm.error = 1, ValueError("secret")
    [(status, text, stream_next)] = told({"prompt": "a"})
    assert (status, json.loads(text)["error"]["code"], stream_next) == (500, "internal_error", "false")


@pytest.mark.parametrize("yaml", [None, CONTINUOUS], ids=["one by one", "continuous"])
def test_a_call_of_the_open_inference_protocol_is_refused_in_its_form(
    yaml: dict[str, Any] | None, tmp_path: Path
) -> None:
    """TorchServe ends the worker over an answer that lacks one of the protocol's fields."""
    worker = Worker(FakeLLM(), tmp_path, yaml)
    call = {
        "id": "7",
        "model_name": "gpt-fast",
        "inputs": [{"name": "prompt", "datatype": "BYTES", "data": ["T25jZQ=="]}],
    }
    [(_, [(_, _, _, headers, text)])] = worker.predict(call, headers={})
    answer = json.loads(text)
    assert headers["ts_stream_next"] == "false"
    assert (answer["id"], answer["model_name"]) == ("7", "gpt-fast")
    assert isinstance(answer["model_version"], str)
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("error", "BYTES", [1])
    assert "no tensors" in output["data"][0]
    assert errors_told(worker.handler)["invalid_request"] == 1
    status, _, text, _ = worker.one(call)  # over HTTP it is a request with unknown fields
    assert (status, "error" in json.loads(text)) == (400, True)


def test_a_field_is_no_header(worker: Worker) -> None:
    status, _, body, _ = worker.one({"prompt": "a"}, name="url_path")
    assert (status, json.loads(body)["error"]["code"]) == (400, "form")


@pytest.mark.parametrize("yaml", [None, CONTINUOUS], ids=["one by one", "continuous"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "Multipart/Form-Data; boundary=x"])
def test_a_form_that_arrives_as_nothing_is_explained(kind: str, yaml: dict[str, Any] | None, tmp_path: Path) -> None:
    worker = Worker(FakeLLM(), tmp_path, yaml)
    [(_, [(_, _, status, _, answer)])] = worker.without_body({"Content-Length": "20", "content-type": kind})
    assert (status, "form" in json.loads(answer)["error"]["message"]) == (400, True)


# ---- when the engine fails ------------------------------------------------------------------------------------------


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended, at once instead of a second later."""
    ended: list[int] = []

    class Now:
        def __init__(self, interval: float, function: Any, args: Any) -> None:
            assert function is os._exit
            self.args = args

        def start(self) -> None:
            ended.extend(self.args)

    monkeypatch.setattr(handler.threading, "Timer", Now)
    return ended


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_piece_is_a_500(stream: bool, tmp_path: Path, exits: list[int]) -> None:
    worker = Worker(FakeLLM(fail_after=0, error=ValueError("secret")), tmp_path)
    status, _, body, nexts = worker.one({"prompt": "a", "stream": stream})
    assert (status, nexts) == (500, [""])
    assert json.loads(body)["error"]["type"] == "server_error"
    assert b"secret" not in body
    assert exits == []


def test_a_failure_in_mid_stream_is_told_in_the_text(tmp_path: Path, exits: list[int]) -> None:
    worker = Worker(FakeLLM(fail_after=2), tmp_path)
    status, _, body, nexts = worker.one({"prompt": "a"})
    assert (status, nexts) == (200, ["true", "true", "false"])
    text, error = body.decode().rstrip().split("\n")
    assert text == " w0 w1"
    assert json.loads(error)["error"]["code"] == "internal_error"


def accelerator_error() -> Exception:
    kind: Any = getattr(torch, "AcceleratorError", RuntimeError)
    return Exception.__new__(kind, "device-side assert triggered")  # its constructor wants a device


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (EngineError("the engine has stopped"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("one bad request"), False),
    ],
)
def test_the_worker_ends_only_when_nothing_works_any_more(
    error: Exception, ends: bool, tmp_path: Path, exits: list[int]
) -> None:
    worker = Worker(FakeLLM(fail_after=1, error=error), tmp_path)
    assert worker.one({"prompt": "a"})[0] == 200
    assert exits == ([1] if ends else [])


@pytest.mark.parametrize("body", [{"CUDA error: x": 1}, {"prompt": "a", "stop": "CUDA error", "n": "CUDA error: 3"}])
def test_no_words_of_a_client_end_the_worker(body: Any, worker: Worker, exits: list[int]) -> None:
    """A refusal quotes them."""
    status, _, text, _ = worker.one(body)
    assert status == 400
    assert b"CUDA error" in text
    assert not handler.fatal(RequestError("CUDA error: 5 is not a number", "n"))
    assert exits == []


@pytest.mark.parametrize(
    ("length", "status"), [("0" * 5000 + "14", 200), ("-1", 200), ("a", 200), ("", 200), ("9" * 5000, 413)]
)
def test_no_header_fails_other_requests(length: str, status: int, worker: Worker) -> None:
    assert worker.one({"prompt": "a"}, headers={"Content-Length": length})[0] == status


def test_what_fails_before_a_request_is_read_costs_the_others_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = worker.handler.begin

    def sometimes(index: int, *args: Any) -> Any:
        if index == 1:
            raise ValueError("what nobody thought of")
        return begin(index, *args)

    monkeypatch.setattr(worker.handler, "begin", sometimes)
    bodies = [{"prompt": "a", "max_new_tokens": 2, "stream": False}] * 3
    found = {answer[0]: answer[2] for _, answers in worker.predict(*bodies) for answer in answers}
    assert found == {"id-0": 200, "id-1": 500, "id-2": 200}


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch has no AcceleratorError")
def test_a_lost_device_is_fatal() -> None:
    assert handler.fatal(accelerator_error())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_up_is_no_success(stream: bool, tmp_path: Path, exits: list[int]) -> None:
    worker = Worker(FakeLLM(abort_after=0), tmp_path)
    status, _, body, _ = worker.one({"prompt": "a", "stream": stream})
    assert status == 504
    assert json.loads(body)["error"]["code"] == "timeout"
    assert exits == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_before_torchserve_kills_the_worker(stream: bool, tmp_path: Path) -> None:
    # It kills a worker that says nothing for responseTimeout, and with it the request; loading takes minutes then.
    llm = FakeLLM()
    llm.silent = True
    worker = Worker(llm, tmp_path, {"responseTimeout": 1})
    # So that this test does not hang where it fails.
    too_late = threading.Timer(30, lambda: [setattr(handle, "silent", False) for handle in llm.handles])
    too_late.start()
    status, _, body, _ = worker.one({"prompt": "a", "stream": stream})
    too_late.cancel()
    assert status == 504
    error = json.loads(body)["error"]
    assert error["code"] == "timeout"
    assert "within 0.9 s" in error["message"]
    assert llm.handles[0].cancelled
    llm.silent = False
    assert worker.one({"prompt": "a"})[0] == 200


# ---- continuous batching --------------------------------------------------------------------------------------------


class Batch(Worker):
    """A worker in continuous batching: a call brings the ids that are active and takes what each has to say."""

    def __init__(self, llm: FakeLLM, tmp_path: Path, **keys: Any) -> None:
        super().__init__(llm, tmp_path, CONTINUOUS, **keys)

    def turn(self, **bodies: object) -> dict[str, tuple[int, bytes, str]]:
        """One call: status, text and ts_stream_next of each id that is answered."""
        [(code, answers)] = self.call({name.replace("_", "-"): body for name, body in bodies.items()})
        assert code == 200
        return {a[0]: (a[2], a[4], a[3].get("ts_stream_next", "")) for a in answers}

    def forget(self) -> None:
        """Drop what the last call has left, as when all clients have gone."""
        ctx = self.service.context
        ctx.request_ids, ctx.request_processor = {}, []
        self.handler.exchange([], ctx)


@pytest.fixture
def batch(llm: FakeLLM, tmp_path: Path) -> Batch:
    return Batch(llm, tmp_path)


def test_requests_join_and_leave(batch: Batch) -> None:
    a, b = {"prompt": "a", "max_new_tokens": 3}, {"prompt": "b", "max_new_tokens": 2}
    assert batch.turn(a=a) == {"a": (200, b" w0", "true")}
    assert batch.turn(a=a, b=b) == {"a": (200, b" w1", "true"), "b": (200, b" w0", "true")}
    assert batch.turn(a=a, b=b) == {"a": (200, b" w2", "false"), "b": (200, b" w1", "false")}
    assert batch.handler.sessions == {}


def test_an_id_that_is_missing_is_cancelled(batch: Batch, llm: FakeLLM) -> None:
    a, b = {"prompt": "a"}, {"prompt": "b"}
    batch.turn(a=a, b=b)
    batch.turn(b=b)
    assert [handle.cancelled for handle in llm.handles] == [True, False]


def test_who_has_said_nothing_yet_is_left_out(batch: Batch, llm: FakeLLM) -> None:
    llm.silent = True
    a, b = {"prompt": "a", "max_new_tokens": 2}, {"prompt": "b", "stream": False, "max_new_tokens": 1}
    assert batch.turn(a=a, b=b) == {}
    llm.handles[1].silent = False
    assert [(k, v[0], v[2]) for k, v in batch.turn(a=a, b=b).items()] == [("b", 200, "")]
    llm.handles[0].silent = False
    assert batch.turn(a=a) == {"a": (200, b" w0", "true")}
    llm.handles[0].silent = True
    assert batch.turn(a=a) == {"a": (200, b"", "true")}, "once started it is answered: TorchServe sees hang-ups then"


def test_a_closed_server_ends_what_runs_and_takes_nothing_new(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(closing.VARIABLE, str(tmp_path / "closed"))
    a = {"prompt": "a", "max_new_tokens": 2}
    assert batch.turn(a=a) == {"a": (200, b" w0", "true")}
    (tmp_path / "closed").touch()
    found = batch.turn(a=a, b={"prompt": "b"})
    assert found["a"] == (200, b" w1", "false")
    assert (found["b"][0], json.loads(found["b"][1])["error"]["code"]) == (503, "stopping")


def test_health_tells_of_requests_that_are_not_in_the_engine_yet(batch: Batch, llm: FakeLLM) -> None:
    llm.silent = True
    batch.turn(a={"prompt": "a"}, b={"prompt": "b"})
    batch.handler.sessions["health itself"] = batch.handler.sessions["a"]
    health = batch.handler.routes.open("health", {}, None)
    assert json.loads(health.text)["open"] == 2


@pytest.mark.parametrize(("route", "start"), [("", "\n{"), ("v1/completions", "data: {"), ("v1/responses", "data: {")])
def test_a_stream_of_an_earlier_worker_is_ended(batch: Batch, route: str, start: str) -> None:
    """TorchServe keeps the requests of a worker that is scaled down for the next one, begun streams without a body. To
    anything but a last piece their clients would wait on."""
    headers = {"Content-Length": "20", "Content-Type": "application/json", "url_path": route}
    [(_, [(_, _, _, sent, text)])] = batch.without_body(headers)
    assert text.decode().startswith(start)
    assert json.loads(text.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert sent["ts_stream_next"] == "false"
    assert batch.handler.sessions == {}
    assert errors_told(batch.handler)["server_error"] == 1


def test_a_worker_that_torchserve_has_forgotten_ends(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the place of the only worker, and batches without requests are all that it ever gets."""
    ended: list[int] = []
    monkeypatch.setattr(handler.os, "_exit", ended.append)
    batch.turn(a={"prompt": "a", "max_new_tokens": 1})
    assert ended == []
    batch.turn()
    assert ended == [1]


def test_a_refusal_in_a_running_batch_is_a_plain_answer(batch: Batch) -> None:
    a = {"prompt": "a", "max_new_tokens": 3}
    batch.turn(a=a)
    turn = batch.turn(a=a, b={"prompt": 5}, c=b"{")
    assert turn["a"] == (200, b" w1", "true")
    assert [(turn[k][0], turn[k][2]) for k in "bc"] == [(400, ""), (400, "")]
    assert batch.turn(a=a) == {"a": (200, b" w2", "false")}


def test_a_failure_of_one_leaves_the_other(batch: Batch, llm: FakeLLM, exits: list[int]) -> None:
    a = {"prompt": "a", "max_new_tokens": 3}
    batch.turn(a=a)
    llm.fail_after, llm.error = 0, ValueError("secret")
    turn = batch.turn(a=a, b={"prompt": "b"})
    assert turn["a"] == (200, b" w1", "true")
    assert turn["b"][0] == 500
    assert exits == []


def test_a_first_piece_that_cannot_be_sent_is_the_whole_answer(tmp_path: Path) -> None:
    """As a failure behind a first piece it would be a stream that ends without HTTP headers."""
    batch = Batch(FakeLLM(words=["x" * (MAX_PIECE_BYTES + 1), " y"]), tmp_path)
    status, body, stream_next = batch.turn(a={"prompt": "a"})["a"]
    assert (status, stream_next) == (400, "")
    assert b"answer_too_large" in body


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [("\ud800", 500, b"internal_error"), ("é" * (MAX_PIECE_BYTES // 2 + 1), 400, b"answer_too_large")],
    ids=["half a pair", "too long"],
)
def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_own(
    text: str, status: int, code: bytes, batch: Batch, monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    """With TorchServe's failure to take it the worker would end."""
    monkeypatch.setattr(NativeRequest, "write_end", lambda self, completions: text)
    bodies = {"a": {"prompt": "a", "max_new_tokens": 3}, "b": {"prompt": "b", "max_new_tokens": 1, "stream": False}}
    told: dict[str, list[tuple[int, bytes, str]]] = {"a": [], "b": []}
    while bodies:
        for name, piece in batch.turn(**bodies).items():
            told[name].append(piece)
            if piece[2] != "true":
                del bodies[name]
    assert told["b"][0][0] == status
    assert code in told["b"][0][1]
    assert told["a"][0] == (200, b" w0", "true")
    assert code in told["a"][-1][1]
    assert exits == []


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    class Full(FakeLLM):
        def submit(self, *_: Any) -> Any:
            raise RequestError("8 requests are waiting", None, "queue_full", 503, retry_after_s=1)

    [(_, [answer])] = Batch(Full(), tmp_path).call({"a": {"prompt": "a"}})
    assert answer[2] == 503
    assert answer[3]["Retry-After"] == "1"
    assert json.loads(answer[4])["error"]["retry_after"] == 1


def errors_told(handler: Any) -> dict[str, int]:
    """The counter of errors, without what it has not counted."""
    return {kind: count for kind, count in handler.metrics.stats()["request_errors_total"].items() if count}


def test_what_is_answered_with_an_error_is_counted_once(batch: Batch, llm: FakeLLM, exits: list[int]) -> None:
    bodies: dict[str, object] = {"a": {"prompt": "a", "max_new_tokens": 3}, "b": {"prompt": 5}, "c": b"{"}
    batch.turn(**bodies)
    assert errors_told(batch.handler) == {"invalid_request": 2}
    llm.fail_after = 1  # of an answer that has begun, whose status is 200
    assert b"error" in batch.turn(a=bodies["a"])["a"][1]
    batch.turn(d={"prompt": "d", "max_new_tokens": 1})
    llm.fail_after = 0
    assert batch.turn(e={"prompt": "e"})["e"][0] == 500
    assert errors_told(batch.handler) == {"invalid_request": 2, "server_error": 2}


def test_errors_are_counted_in_sync_mode_too(worker: Worker) -> None:
    for body in ({"prompt": 5}, {"prompt": "a"}, b"{"):
        worker.one(body)
    assert errors_told(worker.handler) == {"invalid_request": 2}


def test_several_workers_are_refused_in_this_mode(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="maxWorkers: 1"):
        Worker(FakeLLM(), tmp_path, {**CONTINUOUS, "maxWorkers": 2})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a second worker is not seen")
def test_a_second_worker_does_not_start_in_this_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As after PUT /models/gpt-fast?min_worker=2: TorchServe would let it stall the first one for ever.
    monkeypatch.setattr(only_worker, "WAIT_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["worker", "--sock-name", "/tmp/.ts.sock.9000"])
    first = Batch(FakeLLM(), tmp_path)
    monkeypatch.setattr(sys, "argv", ["worker", "--sock-name", "/tmp/.ts.sock.9001"])
    with pytest.raises(RuntimeError, match="continuousBatching needs one worker, and there is one already"):
        Batch(FakeLLM(), tmp_path)
    Worker(FakeLLM(), tmp_path)  # without continuousBatching there may be several
    assert first.turn(a={"prompt": "a", "max_new_tokens": 1})["a"][0] == 200
    first.handler.place.close()  # as the system does when it ends
    Batch(FakeLLM(), tmp_path).handler.place.close()


@pytest.mark.parametrize("follows", [False, True])
def test_the_connection_of_a_rank_that_follows_outlives_the_last_words_of_rank_0(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchServe forgets requests when a connection ends while another rank still answers. But when rank 0 has ended as
    well, torchrun starts both anew, in vain."""
    held: list[float] = []
    monkeypatch.setattr(handler, "hold_open", lambda _, seconds: held.append(seconds))
    adapter = handler.GPTFastHandler()
    adapter.llm = type("Rank", (), {"follows": follows})()
    with socket.socket() as connection:
        adapter.hold(connection)
    assert last_words.HELD_S < held[0] < handler.EXIT_AFTER_S if follows else held[0] == last_words.HELD_S


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_falls_silent_once_it_has_told_that_another_rank_is_lost(
    ranks: int, tmp_path: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    silent: list[float] = []
    monkeypatch.setattr(handler.time, "sleep", silent.append)
    batch = Batch(FakeLLM(fail_after=1, error=EngineError("rank 1 of 2 is lost")), tmp_path)
    a, b = {"prompt": "a"}, {"prompt": "b"}
    batch.turn(a=a, b=b)
    told = batch.turn(a=a, b=b)
    assert {name: text.endswith(b"}\n") for name, (_, text, _) in told.items()} == {"a": True, "b": True}
    assert silent == [], "those who had been served are told"
    batch.turn(c={"prompt": "c"})
    assert len(silent) == (1 if ranks > 1 else 0)
    assert all(seconds > handler.EXIT_AFTER_S for seconds in silent)


def test_a_lost_connection_to_torchserve_ends_the_worker(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def sendall(_: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(worker.wire, "sendall", sendall)
    ctx = worker.service.context
    processor = RequestProcessor({"Content-Length": "15"})
    ctx.request_ids, ctx.request_processor, ctx.cl_socket = {0: "id"}, [processor], worker.wire
    with pytest.raises(BrokenPipeError):
        worker.handler.handle([{"body": b'{"prompt": "a"}'}], ctx)


# ---- loading --------------------------------------------------------------------------------------------------------


def context(tmp_path: Path, config: dict[str, Any] | None, gpu_id: int | None = None) -> Context:
    return Context("gpt-fast", str(tmp_path), None, 1, gpu_id, "0.12.0", model_yaml_config=config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"handler": {"compil": True}}, "unknown key 'compil'.*did you mean 'compile'.*known keys:.*max_new_tokens"),
        ({"handler": {"checkpoint": "nowhere"}}, "'nowhere'.*does not exist"),
        ({"handler": {}, "sequenceBatching": True}, "sequenceBatching"),
        ({"handler": {}, "asyncCommunication": True}, "asyncCommunication"),
        ({"handler": {}, "clientTimeoutInMills": 5000}, "clientTimeoutInMills .* wait for ever.*one_piece_timeout_s"),
        ({**CONTINUOUS, "useJobTicket": True}, "useJobTicket .* not supported with continuousBatching"),
        ({"handler": {}, "batchSize": 4}, "batchSize"),
        ({**CONTINUOUS, "batchSize": -5}, "batchSize .* from 1 to 65536, not -5"),
        ({"continuousBatching": "true", "batchSize": 4}, "continuousBatching .* must be true or false, not 'true'"),
        ({"responseTimeout": "abc"}, "responseTimeout .* must be a whole number from 1 to 86400, not 'abc'"),
        ({"responseTimeOut": 5}, "unknown key 'responseTimeOut' .*did you mean 'responseTimeout'"),
        ({"handler": {"max_body_bytes": 2**40}}, "max_body_bytes .* from 1 to 268435456"),
        (None, "holds no checkpoint"),
    ],
)
def test_a_wrong_configuration_is_a_runtime_error(config: dict[str, Any] | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=says):
        handler.GPTFastHandler().initialize(context(tmp_path, config))


def test_what_the_engine_refuses_is_not_taken_for_lack_of_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    adapter = handler.GPTFastHandler()

    def build(checkpoint: Path, options: Any) -> Any:
        raise ConfigError("torch sees 0 CUDA devices")

    adapter.build = build
    with pytest.raises(RuntimeError, match="0 Cuda devices"):
        adapter.initialize(context(tmp_path, {}))


def test_engine_keys_and_device_reach_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.safetensors").touch()
    seen: list[Any] = []
    adapter = handler.GPTFastHandler()

    def build(checkpoint: Path, options: Any) -> Any:
        seen.extend((checkpoint, options))
        return FakeLLM()

    adapter.build = build
    config = {"handler": {"compile": False, "max_seq_len": 64, "fx_graph_cache": True, "max_new_tokens": 5}}
    adapter.initialize(context(tmp_path, config))
    assert seen == [tmp_path, {"compile": False, "max_seq_len": 64, "device": "cpu"}]
    assert "fx_graph_cache" in caplog.text, "an option without effect warns"
    assert "deviceType" not in caplog.text


def test_a_device_map_is_not_overruled_by_what_torchserve_assigned(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    seen: list[Any] = []
    adapter = handler.GPTFastHandler()

    def build(checkpoint: Path, options: Any) -> Any:
        seen.append(options)
        return FakeLLM()

    adapter.build = build
    adapter.initialize(context(tmp_path, {"handler": {"device_map": ["cuda:0", "cpu"]}}, gpu_id=0))
    assert seen == [{"device_map": ("cuda:0", "cpu")}]


@pytest.mark.parametrize("asked", ["gpu", "GPU"])
def test_a_gpu_that_is_not_there_is_told(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(handler.GPTFastHandler, "build", lambda self, checkpoint, options: FakeLLM())
    handler.GPTFastHandler().initialize(context(tmp_path, {"deviceType": asked}, gpu_id=0))
    assert "deviceType is gpu, but there is no GPU that torch can use: the CPU is used" in caplog.text


def test_device_is_what_torchserve_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert handler.device_of_worker("auto", 1) == "cuda:1"
    assert handler.device_of_worker("auto", None) == "cpu", "deviceType: cpu on a machine with a GPU"
    assert handler.device_of_worker("cuda:0", 1) == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert handler.device_of_worker("auto", 0) == "cpu"


def load_handler(path: Path) -> ModuleType:
    """handler.py of an unpacked archive, in a process's first import of it."""
    spec = importlib.util.spec_from_file_location("archived_handler", path / "handler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("tiny", "tiny"),
        ("models--TinyLlama--TinyLlama-1.1B/snapshots/0123abcd", "TinyLlama/TinyLlama-1.1B"),
        ("models--gpt2/snapshots/0123abcd", "0123abcd"),
        ("models--a--b/other/0123abcd", "0123abcd"),
        ("folder/llama-q4_k_m.gguf", "llama-q4_k_m"),
        ("folder/llama-00001-of-00003.gguf", "llama"),
    ],
)
def test_a_model_of_the_hub_has_its_name_there(checkpoint: str, name: str, tmp_path: Path) -> None:
    assert handler.served_names("gpt-fast", tmp_path / checkpoint) == ("gpt-fast", name)


def test_without_the_package_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handler.py").write_text(inspect.getsource(handler))
    for name in [name for name in sys.modules if name.split(".")[0] == "gpt_fast"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and not (Path(p) / "gpt_fast").is_dir()])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in repr(f)])
    with pytest.raises(RuntimeError, match=r"scripts/archive\.sh"):
        load_handler(tmp_path)
