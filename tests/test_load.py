"""The load client against a server whose every byte and pause is known: times, counts and failures are the truth."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_http import END, HEAD, Answer, Exchange, FakeServer, chunk, event, whole

from gpt_fast import cli
from gpt_fast.bench import plots
from gpt_fast.bench.load import client
from gpt_fast.bench.load.client import Level, Record, run_level, warm_up
from gpt_fast.bench.load.http import ResponseParser
from gpt_fast.bench.load.metrics import describe, parse_goodput, summarize
from gpt_fast.bench.load.options import LoadOptions
from gpt_fast.bench.load.prompts import Prompt, read_prompts, synthetic_prompts
from gpt_fast.bench.load.wire import EventReader, NativeReader, Usage
from gpt_fast.errors import AnswerError, LoadError, MissingPackageError, TransferError

ROOT = Path(__file__).resolve().parent.parent
HANG_S = 120.0  # whoever waits longer waits for ever


def run(server: FakeServer, prompts: Sequence[Prompt] = (Prompt("a"),), **options: Any) -> Level:
    defaults = {"num_prompts": 1, "timeout_s": HANG_S}
    level = Level(LoadOptions(server.url, **(defaults | options)))
    asyncio.run(run_level(level, itertools.cycle(prompts)))
    return level


def story(num_pieces: int, first_s: float = 0.0, gap_s: float = 0.0) -> Answer:
    """Streams ``num_pieces`` chunks, the first after ``first_s``, the others ``gap_s`` apart."""

    async def answer(exchange: Exchange) -> None:
        await asyncio.sleep(first_s)
        await exchange.send(HEAD, chunk("w"))
        for _ in range(num_pieces - 1):
            await asyncio.sleep(gap_s)
            await exchange.send(chunk("w"))
        await exchange.send(END)

    return answer


class Clock:
    """The client's clock. It stands still but for what a test's server, or the client's own sleep, lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.num_looks = 0
        stands = SimpleNamespace(perf_counter=self.look, process_time=time.process_time)
        for module in ("client", "connection"):
            monkeypatch.setattr(f"gpt_fast.bench.load.{module}.time", stands)
        monkeypatch.setattr(
            "gpt_fast.bench.load.client.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": self.sleep})
        )

    def look(self) -> float:
        self.num_looks += 1
        return self.now

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)  # who was started before looks at the clock first
        self.now += delay_s

    def story(self, num_pieces: int, first_s: float = 0.0, gap_s: float = 0.0) -> Answer:
        """Like ``story`` in this clock's time: the next piece is sent when the client has read the one before."""

        async def answer(exchange: Exchange) -> None:
            for i in range(num_pieces):
                self.now += gap_s if i else first_s
                seen = self.num_looks
                await exchange.send(b"" if i else HEAD, chunk("w"))
                await until(lambda seen=seen: self.num_looks > seen)
            await exchange.send(END)

        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(HANG_S / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")


# Reading HTTP.

CHUNKED = HEAD + chunk("one ") + b"4;name=value\r\ntwo \r\n" + chunk("Three") + b"0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_pieces_are_chunks_however_the_bytes_arrive(step: int) -> None:
    parser = ResponseParser()
    pieces = []
    for at in range(0, len(CHUNKED), step):
        assert not parser.complete
        pieces += parser.feed(CHUNKED[at : at + step])
    assert pieces == [b"one ", b"two ", b"Three"]
    assert parser.complete
    assert parser.reusable
    assert parser.status == 200


def test_other_ways_to_delimit_a_body() -> None:
    known = ResponseParser()
    assert (
        b"".join(known.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + whole(404, "gone", "Connection: close\r\n"))) == b"gone"
    )
    assert (known.status, known.complete, known.reusable) == (404, True, False)
    until_close = ResponseParser()
    assert until_close.feed(b"HTTP/1.1 200 OK\r\n\r\nsome") == [b"some"]
    assert until_close.feed(b" more") == [b" more"]
    assert not until_close.complete
    until_close.eof()
    assert until_close.complete
    assert not until_close.reusable


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", "more bytes"),
        (HEAD + b"zz\r\n", "malformed chunk"),
        (HEAD + b"-1\r\n", "malformed chunk"),
        (HEAD + b"0x1\r\na\r\n", "malformed chunk"),
        (HEAD + b"1\r\nabc", "malformed chunk"),
        (HEAD + b"\r\n", "malformed chunk"),
        (HEAD + b"1" * 2000, "malformed chunk"),
        (HEAD + END + b"x", "more bytes"),
    ],
)
def test_what_is_not_http_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(TransferError, match=words):
        ResponseParser().feed(data)


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 2", HEAD, HEAD + chunk("a"), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na"]
)
def test_an_early_end_is_an_error(sent: bytes) -> None:
    parser = ResponseParser()
    parser.feed(sent)
    with pytest.raises(TransferError, match="closed"):
        parser.eof()


def test_events_are_put_together_from_pieces() -> None:
    reader = EventReader()
    text = {"choices": [{"delta": {"content": "é"}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    raw = f": hello\n\ndata: {json.dumps({'choices': [{'delta': {'role': 'assistant'}}]})}\r\n\r\n"
    raw += f"data: {json.dumps(text, ensure_ascii=False)}\n\ndata:{json.dumps(text)}\n\ndata: {json.dumps(usage)}\n\n"
    raw += "data: [DONE]\n\n"
    data = raw.encode()
    counts = [reader.feed(data[i : i + 5]) for i in range(0, len(data), 5)]
    reader.finish()
    assert sum(counts) == 2
    assert reader.text == "éé"
    assert reader.usage == Usage(3, 2)


@pytest.mark.parametrize(
    "data", [b"data: {\n\n", b"data: 3\n\n", b'data: {"error": {"message": "full"}}\n\n', b'data: {"choices": []}\n\n']
)
def test_broken_event_streams_are_failures(data: bytes) -> None:
    def read() -> None:
        reader = EventReader()
        reader.feed(data)
        reader.finish()

    with pytest.raises(AnswerError):
        read()


def test_an_error_at_the_end_of_plain_text_is_told_from_text() -> None:
    failed = NativeReader()
    failed.feed(b"Once upon")
    failed.feed(
        b'\n{"error": {"message": "the request failed", "type": "server_error", "param": null, "code": null}}\n'
    )
    with pytest.raises(AnswerError, match="the request failed"):
        failed.finish()
    told = NativeReader()
    told.feed(b'This is an error:\n{"error": "a string in a story about JSON"}')
    told.finish()


# Prompts.


def test_prompts_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "x", "max_new_tokens": 7}\n\n{"turns": ["y", "z"]}\n{"prompt": [5, 6]}\n'
    )
    (tmp_path / "b.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}]))
    (tmp_path / "c.txt").write_text("one\ntwo\n")
    (tmp_path / "d.txt").write_text("one\ntwo\n\nthree\n")
    assert read_prompts(tmp_path / "a.jsonl") == [Prompt("x", 7), Prompt("y"), Prompt([5, 6])]
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\u2028y\u2029\u0085"}\n', encoding="utf-8")
    assert read_prompts(tmp_path / "a.jsonl") == [Prompt("x\u2028y\u2029\u0085")]
    assert read_prompts(tmp_path / "b.json") == [Prompt("hi")]
    assert [p.content for p in read_prompts(tmp_path / "c.txt")] == ["one", "two"]
    assert [p.content for p in read_prompts(tmp_path / "d.txt")] == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "a.jsonl:2 has no prompt"),
        ("a.jsonl", "{\n", "a.jsonl:1 is not JSON"),
        ("a.jsonl", '{"prompt": "x", "max_new_tokens": 0}\n', "max_new_tokens"),
        ("a.jsonl", "\n", "no prompts"),
        ("a.csv", "x", "must end in"),
        ("a.json", "{}", "not a JSON list"),
    ],
)
def test_a_bad_dataset_is_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_prompts(tmp_path / name)


def test_synthetic_prompts_repeat_with_their_seed() -> None:
    def draw(seed: int) -> list[Prompt]:
        prompts = synthetic_prompts(16, 100, seed)
        return [next(prompts) for _ in range(5)]

    assert draw(1) == draw(1) != draw(2)
    ids = [i for p in draw(1) for i in p.content]
    assert len(ids) == 80
    assert all(isinstance(i, int) and 3 <= i < 100 for i in ids)
    assert len(str(next(synthetic_prompts(4, 100, 0, as_text=True)).content).split()) == 4


# Measuring.


def test_times_are_those_of_the_server(clock: Clock) -> None:
    with FakeServer(clock.story(5, first_s=0.1, gap_s=0.03)) as server:
        level = run(server, num_prompts=4, max_concurrency=1, ignore_eos=True, max_new_tokens=5)
    assert level.counts == {"completed": 4}
    for record in level.records:
        assert record.text == "wwwww"
        assert len(record.times) == 5
        assert record.times[0] - record.start == pytest.approx(0.1)
        assert record.end - record.start == pytest.approx(0.1 + 4 * 0.03)
    result = summarize(level)
    assert result["mean_ttft_ms"] == pytest.approx(100)
    assert result["mean_itl_ms"] == pytest.approx(30)
    assert result["total_output_tokens"] == 20
    assert result["output_tokens_from"] == "fixed length"
    assert result["duration"] == pytest.approx(4 * 0.22)
    assert result["output_throughput"] == pytest.approx(20 / result["duration"])


def test_nothing_is_read_before_the_server_has_written_it() -> None:
    begin = time.perf_counter()
    with FakeServer(story(4, gap_s=0.01)) as server:
        level = run(server)
    (record,), (exchange,) = level.records, server.exchanges
    lateness = [read - written for read, written in zip(record.times, exchange.writes, strict=False)]
    assert min(lateness) >= 0
    assert begin <= record.start <= exchange.writes[0]
    assert exchange.writes[-1] <= record.end <= time.perf_counter()


@pytest.mark.parametrize(
    ("raw", "outcome", "error"),
    [
        (whole(503, '{"code": 503, "type": "Busy", "message": "queue full"}'), "refused", "HTTP 503: queue full"),
        (whole(429, ""), "refused", "HTTP 429"),
        (whole(400, '{"error": {"message": "prompt is missing"}}'), "failed", "HTTP 400: prompt is missing"),
        (whole(500, "<html>"), "failed", "HTTP 500: <html>"),
        (HEAD + chunk("a"), "failed", "connection closed in the middle of the answer"),
        (HEAD + b"5\r\nab", "failed", "connection closed in the middle of the answer"),
        (HEAD + chunk("a") + b"xx\r\n", "failed", "malformed chunk (Invalid character in chunk size)"),
        (b"", "failed", "connection closed without an answer"),
        (b"+OK ready\r\n", "failed", "not an HTTP answer (Expected HTTP/, RTSP/ or ICE/)"),
        (
            HEAD + chunk("a") + chunk('\n{"error": {"message": "died", "type": "server_error"}}\n') + END,
            "failed",
            "died",
        ),
        (HEAD + chunk("a") + END, "completed", ""),
        (HEAD + END, "completed", ""),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "completed", ""),
    ],
)
def test_outcomes(raw: bytes, outcome: str, error: str) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(raw)
        exchange.writer.close()

    with FakeServer(answer) as server:
        level = run(server, num_prompts=2)
    assert level.counts == {outcome: 2}
    assert [r.error for r in level.records] == [error] * 2
    result = summarize(level)
    assert result[outcome] == 2
    assert result["errors"] == ({error: 2} if error else {})
    assert error in describe(result)


def test_resets_and_timeouts_are_failures() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(HEAD, chunk("a"))
        if exchange.body["prompt"] == "reset":
            exchange.reset()
        else:
            await asyncio.sleep(HANG_S)

    for prompt, error, timeout_s in (("reset", "connection reset", HANG_S), ("hang", "timeout", 0.3)):
        with FakeServer(answer) as server:
            level = run(server, [Prompt(prompt)], timeout_s=timeout_s)
        assert [r.error for r in level.records] == [error]
        assert level.counts == {"failed": 1}


def test_nobody_listening() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        options = LoadOptions(f"http://127.0.0.1:{closed.getsockname()[1]}/", num_prompts=1)
        level = Level(options)
        asyncio.run(run_level(level, itertools.cycle([Prompt("a")])))
        assert level.records[0].error == "connection refused"
        with pytest.raises(LoadError, match="connection refused"):
            asyncio.run(warm_up(options, Prompt("a")))
    assert describe(summarize(level)).count("unknown") > 5  # nothing to compute, and no exception


def test_hanging_up_after_the_first_piece() -> None:
    rng = random.Random(3)
    expected = sum(rng.random() < 0.5 for _ in range(40))
    assert 0 < expected < 40

    async def answer(exchange: Exchange) -> None:
        await exchange.send(HEAD, chunk("w"))
        await until(lambda: server.num_hung_up == expected)
        await exchange.send(*[chunk("w")] * 99, END)

    with FakeServer(answer) as server:
        level = run(server, num_prompts=40, abort_fraction=0.5, seed=3)
        assert level.counts == {"aborted": expected, "completed": 40 - expected}
        assert all(len(r.times) == (1 if r.outcome == "aborted" else 100) for r in level.records)
        assert server.num_hung_up == expected
    result = summarize(level)
    assert result["total_output_tokens"] == 100 * (40 - expected)
    assert result["aborted"] == expected


def test_concurrency_is_kept_and_used() -> None:
    async def answer(exchange: Exchange) -> None:
        await until(lambda: server.peak_in_flight >= 4)
        await story(2, gap_s=0.05)(exchange)

    with FakeServer(answer) as server:
        level = run(server, num_prompts=20, max_concurrency=4)
    assert level.counts == {"completed": 20}
    events = sorted([(r.start, 1) for r in level.records] + [(r.end, -1) for r in level.records])
    running = [sum(change for _, change in events[: i + 1]) for i in range(len(events))]
    assert max(running) == level.peak_in_flight == 4
    assert server.peak_in_flight >= 4  # it may learn of an end after the next beginning
    assert level.duration_s >= 5 * 0.05 * 0.99  # of sleeping alone


def test_arrivals_are_drawn_from_the_seed(clock: Clock) -> None:
    with FakeServer(story(1)) as server:
        level = run(server, num_prompts=30, request_rate=60, burstiness=0.7, seed=9)
    rng = random.Random(9)
    due = 0.0
    for record in sorted(level.records, key=lambda r: r.start):
        due += rng.gammavariate(0.7, 1 / (60 * 0.7))
        rng.random()  # whether to hang up
        assert record.start == pytest.approx(level.begin + due)
    assert 0.2 < due < 1.5  # 30 arrivals at 60 a second


def test_duration_ends_the_sending_not_the_answers(clock: Clock) -> None:
    with FakeServer(clock.story(2, gap_s=0.1)) as server:
        level = run(server, num_prompts=1, duration_s=0.35, max_concurrency=1)
    assert level.counts == {"completed": 4}
    assert [r.start - level.begin for r in level.records] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert level.duration_s == pytest.approx(0.4)


def test_connections_are_reused_only_when_asked_and_replaced_when_stale() -> None:
    with FakeServer(story(2), close_after=False) as server:
        run(server, num_prompts=6, max_concurrency=1, keep_alive=True)
        assert server.num_connections == 1
        assert server.exchanges[0].headers["connection"] == "keep-alive"
        level = run(server, num_prompts=6, max_concurrency=1)
        assert server.num_connections == 7
        assert server.exchanges[-1].headers["connection"] == "close"
    with FakeServer(story(2), close_after=True) as server:
        level = run(server, num_prompts=6, max_concurrency=1, keep_alive=True)
        assert level.counts == {"completed": 6}
        assert server.num_connections == 6


def test_native_requests_carry_the_options() -> None:
    with FakeServer(story(1)) as server:
        run(
            server,
            [Prompt([7, 8], 3)],
            temperature=0.5,
            ignore_eos=True,
            seed=11,
            headers={"Authorization": "Bearer k"},
        )
    (exchange,) = server.exchanges
    assert exchange.body == {
        "prompt": [7, 8],
        "max_new_tokens": 3,
        "stream": True,
        "temperature": 0.5,
        "seed": 11,
        "ignore_eos": True,
    }
    assert exchange.headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("protocol", ["openai-completions", "openai-chat"])
def test_openai_streams_are_counted_by_usage(protocol: str) -> None:
    chat = protocol == "openai-chat"

    async def answer(exchange: Exchange) -> None:
        assert exchange.body["stream_options"] == {"include_usage": True}
        assert ("messages" in exchange.body) == chat
        await exchange.send(HEAD)
        for text in ("", "a", "bc", "d"):  # five tokens, three pieces
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            await exchange.send(event({"choices": [choice]}))
            await asyncio.sleep(0.01)
        await exchange.send(event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}))
        await exchange.send(event("[DONE]"), END)

    with FakeServer(answer) as server:
        level = run(server, num_prompts=3, protocol=protocol)
    assert level.counts == {"completed": 3}
    assert {r.text for r in level.records} == {"abcd"}
    result = summarize(level)
    assert result["total_output_tokens"] == 15
    assert result["total_input_tokens"] == 27
    assert result["output_tokens_from"] == "usage"
    assert result["tokens_per_piece"] == pytest.approx(5 / 3)


def test_the_first_request_checks_that_a_fixed_length_comes() -> None:
    async def answer(exchange: Exchange) -> None:
        assert exchange.body["stream"] is False
        usage = {"prompt_tokens": 2, "completion_tokens": 10}
        await exchange.send(whole(200, json.dumps({"text": "x", "usage": usage})))

    with FakeServer(answer) as server:
        asyncio.run(warm_up(LoadOptions(server.url, ignore_eos=True, max_new_tokens=10), Prompt("a")))
        with pytest.raises(LoadError, match="20 tokens were asked for and 10 came"):
            asyncio.run(warm_up(LoadOptions(server.url, ignore_eos=True, max_new_tokens=20), Prompt("a")))
        level = run(server, stream=False)
    assert level.records[0].usage == Usage(2, 10)
    assert summarize(level)["mean_ttft_ms"] is None


def test_five_hundred_connections_at_once() -> None:
    async def answer(exchange: Exchange) -> None:
        await until(lambda: len(server.exchanges) == 500)
        await story(5)(exchange)

    with FakeServer(answer) as server:
        level = run(server, num_prompts=500)
    assert level.counts == {"completed": 500}
    assert level.num_pieces == 2500
    assert level.peak_in_flight == 500


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_prompts": 3}, 3),
        ({"num_prompts": 3, "max_concurrency": 2}, 2),
        ({"duration_s": 0.1, "request_rate": 200.0}, 40),  # 20 are likely
        ({"duration_s": 0.1, "request_rate": 200.0, "max_concurrency": 2}, 2),
    ],
)
def test_files_may_be_open_for_all_requests_under_way(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(client, "raise_file_limit", asked.append)
    with FakeServer(story(1)) as server:
        run(server, **options)
    assert asked == [most + client._SPARE_FILES]


# Numbers.


def known_level() -> Level:
    """Two requests, every time given: 3 pieces of 5 tokens in all, and 2 pieces of 2."""
    level = Level(
        LoadOptions("http://x/", max_concurrency=2), duration_s=2.0, peak_in_flight=2, cpu_s=0.1, num_pieces=5
    )
    first = Record(Prompt([1, 2, 3]), 10.0, end=11.0, times=[10.2, 10.5, 11.0], outcome="completed", fixed_output=5)
    second = Record(Prompt([1]), 10.0, end=10.7, times=[10.4, 10.5], outcome="completed", fixed_output=2)
    broken = Record(Prompt([1]), 10.0, end=12.0, times=[10.1], outcome="failed", error="timeout")
    level.records = [first, second, broken]
    level.counts.update(r.outcome for r in level.records)
    return level


def test_every_number_of_a_known_level() -> None:
    result = summarize(known_level(), percentiles=(50, 90, 99.5), goodput={"ttft": 300, "e2el": 1500})
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 4,
        "total_output_tokens": 7,
        "request_throughput": 1.0,
        "output_throughput": 3.5,
        "total_token_throughput": 5.5,
        "tokens_per_piece": 7 / 5,
        "request_goodput": 0.5,
        "client_cpu_share": 0.05,
        "client_cpu_us_per_piece": 20_000.0,
        "mean_ttft_ms": 300.0,
        "std_ttft_ms": 100.0,
        "mean_tpot_ms": (200.0 + 300.0) / 2,  # 0.8 s over 4 tokens, 0.3 s over 1
        "mean_itl_ms": (300.0 + 500.0 + 100.0) / 3,
        "median_itl_ms": 300.0,
        "mean_e2el_ms": 850.0,
        "p90_e2el_ms": 970.0,
        "p99.5_ttft_ms": 399.0,
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(value), name
    json.dumps(result, allow_nan=False)
    assert "P99.5 TTFT (ms):" in describe(result)


def test_tokens_of_unknown_answers() -> None:
    level = known_level()
    level.records[0].fixed_output = None
    level.records[0].text = "five words are in here"
    by_pieces, by_tokenizer = summarize(level), summarize(level, count_tokens=lambda text: len(text.split()))
    assert (by_pieces["total_output_tokens"], by_pieces["output_tokens_from"]) == (3 + 2, "pieces")
    assert (by_tokenizer["total_output_tokens"], by_tokenizer["output_tokens_from"]) == (5 + 2, "tokenizer")


@pytest.mark.parametrize("words", ["ttft", "itl:5", "ttft:fast", "ttft:0", "ttft:nan"])
def test_goodput_words_are_checked(words: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput([words])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:8080"}, "form http"),
        ({"protocol": "grpc"}, "protocol"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": math.nan}, "burstiness"),
        ({"abort_fraction": 1.5}, "abort_fraction"),
        ({"abort_fraction": 0.5, "stream": False}, "stream"),
        ({"duration_s": 5.0}, "duration"),
        ({"duration_s": math.inf, "request_rate": 1.0}, "duration_s must be finite"),
        ({"burstiness": math.inf, "request_rate": 1.0}, "burstiness must be finite"),
        ({"headers": {"A": "b\r\nC: d"}}, "header 'A' must be one line"),
        ({"headers": {"A": "\u6f22"}}, "header 'A' must be one line"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"url": "http://127.0.0.1:1/"} | options
    with pytest.raises(ValueError, match=words):
        asyncio.run(run_level(Level(LoadOptions(**given)), itertools.cycle([Prompt("a")])))


def test_the_client_needs_no_torch() -> None:
    modules = "gpt_fast.bench.load.metrics, gpt_fast.bench.load.client, gpt_fast.bench.plots"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_missing_httptools_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    for name in [name for name in sys.modules if name.startswith("gpt_fast.bench.load")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["bench", "--url", "http://127.0.0.1:1/"]) == 1
    assert "pip install 'gpt-fast-serve[bench]'" in capsys.readouterr().err


# The command.


async def scripted(exchange: Exchange) -> None:
    """As this project's server answers: a stream, or JSON with usage."""
    n = exchange.body["max_new_tokens"]
    if exchange.body["stream"]:
        await story(n)(exchange)
    else:
        usage = {"prompt_tokens": len(exchange.body["prompt"]), "completion_tokens": n}
        await exchange.send(whole(200, json.dumps({"text": "w" * n, "usage": usage})))


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    def call(url: str, *arguments: str) -> dict[str, Any]:
        assert cli.main(["bench", "--url", url, *arguments, "--json"]) == 0
        last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return last

    return call


def test_bench_sweep_json_output_and_plot(bench: Bench, tmp_path: Path) -> None:
    drawn = ["--plot", str(tmp_path / "load.png")] if _has_matplotlib() else []
    out = tmp_path / "out.json"
    with FakeServer(scripted) as server:
        found = bench(
            server.url,
            *("--sweep", "1,2,4", "--num-prompts", "8", "--random-input-len", "5", "--random-output-len", "6"),
            *("--goodput", "ttft:600000", "--percentiles", "90", "--output", str(out), *drawn),
        )
        assert {len(e.body["prompt"]) for e in server.exchanges} == {5}
        assert len({str(e.body["prompt"]) for e in server.exchanges}) == 1 + 3 * 8  # nothing for a prefix cache to find
    assert [r["max_concurrency"] for r in found["results"]] == [1, 2, 4]
    assert [r["max_concurrent_requests"] for r in found["results"]] == [1, 2, 4]
    assert all(r["total_output_tokens"] == 48 and r["total_input_tokens"] == 40 for r in found["results"])
    assert all(r["p90_ttft_ms"] is not None and r["request_goodput"] > 0 for r in found["results"])
    assert json.loads(out.read_text()) == found
    if drawn:
        assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_bench_with_a_dataset(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\nsecond\n")
    with FakeServer(scripted) as server:
        found = bench(server.url, "--dataset", str(tmp_path / "p.txt"), "--num-prompts", "4", "--max-new-tokens", "3")
        asked = [e.body["prompt"] for e in server.exchanges]
        assert "ignore_eos" not in server.exchanges[-1].body
    assert sorted(asked) == ["first", "first", "first", "second", "second"]  # one of them to warm up
    with FakeServer(scripted) as server:  # of a fixed length, taken for granted: the longest prompt is tried first
        bench(server.url, "--dataset", str(tmp_path / "p.txt"), "--num-prompts", "1", "--ignore-eos")
        assert [e.body["prompt"] for e in server.exchanges] == ["second", "first"]
    (result,) = found["results"]
    assert result["output_tokens_from"] == "pieces"
    assert result["total_input_tokens"] is None
    assert found["request_rate"] is None


def test_bench_fails_when_nothing_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(whole(503, "full"))

    with FakeServer(answer) as server:
        assert cli.main(["bench", "--url", server.url]) == 1
    assert "was refused: HTTP 503: full" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with FakeServer(scripted) as server:
        assert cli.main(["bench", "--url", server.url, "--plot", "x.png"]) == 1
        assert not server.exchanges
    assert "gpt-fast-serve[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--batch-sizes", "1"], 2, "--batch-sizes means nothing with --url"),
        (["--plot", "x.bmp"], 1, ".png"),
        (["--sweep", "1,2", "--max-concurrency", "3"], 1, "exclude each other"),
        (["--sweep", "500"], 1, "never reaches"),
        (["--random-output-len", "3", "--ignore-eos"], 1, "exclude each other"),
        (["--header", "novalue"], 1, "NAME:VALUE"),
        (["--output", "/nowhere/x.json"], 1, "/nowhere"),
        (["--percentiles", "0"], 1, "percentiles"),
    ],
)
def test_mistakes_are_told(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "http://127.0.0.1:1/", *arguments]) == status
    assert words in capsys.readouterr().err


@pytest.mark.skipif("not _has_matplotlib()")
@pytest.mark.parametrize("suffix", plots.FORMATS)
def test_a_plot_of_one_level_without_times(suffix: str, tmp_path: Path) -> None:
    level = known_level()
    level.records = []
    plots.plot_load([summarize(level)], tmp_path / f"x{suffix}")
    assert (tmp_path / f"x{suffix}").stat().st_size > 1000


def _has_matplotlib() -> bool:
    try:
        plots.check("x.png")
    except MissingPackageError:
        return False
    return True
