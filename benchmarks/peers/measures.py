"""What is measured, for every peer alike. Standard library only: workers import it in their own environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORT_PROMPT = 6  # tokens before decoding that is not about context
LONG_PROMPT = 2048  # tokens; with more of them, a worker computes a prompt before decoding once


@dataclass(frozen=True)
class Measure:
    """``decode``: ``new_tokens`` steps with one token for each of ``batch`` sequences, after a prompt that is not
    timed. ``prefill``: one prompt, from its start to the logits of its last token."""

    kind: str  # decode | prefill
    batch: int
    prompt_tokens: int
    new_tokens: int = 0

    @property
    def name(self) -> str:
        """As tables and JSON call it."""
        if self.kind == "prefill":
            return f"prefill {self.prompt_tokens}"
        if self.prompt_tokens != SHORT_PROMPT:
            return f"decode at {self.prompt_tokens + self.new_tokens + 1}"
        return "decode" if self.batch == 1 else f"decode x{self.batch}"

    @property
    def num_tokens(self) -> int:
        """Tokens that one run computes, by which its seconds are divided into."""
        return self.prompt_tokens if self.kind == "prefill" else self.batch * self.new_tokens

    @property
    def longest(self) -> int:
        """Positions that each sequence needs."""
        return self.prompt_tokens + self.new_tokens + 1

    @property
    def mean_context(self) -> float:
        """Cached tokens of one sequence in the middle of decoding."""
        return self.prompt_tokens + self.new_tokens / 2


def plan(batches: Sequence[int], prompt_tokens: int, new_tokens: int, contexts: Sequence[int]) -> list[Measure]:
    """Decoding for each batch size, one prefill unless ``prompt_tokens`` is 0, and decoding that ends at each context.

    Raises ValueError.
    """
    if new_tokens < 1 or prompt_tokens < 0 or any(batch < 1 for batch in batches):
        raise ValueError("new tokens and batch sizes must be at least 1, prompt tokens at least 0")
    if prompt_tokens == 1:
        raise ValueError("a prompt of 1 token is a decode step; give --prompt-tokens 0 to leave prefill out")
    for context in contexts:
        if context <= new_tokens + 1 + SHORT_PROMPT:
            raise ValueError(
                f"context {context} is too short for {new_tokens} new tokens after {SHORT_PROMPT + 1} or more"
            )
    measures = [Measure("decode", batch, SHORT_PROMPT, new_tokens) for batch in batches]
    if prompt_tokens:
        measures.append(Measure("prefill", 1, prompt_tokens))
    measures += [Measure("decode", 1, context - new_tokens - 1, new_tokens) for context in contexts]
    if not measures:
        raise ValueError("nothing is to be measured: give batch sizes, prompt tokens or contexts")
    return measures


def prompt_ids(num_tokens: int, vocab_size: int, number: int = 0) -> list[int]:
    """Token ids, others for each ``number``; the same in every worker."""
    return [3 + (number * 7919 + i * (i + number)) % (vocab_size - 3) for i in range(num_tokens)]
