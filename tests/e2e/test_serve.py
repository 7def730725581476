"""The handler in a real TorchServe: streaming, archives, every way curl sends JSON, and bad requests."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from brake import Brake
from serving import HANG_S, ROOT, TORCHSERVE, Reply, Server, java_home, serve, wait_for

from gpt_fast import LLM, Completion, SamplingParams
from gpt_fast.serve.archive import build_archive

REQUEST = json.loads((ROOT / "request.json").read_text())
PROMPT = REQUEST["prompt"]
FORMATS = {"gpt-fast": "no-archive", "mar": "default", "stored": "zip-store", "tgz": "tgz"}
BROKEN = {"unknown-key": "kompile: true", "impossible": "max_seq_len: 0"}

# Small and quick to load; the same numbers as in the engine that the answers are compared with.
ENGINE = {"compile": False, "dtype": "float32", "max_batch": 1, "device": "cpu", "threads": 1}
CONFIG = """\
minWorkers: 1
maxWorkers: 1
responseTimeout: 300
startupTimeout: 300
handler:
    compile: false
    dtype: float32
    device: cpu
    max_batch: 1
    threads: 1
    max_new_tokens: 20
"""


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    """Of the first model."""
    return Brake(tmp_path_factory.mktemp("brake"), "gpt-fast")


@pytest.fixture(scope="module")
def store(checkpoint: Path, brake: Brake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store with the same model in every format, and two that cannot load."""
    path = tmp_path_factory.mktemp("model_store")
    config = path.parent / "model_config.yaml"
    config.write_text(CONFIG)
    for name, archive_format in FORMATS.items():
        options: dict[str, Any] = {"archive_format": archive_format, "by_reference": name == "stored"}
        if name == "gpt-fast":
            options["handler"] = brake.handler((ROOT / "handler.py").read_text())
        build_archive(checkpoint, name=name, config=config, output=path, **options)
    for name, line in BROKEN.items():
        # TorchServe would start a worker that cannot load again and again for five minutes.
        config.write_text(f"maxRetryTimeoutInSec: 0\n{CONFIG}")
        archive = build_archive(checkpoint, name=name, config=config, output=path, by_reference=True)
        with (archive / "model_config.yaml").open("a") as file:  # build_archive would refuse it
            file.write(f"    {line}\n")
    return path


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    """One TorchServe for this module, with one worker for each model."""
    models = {path.name.split(".")[0]: path.name for path in sorted(store.iterdir())}
    with serve(store, models) as running:
        for name in FORMATS:
            running.wait_ready(name)
        yield running


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """The same engine in this process: the truth that the server's answers are compared with."""
    with LLM(checkpoint, **ENGINE) as engine:
        yield engine


def expected(llm: LLM, max_new_tokens: int, prompt: Any = PROMPT, **params: Any) -> Completion:
    done = llm.generate(prompt, SamplingParams(max_tokens=max_new_tokens, **params))
    assert isinstance(done, Completion)
    return done


def good(max_new_tokens: int = 5) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_new_tokens": max_new_tokens}


# ---- answers --------------------------------------------------------------------------------------------------------


def test_a_completion_arrives_in_pieces_as_it_is_generated(server: Server, llm: LLM, brake: Brake) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool, brake.held(10):
        sent = pool.submit(server.predict, good(100), begun=begun)
        assert begun.wait(HANG_S), "nothing came before the end"
        assert not sent.done()
    reply = sent.result()
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.text == expected(llm, 100).text
    assert len(reply.chunks) > 1
    for chunk in reply.chunks:
        chunk.decode("utf-8")  # every piece is whole characters


def test_the_canonical_request_is_served(server: Server, llm: LLM) -> None:
    reply = server.predict((ROOT / "request.json").read_bytes())
    assert reply.text == expected(llm, REQUEST["max_new_tokens"]).text


@pytest.mark.parametrize("name", FORMATS)
def test_every_archive_format_serves(server: Server, llm: LLM, name: str) -> None:
    assert server.predict(good(10), name).text == expected(llm, 10).text


def test_one_piece_as_json(server: Server, llm: LLM) -> None:
    reply = server.predict({**good(10), "stream": False, "return_token_ids": True})
    truth = expected(llm, 10)
    assert reply.headers["content-type"] == "application/json"
    assert not reply.chunks
    answer = reply.json()
    assert (answer["text"], answer["token_ids"]) == (truth.text, list(truth.token_ids))
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == truth.num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 10


def test_parameters_reach_the_engine(server: Server, llm: LLM) -> None:
    sampled = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7}
    assert server.predict({**good(30), **sampled}).text == expected(llm, 30, **sampled).text
    truth = expected(llm, 30)
    stop = truth.text[12:15]
    assert server.predict({**good(30), "stop": stop}).text == truth.text.split(stop)[0]


def test_token_ids_as_prompt(server: Server, llm: LLM) -> None:
    ids = llm.encode(PROMPT)
    assert server.predict({"prompt": ids, "max_new_tokens": 10}).text == expected(llm, 10).text


def test_defaults_of_the_yaml(server: Server, llm: LLM) -> None:
    assert server.predict({"prompt": PROMPT}).text == expected(llm, 20).text


def test_a_completion_of_one_token(server: Server, llm: LLM) -> None:
    assert server.predict(good(1)).text == expected(llm, 1).text


def test_several_requests_on_one_connection(server: Server, llm: LLM) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    for stream in (True, False, True):
        connection.request("POST", "/predictions/gpt-fast", json.dumps({**good(10), "stream": stream}))
        body = connection.getresponse().read().decode()
        assert (body if stream else json.loads(body)["text"]) == expected(llm, 10).text
    connection.close()


def test_requests_that_wait_for_each_other_are_all_answered(server: Server, llm: LLM) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda n: server.predict(good(n)), range(10, 34)))
    assert [r.text for r in replies] == [expected(llm, n).text for n in range(10, 34)]


# ---- clients that go away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_hangs_up_does_not_hurt_the_next(server: Server, llm: LLM, reset: bool) -> None:
    for _ in range(3):
        body = json.dumps({**good(200), "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
            head = f"PUT /predictions/gpt-fast HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert server.predict(good(10)).text == expected(llm, 10).text
    assert_worker_never_restarted(server)


def test_a_client_that_hangs_up_before_it_has_sent_everything(server: Server, llm: LLM) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        client.sendall(b'PUT /predictions/gpt-fast HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": ')
    assert server.predict(good(10)).text == expected(llm, 10).text


# ---- the ways JSON is sent ------------------------------------------------------------------------------------------

CURL_WAYS = {
    "-T": ["-T", "{file}"],
    "-T chunked": ["-T", "{file}", "-H", "Transfer-Encoding: chunked"],
    "-d with a header": ["-H", "Content-Type: application/json", "-d", "@{file}"],
    "-d with a header and charset": ["-H", "Content-Type: application/json; charset=utf-8", "-d", "@{file}"],
    "--data-binary text/plain": ["-H", "Content-Type: text/plain", "--data-binary", "@{file}"],
    "--data-binary octet-stream": ["-H", "Content-Type: application/octet-stream", "--data-binary", "@{file}"],
    "-F data, a file": ["-F", "data=@{file}"],
    "-F data, a JSON file": ["-F", "data=@{file};type=application/json"],
    "-F body, a file": ["-F", "body=@{file}"],
    "-F data, a field": ["-F", "data=<{file}"],
}


@pytest.mark.parametrize("prompt", [PROMPT, 'é 🙂 "a+b=c" & 100% %41 \\n'], ids=["plain", "awkward"])
@pytest.mark.parametrize("options", CURL_WAYS.values(), ids=CURL_WAYS)
def test_json_is_understood_however_curl_sends_it(
    server: Server, llm: LLM, tmp_path: Path, options: list[str], prompt: str
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"prompt": prompt, "max_new_tokens": 5}, ensure_ascii=False), encoding="utf-8")
    status, body = curl(server, [option.format(file=file) for option in options])
    assert (status, body) == (200, expected(llm, 5, prompt).text)


def test_a_form_with_an_equals_sign_can_be_put_together_again(server: Server, llm: LLM) -> None:
    status, body = curl(server, ["-d", '{"prompt": "a=b&c=d", "max_new_tokens": 5}'])
    assert (status, body) == (200, expected(llm, 5, "a=b&c=d").text)


@pytest.mark.parametrize("prompt", ["Once upon a time", "a=b & c", "a=b & c=d", "100%25=b"])
def test_a_form_that_torchserve_changed_or_lost_is_refused_with_advice(server: Server, prompt: str) -> None:
    status, body = curl(server, ["-d", json.dumps({"prompt": prompt})])
    assert status == 400
    assert "Content-Type: application/json" in json.loads(body)["error"]["message"]


def curl(server: Server, options: list[str]) -> tuple[int, str]:
    """Status and body of what curl gets."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    url = f"http://127.0.0.1:{server.port}/predictions/gpt-fast"
    command = ["curl", "-sS", "--noproxy", "*", "-m", str(int(HANG_S)), "-w", "\n%{http_code}", url, *options]
    done = subprocess.run(command, capture_output=True, check=True)
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), body


# ---- bad requests ---------------------------------------------------------------------------------------------------


def field(name: str, value: object) -> tuple[object, int, str | None]:
    return {"prompt": PROMPT, name: value}, 400, name


def raw(name: str, literal: str) -> tuple[object, int, str | None]:
    """A field as it is written in JSON; what Python's json would not write, for instance."""
    before = "" if name == "prompt" else '"prompt": "a", '
    return f'{{{before}"{name}": {literal}}}'.encode(), 400, name


BAD: dict[str, tuple[object, int, str | None]] = {
    "not JSON": (b"Once upon a time", 400, None),
    "cut off": (b'{"prompt": "Once', 400, None),
    "empty": (b"", 400, None),
    "blanks": (b" \r\n", 400, None),
    "an array": (b'[{"prompt": "a"}]', 400, None),
    "a string": (b'"Once"', 400, None),
    "a number": (b"5", 400, None),
    "null": (b"null", 400, None),
    "broken UTF-8": (b'{"prompt": "\xff\xfe"}', 400, None),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), 400, None),
    "byte order mark": (b'\xef\xbb\xbf{"prompt": "a"}', 400, None),
    "nested too deeply": (b'{"prompt":' + b"[" * 100_000, 400, None),
    "a field twice": (b'{"prompt": "a", "prompt": "b"}', 400, "prompt"),
    "no prompt": ({"max_new_tokens": 5}, 400, "prompt"),
    "prompt null": field("prompt", None),
    "prompt number": field("prompt", 5),
    "prompt object": field("prompt", {"text": "a"}),
    "prompt empty list": field("prompt", []),
    "prompt too long": field("prompt", "word " * 30_000),
    "prompt too many ids": field("prompt", [5] * 50_000),
    "prompt id out of range": field("prompt", [1, 2_000_000]),
    "prompt id negative": field("prompt", [-1]),
    "prompt id float": field("prompt", [1.0]),
    "prompt id boolean": field("prompt", [True]),
    "prompt lone surrogate": raw("prompt", '"\\ud800"'),
    "max_new_tokens negative": field("max_new_tokens", -1),
    "max_new_tokens zero": field("max_new_tokens", 0),
    "max_new_tokens huge": field("max_new_tokens", 10**12),
    "max_new_tokens enormous": raw("max_new_tokens", "9" * 10_000),
    "max_new_tokens boolean": field("max_new_tokens", True),
    "max_new_tokens string": field("max_new_tokens", "5"),
    "max_new_tokens float": field("max_new_tokens", 5.5),
    "temperature NaN": raw("temperature", "NaN"),
    "temperature Infinity": raw("temperature", "Infinity"),
    "temperature overflow": raw("temperature", "1e999"),
    "temperature negative": field("temperature", -1),
    "top_p zero": field("top_p", 0),
    "top_p two": field("top_p", 2),
    "top_k float": field("top_k", 0.5),
    "min_p string": field("min_p", "0.1"),
    "seed float": field("seed", 1.5),
    "stop number": field("stop", 3),
    "stop too many": field("stop", ["a"] * 100),
    "stop empty": field("stop", [""]),
    "stop_token_ids out of range": field("stop_token_ids", [2_000_000]),
    "ignore_eos string": field("ignore_eos", "yes"),
    "stream number": field("stream", 1),
    "unknown field": field("max_new_token", 5),
    "above our limit": (b'{"prompt": "' + b"a" * 2_000_000 + b'"}', 413, None),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, None),
}


@pytest.mark.parametrize(("request_", "status", "param"), BAD.values(), ids=BAD)
def test_a_bad_request_is_explained_and_the_next_good_one_served(
    server: Server, llm: LLM, request_: object, status: int, param: str | None
) -> None:
    # TorchServe's own parser would be more lenient; with a JSON content type it must make no difference.
    for headers in ({}, {"Content-Type": "application/json"}):
        reply = server.predict(request_, headers=headers)
        assert reply.status == status, reply.text
        if reply.body:
            check_error(reply, param)
        else:
            assert isinstance(request_, bytes)
            assert len(request_) > 6_000_000, "only TorchServe's own limit answers with nothing"
    after = server.predict(good())
    assert (after.status, after.text) == (200, expected(llm, 5).text)


def check_error(reply: Reply, param: str | None) -> None:
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"]
    assert param or "body" in error["message"]
    assert len(error["message"]) < 500


def test_a_prompt_too_long_is_told_with_the_numbers(server: Server, llm: LLM) -> None:
    error = server.predict({"prompt": [5] * 5000}).error
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert str(llm.max_seq_len) in error["message"]


def test_other_methods_and_routes(server: Server) -> None:
    assert server.request("GET", "/predictions/gpt-fast").status == 400
    assert server.request("POST", "/predictions/gpt-fast/1.0/no/such/route", b"{}").status == 404
    assert server.request("POST", "/predictions/no-such-model", b"{}").status == 404


def assert_worker_never_restarted(server: Server) -> None:
    [worker] = server.workers("gpt-fast")
    assert worker["status"] == "READY"
    started = [line for line in server.log.splitlines() if "gpt-fast_1.0" in line and "State change" in line]
    assert len(started) == 2, "\n".join(started)  # null -> STARTED -> MODEL_LOADED


# ---- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [("unknown-key", "did you mean 'compile'"), ("impossible", "must be a whole number from 1 to 1073741824, not 0")],
)
def test_a_model_that_is_configured_wrongly_says_so_in_the_log(server: Server, name: str, says: str) -> None:
    wait_for(lambda: says in server.log)
    assert not any(worker["status"] == "READY" for worker in server.workers(name))
    if name == "unknown-key":
        [line] = {line for line in server.log.splitlines() if "cannot serve unknown-key" in line}
        assert all(key in line for key in ("checkpoint", "max_seq_len", "max_body_bytes", "converted_ckpt_dir"))


def test_a_worker_that_died_is_replaced_and_the_next_request_waits_for_it(server: Server, llm: LLM) -> None:
    [worker] = server.workers("tgz")
    os.kill(worker["pid"], signal.SIGKILL)
    # Not at once: a request that reaches the dead worker is answered "Worker died".
    wait_for(lambda: server.workers("tgz")[0]["status"] != "READY" or server.workers("tgz")[0]["pid"] != worker["pid"])
    assert server.predict(good(10), "tgz").text == expected(llm, 10).text


def test_plain_torch_model_archiver_and_the_shipped_configuration(
    checkpoint: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands as a README shows them, compiled and with everything in model_config.yaml as it is shipped."""
    store = tmp_path / "model_store"
    store.mkdir()
    command = ["torch-model-archiver", "--model-name", "gpt-fast", "--version", "1.0", "--handler", "handler.py"]
    command += ["--config-file", "model_config.yaml", "--extra-files", f"gpt_fast,{checkpoint}"]
    command += ["--archive-format", "no-archive", "--export-path", str(store)]
    path = f"{TORCHSERVE.parent}{os.pathsep}{os.environ['PATH']}"
    # The archiver deletes $TMPDIR/<model name>, so each archive gets another folder.
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "JAVA_HOME": str(java_home())}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    compiled = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    with serve(store, {"gpt-fast": "gpt-fast"}) as server:
        server.wait_ready("gpt-fast")
        before = set(compiled.rglob("*"))
        assert curl(server, ["-T", str(ROOT / "request.json")])[0] == 200
        reply = server.predict(good(200))
        assert reply.text == expected(llm, 200).text
        assert set(compiled.rglob("*")) == before, "something was compiled in service"
        assert server.streams(good(200)), "it was not streamed"
        assert server.predict({"prompt": None}).status == 400
        assert "Backend received" not in server.log, "a line for each exchange"
