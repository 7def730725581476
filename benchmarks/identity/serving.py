"""All requests through one engine, and what each was answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpt_fast import LLM, Completion, RequestError
from gpt_fast.engine.handle import Handle
from gpt_fast.errors import RequestFailedError
from gpt_fast.outputs import TokenLogprobs
from identity.mixed import Ask

_NEWS_S = 1.0


@dataclass
class Answer:
    """What one request got: a completion or an error, and the pieces that came before."""

    completion: Completion | None = None
    error: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Serving:
    """Keeps ``at_once`` requests of ``asks`` in ``llm``. ``troubled``: some pause, and some are cancelled on the
    way, as each ``Ask`` says. ``tick`` is called with every one that ends."""

    def __init__(
        self, llm: LLM, asks: Sequence[Ask], at_once: int, troubled: bool, tick: Callable[[int], object]
    ) -> None:
        self._llm, self._asks, self._at_once, self._troubled, self._tick = llm, asks, at_once, troubled, tick
        self.answers = [Answer() for _ in asks]
        self._coming = deque(range(len(asks)))
        self._live: dict[int, Handle] = {}

    def run(self) -> list[Answer]:
        """The answers, in order. Raises RuntimeError when the engine keeps pages of requests that have ended."""
        engine = self._llm.engine
        while self._coming or self._live:
            while self._coming and len(self._live) < self._at_once:
                self._submit(self._coming.popleft())
            with engine.changed:
                engine.changed.wait_for(lambda: any(handle.has_news for handle in self._live.values()), _NEWS_S)
            for which in list(self._live):
                self._collect(which)
        with engine.changed:
            engine.scheduler.check_integrity()
            if engine.scheduler.pages.num_used:
                raise RuntimeError(f"{engine.scheduler.pages.num_used} pages are in use, and no request is")
        return self.answers

    def _submit(self, which: int) -> None:
        ask = self._asks[which]
        try:
            self._live[which] = self._llm.submit(ask.prompt, ask.params, ask.pauses_at if self._troubled else None)
        except RequestError as error:
            self._end(which, str(error))

    def _collect(self, which: int) -> None:
        handle, answer, gone_after = self._live[which], self.answers[which], self._asks[which].gone_after
        try:
            delta = handle.poll()
        except (RequestError, RequestFailedError) as error:
            return self._end(which, str(error))
        if delta is None:
            return None
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.completion = delta.completion
        if delta.completion is not None:
            return self._end(which, "")
        if self._troubled and gone_after is not None and len(answer.token_ids) >= gone_after:
            handle.cancel()
        return None

    def _end(self, which: int, error: str) -> None:
        self.answers[which].error = error
        self._live.pop(which, None)
        self._tick(1)
