"""One HTTP request between a wire protocol and the engine, whatever server carries it. No torch, no TorchServe here.

A request that fails before its first piece is answered with an HTTP status that says so; after it the failure can only
be written into the body. Whatever may take long is done in other threads (lanes.py).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from gpt_fast.errors import MAX_SHOWN, RequestError, brief, try_later, without_frames
from gpt_fast.outputs import Completion
from gpt_fast.serve.lanes import Lanes
from gpt_fast.serve.protocol.request import Piece, WireRequest, as_written

if TYPE_CHECKING:
    from gpt_fast.engine.engine import Engine
    from gpt_fast.engine.handle import Handle
    from gpt_fast.llm import LLM

log = logging.getLogger(__name__)

MAX_UNCOLLECTED = 256  # tokens of a stream that wait to be sent; then the engine pauses that sequence
LIGHT_BYTES = 8192  # a larger body takes the heavy lane
LIGHT_NUMBERS = 1000  # an answer with more log probabilities does, too
MAX_PIECE_BYTES = 6_553_500  # TorchServe's max_response_size, where nobody sets it
PARSE_S = 10.0  # to parse a request and prepare its prompt and grammar; one that takes longer is refused
TOO_MANY_LARGE = "too many large requests are waiting"


Read = Callable[[], WireRequest | Piece]  # raises RequestError


class Session:
    """Answers one request, which ``read`` parses. ``num_bytes``: the size of its body.

    ``announce``: give out an empty first piece of a stream as soon as the first token is there, even if that token has
    no whole character yet. TorchServe notices a client that has gone only when it sends something: it notices early.
    ``one_piece_s``: the time limit of requests for one whole answer that give no ``timeout_s``. While such an answer is
    made, the server cannot notice that its client has gone; the limit bounds what is computed for nobody.
    ``silence_s``: a session that has given out nothing for so long fails.
    ``in_one_message``: nothing is given out before the end, and then all pieces joined."""

    def __init__(
        self,
        llm: LLM,
        read: Read,
        lanes: Lanes,
        num_bytes: int,
        announce: bool,
        one_piece_s: float,
        silence_s: float = math.inf,
        in_one_message: bool = False,
    ) -> None:
        self.num_bytes, self.in_one_message = num_bytes, in_one_message
        self.started = False  # a piece has been given out
        self.failure: Exception | None = None  # what went wrong after that
        self._llm, self._lanes, self._announce, self._one_piece_s = llm, lanes, announce, one_piece_s
        self._cancelled = False
        self._request: WireRequest
        self._sequences: list[Handle] = []
        self._completions: list[Completion | None] = []
        self._silence_s = silence_s
        self._since = self._spoke = time.monotonic()
        self._kept = ""  # of an answer in one message
        self._work: Future[Any] | None = None  # what a lane does for this session at present
        self._begin(lanes.light if num_bytes <= LIGHT_BYTES else lanes.heavy, self._parse, read)

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would say something. Needs the engine's ``changed`` held, or an idle engine."""
        if self._work is not None:
            return self._work.done()
        running = [s for s, completion in zip(self._sequences, self._completions, strict=True) if completion is None]
        return any(s.has_news if self._gives_pieces else s.finished for s in running)

    @property
    def _gives_pieces(self) -> bool:
        """Whether the answer goes out piece by piece."""
        return self._request.stream and not self.in_one_message

    @property
    def ending(self) -> bool:
        return self._work is not None or all(s.finished for s in self._sequences)

    def cancel(self) -> None:
        """Nobody listens any more."""
        self._cancelled = True
        if self._work is not None:
            self._work.cancel()
            self._drop(self._work)
        for sequence in self._sequences:
            sequence.cancel()

    def take(self) -> Piece | None:
        """What is new, or None while there is nothing to say. Raises RequestError when the request failed and nothing
        had been given out: it is the whole answer."""
        try:
            piece = self._finished_work()
            if piece is None and self._work is None:
                piece = self._news()
            if piece is not None and self.in_one_message:
                piece = self._joined(piece)
            if piece is None:
                self._check_silence()
                return None
            _check_sendable(piece)
            self.started, self._spoke = True, time.monotonic()
            return piece
        except Exception as error:
            self.cancel()
            if not self.started and isinstance(error, RequestError):
                raise
            if not self.started:
                raise as_request_error(error) from error
            failure = as_request_error(error)
            self.failure = without_frames(error)
            log.warning("a request failed after its first piece: %s", failure.message[:MAX_SHOWN])
            return Piece(self._request.write_error(failure), self._request.content_type, plain=False)

    # In the lanes.

    def _begin(self, lane: Executor, work: Callable[..., object], *args: object) -> None:
        self._work = lane.submit(work, *args)
        self._work.add_done_callback(self._wake)

    def _wake(self, work: Future[Any]) -> None:
        if self._cancelled:
            self._drop(work)
        engine = self._llm.engine
        with engine.changed:
            engine.changed.notify_all()
            engine.begun_or_ended.notify_all()

    @staticmethod
    def _drop(work: Future[Any]) -> None:
        """Cancel what ``work`` has put into the engine, if it has."""
        if work.done() and not work.cancelled() and work.exception() is None:
            found = work.result()
            for sequence in found if isinstance(found, list) else ():
                sequence.cancel()

    def _parse(self, read: Read) -> Piece | list[Handle] | None:
        """The whole answer, or handles of what the engine has; None where compiling a grammar is for the heavy lane."""
        opened = read()
        if isinstance(opened, Piece):
            return opened
        self._request = opened
        return None if opened.params.grammar_field and self.num_bytes <= LIGHT_BYTES else self._submit()

    def _submit(self) -> list[Handle]:
        request, params = self._request, self._request.params
        if not self._gives_pieces and params.timeout_s is None:
            params = dataclasses.replace(params, timeout_s=self._one_piece_s)
        try:
            prompts = request.prompts
            if params.prompt_logprobs is not None:
                prompts = [self._llm.encode(prompt) for prompt in prompts]
                _check_prompt_logprobs(sum(map(len, prompts)) * params.n, params.prompt_logprobs, request.least_bytes)
            parts = [(prompt, sample) for prompt in prompts for sample in params.samples()]
            # An answer in one piece is collected at its end.
            return self._llm.submit_all(parts, MAX_UNCOLLECTED if self._gives_pieces else None)
        except RequestError as error:
            raise as_written(error, request.given) from None

    def _write_end(self, completions: list[Completion]) -> Piece:
        return Piece(self._request.write_end(completions), self._request.content_type)

    # In the thread that talks to the server.

    def _finished_work(self) -> Piece | None:
        """Take over what a lane has done; a piece if that is the whole answer."""
        while self._work is not None:
            if not self._work.done():
                self._check_time()
                return None
            work, self._work = self._work, None
            try:
                found = work.result()
            finally:
                del work  # an exception would hold this frame, and through it the future and itself
            if isinstance(found, Piece):
                return found
            if found is None:
                self._begin(self._lanes.heavy, self._submit)
            else:
                self._sequences, self._completions = found, [None] * len(found)
        return None

    def _check_time(self) -> None:
        """Raise RequestError if the request takes too long to parse and prepare."""
        if self._sequences or time.monotonic() < self._since + PARSE_S:
            return
        if self._work is not None and self._work.running():
            message = f"the request takes longer than {PARSE_S:g} s to prepare: make its grammar or prompt smaller"
            raise RequestError(message, None, "too_complex")
        raise try_later(TOO_MANY_LARGE)

    def _check_silence(self) -> None:
        """Raise RequestError if nothing was given out for too long."""
        if time.monotonic() >= self._spoke + self._silence_s:
            limit = f"nothing of the answer could be sent within {self._silence_s:g} s, and the server waits no longer"
            raise RequestError(f"{limit}; ask for a stream, or for less", None, "timeout", 504)

    def _news(self) -> Piece | None:
        text = self._collect()
        completions = [c for c in self._completions if c is not None]
        last = len(completions) == len(self._sequences)
        if not self._request.stream:
            if not last:
                return None
            self._begin(self._lane_for(completions), self._write_end, completions)
            return self._finished_work()
        if last:
            text += self._request.write_end(completions)
        has_begun = self._announce and (self.started or any(s.has_begun for s in self._sequences))
        if not text and not last and not has_begun:
            return None
        return Piece(text, self._request.content_type, last, plain=last and not self.started)

    def _joined(self, piece: Piece) -> Piece | None:
        """The last ``piece`` behind all those before it; None for these."""
        self._kept += piece.text
        return piece._replace(text=self._kept) if piece.last else None

    def _lane_for(self, completions: Collection[Completion]) -> Executor:
        entries = [e for c in completions for e in (*(c.logprobs or ()), *(c.prompt_logprobs or ())) if e is not None]
        return self._lanes.heavy if sum(1 + len(e.top) for e in entries) > LIGHT_NUMBERS else self._lanes.light

    def _collect(self) -> str:
        parts = []
        for i, sequence in enumerate(self._sequences):
            if self._completions[i] is not None or (delta := sequence.poll()) is None:
                continue
            if delta.finish_reason == "abort":
                raise timed_out()
            if self._request.stream:
                parts.append(self._request.write_delta(i, delta))
            self._completions[i] = delta.completion
        return "".join(parts)


def _check_sendable(piece: Piece) -> None:
    """Raise for a piece that TorchServe cannot send, which would end the worker: UnicodeEncodeError for half of a
    surrogate pair, RequestError for too many bytes."""
    num_bytes = len(piece.text.encode())
    if num_bytes > MAX_PIECE_BYTES:
        limit = f"the answer has {num_bytes} bytes, and at most {MAX_PIECE_BYTES} can be sent at once"
        raise RequestError(f"{limit}; ask for less in one request", None, "answer_too_large")


def _check_prompt_logprobs(num_tokens: int, num_top: int, least_bytes: int) -> None:
    """Raise RequestError where log probabilities of ``num_tokens`` tokens of prompts cannot be sent, however they come
    out: they would be computed for nothing, and take a hundred times their prompts' memory until then."""
    num_bytes = num_tokens * max(1, num_top) * least_bytes
    if num_bytes > MAX_PIECE_BYTES:
        asked = f"prompt_logprobs of {num_top} for each of {num_tokens} tokens have more than {num_bytes} bytes"
        message = f"{asked}, and at most {MAX_PIECE_BYTES} can be sent at once; ask for less in one request"
        raise RequestError(message, "prompt_logprobs", "answer_too_large")


def timed_out() -> RequestError:
    """The end of a request that the engine aborted at its ``timeout_s``."""
    return RequestError("the request was aborted: its time was up", "timeout_s", "timeout", 504)


def as_request_error(error: Exception) -> RequestError:
    """``error`` as its requester may see it: never a stack, a path or another request's words."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed: %s", brief(error))
    message = f"the request failed: {type(error).__name__}; see the server's log"
    return RequestError(message, None, "internal_error", 500)


def wait_for_news(
    engine: Engine, sessions: Collection[Session], timeout_s: float, pause_s: float, since: float
) -> None:
    """Sleep until a session has something to say, or ``timeout_s`` is over. A piece of a stream that already runs waits
    until ``pause_s`` after ``since`` (monotonic), so that a fast engine does not drown in exchanges; a first piece or
    an ending does not wait."""
    deadline = time.monotonic() + timeout_s
    with engine.changed:
        while (now := time.monotonic()) < deadline:
            talking = [s for s in sessions if s.has_news]
            if any(not s.started or s.ending for s in talking) or (talking and now >= since + pause_s):
                return
            if talking:
                engine.begun_or_ended.wait(since + pause_s - now)
            else:
                engine.changed.wait(deadline - now)
