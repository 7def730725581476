"""Lines to answers on one engine, with its batch always full and few requests in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Generator, Iterator
from typing import NamedTuple

from gpt_fast.batch.lines import Line, read_line
from gpt_fast.batch.rows import Answer, answer_of, refusal_of
from gpt_fast.batch.setup import Setup, open_llm
from gpt_fast.engine.handle import Handle
from gpt_fast.errors import MAX_SHOWN, EngineError, RequestError, RequestFailedError, brief
from gpt_fast.llm import LLM
from gpt_fast.serve.protocol.request import WireRequest, as_written
from gpt_fast.serve.routes import openai_context, parse
from gpt_fast.serve.session import timed_out

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A line that wants an answer, and the digest of its row."""

    digest: str
    raw: bytes


class _Asked(NamedTuple):
    """A request that the engine has. ``handles``: of its sequences."""

    digest: str
    line: Line
    request: WireRequest
    handles: list[Handle]

    @property
    def finished(self) -> bool:
        return all(handle.finished for handle in self.handles)


class OneEngine:
    """The engine of this process, loaded when there is something to answer."""

    device: str | None = None  # its own choice

    def answers(self, setup: Setup, jobs: Iterator[Job]) -> Generator[tuple[str, Answer]]:
        """As :meth:`Answerer.answers`."""
        with open_llm(setup, progress=True) as llm:
            yield from Answerer(llm, setup.names).answers(jobs)

    def close(self) -> None:
        """Nothing stays open between answers."""


class Answerer:
    """Answers lines with ``llm``. ``names``: what requests may call the model. Several threads may use one."""

    def __init__(self, llm: LLM, names: tuple[str, ...]) -> None:
        self._llm, self._openai = llm, openai_context(llm, names)
        self._most = 2 * llm.engine.runner.max_batch  # sequences: as many as run, and as many that wait to follow them

    def answers(self, jobs: Iterator[Job]) -> Generator[tuple[str, Answer]]:
        """Digest and answer of each of ``jobs``, in the order in which they end. A job is fetched when there is room
        for it. Raises EngineError when the engine stops."""
        asked: list[_Asked] = []
        held: Job | None = None  # that has to wait
        try:
            while True:
                while sum(len(one.handles) for one in asked) < self._most:
                    if (job := held or next(jobs, None)) is None:
                        break
                    held = None
                    begun = self._begin(job, may_wait=bool(asked))
                    if isinstance(begun, _Asked):
                        asked.append(begun)
                    elif begun is not None:
                        yield job.digest, begun
                    else:
                        held = job
                        break
                if not asked:
                    return
                ended = self._some_ended(asked)
                asked = [one for one in asked if one not in ended]
                for one in ended:
                    yield one.digest, self._end(one)
        finally:
            for one in asked:
                for handle in one.handles:
                    handle.cancel()

    def _begin(self, job: Job, may_wait: bool) -> _Asked | Answer | None:
        """Give the request of ``job`` to the engine; its answer if it is refused. None if it ``may_wait``, and has to
        until another one has ended: grammars share a budget of memory."""
        line = read_line(job.raw)
        try:
            if line.fault is not None:
                raise line.fault
            request = self._parse(line)
            return _Asked(job.digest, line, request, self._submit(job.digest, request))
        except Exception as error:
            refused = _explained(error)
            return None if may_wait and refused.retry_after_s else refusal_of(line, job.digest, refused)

    def _parse(self, line: Line) -> WireRequest:
        body = line.body if line.form == "batch" else {"return_token_ids": True, **line.body}
        if line.body.get("stream"):
            raise RequestError("stream has no meaning in a batch; leave it out", "stream", "unsupported_value")
        return parse(line.route, body, self._openai, default_stream=False)

    def _submit(self, digest: str, request: WireRequest) -> list[Handle]:
        parts = []
        for i, prompt in enumerate(request.prompts):
            params = request.params
            if params.seed is None:  # drawn anew, an answer would be another one in each run
                params = dataclasses.replace(params, seed=derived_seed(digest, i))
            parts += [(prompt, sample) for sample in params.samples()]
        try:
            return self._llm.submit_all(parts)
        except RequestError as error:
            raise as_written(error, request.given) from None

    def _some_ended(self, asked: list[_Asked]) -> list[_Asked]:
        """Wait until requests have ended; returns those."""
        with (changed := self._llm.engine.begun_or_ended):
            return changed.wait_for(lambda: [one for one in asked if one.finished])

    def _end(self, one: _Asked) -> Answer:
        """The answer of a request that has ended."""
        try:
            completions = []
            for handle in one.handles:
                if handle.completion is None:
                    raise handle.error or RequestFailedError("it has no completion")
                if handle.completion.finish_reason == "abort":
                    raise timed_out()
                completions.append(handle.completion)
            return answer_of(one.line, one.digest, json.loads(one.request.write_end(completions)))
        except EngineError:
            raise
        except Exception as error:
            return refusal_of(one.line, one.digest, _explained(error))


def derived_seed(digest: str, index: int) -> int:
    """The seed of the prompt ``index`` of a request that has none: 63 bits that any run finds again."""
    return int.from_bytes(hashlib.blake2b(f"{digest} {index}".encode(), digest_size=8).digest(), "little") >> 1


def _explained(error: Exception) -> RequestError:
    """``error`` as a row may tell it. Raises EngineError: no later row would fare better."""
    if isinstance(error, EngineError):
        raise error
    if isinstance(error, RequestError):
        return error
    log.error("a row failed: %s", brief(error))
    return RequestError(f"the request failed: {str(error)[:MAX_SHOWN]}", None, "internal_error", 500)
