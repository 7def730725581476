"""A running request as its caller sees it: text arrives here, any thread may fetch it or cancel."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence

from gpt_fast.engine.request import Request
from gpt_fast.outputs import Completion, Delta


class Handle:
    """``completion`` is there once the request has ended, ``error`` once it has failed. The request pauses while
    ``max_uncollected`` tokens wait to be fetched, and is aborted if nobody fetches them. ``owner`` is what must live as
    long as the request runs."""

    def __init__(
        self,
        request: Request,
        changed: threading.Condition,
        max_uncollected: int | None = None,
        owner: object = None,
    ) -> None:
        self.id, self.request, self.owner = request.id, request, owner
        self.deadline = request.arrival + (request.params.timeout_s or float("inf"))  # monotonic seconds
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.paused_since = float("inf")  # monotonic seconds
        self.cancelled = False
        self._changed, self._max_uncollected = changed, max_uncollected or float("inf")
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._num_fetched = 0

    @property
    def finished(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def has_news(self) -> bool:
        """Whether :meth:`poll` would return something or raise."""
        return bool(self._tokens) or self.finished

    @property
    def has_begun(self) -> bool:
        return self.request.first_token is not None

    def poll(self) -> Delta | None:
        """What is new since the last call, or None. Raises the request's error."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> Delta | None:
        """Like :meth:`poll`, but waits for something new; None after ``timeout_s``."""
        with self._changed:
            return self._take() if self._changed.wait_for(lambda: self.has_news, timeout_s) else None

    def cancel(self) -> None:
        """Stop the request within a step. Harmless when it has finished."""
        with self._changed:
            self.cancelled = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Delta]:
        """All deltas to the end; leaving early cancels the request."""
        try:
            while (delta := self.wait()) is not None:
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if not self.finished:
                self.cancel()

    def _take(self) -> Delta:
        if self.error is not None:
            raise copy.copy(self.error)  # the same one would hold this frame, and through it the handle and itself
        text, tokens = "".join(self._text), tuple(self._tokens)
        self._text, self._tokens = [], []
        if self.request.paused:
            self.request.paused, self.paused_since = False, float("inf")
            self._changed.notify_all()
        done = self.completion
        new = slice(self._num_fetched, self._num_fetched + len(tokens))
        logprobs, origins = tuple(self.request.logprobs[new]), tuple(self.request.origins[new])
        self._num_fetched += len(tokens)
        reason = done.finish_reason if done else None
        return Delta(text, tokens, reason, done, logprobs, origins, self.request.num_cached)

    # The engine's side, called with the lock held.

    def end(self, completion: Completion | None, error: Exception | None) -> None:
        """The request has ended, or failed."""
        self.completion, self.error, self.owner = completion, error, None

    def put(self, text: str, tokens: Sequence[int]) -> None:
        """More tokens, and the text that became certain with them."""
        self._text.append(text)
        self._tokens += tokens
        if len(self._tokens) >= self._max_uncollected:
            self.request.paused, self.paused_since = True, time.monotonic()
