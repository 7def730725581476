"""The engine: one thread that owns the queue, the pages and the model, and serves every request in one batch.

``step()`` is the whole story: schedule, run, sample, emit. Other threads only hand requests in and take text out
(handle.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gpt_fast.engine.handle import EngineError, Handle, RequestFailedError
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.outputs import FinishReason
from gpt_fast.params import RequestError
from gpt_fast.sampling import SamplingRow, logprobs, sample

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # what a refused client is told to wait
ABANDONED_S = 5.0  # a request that is held this long without anybody fetching is aborted


class Engine:
    """Runs requests on ``runner`` as ``scheduler`` decides, in a thread from :meth:`start` to :meth:`close`.

    At most ``max_waiting`` requests wait; one more is refused. ``on_finish`` hears of every request that ends,
    ``on_step`` of every step's plan and seconds; both run in the engine's thread and must be quick.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_waiting: int | None = None,
        threads: int | None = None,
        on_finish: Callable[[Request], None] = lambda request: None,
        on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        lock = threading.RLock()  # guards the inbox and every handle
        self.changed = threading.Condition(lock)
        self.pressing = threading.Condition(lock)  # first tokens and endings alone, for those who let tokens gather
        self.max_waiting = max_waiting
        self.num_steps = 0
        self.on_finish = on_finish
        self.on_step = on_step
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
        """Requests that have not started."""
        return len(self._inbox) + len(self.scheduler.waiting)

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread is not None and self._thread.is_alive() and not self._closing

    def start(self, warm_up: Callable[[], None]) -> None:
        """Start the thread and run ``warm_up`` in it: what it compiles is then what service finds compiled."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(warm_up, ready), name="gpt-fast-engine", daemon=True)
        self._thread.start()
        while not ready.wait(0.1) and self._thread.is_alive():
            pass
        if self._fatal is not None:
            raise self._fatal

    def add(self, request: Request, max_uncollected: int | None = None) -> Handle:
        """Queue ``request``; the handle gives its text. It pauses while ``max_uncollected`` tokens wait for fetching.

        Raises RequestError (503, ``queue_full``) when ``max_waiting`` are waiting, EngineError when the engine stopped.
        """
        handle = Handle(request, self, max_uncollected)
        with self.changed:
            if self._fatal is not None or self._closing:
                raise EngineError(f"the engine has stopped: {self._fatal or 'it was closed'}")
            if self.max_waiting is not None and self.num_waiting >= self.max_waiting:
                message = f"{self.num_waiting} requests are waiting, and no more may; try again later"
                raise RequestError(message, None, "queue_full", 503, retry_after_s=RETRY_AFTER_S)
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

    def check_idle(self, timeout_s: float) -> None:
        """Wait until no request is left; raise RuntimeError if one is after ``timeout_s`` or a page is astray."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self._handles and not self._inbox, timeout_s):
                raise RuntimeError(f"{len(self._handles)} requests are still running")
            self.scheduler.check_integrity()
            if self.scheduler.pages.num_used:
                raise RuntimeError(f"{self.scheduler.pages.num_used} pages are still in use")

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
        """Take in new requests and cancellations; sleep when there is nothing to compute. False: close."""
        with self.changed:
            while not (self._closing or self._inbox or self._cancelled or self.scheduler.has_work):
                self.changed.wait(1.0 if self._handles else None)  # held requests still have deadlines
                if self._handles:
                    break
            while self._inbox:
                self.scheduler.add(self._inbox.popleft())
            cancelled, self._cancelled = self._cancelled, set()
            now = time.monotonic()
            ending = [
                handle.request
                for handle in self._handles.values()
                if handle.id in cancelled or now > handle.request.deadline or handle.held_since < now - ABANDONED_S
            ]
        self._abort(ending)
        return not self._closing

    def step(self) -> None:
        """One turn: schedule, run, sample, emit."""
        begin = time.perf_counter()
        plan, requests = self.scheduler.schedule()
        if not plan.sequences:
            return
        logits = self.runner.execute(plan)
        emitting, rows = self._take_prompt_logprobs(plan, requests, logits)
        for request, sequence in zip(requests, plan.sequences, strict=True):
            self.scheduler.computed(request, len(sequence.tokens))
        emitting, tokens = self._sample(emitting, logits, rows)
        self._emit(emitting, tokens)
        self.num_steps += 1
        self.on_step(plan, time.perf_counter() - begin)

    def _take_prompt_logprobs(
        self, plan: StepPlan, requests: Sequence[Request], logits: Tensor
    ) -> tuple[list[Request], list[int]]:
        """The requests whose next token can be sampled, and the row of logits of each.

        Other rows are there for the log probabilities of prompt tokens, which are taken here.
        """
        emitting, rows, row = [], [], 0
        for request, sequence in zip(requests, plan.sequences, strict=True):
            first, row = row, row + sequence.num_logits
            if request.params.prompt_logprobs is not None and sequence.start < request.num_prompt:
                known = request.token_ids[sequence.start + 1 : sequence.start + 1 + sequence.num_logits]
                known = known[: request.num_prompt - sequence.start - 1]
                known = known[max(0, len(request.prompt_logprobs) - 1 - sequence.start) :]  # again after preemption
                if known:
                    at = first + len(request.prompt_logprobs) - 1 - sequence.start
                    num_top = [request.params.prompt_logprobs] * len(known)
                    request.prompt_logprobs += logprobs(logits[at : at + len(known)], known, num_top)
            if sequence.num_logits and sequence.start + len(sequence.tokens) == request.num_tokens:
                emitting.append(request)
                rows.append(row - 1)
        return emitting, rows

    def _sample(
        self, candidates: Sequence[Request], logits: Tensor, rows: Sequence[int]
    ) -> tuple[list[Request], list[int]]:
        """The next token of each request from its row of ``logits``; one whose grammar fails ends here, alone."""
        requests, chosen, sampling = [], [], []
        for request, row in zip(candidates, rows, strict=True):
            try:
                sampling.append(_row(request))
            except Exception as error:
                self._fail(request, error)
                continue
            requests.append(request)
            chosen.append(row)
        if not requests:
            return [], []
        logits = logits if len(chosen) == len(logits) else logits[chosen]
        tokens: list[int] = sample(logits, sampling).tolist()
        wanting = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        if wanting:
            num_top = [requests[i].params.logprobs or 0 for i in wanting]
            found = logprobs(logits[wanting], [tokens[i] for i in wanting], num_top)
            for i, entry in zip(wanting, found, strict=True):
                requests[i].logprobs.append(entry)
        return requests, tokens

    def _emit(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        now = time.monotonic()
        with self.changed:
            pressing = False
            for request, token in zip(requests, tokens, strict=True):
                try:
                    text = request.append(token, now)
                except Exception as error:
                    self._fail(request, error)
                    continue
                self._handles[request.id].put(text, token)
                pressing |= request.first_token == now
                if request.finish_reason is not None:
                    self._finish(request)
                    pressing = True
            self._notify(pressing)

    def _notify(self, pressing: bool = True) -> None:
        self.changed.notify_all()
        if pressing:
            self.pressing.notify_all()

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._handles.pop(request.id).completion = request.completion()
        self.on_finish(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request by its own fault; the others go on."""
        log.error("request %s failed: %s", request.id, error)
        request.finish_reason = "abort"
        self.scheduler.finish(request)
        with self.changed:
            self._handles.pop(request.id).error = RequestFailedError(str(error).partition("\n")[0])
            self._notify()
        self.on_finish(request)

    def _abort(self, requests: Iterable[Request], reason: FinishReason = "abort") -> None:
        with self.changed:
            for request in requests:
                request.finish_reason = reason
                self._finish(request)
                self._notify()

    def _abandon(self, error: Exception | None) -> None:
        """End every request: the engine stops."""
        with self.changed:
            for handle in self._handles.values():
                handle.error = EngineError(f"the engine has stopped: {error or 'it was closed'}")
            self._handles.clear()
            self._notify()


def _row(request: Request) -> SamplingRow:
    return SamplingRow(
        request.params,
        request.seed,
        request.num_tokens,
        request.token_ids,
        request.num_prompt,
        request.end_ids,
        None if request.grammar is None else request.grammar.allowed(),
    )
