"""The good client: a few fixed requests over and over, whose every byte is known before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from fuzzing.client import Answer, fire
from fuzzing.judge import normal
from fuzzing.shot import Shot, Target, message
from fuzzing.values import dump

PAUSE_S = 0.05  # between two requests: the load is not this client's to make
AGAIN_S = 0.5  # after a wrong answer: the worker may be on its way back
NUM_TOKENS = 8
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def requests(target: Target) -> list[Shot]:
    """Greedy and sampled, streamed and not, on every route that generates."""
    prompt = "Once upon a time, there was a little"
    talk = [{"role": "user", "content": "Tell me about the dog."}]
    openai = {"model": target.model, "max_tokens": NUM_TOKENS}
    asked = {
        target.path: {"prompt": prompt, "max_new_tokens": NUM_TOKENS},
        f"{target.versioned}/v1/completions": {**openai, "prompt": [prompt, "The cat"], "logprobs": 1},
        f"{target.versioned}/v1/chat/completions": {**openai, "messages": talk},
        f"{target.versioned}/v1/responses": {"model": target.model, "max_output_tokens": NUM_TOKENS, "input": talk},
    }
    return [
        Shot(i, "good", path, message(target, path, dump({**body, **how, "stream": stream})), served=True)
        for i, (path, body, how, stream) in enumerate(
            (path, body, how, stream)
            for path, body in asked.items()
            for how in (GREEDY, SAMPLED)
            for stream in (True, False)
        )
    ]


@dataclass
class GoodClient:
    """Runs in a separate thread, so that the other clients' work does not count as the server's latency."""

    target: Target
    answers: list[str] = field(default_factory=list)  # the right ones, in the order of the requests
    counts: Counter[str] = field(default_factory=Counter)  # right, refused, wrong
    problems: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # seconds, and when it began (perf_counter)
    late_s: float = 0.0  # by how much this client itself was woken too late, at worst: a busy machine, not the server

    def __post_init__(self) -> None:
        self.requests = requests(self.target)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def learn(self) -> None:
        """Take the right answers from the idle server, each twice. Raises RuntimeError if those differ or fail."""
        for shot in self.requests:
            first, second = [await fire(self.target.host, self.target.port, shot) for _ in range(2)]
            if first.status != 200 or normal(first) != normal(second):
                raise RuntimeError(f"{shot.route}: the idle server answered {_told(first)}, then {_told(second)}")
            self.answers.append(normal(first))

    def start(self) -> None:
        """Begin asking."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the request under way, then ask each once more."""
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            await self._ask(turn % len(self.requests))
            turn += 1
            begin = time.perf_counter()
            await asyncio.sleep(PAUSE_S)
            self.late_s = max(self.late_s, time.perf_counter() - begin - PAUSE_S)
        for which in range(len(self.requests)):
            if (await self._ask(which)).fault:
                break  # nobody answers any more

    async def _ask(self, which: int) -> Answer:
        begin = time.perf_counter()
        answer = await fire(self.target.host, self.target.port, self.requests[which])
        if answer.refused:
            self.counts["refused"] += 1
        elif normal(answer) == self.answers[which] and not answer.fault:
            self.counts["right"] += 1
            self.latencies.append((answer.took_s, begin))
        else:
            self.counts["wrong"] += 1
            at = time.strftime("%H:%M:%S")
            self.problems.append(f"good request {which} ({self.requests[which].route}) at {at}: {_told(answer)}")
            await asyncio.sleep(AGAIN_S)
        return answer


def _told(answer: Answer) -> str:
    return answer.fault or f"{answer.status} {answer.body[:200]!r}"
