"""An LLM without a model: the prompt's words come back one a token, so that a test knows every answer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

from gpt_fast.checkpoint.generation import GenerationDefaults
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, FinishReason
from gpt_fast.params import SamplingParams


class FakeLLM:
    """Answers "w0 w1 w2 ..." of at most ``max_tokens`` words, the token of word i being i.

    A prompt of more than ``max_seq_len`` characters is refused as the engine would. ``fail_after``: raise ``error``
    after so many words. ``abort_after``: end as an engine that stops ends its requests. ``calls``: what was asked for.
    """

    def __init__(
        self,
        max_seq_len: int = 1000,
        *,
        words: Sequence[str] = (),
        fail_after: int | None = None,
        error: Exception | None = None,
        abort_after: int | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.words = words
        self.fail_after = fail_after
        self.error = error or ValueError("the fake failed")
        self.abort_after = abort_after
        self.calls: list[tuple[Any, SamplingParams]] = []
        changed = threading.Condition()
        self.tokenizer = None
        self.chat_templates = dict[str, Any]()
        self.defaults = GenerationDefaults((), None, SamplingParams())
        scheduler = SimpleNamespace(running=[], num_preemptions=0, max_batch=8, pages=PageAllocator(2, 1))
        self.engine = SimpleNamespace(
            scheduler=scheduler, speculation=None, num_waiting=0, max_waiting=None,
            since_last_step_s=0.0, changed=changed, begun_or_ended=changed,
        )  # fmt: skip
        self.handles: list[FakeHandle] = []
        self.silent = False  # of the handles to come

    follows = False

    def status(self) -> dict[str, Any]:
        return {"running": len(self.handles)}

    def submit(self, prompt: str | list[int], params: SamplingParams, max_uncollected: int | None = None) -> FakeHandle:
        """Checks eagerly, like the real one; every poll of the handle gives one more word."""
        self.calls.append((prompt, params))
        if len(prompt) > self.max_seq_len:
            message = f"the prompt has {len(prompt)} tokens; at most {self.max_seq_len} fit"
            raise RequestError(message, "prompt", "context_length_exceeded")
        self.handles.append(FakeHandle(self, prompt, params, eager=max_uncollected is None))
        return self.handles[-1]

    def encode(self, prompt: str | list[int]) -> list[int]:
        return [ord(char) for char in prompt] if isinstance(prompt, str) else prompt

    def submit_all(self, parts: Sequence[tuple[Any, Any]], max_uncollected: int | None = None) -> list[FakeHandle]:
        return [self.submit(prompt, params, max_uncollected) for prompt, params in parts]


class FakeHandle:
    """One request. ``silent``: it has nothing to say until that is set to False. ``eager``: all of it is there."""

    def __init__(self, llm: FakeLLM, prompt: str | list[int], params: SamplingParams, eager: bool = False) -> None:
        self.eager = eager
        self.llm = llm
        self.completion: Completion | None = None
        self.silent = llm.silent
        self.cancelled = False
        self._prompt = prompt
        self._words = list(llm.words) or [f" w{i}" for i in range(params.max_tokens or 10)]
        self._at = 0

    @property
    def has_news(self) -> bool:
        return not self.silent

    @property
    def has_begun(self) -> bool:
        return self._at > 0

    @property
    def finished(self) -> bool:
        return self.completion is not None or (self.eager and not self.silent)

    def cancel(self) -> None:
        self.cancelled = True

    def poll(self) -> Delta | None:
        if self.silent:
            return None
        i, words, llm = self._at, self._words, self.llm
        self._at += 1
        if i == llm.fail_after:
            raise copy.copy(llm.error)
        reason: FinishReason | None = "abort" if i == llm.abort_after else None
        if i == len(words) - 1 and reason is None:
            reason = "length"
        if reason:
            text = "".join(words[: i + 1])
            self.completion = Completion(text, tuple(range(i + 1)), reason, num_prompt_tokens=len(self._prompt))
        return Delta(words[i], (i,), reason, self.completion)


class Here(Executor):
    """Does its work at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
