"""The worker as it is seen from outside: its health page, its process id, its memory."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import statistics
import time
from typing import Any

import psutil

from fuzzing.client import fire
from fuzzing.shot import Shot, Target, message

SAMPLE_S = 0.5
BACK_S = 120.0  # a worker that ended is waited for
REST_S = 60.0  # until what still runs at the end has ended


class WorkerGoneError(RuntimeError):
    """No worker answers any more."""


class Worker:
    """The process behind the health page. ``pids``: every one that was seen. ``samples``: seconds and bytes."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pids: list[int] = []
        self.samples: list[tuple[float, int]] = []
        self._health = Shot(0, "health", "health", message(target, f"{target.versioned}/health", method="GET"))

    async def health(self) -> dict[str, Any] | None:
        """What the page says, or None when there is no answer."""
        answer = await fire(self.target.host, self.target.port, self._health)
        try:
            status = dict(json.loads(answer.body)) if answer.status == 200 else None
        except ValueError:
            return None
        if status is not None and status["pid"] not in self.pids:
            self.pids.append(status["pid"])
        return status

    async def wait(self) -> dict[str, Any]:
        """The page, as soon as there is a worker. Raises WorkerGoneError after a while."""
        end = time.monotonic() + BACK_S
        while time.monotonic() < end:
            status = await self.health()
            if status is not None:
                return status
            await asyncio.sleep(0.5)
        raise WorkerGoneError(f"the health page did not answer for {BACK_S:.0f} s")

    async def rest(self) -> dict[str, Any]:
        """The page once nothing runs, or as it is after a while."""
        end = time.monotonic() + REST_S
        while True:
            status = await self.wait()
            busy = status["running"] or status["waiting"] or status["pages_used"]
            if not busy or time.monotonic() > end:
                return status
            await asyncio.sleep(0.2)

    async def watch(self) -> None:
        """Sample the memory until cancelled, and now and then whether it is still the same process."""
        process = self.process()
        begin = time.monotonic()
        for turn in itertools.count():
            if process is not None:
                with contextlib.suppress(psutil.Error):  # it ended: the next look at the page tells
                    self.samples.append((time.monotonic() - begin, process.memory_info().rss))
            if turn % 4 == 0:
                await self.health()
            await asyncio.sleep(SAMPLE_S)

    def process(self) -> psutil.Process | None:
        """The worker's process, where it runs on this machine."""
        host = self.target.host
        if host != "localhost" and not _is_loopback(host):
            return None
        try:
            return psutil.Process(self.pids[0])
        except psutil.NoSuchProcess:
            return None

    def secrets(self) -> list[bytes]:
        """Paths by which the worker knows itself: no answer may hold one."""
        process = self.process()
        if process is None:
            return []
        try:
            told = [process.cwd(), process.exe(), *process.cmdline()]
        except psutil.Error:
            return []
        return sorted({path.encode() for path in told if path.startswith("/") and path.count("/") > 1})

    def growth(self) -> float | None:
        """Of the memory, from the median of the second minute to that of the last; None: too short, or elsewhere."""
        lasted = self.samples[-1][0] if self.samples else 0.0
        if lasted < 180:
            return None
        second = [rss for at, rss in self.samples if 60 <= at < 120]
        last = [rss for at, rss in self.samples if at >= lasted - 60]
        return statistics.median(last) / statistics.median(second) - 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
