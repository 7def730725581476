"""One request's life in the engine: waiting, running, finished; its tokens, pages and text. The engine's thread alone
changes it. No torch here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpt_fast.engine.text import TextStream
from gpt_fast.outputs import Completion, FinishReason, Origin, Timings, TokenLogprobs
from gpt_fast.params import SamplingParams

if TYPE_CHECKING:
    from gpt_fast.engine.grammar import CompiledGrammar
    from gpt_fast.engine.token_rules import TokenRules


@dataclass(eq=False)
class Request:
    """``token_ids`` is the prompt and then what was generated; the cache holds the first ``num_computed`` of them."""

    id: str
    token_ids: list[int]
    params: SamplingParams  # resolved
    seed: int
    max_tokens: int  # params.max_tokens, limited by the context
    end_ids: frozenset[int]  # tokens that end the completion
    text: TextStream
    grammar: CompiledGrammar | None = None
    rules: TokenRules | None = None
    group: str = ""  # equal for those that one client asked for together: they take turns as one
    num_prompt: int = 0
    rope_len: int = 0  # tokens that rotary scaling takes the sequence to have at least
    arrival: float = field(default_factory=time.monotonic)
    slot: int = -1  # while it runs, and holds pages; -1 before, after and while it is preempted
    pages: list[int] = field(default_factory=list)
    num_admissions: int = 0  # times that it began to run, more than one after preemptions
    num_placed: int = 0  # pages that the runner has in its page table
    digest: bytes = b""  # of the last remembered page
    num_remembered: int = 0  # pages made findable
    num_computed: int = 0
    drafts: tuple[int, ...] = ()  # what may come next, for the next step to verify
    num_drafted: int = 0  # drafts that were verified
    num_accepted: int = 0  # and those that were right
    origins: list[Origin] = field(default_factory=list)  # of what was generated, where a drafter is loaded
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: FinishReason | None = None
    paused: bool = False  # its caller must fetch tokens before more are made
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = self.rope_len = len(self.token_ids)
        self.group = self.group or self.id
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def append(self, tokens: Iterable[int], now: float) -> str:
        """Take generated tokens up to the one that ends the completion, and drop those behind it; returns the text that
        became certain. At the end ``finish_reason`` is set."""
        text = ""
        for token in tokens:
            self.first_token, self.last_token = self.first_token or now, now
            self.token_ids.append(token)
            if self.grammar is not None:
                self.grammar.advance(token)
            may_stop = self.num_output >= self.params.min_tokens
            stops = may_stop and token in self.end_ids
            if not stops or self.params.include_stop_str_in_output:
                text += self.text.push(token, may_stop)
                stops = stops or self.text.stopped or (self.grammar is not None and self.grammar.complete)
            if stops or self.num_output >= self.max_tokens:
                text += self.text.flush()
                self.finish_reason = "stop" if stops or self.text.stopped else "length"
                break
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs)
        of_prompt = None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs)
        tokens, times = tuple(self.token_ids[self.num_prompt :]), self.timings(time.monotonic())
        counts = (self.num_prompt, self.num_cached, self.num_drafted, self.num_accepted, tuple(self.origins))
        return Completion(self.text.text, tokens, self.finish_reason, logprobs, of_prompt, *counts, times)

    def timings(self, now: float) -> Timings:
        """The times of a request that ends at ``now`` (monotonic); phases that it did not reach took no time."""
        scheduled = now if self.first_scheduled is None else self.first_scheduled
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        start = self.arrival
        return Timings(scheduled - start, first - scheduled, first - start, now - start, last - first)
