"""Sends the requests of one load level and keeps a record of each.

Open loop: requests arrive at ``request_rate`` whatever the server does, the way independent users come. Closed loop:
``max_concurrency`` requests are always under way, the next one is sent when one ends. Given both, arrivals wait for
a free place, and that wait is not part of any latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from gpt_fast.bench.load import wire
from gpt_fast.bench.load.connection import Endpoint, raise_file_limit
from gpt_fast.bench.load.options import LoadOptions
from gpt_fast.bench.load.prompts import Prompt
from gpt_fast.errors import AnswerError, LoadError, TransferError

_REFRESH_S = 0.5  # of what a terminal shows
_SPARE_FILES = 64  # open files of the process itself


@dataclass
class Record:
    """One request. Times are of time.perf_counter(), ``start`` from before the connection was opened. ``times``: when
    each piece of text was read from the socket. ``num_output``: tokens by the server's usage, else, where the length
    was fixed, ``fixed_output``; None where neither is known."""

    prompt: Prompt
    start: float = 0.0
    hang_up: bool = False
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    outcome: Literal["completed", "failed", "refused", "aborted"] = "failed"
    error: str = ""
    usage: wire.Usage | None = None
    fixed_output: int | None = None
    text: str = ""

    @property
    def num_input(self) -> int | None:
        """Tokens of the prompt, where usage or the prompt itself says."""
        if self.usage is not None:
            return self.usage.prompt_tokens
        return None if isinstance(self.prompt.content, str) else len(self.prompt.content)

    @property
    def num_output(self) -> int | None:
        return self.usage.completion_tokens if self.usage is not None else self.fixed_output


@dataclass
class Level:
    """What happened at one load level. It may be watched while it runs: counts are always up to date."""

    options: LoadOptions
    records: list[Record] = field(default_factory=list)  # in the order they ended
    counts: Counter[str] = field(default_factory=Counter)  # by outcome
    num_pieces: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    begin: float = 0.0  # of time.perf_counter()
    duration_s: float = 0.0
    cpu_s: float = 0.0  # of this process, all threads


async def warm_up(options: LoadOptions, prompt: Prompt) -> None:
    """One request before any that counts: finds a wrong address or a refusal early, and wakes the server. With the
    native protocol and ``ignore_eos`` it asks for an answer with usage, and checks that the tokens that were asked for
    come: the streamed requests, which have no usage, are counted by that. Raises LoadError."""
    fixed = options.protocol == "native" and options.ignore_eos
    record = Record(prompt)
    asked = prompt.max_new_tokens or options.max_new_tokens
    endpoint = Endpoint(options.url, headers=options.headers)
    await _send(Level(options), endpoint, record, options.seed, options.stream and not fixed)
    if record.outcome != "completed":
        verb = "was refused" if record.outcome == "refused" else "failed"
        raise LoadError(f"{options.url}: the first request {verb}: {record.error}")
    if fixed and record.usage is None:
        raise LoadError(f"{options.url}: the answer to a request without streaming has no usage to count tokens by")
    if fixed and record.num_output != asked:
        came = f"{asked} tokens were asked for and {record.num_output} came"
        raise LoadError(f"{options.url}: {came}; prompt and answer together must fit the server's context")


async def run_level(level: Level, prompts: Iterator[Prompt]) -> None:
    """Send the requests of ``level``, wait for all of them, and fill it in."""
    options = level.options
    endpoint = Endpoint(options.url, headers=options.headers, keep_alive=options.keep_alive)
    raise_file_limit(_most_in_flight(options) + _SPARE_FILES)
    tasks: set[asyncio.Task[None]] = set()
    cpu = time.process_time()
    level.begin = time.perf_counter()
    try:
        await _dispatch(level, endpoint, prompts, tasks)
        await asyncio.gather(*tasks)  # raises a mistake of this program; the server's are records
    finally:
        for task in tasks:
            task.cancel()
        endpoint.close()
    level.duration_s = max((r.end for r in level.records), default=level.begin) - level.begin
    level.cpu_s = time.process_time() - cpu


def _most_in_flight(options: LoadOptions) -> int:
    """Requests that are under way together, at most; where rate and duration alone limit them, twice the likely ones
    of the slowest server."""
    if options.max_concurrency is not None:
        return options.max_concurrency
    if options.duration_s is None:
        return options.num_prompts
    return math.ceil(2 * options.request_rate * options.duration_s)


async def _dispatch(
    level: Level, endpoint: Endpoint, prompts: Iterator[Prompt], tasks: set[asyncio.Task[None]]
) -> None:
    """Start each request when it is due and there is room."""
    o = level.options
    rng = random.Random(o.seed)
    room = asyncio.Semaphore(o.max_concurrency or sys.maxsize)

    def ended(task: asyncio.Task[None]) -> None:
        room.release()
        if not task.cancelled() and task.exception() is None:
            tasks.discard(task)

    due, index = 0.0, 0
    while o.duration_s is not None or index < o.num_prompts:
        if not math.isinf(o.request_rate):
            due += rng.gammavariate(o.burstiness, 1 / (o.request_rate * o.burstiness))
            if o.duration_s is not None and due >= o.duration_s:
                return
            # Sleep even when late: arrivals must not keep the answers from being read.
            await asyncio.sleep(max(0.0, level.begin + due - time.perf_counter()))
        await room.acquire()
        if o.duration_s is not None and time.perf_counter() - level.begin >= o.duration_s:
            return
        record = Record(next(prompts), hang_up=rng.random() < o.abort_fraction)
        task = asyncio.create_task(_send(level, endpoint, record, o.seed + index, o.stream))
        tasks.add(task)
        task.add_done_callback(ended)
        index += 1


async def _send(level: Level, endpoint: Endpoint, record: Record, seed: int, stream: bool) -> None:
    """Send one request, fill in its record and count it; whatever goes wrong becomes its outcome and error."""
    o = level.options
    answer = wire.reader(o.protocol, stream)
    refusal: list[bytes] = []

    def receive(status: int, pieces: list[bytes], now: float) -> bool:
        if status != 200:
            refusal.extend(pieces)
            return True
        num_texts = sum([answer.feed(piece) for piece in pieces])
        record.times += [now] * num_texts
        level.num_pieces += num_texts
        return not (record.hang_up and record.times)

    request = endpoint.request(wire.request_body(o, record.prompt, seed, stream))
    level.in_flight += 1
    level.peak_in_flight = max(level.peak_in_flight, level.in_flight)
    record.start = time.perf_counter()
    try:
        response = await asyncio.wait_for(endpoint.post(request, receive), o.timeout_s)
        record.end = record.times[-1] if response is None else response.read_at
        if response is None:
            record.outcome = "aborted"
        elif response.status != 200:
            record.outcome = "refused" if response.status in wire.REFUSED else "failed"
            record.error = _status_line(response.status, b"".join(refusal))
        else:
            answer.finish()
            record.outcome = "completed"
            record.usage, record.text = answer.usage, answer.text
            record.fixed_output = (record.prompt.max_new_tokens or o.max_new_tokens) if o.ignore_eos else None
    except (asyncio.TimeoutError, TransferError, AnswerError) as error:
        record.end = time.perf_counter()
        record.error = "timeout" if isinstance(error, asyncio.TimeoutError) else str(error)
    finally:
        level.in_flight -= 1
    level.records.append(record)
    level.counts[record.outcome] += 1


def _status_line(status: int, body: bytes) -> str:
    message = body[:200].decode("utf-8", "replace").strip()
    with contextlib.suppress(ValueError):
        message = wire.error_message(json.loads(body)) or message
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


async def run_level_shown(level: Level, prompts: Iterator[Prompt], name: str) -> None:
    """``run_level`` with a bar named ``name`` where stderr is a terminal; elsewhere nothing is written."""
    bar = asyncio.create_task(_show(level, name)) if sys.stderr.isatty() else None
    try:
        await run_level(level, prompts)
    finally:
        if bar is not None:
            bar.cancel()
            await asyncio.wait([bar])


async def _show(level: Level, name: str) -> None:
    """Redraws twice a second, whatever the load: per token it would cost more than reading the token does."""
    from tqdm import tqdm

    total = None if level.options.duration_s is not None else level.options.num_prompts
    with tqdm(total=total, desc=name, unit="req", file=sys.stderr) as bar:

        def draw(*running: str) -> None:
            ended = [f"{level.counts[o]} {o}" for o in ("failed", "refused", "aborted") if level.counts[o]]
            bar.set_postfix_str(", ".join([*running, *ended]), refresh=False)
            bar.update(len(level.records) - bar.n)

        try:
            while True:
                seen = level.num_pieces
                await asyncio.sleep(_REFRESH_S)
                draw(f"{level.in_flight} running", f"{(level.num_pieces - seen) / _REFRESH_S:.0f} tok/s")
        finally:
            draw()
