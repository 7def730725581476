"""Many clients in waves against one served model: every answer checked, the worker's memory watched.

    python benchmarks/soak.py --url http://127.0.0.1:8080/predictions/gpt-fast --checkpoint DIR \
        [--clients 500] [--minutes 5] [--wave-s 10] [--hang-up 0.1]

Each wave starts ``--clients`` clients at random moments of ``--wave-s`` seconds; each sends one of a pool of requests
whose answers were computed before, by the same checkpoint in this process. A client is *served* (status 200 and the
right text), *refused* (503 with a JSON error that says queue_full), *gone* (it hung up itself) or *wrong*: anything
else, and a reason to fail. The last line is JSON; the exit status is 1 if anything was wrong, if pages stay in use
when all is quiet, or if the worker's memory grew by more than 2 % between the second minute and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.parse
from collections import Counter
from typing import Any

import psutil

POOL = 64
PROMPT_WORDS = [
    "Once", "upon", "a", "time", "there", "was", "little", "girl", "named", "Lily",
    "she", "saw", "big", "red", "ball", "and", "her", "mom", "said",
]  # fmt: skip


def pool_of_requests() -> list[dict[str, Any]]:
    """Short and long, greedy and seeded, streamed and in one piece."""
    draw = random.Random(0)
    pool = []
    for i in range(POOL):
        body: dict[str, Any] = {
            "prompt": " ".join(draw.choice(PROMPT_WORDS) for _ in range(draw.randrange(1, 60))),
            "max_new_tokens": draw.randrange(1, 80),
        }
        if i % 2:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": i}
        if i % 4 == 0:
            body["stream"] = False
        pool.append(body)
    return pool


def expected_texts(checkpoint: str, pool: list[dict[str, Any]]) -> list[str]:
    """What each request must be answered, computed one at a time."""
    from gpt_fast import LLM, SamplingParams

    with LLM(checkpoint, dtype="float32", compile=False) as llm:
        found = []
        for body in pool:
            fields = {k: v for k, v in body.items() if k not in ("prompt", "stream")}
            found.append(llm.generate(body["prompt"], SamplingParams(**fields)).text)
        return found


class Soak:
    """The clients and what became of them."""

    def __init__(self, url: str, pool: list[dict[str, Any]], expected: list[str], hang_up: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port, self.path = parts.hostname or "127.0.0.1", parts.port or 80, parts.path
        self.pool, self.expected, self.hang_up = pool, expected, hang_up
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.latencies: list[float] = []

    async def send(self, method: str, path: str, body: bytes, hang_up: bool = False) -> tuple[int, bytes]:
        """One request on its own connection: status and body; status 0 when this client hung up."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            if hang_up:
                return 0, b""
            if "content-length" in headers:
                return status, await reader.readexactly(int(headers["content-length"]))
            text = b""
            while size := int(await reader.readline(), 16):
                text += await reader.readexactly(size)
                await reader.readexactly(2)
            return status, text
        finally:
            writer.transport.abort()

    async def client(self, which: int, delay_s: float, hang_up: bool) -> None:
        """Send request ``which`` after ``delay_s`` and judge the answer."""
        await asyncio.sleep(delay_s)
        body = self.pool[which]
        begin = time.monotonic()
        try:
            status, raw = await asyncio.wait_for(
                self.send("PUT", self.path, json.dumps(body).encode(), hang_up), timeout=120
            )
        except (OSError, ValueError, IndexError, EOFError, asyncio.TimeoutError) as error:
            self.wrong(which, f"{type(error).__name__}: {error}")
            return
        if status == 0:
            self.counts["gone"] += 1
        elif status == 503 and b'"queue_full"' in raw:  # TorchServe's own does not say when to come back
            self.counts["refused"] += 1
        elif status != 200:
            self.wrong(which, f"status {status}: {raw[:200]!r}")
        else:
            text = json.loads(raw)["text"] if body.get("stream") is False else raw.decode()
            if text != self.expected[which]:
                self.wrong(which, f"another text: {text[:100]!r}")
                return
            self.counts["served"] += 1
            self.latencies.append(time.monotonic() - begin)

    def wrong(self, which: int, what: str) -> None:
        """Note what must not happen."""
        self.counts["wrong"] += 1
        self.problems.append(f"request {which}: {what}")

    async def health(self) -> dict[str, Any]:
        """The server's own word on its state."""
        return dict(json.loads((await self.send("GET", f"{self.path}/1.0/health", b""))[1]))


async def watch(process: psutil.Process, samples: list[tuple[float, int]], begin: float) -> None:
    """Sample the worker's resident memory every half second."""
    while True:
        samples.append((time.monotonic() - begin, process.memory_info().rss))
        await asyncio.sleep(0.5)


async def run(soak: Soak, clients: int, minutes: float, wave_s: float) -> dict[str, Any]:
    """Waves until the time is up; then rest, and the verdict."""
    draw = random.Random(1)
    process = psutil.Process((await soak.health())["pid"])
    samples: list[tuple[float, int]] = []
    begin = time.monotonic()
    watcher = asyncio.create_task(watch(process, samples, begin))
    num_waves = 0
    while time.monotonic() - begin < minutes * 60:
        num_waves += 1
        await asyncio.gather(
            *(
                soak.client(draw.randrange(POOL), draw.random() * wave_s, draw.random() < soak.hang_up)
                for _ in range(clients)
            )
        )
        if sys.stderr.isatty():
            print(f"\r{time.monotonic() - begin:5.0f} s  {dict(soak.counts)}", end="", file=sys.stderr)
    lasted = time.monotonic() - begin
    watcher.cancel()
    for _ in range(100):
        status = await soak.health()
        if not status["running"] and not status["waiting"] and not status["pages_used"]:
            break
        await asyncio.sleep(0.2)
    second = [rss for at, rss in samples if 60 <= at < 120]
    last = [rss for at, rss in samples if at >= lasted - 60]
    growth = statistics.median(last) / statistics.median(second) - 1 if second and last else 0.0
    return {
        "clients": sum(soak.counts.values()),
        "waves": num_waves,
        "lasted_s": round(lasted, 1),
        **{name: soak.counts[name] for name in ("served", "refused", "gone", "wrong")},
        "median_latency_s": round(statistics.median(soak.latencies), 3) if soak.latencies else None,
        "memory_second_minute_mb": round(statistics.median(second) / 2**20, 1) if second else None,
        "memory_last_minute_mb": round(statistics.median(last) / 2**20, 1) if last else None,
        "memory_growth": round(growth, 4),
        "pages_used_when_idle": status["pages_used"],
        "worker_restarted": status["pid"] != process.pid,
    }


def main() -> int:
    """Run it; prints the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", required=True, help="what the server serves, for the right answers")
    parser.add_argument("--clients", type=int, default=500, help="of each wave")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--wave-s", type=float, default=10.0, help="seconds over which a wave starts")
    parser.add_argument("--hang-up", type=float, default=0.1, help="share of clients that hang up after the headers")
    arguments = parser.parse_args()
    pool = pool_of_requests()
    soak = Soak(arguments.url, pool, expected_texts(arguments.checkpoint, pool), arguments.hang_up)
    verdict = asyncio.run(run(soak, arguments.clients, arguments.minutes, arguments.wave_s))
    for problem in soak.problems[:20]:
        print(problem, file=sys.stderr)
    print(json.dumps(verdict))
    bad = verdict["wrong"] or verdict["pages_used_when_idle"] or verdict["worker_restarted"]
    return 1 if bad or verdict["memory_growth"] > 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
