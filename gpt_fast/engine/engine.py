"""The engine: one thread that owns the queue, the pages and the model, and serves every request in one batch.

``step()`` is the whole story: schedule, execute, sample, advance, emit. Other threads hand requests in and take text
out (handle.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gpt_fast.engine import ahead
from gpt_fast.engine.compute import Outcome, Scheduled, attempt, drawn, draws_of, execute, probe, sample_tokens
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler, StepPlan, goes_on
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.errors import EngineError, RequestError, RequestFailedError, brief, first_line, try_later, without_frames
from gpt_fast.outputs import Completion

log = logging.getLogger(__name__)

# With the next step on its way this thread waits for nothing, and would keep Python's lock for up to 5 ms from the
# threads that it has woken.
_PAUSE_S = 1e-4
ABANDONED_S = 5.0  # a request that is paused this long without anybody fetching is aborted
_EXIT_S = 10.0  # that the end of the process waits for a step that stands still

_started: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs requests on ``runner`` as ``scheduler`` decides, in a thread from :meth:`start` to :meth:`close`. At most
    ``max_waiting`` requests wait for their first turn. ``on_finish`` is called with every request that ends,
    ``on_step`` with every step's plan and its seconds since the step before it, or since the engine slept: what a
    caller waits for, none of it left out. Both run in the engine's thread, so they must be quick."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, max_waiting: int | None = None, threads: int | None = None
    ) -> None:
        self.runner, self.scheduler, self.max_waiting = runner, scheduler, max_waiting
        self.speculation: Speculation | None = None  # to be set before start
        lock = threading.RLock()  # guards the inbox and every handle
        self.changed = threading.Condition(lock)  # notified whenever a request has something new
        self.begun_or_ended = threading.Condition(lock)  # first tokens and endings, for those who let tokens gather
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        self.threads = threads
        self._began = 0.0  # when the next step began: at the end of the one before, or of a sleep
        self._moved = 0.0  # monotonic: when a step last ended, a sleep did, or a request found the engine idle
        self._inbox: deque[Request] = deque()
        self._handles: dict[str, Handle] = {}
        self._closing = False
        self._fatal: Exception | None = None
        self._told = False  # whether this step had a first token or an end
        self._begun: ahead.Begun | None = None  # the next step, if it began before the last one's tokens were known
        self._thread: threading.Thread | None = None
        self._pid = 0  # of the process that it runs in; 0: of none yet

    # Any thread.

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting)

    @property
    def since_last_step_s(self) -> float:
        """Seconds since a step last ended, or since there is something to compute; 0 where no request is there. In a
        step it is the time that this one has taken so far: an engine that stands still is known by it."""
        return max(0.0, time.monotonic() - self._moved) if self._handles else 0.0

    def start(self, warm_up: Callable[[], None]) -> None:
        """Start the thread and run ``warm_up`` in it. Raises what ends the engine in there."""
        ready, first = threading.Event(), [warm_up]
        self._pid = os.getpid()
        _started.add(self)
        self._thread = threading.Thread(target=self._run, args=(first, ready), name="gpt-fast-engine", daemon=True)
        self._thread.start()
        ready.wait()
        if self._fatal is not None:
            raise self._fatal

    def add_all(
        self, requests: Sequence[Request], max_uncollected: int | None = None, owner: object = None
    ) -> list[Handle]:
        """Queue all of ``requests``, or raise and queue none. ``max_uncollected``, ``owner``: see ``Handle``. Raises
        RequestError (503, ``queue_full``) when more than ``max_waiting`` would wait, EngineError when the engine has
        stopped."""
        if self._pid not in (0, os.getpid()):  # nobody here computes anything, or gives the lock back
            raise EngineError(f"the engine runs in process {self._pid}, and this is a fork of it: load the model here")
        handles = [Handle(request, self.changed, max_uncollected, owner) for request in requests]
        with self.changed:
            if self._fatal is not None or self._closing:
                raise self._stopped()
            num_new = len(self._inbox) + self.scheduler.waiting.num_new
            if self.max_waiting is not None and num_new + len(handles) > self.max_waiting:
                raise try_later(f"{num_new} requests are waiting, and at most {self.max_waiting} may")
            if not self._handles:
                self._moved = time.monotonic()
            self._handles |= {handle.id: handle for handle in handles}
            self._inbox.extend(requests)
            self.runner.hold()  # whoever comes waits for the step that runs, and not for the one behind it
            self.changed.notify_all()
        return handles

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread, and wait for it, at most ``timeout_s``. A signal handler may call it too: where it has
        interrupted whoever holds the lock, the thread ends as soon as that one lets go."""
        if self._thread is not None and not self._thread.is_alive():  # or it is that of another process
            return
        interrupting = self._holds_lock()
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread() and not interrupting:
            self._thread.join(timeout_s)

    def close_soon(self) -> None:
        """Like :meth:`close`, but waits for nothing and nobody: the garbage collector may call it, in a thread that
        holds any lock."""
        self._closing = True
        if self.changed.acquire(blocking=False):  # else the thread sees it when it wakes
            self.changed.notify_all()
            self.changed.release()

    def _holds_lock(self) -> bool:
        """Whether the calling thread does."""
        try:
            self.changed.notify_all()
        except RuntimeError:
            return False
        return True

    # The engine thread.

    def _run(self, first: list[Callable[[], None]], ready: threading.Event) -> None:
        """``first``: what is done once. It is taken out, since a thread holds its arguments, and it holds the model."""
        try:
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            with torch.inference_mode():
                first.pop()()
                ready.set()
                while self._wait_for_work():
                    self.step()
        except Exception as error:
            log.exception("the engine has stopped")
            self._fatal = error
        finally:
            with self.changed:
                for handle in self._handles.values():
                    handle.end(None, self._stopped())
                self._handles.clear()
                self._notify()
            ready.set()

    def _stopped(self) -> EngineError:
        return EngineError(f"the engine has stopped: {self._fatal or 'it was closed'}")

    def _wait_for_work(self) -> bool:
        """Take in new requests and cancellations; sleep when there is nothing to compute. False: close."""
        with self.changed:
            busy = self._closing or self._inbox or self.scheduler.has_work
            if not busy and not any(handle.cancelled for handle in self._handles.values()):
                self.changed.wait(1.0)  # paused requests still have deadlines, and close_soon() may not have notified
                self._began, self._moved = time.perf_counter(), time.monotonic()
            while self._inbox:
                self.scheduler.add(self._inbox.popleft())
            now = time.monotonic()
            for handle in list(self._handles.values()):
                if handle.cancelled or now > handle.deadline:
                    handle.request.finish_reason = "abort"
                    self._try(self._finish, handle.request)
                elif handle.paused_since < now - ABANDONED_S:
                    message = f"the request was aborted: nobody fetched its tokens for {ABANDONED_S:g} s"
                    self._fail(handle.request, RequestError(message, None, "abandoned", 504))
            return not self._closing

    def step(self) -> None:
        """One turn: draft, schedule, execute, sample, advance, emit. A failure costs only the requests at fault. The
        next step may begin before this one's tokens are known (ahead.py)."""
        begun, self._begun = self._begun, None
        if begun is not None and not any(map(goes_on, begun.parts)):
            begun = None
        if begun is not None:
            plan, parts = begun.plan, begun.parts
        else:
            if self.speculation is not None:
                self.speculation.propose(self.scheduler)
            plan, parts = self._schedule()
            if not parts:
                return
        outcomes: Sequence[Outcome | Exception] | None = self._outcomes_ahead(plan, parts, begun)
        if outcomes is None and begun is not None:
            return  # its plan does not have the tokens: the next turn schedules anew
        if outcomes is None:
            outcomes = self._outcomes(plan, parts)
        now = time.monotonic()
        with self.changed:
            for part, outcome in zip(parts, outcomes, strict=True):
                if begun is not None and not goes_on(part):
                    continue
                request, own = part
                num_drafts = max(0, own.end - request.num_tokens)
                self._try(self._advance, request, outcome, num_drafts, now)
            self.changed.notify_all()
        if self._begun is not None and self._told:
            time.sleep(_PAUSE_S)
        self._told = False
        began, self._began, self._moved = self._began, time.perf_counter(), time.monotonic()
        if self.speculation is not None:
            _observe(self.speculation.observe, plan, self._began - began)
        _observe(self.on_step, plan, self._began - began)

    def _outcomes(self, plan: StepPlan, parts: Sequence[Scheduled]) -> Sequence[Outcome | Exception]:
        outcomes: Sequence[Outcome | Exception] | None = self._outcomes_in_one_call(plan, parts)
        if outcomes is not None:
            return outcomes
        computed = attempt(partial(execute, self.runner), parts)
        outcomes = attempt(sample_tokens, computed)
        if all(isinstance(outcome, Exception) for outcome in outcomes):
            probe(self.runner, plan.sequences[0].slot)
        return outcomes

    def _outcomes_in_one_call(self, plan: StepPlan, parts: Sequence[Scheduled]) -> Sequence[Outcome] | None:
        """The outcomes of a step whose tokens C++ can draw as soon as it has the logits. None where that is not
        possible, or failed: then the step is computed again, and it turns out whose fault it is."""
        if not self.runner.draws_at_once:
            return None
        try:
            draws = draws_of(parts)
            return None if draws is None else drawn(parts, self.runner.draw(plan, draws))
        except Exception:
            log.exception("a step failed; it is computed again")
            return None

    def _outcomes_ahead(
        self, plan: StepPlan, parts: Sequence[Scheduled], begun: ahead.Begun | None
    ) -> Sequence[Outcome] | None:
        """The outcomes of a step, ``begun`` already or not, with the step behind it begun before they are known. None
        where that is not possible, or failed: then :meth:`_outcomes` finds out whose fault it is."""
        if not self.runner.runs_ahead or self.speculation is not None:
            return None
        try:
            begun = begun or ahead.begin(self.runner, plan, parts)
            if begun is None:
                return None
            self._begun = ahead.begin_behind(self.runner, self.scheduler, begun)
            outcomes = begun.outcomes()
        except Exception:
            log.exception("a step ahead failed; it is computed again")
            outcomes = None
        if outcomes is None and self._begun is not None:
            behind = self._begun.parts
            self._begun = None  # waits for it, if it is in another thread
            self.scheduler.take_back(behind)  # this step will be computed again, and places its own pages alone
        return outcomes

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

    def _advance(self, request: Request, outcome: Outcome | Exception, num_drafts: int, now: float) -> None:
        """Advance ``request`` by what the step found behind its last token and ``num_drafts`` drafts, and emit text and
        tokens to its caller. With the lock held."""
        if isinstance(outcome, Exception):
            raise outcome
        before, begins = request.num_tokens, request.first_token is None
        text = request.append(outcome.tokens, now)
        tokens = request.token_ids[before:]
        if self.speculation is not None and tokens:
            self.speculation.note(request, num_drafts, len(outcome.tokens) - 1, len(tokens))
        request.prompt_logprobs += outcome.prompt_logprobs
        request.logprobs += outcome.logprobs[: len(tokens)]
        self.scheduler.advance(request, outcome.kept)
        if tokens:
            self._handles[request.id].put(text, tokens)
        if request.finish_reason is not None:
            self._finish(request)
        elif begins and tokens:
            self._tell()

    def _try(self, work: Callable[..., None], request: Request, *args: object) -> None:
        """Do ``work`` for ``request``. A failure ends this request alone."""
        try:
            work(request, *args)
        except Exception as error:
            self._fail(request, error)

    def _finish(self, request: Request) -> None:
        self._end(request, request.completion(), None)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request by its own fault; the others go on."""
        why = first_line(error)
        explained = isinstance(error, (RequestError, RequestFailedError))
        log.error("request %s failed: %s", request.id, why if explained else brief(error))
        without_frames(error)
        request.finish_reason = "abort"
        self._end(request, None, error if explained else RequestFailedError(why))

    def _end(self, request: Request, completion: Completion | None, error: Exception | None) -> None:
        self.scheduler.finish(request)
        if self.speculation is not None:
            _observe(self.speculation.end, request)
        with self.changed:
            self._handles.pop(request.id).end(completion, error)
            self._notify()
        _observe(self.on_finish, request)

    def _notify(self) -> None:
        self.changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        self.begun_or_ended.notify_all()
        self._told = True


@atexit.register
def _close_all() -> None:
    """What nobody has closed ends before Python does: a thread that comes back from C++ while Python ends is unwound,
    and then C++ may abort the process."""
    for engine in list(_started):
        engine.close(_EXIT_S)


def _observe(observer: Callable[..., None], *args: object) -> None:
    """Tell ``observer``. What goes wrong there is logged and costs no request anything."""
    try:
        observer(*args)
    except Exception:
        log.exception("an observer of the engine failed")
