"""benchmarks/fuzz.py without a model: requests that are the same for everybody and reach everything, a strict judge."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from fuzzing import bodies, report
from fuzzing.campaign import Campaign
from fuzzing.client import Answer, fire
from fuzzing.fields import CHAT, COMPLETION, DETOKENIZE, LIMITS, NATIVE, PREDICT, PROTOCOLS, RESPONSE, TOKENIZE
from fuzzing.generator import FOREIGN, KINDS, PAGES, Generator
from fuzzing.judge import SAME, SECRET, SERVED, STATUS, WHOLE, faults, normal
from fuzzing.round_trip import lost
from fuzzing.shot import Shot, Target, message
from fuzzing.values import Pairs, Raw, dump

from gpt_fast.errors import RequestError
from gpt_fast.serve import routes
from gpt_fast.serve.protocol import native, openai_fields, responses_fields, token_routes
from gpt_fast.serve.protocol.body import parse_json
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TARGET = Target.of("http://127.0.0.1:8080/predictions/gpt-fast")
SHOT = Shot(0, "odd", "native", b"PUT / HTTP/1.1\r\n\r\n{}")


@pytest.fixture(scope="module")
def shots() -> list[Shot]:
    """Enough requests of one seed to hold some of everything."""
    return [Generator(TARGET, 1).shot(index) for index in range(4000)]


# ---- the generator --------------------------------------------------------------------------------------------------


def test_a_request_is_the_same_whoever_asks_for_it_and_when(shots: list[Shot]) -> None:
    again = Generator(TARGET, 1)
    for index in random.Random(0).sample(range(len(shots)), 200):
        assert again.shot(index) == shots[index]
    assert Generator(TARGET, 2).shot(5).data != shots[5].data


def test_a_request_is_the_same_in_every_process() -> None:
    # Names come out of sets of the package: their order changes with the hash seed unless it is put right.
    program = (
        "import hashlib; from fuzzing.generator import Generator; from fuzzing.shot import Target;"
        f"g = Generator(Target.of('http://127.0.0.1:8080{TARGET.path}'), 3);"
        "print(hashlib.sha256(b''.join(g.shot(i).data for i in range(150))).hexdigest())"
    )
    path = os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT)))
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "1")
    }
    here = Generator(TARGET, 3)
    assert digests == {hashlib.sha256(b"".join(here.shot(i).data for i in range(150))).hexdigest()}


def test_every_kind_and_every_route_is_asked_for(shots: list[Shot]) -> None:
    kinds = Counter(shot.kind for shot in shots)
    assert kinds.keys() == {maker.__name__.strip("_") for maker in KINDS} | {"repeat"}
    assert {shot.route for shot in shots} == {*PROTOCOLS, *PAGES, "foreign"}
    targets = Counter(shot.data.partition(b" ")[2].partition(b" ")[0].decode("latin-1") for shot in shots)
    asked = (path.format(model=TARGET.model) for path in FOREIGN)
    assert [path for path in asked if path not in targets] == []
    assert {shot.hang_up for shot in shots} == {"", "sent", "first"}
    assert any(shot.cuts for shot in shots)


def test_every_field_of_the_package_is_sent_right_and_odd(shots: list[Shot]) -> None:
    assert set(NATIVE) == set(native.FIELDS)
    assert set(COMPLETION) == set(openai_fields.COMPLETION)
    assert set(CHAT) == set(openai_fields.CHAT)
    assert set(RESPONSE) == set(responses_fields.RESPONSE)
    assert set(PREDICT) == set(native.FIELDS)
    assert set(TOKENIZE) == set(token_routes.TOKENIZE)
    assert set(DETOKENIZE) == set(token_routes.DETOKENIZE)
    for protocol, fields in PROTOCOLS.items():
        for kind in ("right", "odd"):
            sent = b"".join(s.data for s in shots if s.route == protocol and s.kind == kind)
            # best_of and its like are right only where they ask for nothing, and then are there as well.
            assert [name for name in fields if b'"%s":' % name.encode() not in sent] == [], (protocol, kind)


def test_what_the_generator_calls_right_is_accepted() -> None:
    """Else the demand that right requests are served would ask for too much, or for nothing."""
    tokenizer = load_tokenizer(ROOT / "model_store" / "demo" / "target")
    context = OpenAIContext(models=("gpt-fast",), max_model_len=512, tokenizer=tokenizer)
    parse: dict[str, Callable[[dict[str, Any]], object]] = {
        **{name: partial(routes.parse, name, openai=context) for name in PROTOCOLS},
        "tokenize": lambda body: token_routes.tokenize(body, context),
        "detokenize": lambda body: token_routes.detokenize(body, context),
    }
    rng = random.Random(0)
    for _ in range(300):
        for protocol in PROTOCOLS:
            body = bodies.right(rng, protocol, "gpt-fast")
            assert parse[protocol](json.loads(dump(body)))


def test_requests_that_are_odd_are_mostly_refused_and_never_all() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        body = bodies.odd(rng, "native", "gpt-fast")
        try:
            native.parse_request(parse_json(dump(body)))
        except RequestError:
            refused += 1
    assert 150 < refused < 290


def test_a_repeat_is_an_earlier_request_to_the_byte(shots: list[Shot]) -> None:
    repeats = [shot for shot in shots if shot.of is not None]
    assert len(repeats) > 200
    for shot in repeats:
        assert shot.of is not None
        assert shot.of < shot.index
        assert shot.same
        assert shots[shot.of].of is None
        assert (shot.data, shot.route) == (shots[shot.of].data, shots[shot.of].route)


def test_only_requests_without_chance_and_clock_are_compared(shots: list[Shot]) -> None:
    for shot in shots:
        if shot.same:
            assert not shot.timed
            assert not shot.hang_up
            assert b"/health HTTP" not in shot.data


def test_the_json_writer_writes_what_json_does_not() -> None:
    pairs = Pairs([("a", 1), ("a", Raw("NaN"))])
    assert dump({"x": pairs, "y": [Raw("01"), "\ud800"]}) == b'{"x": {"a": 1, "a": NaN}, "y": [01, "\\ud800"]}'
    assert dump("\ud800", ascii_only=False) == b'"\xed\xa0\x80"'
    value = {"a": [1, 2.5, None, True, "é"], "b": {"c": []}}
    assert json.loads(dump(value)) == json.loads(dump(value, False)) == value


# ---- the judge ------------------------------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
TEXT = {"content-type": "text/plain; charset=utf-8"}
REFUSAL = b'{"error": {"message": "no", "type": "t", "param": null, "code": "c"}}'
SERVED_SHOT = Shot(0, "right", "native", b"", served=True)
TIMED = Shot(0, "odd", "native", b"", timed=True)
LAME = Shot(0, "http", "native", b"", lame=True)
TIMEOUT = b'{"error": {"message": "late", "code": "timeout"}}'


@pytest.mark.parametrize(
    ("shot", "answer", "broken"),
    [
        (SHOT, Answer(200, JSON, b'{"text": "ok"}'), []),
        (SHOT, Answer(400, JSON, REFUSAL), []),
        (SHOT, Answer(500, JSON, REFUSAL), [STATUS]),
        (LAME, Answer(500, JSON, REFUSAL), [STATUS]),
        (SHOT, Answer(503, JSON, REFUSAL), [STATUS]),
        (SHOT, Answer(503, {**JSON, "retry-after": "1"}, REFUSAL), []),
        (SHOT, Answer(503, {**JSON, "retry-after": "soon"}, REFUSAL), [STATUS]),
        (SHOT, Answer(504, JSON, TIMEOUT), [STATUS]),
        (TIMED, Answer(504, JSON, TIMEOUT), []),
        (SHOT, Answer(500, JSON, b'{\n  "code": 500,\n  "type": "ErrorDataDecoderException"\n}'), []),
        (SHOT, Answer(500, JSON, b'{\n  "code": 500,\n  "type": "InternalServerException"\n}'), [STATUS]),
        (SERVED_SHOT, Answer(400, JSON, REFUSAL), [SERVED]),
        (SHOT, Answer(400, JSON, b"no"), [WHOLE]),
        (SHOT, Answer(400, JSON, b'{"error": {"message": "%s"}}' % (b"x" * 5000)), [WHOLE]),
        (SHOT, Answer(413, {}, b""), []),
        (SHOT, Answer(200, JSON, b'{"error": {"message": "late"}}'), [WHOLE]),
        (SHOT, Answer(200, JSON, b'{"logprob": -Infinity}'), [WHOLE]),
        (SHOT, Answer(200, JSON, b'{"text": "cut'), [WHOLE]),
        (SHOT, Answer(200, TEXT, b"half a character \xe2\x82"), [WHOLE]),
        (SHOT, Answer(200, TEXT, b"Once\n" + REFUSAL + b"\n"), [WHOLE]),
        (TIMED, Answer(200, TEXT, b"Once\n" + TIMEOUT + b"\n"), []),
        (SHOT, Answer(200, EVENTS, b'data: {"choices": []}\n\ndata: [DONE]\n\n'), []),
        (SHOT, Answer(200, EVENTS, b'data: {"choices": []}\n\n'), [WHOLE]),
        (SHOT, Answer(200, EVENTS, b"data: " + REFUSAL + b"\n\ndata: [DONE]\n\n"), [WHOLE]),
        (SHOT, Answer(0, {}, b"", fault="connection closed without an answer"), [WHOLE]),
        (LAME, Answer(0, {}, b"", fault="connection closed without an answer"), []),
        (SHOT, Answer(400, JSON, b'{"error": {"message": "no file /opt/model/x.bin"}}'), [SECRET]),
        (SHOT, Answer(200, TEXT, b"Traceback (most recent call last)"), [SECRET]),
        (SHOT, Answer(200, {**TEXT, "x": 'File "a.py", line 3'}, b""), [SECRET]),
        (Shot(0, "odd", "native", b"/etc/passwd"), Answer(200, TEXT, b"/etc/passwd"), []),  # its own words
    ],
)
def test_what_breaks_which_demand(shot: Shot, answer: Answer, broken: list[str]) -> None:
    assert [demand for demand, _ in faults(shot, answer)] == broken


def test_the_workers_own_paths_are_secrets() -> None:
    found = list(faults(SHOT, Answer(200, TEXT, b"in /odd/place"), [b"/odd/place"]))
    assert [demand for demand, _ in found] == [SECRET]


LINES = {"content-type": "application/x-ndjson"}
USAGE = {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3}
CONTRADICTION = b'{"error": {"message": "no token", "code": "contradiction"}}'


def response(text: str = "a b", **changed: Any) -> dict[str, Any]:
    """An answer of v1/responses."""
    item = {"id": "msg_1", "type": "message", "status": "completed", "content": [{"type": "output_text", "text": text}]}
    head = {"object": "response", "status": "completed", "error": None, "incomplete_details": None}
    return {**head, "output": [item], "usage": USAGE, **changed}


def named(*changed: tuple[int, dict[str, Any]], last: bool = True) -> bytes:
    """A stream of v1/responses, with fields of the numbered events changed."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": response(status="in_progress")}]
    events += [{"type": "response.output_text.delta", "delta": piece, "output_index": 0} for piece in ("a ", "b")]
    events += [{"type": "response.completed", "response": response()}] if last else []
    numbered = [{"sequence_number": i, **event} for i, event in enumerate(events)]
    for i, fields in changed:
        numbered[i] |= fields
    texts = [
        f"event: {event['type']}\ndata: {json.dumps(each)}\n\n" for event, each in zip(events, numbered, strict=True)
    ]
    return "".join(texts).encode()


@pytest.mark.parametrize(
    ("route", "answer", "right"),
    [
        ("v1/responses", Answer(200, JSON, json.dumps(response()).encode()), True),
        ("v1/responses", Answer(200, JSON, json.dumps(response(output=[])).encode()), False),
        ("v1/responses", Answer(200, JSON, json.dumps(response(status="incomplete")).encode()), False),
        ("v1/responses", Answer(200, JSON, json.dumps(response(usage={**USAGE, "total_tokens": 4})).encode()), False),
        ("v1/responses", Answer(200, JSON, b'{"text": "another form"}'), False),
        ("v1/responses", Answer(200, EVENTS, named()), True),
        ("v1/responses", Answer(200, EVENTS, named(last=False)), False),
        ("v1/responses", Answer(200, EVENTS, named()[:-1]), False),
        ("v1/responses", Answer(200, EVENTS, named((2, {"sequence_number": 1}))), False),
        ("v1/responses", Answer(200, EVENTS, named((2, {"type": "response.other"}))), False),
        ("v1/responses", Answer(200, EVENTS, named((2, {"delta": "c"}))), False),
        ("v1/responses", Answer(200, EVENTS, named((3, {"response": response(status="failed")}))), False),
        ("v1/responses", Answer(200, EVENTS, named().replace(b"a b", "é".encode())), False),
        (
            "v1/responses",
            Answer(200, EVENTS, b'event: error\ndata: {"type": "error", "sequence_number": 0}\n\n'),
            False,
        ),
        ("tokenize", Answer(200, JSON, b'{"count": 2, "tokens": [5, 6], "token_strs": null}'), True),
        ("tokenize", Answer(200, JSON, b'{"count": 3, "tokens": [5, 6], "token_strs": null}'), False),
        ("tokenize", Answer(200, JSON, b'{"count": 2, "tokens": [5, 6], "token_strs": ["a"]}'), False),
        ("tokenize", Answer(200, JSON, b'{"count": 2}'), False),
        ("detokenize", Answer(200, JSON, b'{"prompt": "a"}'), True),
        ("detokenize", Answer(200, JSON, b"{}"), False),
        ("predict", Answer(200, JSON, b'"Once upon"'), True),
        ("predict", Answer(200, JSON, b'"upon"'), False),
        ("native", Answer(200, LINES, b'{"text": "a"}\n{"finish_reason": "stop"}\n'), True),
        ("native", Answer(200, LINES, b'{"text": "a"}\n'), False),
        ("native", Answer(200, LINES, b'{"text": "a"}\n{"finish_rea'), False),
        ("native", Answer(200, LINES, b'{"text": "a"}\n' + CONTRADICTION), False),
    ],
)
def test_an_answer_has_the_form_of_its_route(route: str, answer: Answer, right: bool) -> None:
    shot = Shot(0, "right", route, b'POST / HTTP/1.1\r\n\r\n{"prompt": "Once"}', served=True)
    assert {demand for demand, _ in faults(shot, answer)} == (set() if right else {WHOLE})


@pytest.mark.parametrize("kind", [LINES, TEXT])
def test_what_demands_the_impossible_may_fail_in_mid_stream(kind: dict[str, str]) -> None:
    answer = Answer(200, kind, b'{"text": "a"}\n' + CONTRADICTION + b"\n")
    assert list(faults(SHOT, answer)) == []
    assert [demand for demand, _ in faults(SERVED_SHOT, answer)] == [WHOLE]


def stream(*pieces: str, id: str = "a") -> Answer:
    events = [
        {"id": id, "created": 5, "choices": [{"index": 0, "text": piece, "finish_reason": None}]} for piece in pieces
    ]
    return Answer(200, EVENTS, b"".join(f"data: {json.dumps(e)}\n\n".encode() for e in events) + b"data: [DONE]\n\n")


def test_answers_are_compared_without_what_changes_from_time_to_time() -> None:
    assert normal(stream("Once", " upon")) == normal(stream("On", "ce upon", id="b"))
    assert normal(stream("Once", " upon")) != normal(stream("Once", " Upon"))
    body = '{"text": "a", "usage": {"total_tokens": 3, "cached_tokens": %d}, "id": "%s"}'
    assert normal(Answer(200, JSON, (body % (0, "x")).encode())) == normal(
        Answer(200, JSON, (body % (16, "y")).encode())
    )
    lines = [
        b'{"text": "a"}\n{"text": "b", "token_ids": [5, 6]}\n',
        b'{"text": "ab", "token_ids": [5]}\n{"token_ids": [6]}\n',
    ]
    assert normal(Answer(200, LINES, lines[0])) == normal(Answer(200, LINES, lines[1]))
    assert normal(Answer(200, LINES, lines[0])) != normal(Answer(200, LINES, lines[0].replace(b"6", b"7")))
    assert normal(Answer(200, EVENTS, named())) == normal(Answer(200, EVENTS, named((0, {"id": "b"}))))
    last = {"response": response(output=[])}
    assert normal(Answer(200, EVENTS, named())) != normal(Answer(200, EVENTS, named((3, last))))
    assert normal(Answer(200, TEXT, b"a")) != normal(Answer(400, TEXT, b"a"))


# ---- all of it, against a server that breaks one demand -------------------------------------------------------------


class Fake(BaseHTTPRequestHandler):
    """Answers everything alike, in the way of this project's server; ``fault`` says what it does wrong."""

    protocol_version = "HTTP/1.1"
    fault = ""
    count = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        pid = os.getppid() if self.fault == "restart" and Fake.count > 60 else os.getpid()
        used = 3 if self.fault == "pages" and Fake.count > 60 else 0
        self.reply(200, {"pid": pid, "running": 0, "waiting": 0, "pages_used": used})

    def do_POST(self) -> None:
        with self.lock:
            Fake.count += 1
            nth = Fake.count > 60 and Fake.count % 10 == 0
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = 8 in (body.get(name) for name in LIMITS)
        if self.fault == "silence" and Fake.count > 60:
            time.sleep(0.5)
        elif nth and not good and self.fault == "status":
            self.reply(500, {"error": {"message": "oh"}})
        elif nth and not good and self.fault == "refusal":
            self.reply(503, {"error": {"message": "busy"}}, {"Retry-After": "1"})
        elif nth and not good and self.fault == "whole":
            self.reply(200, {"error": {"message": "oh"}})
        else:
            wrong = Fake.count > 60 and self.fault == ("good" if good else "same")
            self.reply(
                200, {"prompt": "<s> text"} if "tokens" in body else {"text": f"text {Fake.count}" if wrong else "text"}
            )

    def reply(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake(fault: str = "") -> Iterator[Target]:
    Fake.fault, Fake.count = fault, 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that are gone
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Target.of(f"http://127.0.0.1:{server.server_port}/predictions/m")
        server.shutdown()


class Plain:
    """In place of the generator: requests that the fake understands, every other one the one before it again."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def shot(self, index: int) -> Shot:
        first = index - index % 2
        data = message(self.target, self.target.path, json.dumps({"prompt": str(first)}).encode())
        return Shot(index, "right", "native", data, served=True, same=True, of=first if index % 2 else None)


@pytest.mark.parametrize(
    ("fault", "demand"),
    [
        ("", None),
        ("refusal", None),
        ("status", STATUS),
        ("whole", WHOLE),
        ("same", SAME),
        ("good", "no wrong byte for the good client"),
        ("pages", "no page in use at the end"),
        ("restart", "the same worker throughout"),
    ],
)
def test_a_server_that_breaks_a_demand_is_caught(
    fault: str, demand: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzzing.worker.REST_S", 0.5)
    monkeypatch.setattr("fuzzing.good.AGAIN_S", 0.0)
    with fake(fault) as target:
        campaign = Campaign(target, 1, 300)
        campaign.generator = Plain(target)  # type: ignore[assignment]
        asyncio.run(campaign.run())
    found = report.demands(campaign)
    caught = {d.name for d in found if d.held is False and "latency" not in d.name}  # how fast this machine is
    assert demand in caught if demand else not caught
    assert caught <= {demand, SAME}  # an answer that is wrong now and then differs from the right one before
    assert campaign.sent == 300
    assert next(d.held for d in found if d.name.startswith("memory")) is None  # too short to tell
    assert report.exit_status(found) == (1 if demand else 3) or any(d.held is False for d in found)
    shown = report.failures(campaign, "again")
    assert bool(shown) == bool(campaign.problems or campaign.good.problems)
    assert "BROKEN" in report.table(campaign) if demand else True
    json.dumps(report.as_json(campaign))


def test_a_server_that_stops_answering_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("client", "campaign"):
        monkeypatch.setattr(f"fuzzing.{module}.TIMEOUT_S", 0.2)
    monkeypatch.setattr("fuzzing.worker.REST_S", 0.5)
    monkeypatch.setattr("fuzzing.good.AGAIN_S", 0.0)
    with fake("silence") as target:
        campaign = Campaign(target, 1, 3000)
        campaign.generator = Plain(target)  # type: ignore[assignment]
        asyncio.run(campaign.run())
    assert campaign.ended_early == "8 requests had no answer within 0 s"
    assert campaign.sent < 300


@pytest.mark.parametrize("text", ["text", "te"])
def test_tokens_that_do_not_make_their_text_again_are_caught(text: str) -> None:
    told = Answer(200, JSON, b'{"count": 1, "tokens": [5], "token_strs": null}')
    with fake() as target:  # which answers {"prompt": "<s> text"} to whoever asks for the text of tokens
        for route, served in (("tokenize", True), ("tokenize", False), ("native", True)):
            data = message(target, target.path, json.dumps({"prompt": text}).encode())
            what = asyncio.run(lost(target, Shot(0, "right", route, data, served=served), told))
            assert bool(what) == (text == "te" and route == "tokenize" and served)


def test_slow_and_vanishing_clients() -> None:
    with fake() as target:
        body = json.dumps({"prompt": "a"}).encode()
        whole = message(target, target.path, body)
        slow = Shot(0, "slow", "native", whole, cuts=(5, 30, len(whole) - 1), pause_s=0.05)
        answer = asyncio.run(fire(target.host, target.port, slow))
        assert (answer.status, json.loads(answer.body)) == (200, {"text": "text"})
        assert answer.took_s > 0.15
        gone = asyncio.run(
            fire(target.host, target.port, Shot(0, "hang_up", "native", whole[:20], hang_up="sent", lame=True))
        )
        assert gone.gone
        first = asyncio.run(
            fire(target.host, target.port, Shot(0, "hang_up", "native", whole, hang_up="first", lame=True))
        )
        assert first.gone
        waits = Shot(0, "http", "native", message(target, target.path, body, length="500"), lame=True)
        assert asyncio.run(fire(target.host, target.port, waits)).gone
    refused = asyncio.run(fire(target.host, target.port, slow))
    assert refused.fault.startswith("cannot connect")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080/predictions/m", "http://h:1/", "http://h:1/predictions/m/1.0", "https://h/predictions/m"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        Target.of(url)
