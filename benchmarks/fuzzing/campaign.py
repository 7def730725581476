"""All of it at once: some clients that send generated requests, the good client, and an eye on the worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzzing.client import TIMEOUT_S, Answer, fire
from fuzzing.generator import Generator
from fuzzing.good import GoodClient
from fuzzing.judge import BACK, CONTRADICTION, SAME, STATUS, faults, normal, of_front_end
from fuzzing.round_trip import lost
from fuzzing.shot import Shot, Target
from fuzzing.worker import Worker, WorkerGoneError

PROBLEMS_KEPT = 500
MOST_LATE = 8  # requests without an answer, after which nobody waits for more


@dataclass(frozen=True)
class Problem:
    """A generated request whose answer broke a demand."""

    index: int
    kind: str
    route: str
    demand: str
    what: str


@dataclass
class Campaign:
    """What was sent and what came of it. It may be watched while it runs."""

    target: Target
    seed: int
    num_requests: int
    minutes: float = 0.0  # goes on for so long, with requests beyond ``num_requests``
    concurrency: int = 4

    sent: int = 0
    lasted_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # by status, "gone", "no answer"
    repeats_compared: int = 0
    num_problems: Counter[str] = field(default_factory=Counter)  # by demand
    problems: list[Problem] = field(default_factory=list)
    spans: list[tuple[int, float, float]] = field(default_factory=list)  # request, begin and end of time.perf_counter()
    pages_left: int | None = None  # when all is quiet; None: nobody could be asked
    ended_early: str = ""

    def __post_init__(self) -> None:
        self.generator = Generator(self.target, self.seed)
        self.good = GoodClient(self.target)
        self.worker = Worker(self.target)
        self._secrets: list[bytes] = []
        self._num_late = 0
        self._answers: dict[int, str] = {}  # normal forms, by the number of the first time

    async def run(self, progress: Callable[[Campaign], object] = lambda campaign: None) -> None:
        """Send everything and wait until all is quiet. ``progress`` is called after each request.

        Raises WorkerGoneError or RuntimeError when the server does not even answer right before.
        """
        await self.worker.wait()
        await self.good.learn()
        self._secrets = self.worker.secrets()
        watcher = asyncio.create_task(self.worker.watch())
        self.good.start()
        try:
            await self._send_all(progress)
        except WorkerGoneError as error:
            self.ended_early = str(error)
        finally:
            await asyncio.to_thread(self.good.stop)
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        with contextlib.suppress(WorkerGoneError):
            self.pages_left = (await self.worker.rest())["pages_used"]

    async def _send_all(self, progress: Callable[[Campaign], object]) -> None:
        begin = time.monotonic()

        async def client() -> None:
            while self.sent < self.num_requests or time.monotonic() - begin < self.minutes * 60:
                index, self.sent = self.sent, self.sent + 1
                # In a thread: to make a large request takes longer than to judge many answers.
                shot = await asyncio.to_thread(self.generator.shot, index)
                await self._one(shot)
                self.lasted_s = time.monotonic() - begin
                progress(self)

        clients = [asyncio.create_task(client()) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    def beside(self, begin: float, end: float) -> list[int]:
        """The generated requests that were under way at any moment between the two (perf_counter)."""
        return sorted(index for index, began, ended in self.spans if began < end and ended > begin)

    async def _one(self, shot: Shot) -> None:
        begin = time.perf_counter()
        answer = await fire(self.target.host, self.target.port, shot)
        self.spans.append((shot.index, begin, time.perf_counter()))
        self.kinds[shot.kind] += 1
        outcome = "gone" if answer.gone else str(answer.status or "no answer")
        self.outcomes[outcome + " of TorchServe alone" * of_front_end(answer)] += 1
        found = list(faults(shot, answer, self._secrets))
        found += [(SAME, what) for what in self._difference(shot, answer)]
        found += [(BACK, what) for what in [await lost(self.target, shot, answer)] if what]
        for demand, what in found:
            self.num_problems[demand] += 1
            if len(self.problems) < PROBLEMS_KEPT:
                self.problems.append(Problem(shot.index, shot.kind, shot.route, demand, what))
        self._num_late += answer.took_s > TIMEOUT_S
        if self._num_late >= MOST_LATE:
            raise WorkerGoneError(f"{MOST_LATE} requests had no answer within {TIMEOUT_S:.0f} s")
        if any(demand == STATUS for demand, _ in found) or (answer.fault and not shot.lame):
            await self.worker.wait()  # if it ended, what comes now would only tell that again

    def _difference(self, shot: Shot, answer: Answer) -> list[str]:
        """How ``answer`` differs from that to the same request before, if there was one."""
        # Whether a time limit is met, and how much of a stream has left before it fails, depends on the machine.
        by_chance = any(b'"%s"' % code.encode() in answer.body for code in ("too_complex", CONTRADICTION))
        if not shot.same or answer.refused or answer.gone or answer.fault or by_chance:
            return []
        now = normal(answer)
        first = self._answers.setdefault(shot.index if shot.of is None else shot.of, now)
        self.repeats_compared += shot.of is not None
        if now == first:
            return []
        at = next((i for i, (a, b) in enumerate(zip(first, now, strict=False)) if a != b), min(len(first), len(now)))
        begin = max(0, at - 60)
        return [f"request {shot.of} was answered {first[begin : at + 100]!r}, this one {now[begin : at + 100]!r}"]
