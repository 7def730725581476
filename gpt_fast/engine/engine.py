"""The engine: one thread that owns the queue, the pages and the model, and serves every request in one batch.

``step()`` is the whole story: schedule, run, sample, emit. Other threads only hand requests in and take text out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.outputs import Completion, Delta, FinishReason
from gpt_fast.sampling import SamplingRow, sample

log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine cannot go on, or a step failed; the message says what happened."""


class Handle:
    """A request as its caller sees it: text arrives here, any thread may read or cancel."""

    def __init__(self, request: Request, engine: Engine) -> None:
        self.id = request.id
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self._engine = engine
        self._changed = engine.changed
        self._text: list[str] = []
        self._tokens: list[int] = []

    @property
    def finished(self) -> bool:
        return self.completion is not None or self.error is not None

    def poll(self) -> Delta | None:
        """What is new since the last call, or None. Raises the request's error once nothing else is left."""
        with self._changed:
            return self._take()

    def wait(self, timeout_s: float | None = None) -> Delta | None:
        """Like :meth:`poll`, but waits for something new; None after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._tokens) or self.finished, timeout_s)
            return self._take()

    def cancel(self) -> None:
        """Stop the request within a step and give its pages back. Harmless when it has finished."""
        self._engine.cancel(self.id)

    def __iter__(self) -> Iterator[Delta]:
        """All deltas to the end; leaving early cancels the request."""
        try:
            while True:
                delta = self.wait()
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            if not self.finished:
                self.cancel()

    def _take(self) -> Delta | None:
        if not self._tokens and not self.finished:
            return None
        if self.error is not None:
            raise self.error
        text, tokens = "".join(self._text), tuple(self._tokens)
        self._text.clear()
        self._tokens.clear()
        done = self.completion
        return Delta(text, tokens, done.finish_reason if done else None, done)

    # The engine's side, called with the lock held.

    def put(self, text: str, token: int) -> None:
        self._text.append(text)
        self._tokens.append(token)


class Engine:
    """Runs requests on ``runner`` as ``scheduler`` decides, in a thread from :meth:`start` to :meth:`close`."""

    def __init__(self, runner: Runner, scheduler: Scheduler, threads: int | None = None) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.changed = threading.Condition()  # guards the inbox and every handle
        self._threads = threads
        self._inbox: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._handles: dict[str, Handle] = {}
        self._closing = False
        self._fatal: Exception | None = None
        self._thread: threading.Thread | None = None
        self.num_steps = 0

    # Any thread.

    def start(self, warm_up: Callable[[], None]) -> None:
        """Start the thread and run ``warm_up`` in it: what it compiles is then what service finds compiled."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(warm_up, ready), name="gpt-fast-engine", daemon=True)
        self._thread.start()
        while not ready.wait(0.1) and self._thread.is_alive():
            pass
        if self._fatal is not None:
            raise self._fatal

    def add(self, request: Request) -> Handle:
        """Queue ``request``; the handle gives its text."""
        handle = Handle(request, self)
        with self.changed:
            if self._fatal is not None or self._closing:
                raise EngineError(f"the engine has stopped: {self._fatal or 'it was closed'}")
            self._handles[request.id] = handle
            self._inbox.append(request)
            self.changed.notify_all()
        return handle

    def cancel(self, request_id: str) -> None:
        """Ask that a request ends before the next step."""
        with self.changed:
            if request_id in self._handles:
                self._cancelled.add(request_id)
                self.changed.notify_all()

    def close(self) -> None:
        """Abort what runs, end the thread, wait for it."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # The engine thread.

    def _run(self, warm_up: Callable[[], None], ready: threading.Event) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                warm_up()
                ready.set()
                while self._wait_for_work():
                    self.step()
        except Exception as error:
            log.exception("the engine has stopped")
            self._fatal = error
        finally:
            self._abandon(self._fatal)
            ready.set()

    def _wait_for_work(self) -> bool:
        """Take in new requests and cancellations; sleep when there is nothing to do. False: close."""
        with self.changed:
            while not (self._closing or self._inbox or self._cancelled or self.scheduler.has_work):
                self.changed.wait()
            while self._inbox:
                self.scheduler.add(self._inbox.popleft())
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            self._abort([r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.id in cancelled])
        return not self._closing

    def step(self) -> None:
        """One turn: schedule, run, sample, emit."""
        plan, requests = self.scheduler.schedule()
        if not plan.sequences:
            return
        logits = self.runner.execute(plan)
        sampled = [r for r, s in zip(requests, plan.sequences, strict=True) if s.num_logits]
        tokens = (
            sample(logits, [SamplingRow(r.params, r.seed, r.num_tokens) for r in sampled]).tolist() if sampled else []
        )
        for request, sequence in zip(requests, plan.sequences, strict=True):
            self.scheduler.computed(request, len(sequence.tokens))
        self._emit(sampled, tokens)
        self.num_steps += 1

    def _emit(self, requests: list[Request], tokens: list[int]) -> None:
        now = time.monotonic()
        with self.changed:
            for request, token in zip(requests, tokens, strict=True):
                self._handles[request.id].put(request.append(token, now), token)
                if request.finish_reason is not None:
                    self._finish(request)
            self.changed.notify_all()

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._handles.pop(request.id).completion = request.completion()

    def _abort(self, requests: list[Request], reason: FinishReason = "abort") -> None:
        with self.changed:
            for request in requests:
                request.finish_reason = reason
                self._finish(request)
            self.changed.notify_all()

    def _abandon(self, error: Exception | None) -> None:
        """End every request: the engine stops."""
        self._abort([*self.scheduler.running, *self.scheduler.waiting])
        with self.changed:
            for handle in self._handles.values():
                handle.error = EngineError(f"the engine has stopped: {error or 'it was closed'}")
            self._handles.clear()
            self.changed.notify_all()
