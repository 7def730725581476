"""A profiler's trace of a server's first request (``profile: true``), and of whatever else is timed."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gpt_fast.engine.engine import Engine
from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import StepPlan

log = logging.getLogger(__name__)

MOST_STEPS = 100  # of a long request: a step of a large model has a thousand events and more


def profiler(device_type: str) -> profile:
    """A profiler of what all threads compute, not yet started. The engine's thread is one of them."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device_type == "cuda" else [])
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, experimental_config=every_thread)


@contextlib.contextmanager
def traced(path: Path, device_type: str) -> Iterator[None]:
    """Trace what runs inside, on all threads, into the new file ``path``, which stderr then names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with profiler(device_type) as trace:
        yield
    trace.export_chrome_trace(str(path))
    print(f"trace: {path}", file=sys.stderr)


class FirstRequest:
    """Records ``engine`` from now on, until a request ends or ``MOST_STEPS`` steps have run; then a trace is written.

    The trace is a new file beside TorchServe's logs (``$LOG_LOCATION``), else in the folder for temporary files; the
    log names it. Steps are slower while they are recorded. Writing it, in another thread, delays nobody. ``written`` is
    set when that has ended.
    """

    def __init__(self, engine: Engine, device_type: str) -> None:
        self._engine, self._steps, self.written = engine, 0, threading.Event()
        self._on_step, self._on_finish = engine.on_step, engine.on_finish
        engine.on_step, engine.on_finish = self._step, self._finished
        self._profiler = profiler(device_type)
        self._profiler.start()

    def _step(self, plan: StepPlan, seconds: float) -> None:
        self._on_step(plan, seconds)
        self._steps += 1
        if self._steps == MOST_STEPS:
            self._end()

    def _finished(self, request: Request) -> None:
        self._on_finish(request)
        if self._steps:  # not one that failed before its first step
            self._end()

    def _end(self) -> None:
        self._engine.on_step, self._engine.on_finish = self._on_step, self._on_finish
        threading.Thread(target=self._write, name="gpt-fast-trace", daemon=True).start()

    def _write(self) -> None:
        try:
            self._profiler.stop()
            rank = os.environ.get("RANK", "0")  # torchrun's: each process of a worker writes its own
            # The temporary folder of a server goes with it.
            folder = os.environ.get("LOG_LOCATION") or None
            file, path = tempfile.mkstemp(prefix=f"gpt-fast-rank{rank}-", suffix=".trace.json", dir=folder)
            os.close(file)
            self._profiler.export_chrome_trace(path)
            log.info("profile: a trace of %d steps is in %s (chrome://tracing, Perfetto)", self._steps, path)
        except Exception:
            log.exception("profile: no trace could be written")
        self.written.set()
