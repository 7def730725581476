"""What comes back from a request: pieces while it runs, one completion at its end. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
# Where a token comes from: a step without drafts, a draft that was right, the place of the first wrong draft, or the
# place behind drafts that were all right.
Origin = Literal["plain", "accepted", "corrected", "bonus"]


class TokenLogprobs(NamedTuple):
    """A token's log probability, and the likeliest tokens in its place as (token id, log probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds of a request's phases."""

    queue_s: float = 0.0  # from its arrival until it was first scheduled
    prefill_s: float = 0.0  # from there to the first token
    first_token_s: float = 0.0  # from its arrival
    total_s: float = 0.0  # from its arrival
    decode_s: float = 0.0  # from the first token to the last

    def tokens_per_second(self, num_tokens: int) -> float:
        """Decode rate: tokens after the first over the time they took; 0 when there is none."""
        return (num_tokens - 1) / self.decode_s if num_tokens > 1 and self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished request. ``logprobs``: one for each token, if they were asked for. ``prompt_logprobs``: one for each
    prompt token; None for the first, which nothing predicts."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0  # tokens that were guessed, and verified
    num_accepted: int = 0  # and those of them that were right
    origins: tuple[Origin, ...] = ()  # of each token, where a drafter is loaded
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True)
class Delta:
    """What is new since the last delta. The last one has a ``finish_reason`` and the whole ``completion``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[Origin, ...] = ()  # of each token, where a drafter is loaded
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
