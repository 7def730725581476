"""The demo pair through a real TorchServe: what clients get with drafts is what an LLM without drafts answers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_text import parse
from serving import ROOT, Reply, Server, serve
from test_batching import get, hang_up, idle

from gpt_fast import LLM
from gpt_fast.serve.archive import build_archive
from gpt_fast.serve.metrics import Metrics
from gpt_fast.serve.protocol.request import Piece
from gpt_fast.serve.routes import Routes
from gpt_fast.serve.settings import HandlerSettings

# Without a prefix cache, so that usage.cached_tokens does not depend on who came first.
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_batch": 6, "prefix_cache": False}
CONFIG = """\
minWorkers: 1
maxWorkers: 1
continuousBatching: true
batchSize: 64
maxBatchDelay: 1
responseTimeout: 300
startupTimeout: 300
handler:
"""
NUM_CLIENTS = 8
NUM_REQUESTS = int(os.environ.get("GPT_FAST_DRAFTS_REQUESTS", "60"))  # 500 take some minutes
DRAFT = os.environ.get("GPT_FAST_DRAFTS_DRAFT", "demo/draft")  # in model_store, or lookup, int8, int4
Asked = tuple[str, dict[str, Any]]  # a route and a body


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With an archive that holds both models, where the draft is one."""
    store = tmp_path_factory.mktemp("model_store")
    config = store.parent / "model_config.yaml"
    draft = ROOT / "model_store" / DRAFT
    keys = {**ENGINE, "speculate": "always", "speculate_k": 3} | ({} if draft.is_dir() else {"draft": DRAFT})
    config.write_text(CONFIG + "".join(f"    {key}: {json.dumps(value)}\n" for key, value in keys.items()))
    folder = draft if draft.is_dir() else None
    build_archive(checkpoint, draft=folder, name="gpt-fast", config=config, output=store)
    with serve(store, {"gpt-fast": "gpt-fast"}) as running:
        running.wait_ready("gpt-fast")
        yield running


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[tuple[LLM, Routes]]:
    """An LLM without drafts, and the routes to it."""
    with LLM(checkpoint, **ENGINE) as llm:
        yield llm, Routes(llm, HandlerSettings(), ("gpt-fast",), Metrics(llm.engine, "gpt-fast"), lambda: 0)


def mixed(count: int) -> list[Asked]:
    """Requests of every protocol: greedy and sampled with a seed, with and without numbers, streamed and whole."""
    draw = random.Random(0)
    starts = ["Once upon a time", "Lily and Tom went to the park. Lily and Tom", "The little dog", "Her mom said"]
    how: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_k": 20, "min_tokens": 9},
        {"temperature": 1, "stop": ["and", "was"]},
        {"temperature": 0.9, "min_p": 0.1, "frequency_penalty": 0.4},
        {"temperature": 1, "logit_bias": {"300": 3.0, "301": -100.0}, "ignore_eos": True},
        {"temperature": 0.7, "regex": "[A-Z][a-z]+( [a-z]+){2,12}[.]"},
        {"temperature": 1, "choice": ["a red fox", "a red ox", "a blue fish"]},
        {"temperature": 1, "json_schema": {"type": "array", "items": {"enum": ["yes", "no"]}, "maxItems": 6}},
    ]
    asked: list[Asked] = []
    for i in range(count):
        prompt = draw.choice(starts)
        body = {"max_tokens": draw.randrange(9, 60), "seed": i, **how[i % len(how)]}
        stream = draw.random() < 0.5
        if i % 3 == 0:
            numbers = {} if stream else {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}
            asked.append(("", {"prompt": prompt, "stream": stream, **body, **numbers}))
        elif i % 3 == 1:
            numbers = {"logprobs": 2} if draw.random() < 0.5 else {}
            asked.append(
                ("v1/completions", {"model": "gpt-fast", "prompt": prompt, "stream": stream, **body, **numbers})
            )
        else:
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 1, "n": 2}
            asked.append(("v1/chat/completions", {"model": "gpt-fast", "stream": stream, **body}))
    return asked


def send(server: Server, asked: Asked) -> Reply:
    route, body = asked
    path = f"/predictions/gpt-fast/1.0/{route}" if route else "/predictions/gpt-fast"
    return server.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def expected(plain: tuple[LLM, Routes], asked: Asked) -> str:
    """The whole answer without drafts, as it is written when it is not streamed."""
    llm, routes = plain
    route, body = asked
    request = routes.open(route, {"body": {**body, "stream": False}}, None)
    assert not isinstance(request, Piece)
    parts = [(prompt, sample) for prompt in request.prompts for sample in request.params.samples()]
    done = llm.generate([prompt for prompt, _ in parts], [sample for _, sample in parts])
    assert isinstance(done, list)
    return request.write_end(done)


def check(asked: Asked, reply: Reply, whole: str) -> None:
    """``reply`` must say what ``whole`` says."""
    route, body = asked
    assert reply.status == 200, reply.text
    if not body["stream"]:
        assert without_stamp(reply.text) == without_stamp(whole)
    elif not route:
        assert reply.text == json.loads(whole)["text"]
    else:
        assert joined(reply.text, len(json.loads(whole)["choices"])) == json.loads(whole)["choices"]


def without_stamp(answer: str) -> str:
    """The JSON of ``answer`` in its order, without the id and the time that OpenAI's answers have."""
    return json.dumps({key: value for key, value in json.loads(answer).items() if key not in ("id", "created")})


def joined(events: str, count: int) -> list[dict[str, Any]]:
    """The ``count`` choices that a stream of OpenAI's events makes, as they are in an answer in one piece."""
    choices: list[dict[str, Any]] = [{} for _ in range(count)]
    for event in events.split("\n\n")[:-2]:
        for piece in json.loads(event.removeprefix("data: "))["choices"]:
            whole = choices[piece["index"]]
            if "delta" in piece:
                message = whole.setdefault("message", {"role": "assistant", "content": "", "refusal": None})
                message["content"] += piece["delta"].get("content", "")
            else:
                whole["text"] = whole.get("text", "") + piece["text"]
            for name, values in (piece["logprobs"] or {}).items():
                if isinstance(values, list):
                    whole.setdefault("logprobs", {}).setdefault(name, []).extend(values)
            whole["index"], whole["finish_reason"] = piece["index"], piece["finish_reason"]
    for whole in choices:
        whole.setdefault("logprobs", None)
        if "message" in whole and whole["logprobs"]:
            whole["logprobs"]["refusal"] = None
    return choices


def of_one_client(server: Server, requests: Sequence[Asked]) -> list[Reply]:
    return [send(server, asked) for asked in requests]


def test_eight_clients_get_what_they_get_without_drafts(server: Server, plain: tuple[LLM, Routes]) -> None:
    """While others hang up in the middle of their streams, and while wrong requests come."""
    requests = mixed(NUM_REQUESTS)
    gone = {"prompt": "Once upon a time", "max_new_tokens": 400, "ignore_eos": True, "temperature": 1}
    wrong: list[Any] = [b"{", {"prompt": "a", "draft_n": 1}, {"prompt": [99999]}, {"prompt": "a", "draft_counts": "x"}]
    with ThreadPoolExecutor(2 * NUM_CLIENTS) as pool:
        clients = [pool.submit(of_one_client, server, requests[i::NUM_CLIENTS]) for i in range(NUM_CLIENTS)]
        aborted = [pool.submit(hang_up, server, gone, after_bytes) for after_bytes in (1, 100, 300)]
        refused = [pool.submit(server.predict, body) for body in wrong]
        for future in aborted:
            future.result()
        assert [future.result().status for future in refused] == [400] * len(wrong)
        replies = [future.result() for future in clients]
    for i, asked in enumerate(requests):
        check(asked, replies[i % NUM_CLIENTS][i // NUM_CLIENTS], expected(plain, asked))
    idle(server)
    page = parse(get(server, "metrics").text)
    drafted = page.value("vllm:spec_decode_num_draft_tokens_total")
    accepted = page.value("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafted
    by_position = [page.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def test_a_request_is_told_of_its_drafts(server: Server, plain: tuple[LLM, Routes]) -> None:
    body = {"prompt": "Once upon a time", "max_new_tokens": 40, "stream": False}
    told = server.predict({**body, "draft_counts": True}).json()
    assert 0 < told["usage"].pop("draft_n_accepted") < told["usage"].pop("draft_n")
    assert told == server.predict(body).json() == json.loads(expected(plain, ("", body)))


def test_origins_come_token_by_token_and_at_the_end(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_new_tokens": 40, "return_origins": True, "return_token_ids": True}
    whole = server.predict({**body, "stream": False}).json()
    assert len(whole["origins"]) == len(whole["token_ids"]) == 40
    reply = server.predict(body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    *parts, last = map(json.loads, reply.text.splitlines())
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert [origin for part in parts for origin in part["origins"]] == whole["origins"]
    assert {"accepted", "corrected"} <= set(whole["origins"])
    assert last == {"finish_reason": whole["finish_reason"], "usage": whole["usage"]}


def test_predict_continues_its_prompt(server: Server) -> None:
    reply = server.request("POST", "/predictions/gpt-fast/1.0/predict", b'{"prompt": "Once upon a time"}')
    assert reply.status == 200
    assert reply.json().startswith("Once upon a time")
    assert len(reply.json()) > len("Once upon a time")
