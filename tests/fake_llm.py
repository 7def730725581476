"""An LLM without a model: the prompt's words come back one a token, so that a test knows every answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpt_fast.outputs import Completion, Delta, FinishReason
from gpt_fast.params import RequestError, SamplingParams


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

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Checks eagerly, like the real one; the text comes from the iterator."""
        params = params or SamplingParams()
        self.calls.append((prompt, params))
        if len(prompt) > self.max_seq_len:
            message = f"the prompt has {len(prompt)} tokens; at most {self.max_seq_len} fit"
            raise RequestError(message, "prompt", "context_length_exceeded")
        return self._deltas(prompt, params)

    def _deltas(self, prompt: str | list[int], params: SamplingParams) -> Iterator[Delta]:
        words = list(self.words) or [f" w{i}" for i in range(params.max_tokens or 10)]
        for i, word in enumerate(words):
            if i == self.fail_after:
                raise self.error
            reason: FinishReason | None = "abort" if i == self.abort_after else None
            if i == len(words) - 1 and reason is None:
                reason = "length"
            done = None
            if reason:
                done = Completion("".join(words[: i + 1]), tuple(range(i + 1)), reason, num_prompt_tokens=len(prompt))
            yield Delta(word, (i,), reason, done)
            if reason:
                return
