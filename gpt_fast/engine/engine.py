"""The engine: one thread that owns the queue, the pages and the model, and serves every request in one batch.

``step()`` is the whole story: schedule, execute, sample, advance, emit. Other threads only hand requests
in and take text out (handle.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from gpt_fast.engine.compute import Outcome, Scheduled, attempt, execute, probe, sample_tokens
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.errors import EngineError, RequestError, RequestFailedError
from gpt_fast.params import MAX_SHOWN, brief, try_later, without_frames

log = logging.getLogger(__name__)

ABANDONED_S = 5.0  # a request that is paused this long without anybody fetching is aborted


class _Piece(NamedTuple):
    """What one request's caller gets of a step. ``begins``: the tokens are the first."""

    text: str
    tokens: list[int]
    begins: bool


class Engine:
    """Runs requests on ``runner`` as ``scheduler`` decides, in a thread from :meth:`start` to :meth:`close`. At most
    ``max_waiting`` requests wait; one more is refused. ``on_finish`` hears of every request that ends, ``on_step`` of
    every step's plan and seconds; both run in the engine's thread and must be quick."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, max_waiting: int | None = None, threads: int | None = None
    ) -> None:
        self.runner, self.scheduler, self.max_waiting = runner, scheduler, max_waiting
        lock = threading.RLock()  # guards the inbox and every handle
        self.changed = threading.Condition(lock)  # notified whenever a request has something new
        self.begun_or_ended = threading.Condition(lock)  # first tokens and endings, for those who let tokens gather
        self.num_steps = 0
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        self._threads = threads
        self._inbox: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._handles: dict[str, Handle] = {}
        self._closing = False
        self._fatal: Exception | None = None
        self._thread: threading.Thread | None = None

    # Any thread.

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting)

    def start(self, warm_up: Callable[[], None]) -> None:
        """Start the thread and run ``warm_up`` in it: what it compiles is then what service finds compiled."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(warm_up, ready), name="gpt-fast-engine", daemon=True)
        self._thread.start()
        while not ready.wait(0.1) and self._thread.is_alive():
            pass
        if self._fatal is not None:
            raise self._fatal

    def add_all(self, requests: Sequence[Request], max_uncollected: int | None = None) -> list[Handle]:
        """Queue all of ``requests``, or raise and queue none; the handles give their texts. A request pauses while
        ``max_uncollected`` of its tokens wait to be fetched. Raises RequestError (503, ``queue_full``) when
        ``max_waiting`` are waiting, EngineError when the engine has stopped."""
        handles = [Handle(request, self, max_uncollected) for request in requests]
        with self.changed:
            if self._fatal is not None or self._closing:
                raise EngineError(f"the engine has stopped: {self._fatal or 'it was closed'}")
            if self.max_waiting is not None and self.num_waiting + len(handles) > self.max_waiting:
                raise try_later(f"{self.num_waiting} requests are waiting, and at most {self.max_waiting} may")
            self._handles |= {handle.id: handle for handle in handles}
            self._inbox.extend(requests)
            self.changed.notify_all()
        return handles

    def cancel(self, request_id: str) -> None:
        """Ask that a request ends before the next step."""
        with self.changed:
            if request_id in self._handles:
                self._cancelled.add(request_id)
                self.changed.notify_all()

    def close(self) -> None:
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
        """Take in new requests and cancellations; sleep when there is nothing to compute. False: close."""
        with self.changed:
            while not (self._closing or self._inbox or self._cancelled or self.scheduler.has_work):
                self.changed.wait(1.0 if self._handles else None)  # paused requests still have deadlines
                if self._handles:
                    break
            while self._inbox:
                self.scheduler.add(self._inbox.popleft())
            cancelled, self._cancelled = self._cancelled, set()
            now = time.monotonic()
            ending = [
                handle.request
                for handle in self._handles.values()
                if handle.id in cancelled or now > handle.request.deadline or handle.paused_since < now - ABANDONED_S
            ]
        self._abort(ending)
        return not self._closing

    def step(self) -> None:
        """One turn: schedule, execute, sample, advance, emit. What fails in it costs the requests that make it fail."""
        begin = time.perf_counter()
        plan, parts = self._schedule()
        if not parts:
            return
        computed = attempt(partial(execute, self.runner), parts)
        outcomes = attempt(sample_tokens, computed)
        if all(isinstance(outcome, Exception) for outcome in outcomes):
            probe(self.runner, plan.sequences[0].slot)
        pieces = self._advance(parts, outcomes)
        self._emit(parts, pieces)
        self.num_steps += 1
        _observe(self.on_step, plan, time.perf_counter() - begin)

    def _schedule(self) -> tuple[StepPlan, list[Scheduled]]:
        """The scheduler's next step. Requests that it cannot plan end here."""
        try:
            plan, requests = self.scheduler.schedule()
        except Exception:
            everyone = [*self.scheduler.running, *self.scheduler.waiting]
            tried = attempt(lambda among: [self.scheduler.schedule(among)] * len(among), everyone)
            faults = [(r, fault) for r, fault in zip(everyone, tried, strict=True) if isinstance(fault, Exception)]
            for request, fault in faults:
                self._fail(request, fault)
            if len(faults) == len(everyone):
                self.scheduler.check_integrity()
            plan, requests = self.scheduler.schedule()
        return plan, [Scheduled(*part) for part in zip(requests, plan.sequences, strict=True)]

    def _advance(self, parts: Sequence[Scheduled], outcomes: Sequence[Outcome | Exception]) -> list[_Piece | Exception]:
        """Give each request what the step found for it."""
        now = time.monotonic()
        pieces: list[_Piece | Exception] = []
        for (request, _), outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Exception):
                pieces.append(outcome)
                continue
            try:
                before = request.num_tokens
                begins = bool(outcome.tokens) and request.first_token is None
                text = request.append(outcome.tokens, now) if outcome.tokens else ""
                tokens = request.token_ids[before:]
                request.prompt_logprobs += outcome.prompt_logprobs
                request.logprobs += outcome.logprobs[: len(tokens)]
                self.scheduler.advance(request, outcome.kept)
                pieces.append(_Piece(text, tokens, begins))
            except Exception as error:
                pieces.append(error)
        return pieces

    def _emit(self, parts: Sequence[Scheduled], pieces: Sequence[_Piece | Exception]) -> None:
        """Hand over text and tokens, and end what has ended."""
        with self.changed:
            for (request, _), piece in zip(parts, pieces, strict=True):
                if isinstance(piece, Exception):
                    self._fail(request, piece)
                    continue
                try:
                    if piece.tokens:
                        self._handles[request.id].put(piece.text, piece.tokens)
                    if request.finish_reason is not None:
                        self._finish(request)
                    if piece.begins or request.finish_reason is not None:
                        self.begun_or_ended.notify_all()
                except Exception as error:
                    self._fail(request, error)
            self.changed.notify_all()

    def _notify(self) -> None:
        self.changed.notify_all()
        self.begun_or_ended.notify_all()

    def _finish(self, request: Request) -> None:
        completion = request.completion()
        self.scheduler.finish(request)
        self._handles.pop(request.id).completion = completion
        _observe(self.on_finish, request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request by its own fault; the others go on."""
        why = str(error).partition("\n")[0][:MAX_SHOWN]
        explained = isinstance(error, (RequestError, RequestFailedError))
        log.error("request %s failed: %s", request.id, why if explained else brief(error))
        without_frames(error)
        request.finish_reason = "abort"
        self.scheduler.finish(request)
        with self.changed:
            self._handles.pop(request.id).error = error if explained else RequestFailedError(why)
            self._notify()
        _observe(self.on_finish, request)

    def _abort(self, requests: Iterable[Request]) -> None:
        with self.changed:
            for request in requests:
                request.finish_reason = "abort"
                try:
                    self._finish(request)
                except Exception as error:
                    self._fail(request, error)
                self._notify()

    def _abandon(self, error: Exception | None) -> None:
        """End every request: the engine stops."""
        with self.changed:
            for handle in self._handles.values():
                handle.error = EngineError(f"the engine has stopped: {error or 'it was closed'}")
            self._handles.clear()
            self._notify()


def _observe(observer: Callable[..., None], *args: object) -> None:
    """Tell ``observer``. What goes wrong there is logged and costs no request anything."""
    try:
        observer(*args)
    except Exception:
        log.exception("an observer of the engine failed")
