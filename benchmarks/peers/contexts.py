"""What the workers of llama.cpp and ik_llama.cpp share: a measure run on a context, in the way that is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from peers.measures import LONG_PROMPT, Measure, prompt_ids

N_BATCH = 512  # rows that one call computes at most
_TELLING_PROMPT = 1024  # tokens that show which way is fast with many more
_SURE_S = 1.0  # a run of so long is timed once
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Context(Protocol):
    """A model's cache and what computes with it, behind the C API of one of the two."""

    num_vocab: int

    def decode(self, rows: Sequence[Row]) -> None: ...

    def likeliest(self, row: int) -> int:
        """The token with the greatest logit of a row of the last call; -1: the last that was wanted."""
        ...

    def forget(self, sequence: int, position: int) -> None:
        """Remove the cached tokens of a sequence from ``position`` on."""
        ...

    def close(self) -> None: ...


class Run:
    """One measure. Nothing else uses its context. A prompt before decoding is computed once, here, and stays cached."""

    def __init__(self, context: Context, measure: Measure) -> None:
        self.context, self.measure = context, measure
        self.prompts = [prompt_ids(measure.prompt_tokens, context.num_vocab, i) for i in range(measure.batch)]
        if measure.kind == "decode":
            for sequence, prompt in enumerate(self.prompts):
                self._prefill(sequence, prompt)

    def seconds(self, new_tokens: int | None = None) -> float:
        """Of one run; what it cached is removed afterwards. ``new_tokens``: instead of the measure's."""
        m = self.measure
        steps = m.new_tokens if new_tokens is None else new_tokens
        begin = time.perf_counter()
        if m.kind == "prefill":
            self._prefill(0, self.prompts[0])
            self.context.likeliest(-1)
        else:
            tokens = [prompt[0] for prompt in self.prompts]
            for position in range(m.prompt_tokens, m.prompt_tokens + steps):
                self.context.decode([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
                tokens = [self.context.likeliest(i) for i in range(m.batch)]
        seconds = time.perf_counter() - begin
        for sequence in range(m.batch):
            self.context.forget(sequence, m.prompt_tokens if m.kind == "decode" else 0)
        return seconds

    def _prefill(self, sequence: int, prompt: list[int]) -> None:
        last = len(prompt) - 1
        for begin in range(0, len(prompt), N_BATCH):
            part = prompt[begin : begin + N_BATCH]
            self.context.decode([(token, i, sequence, i == last) for i, token in enumerate(part, begin)])


class FastestRuns:
    """At its first call a measure is run in every way, a step to warm up and then once or twice timed; the fastest way
    stays. A prompt of more than LONG_PROMPT tokens would take minutes in every way: such a measure is run in
    the way of the longest shorter one, if that has a thousand tokens.

    ``ways``: by name, what opens a context for a measure. ``notes``: by measure, what was chosen and from which times.
    """

    def __init__(self, ways: Mapping[str, Callable[[Measure], Context]]) -> None:
        self.ways = ways
        self.runs: dict[Measure, Run] = {}
        self.notes: dict[str, dict[str, Any]] = {}

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        if measure not in self.runs:
            lengths = range(_TELLING_PROMPT, measure.prompt_tokens)
            shorter = [m for m in self.runs if m.kind == measure.kind and m.prompt_tokens in lengths]
            if measure.prompt_tokens > LONG_PROMPT and shorter:
                self._follow(measure, max(shorter, key=lambda m: m.prompt_tokens))
            else:
                self._choose(measure)
        return self.runs[measure].seconds()

    def _follow(self, measure: Measure, shorter: Measure) -> None:
        chosen = self.notes[shorter.name]["chosen"]
        self.runs[measure] = Run(self.ways[chosen](measure), measure)
        self.notes[measure.name] = {"chosen": chosen, "like": shorter.name}

    def _choose(self, measure: Measure) -> None:
        seconds: dict[str, float] = {}
        for name, open_context in self.ways.items():
            run = Run(open_context(measure), measure)
            run.seconds(1)
            seconds[name] = run.seconds()
            if seconds[name] < _SURE_S:
                seconds[name] = min(seconds[name], run.seconds())
            faster = seconds[name] == min(seconds.values())
            loser = self.runs.get(measure) if faster else run
            if faster:
                self.runs[measure] = run
            if loser is not None:
                loser.context.close()
        self.notes[measure.name] = {"chosen": min(seconds, key=lambda name: seconds[name]), "seconds": seconds}
