"""One HTTP request between a wire protocol and the engine, whatever server carries it. No torch, no TorchServe here.

A :class:`Session` submits a job's sequences, turns what the engine says into pieces of the answer, and knows what can
still be said: before the first piece a failure is an error of its own, afterwards only words in the body.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import RequestError, SamplingParams
from gpt_fast.protocol.job import Job

log = logging.getLogger(__name__)

MAX_UNCOLLECTED = 256  # tokens that a sequence may be ahead of its server


class Sequence(Protocol):
    """What a session needs of engine.handle.Handle."""

    completion: Completion | None

    @property
    def has_news(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def has_begun(self) -> bool: ...
    def poll(self) -> Delta | None: ...
    def cancel(self) -> None: ...


class Engine(Protocol):
    """What a session needs of LLM."""

    changed: threading.Condition  # notified when any sequence has something new
    pressing: threading.Condition  # of the same lock, when it is a first token or an ending

    def submit(self, prompt: Any, params: SamplingParams, max_uncollected: int | None) -> Sequence: ...


class Piece(NamedTuple):
    """The next part of an answer. ``plain``: it is the first and the last, so the answer was never a stream."""

    text: str
    last: bool
    plain: bool


class Session:
    """Answers one request. Raises RequestError when the engine refuses it; nothing of it is left running then.

    ``announce``: give out an empty first piece as soon as the first token is there, even if its text is not: a server
    that looks whether its client is still there only when it sends something then looks early.
    """

    def __init__(self, engine: Engine, job: Job, announce: bool = False) -> None:
        self.job = job
        self._announce = announce
        self.started = False  # a piece has been given out
        self.failure: Exception | None = None  # what went wrong after that
        self._sequences: list[Sequence] = []
        try:
            for part in job.sequences:
                for params in part.params.samples():
                    self._sequences.append(engine.submit(part.prompt, params, MAX_UNCOLLECTED))
        except RequestError as error:
            self.cancel()
            raise job.named(error) from None
        except BaseException:
            self.cancel()
            raise
        self._completions: list[Completion | None] = [None] * len(self._sequences)

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would say something. Needs the engine's ``changed`` held, or an idle engine."""
        return any(s.has_news and self._completions[i] is None for i, s in enumerate(self._sequences))

    @property
    def ending(self) -> bool:
        """Whether :meth:`take` would give the last piece."""
        return all(s.finished for s in self._sequences)

    def cancel(self) -> None:
        """Nobody listens any more."""
        for sequence in self._sequences:
            sequence.cancel()

    def take(self) -> Piece | None:
        """What is new, or None while there is nothing to say.

        Raises RequestError when the request failed and nothing had been given out: it is the whole answer.
        """
        try:
            text = self._collect()
        except Exception as error:
            self.cancel()
            failure = as_request_error(error)
            if not self.started:
                raise failure from (None if failure is error else error)
            self.failure = error
            log.warning("a request failed after its first piece: %s", failure.message)
            return Piece(self.job.broken(failure), last=True, plain=False)
        completions = [c for c in self._completions if c is not None]
        last = len(completions) == len(self._sequences)
        if last:
            text += self.job.end(completions)
        has_begun = self._announce and (self.started or any(s.has_begun for s in self._sequences))
        if not text and not last and not has_begun:
            return None
        plain = last and not self.started
        self.started = True
        return Piece(text, last, plain)

    def _collect(self) -> str:
        parts = []
        for i, sequence in enumerate(self._sequences):
            delta = sequence.poll() if self._completions[i] is None else None
            if delta is None:
                continue
            if delta.finish_reason == "abort":
                raise RequestError("the request was aborted: its time was up", "timeout_s", "timeout", 504)
            if self.job.stream:
                parts.append(self.job.delta(i, delta))
            self._completions[i] = delta.completion
        return "".join(parts)


def as_request_error(error: Exception) -> RequestError:
    """``error`` as its requester may see it: never a stack, a path or another request's words."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed", exc_info=error)
    return RequestError(
        f"the request failed: {type(error).__name__}; see the server's log", None, "internal_error", 500
    )


def wait_for_news(
    engine: Engine, sessions: Collection[Session], timeout_s: float, pause_s: float, since: float
) -> None:
    """Sleep until a session has something to say, or ``timeout_s`` is over.

    A piece of a stream that already runs waits until ``pause_s`` after ``since`` (monotonic), so that a fast engine
    does not drown in exchanges; a first piece or an ending does not wait.
    """
    deadline = time.monotonic() + timeout_s
    with engine.changed:
        while (now := time.monotonic()) < deadline:
            talking = [s for s in sessions if s.has_news]
            if any(not s.started or s.ending for s in talking) or (talking and now >= since + pause_s):
                return
            if talking:
                engine.pressing.wait(since + pause_s - now)
            else:
                engine.changed.wait(deadline - now)
