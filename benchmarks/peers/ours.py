"""Worker: this repository's engine, as a program uses it. Times are the engine's own stamps, as in ``gpt-fast bench``.

The prefix cache is on, so that a long prompt is computed once and not in every round; prefill is timed with prompts
that no earlier one began with.
"""

from __future__ import annotations

import itertools
import platform
import random
from importlib import metadata
from typing import Any

from peers.measures import Measure, prompt_ids
from peers.worker import serve

_PAGE = 16


def check() -> dict[str, Any]:
    """Versions, without the time that importing takes."""
    return {"torch": metadata.version("torch"), "python": platform.python_version()}


class Ours:
    """``options``: checkpoint, format, threads, measures."""

    def __init__(self, options: dict[str, Any]) -> None:
        from gpt_fast import LLM
        from gpt_fast.checkpoint.checkpoint import Checkpoint

        measures = [Measure(**fields) for fields in options["measures"]]
        config = Checkpoint.open(options["checkpoint"]).config
        # Those who start first of several go on until the last has decoded all its tokens.
        lengths = [m.longest + m.batch * (m.prompt_tokens + 1) * (m.batch > 1) for m in measures]
        # More positions than the model was made for only where a measure is about them.
        longest = max(min(config.max_seq_len, max(lengths)), max(m.longest for m in measures))
        pages = sum(m.batch * -(-length // _PAGE) for m, length in zip(measures, lengths, strict=True))
        self.config = config
        self.llm = LLM(
            options["checkpoint"],
            device="cpu",
            dtype="bfloat16",
            quantize=None if options["format"] == "bfloat16" else options["format"],
            threads=options["threads"],
            max_batch=max(m.batch for m in measures),
            max_seq_len=longest,
            page_size=_PAGE,
            num_pages=2 * pages,  # long prompts stay in the cache from round to round
        )
        self._numbers = itertools.count(1)
        self._rng = random.Random(0)

    def facts(self) -> dict[str, Any]:
        """Bytes as the model counts them."""
        weights = self.llm.roofline(0).bytes_per_token
        return {
            "weight_bytes": weights,
            "kv_bytes_per_token": self.llm.roofline(1).bytes_per_token - weights,
            "load_s": self.llm.load_s,
            "warm_up_s": self.llm.warm_up_s,
        }

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        from gpt_fast.bench.throughput import measure as measure_together

        if measure.batch > 1:
            steps = measure.new_tokens + 1  # the first comes from prefill
            return measure_together(self.llm, measure.batch, measure.prompt_tokens, steps, self._rng).decode_s
        # A prompt whose prefill is timed must not be in the cache.
        number = next(self._numbers) if measure.kind == "prefill" else 0
        return self._alone(prompt_ids(measure.prompt_tokens, self.config.vocab_size, number), measure)

    def _alone(self, prompt: list[int], measure: Measure) -> float:
        from gpt_fast import SamplingParams
        from gpt_fast.bench.throughput import ended

        params = SamplingParams(max_tokens=measure.new_tokens + 1, temperature=0.0, ignore_eos=True)
        done = ended([self.llm.submit(prompt, params)])[0].completion
        if done is None or len(done.token_ids) != measure.new_tokens + 1:
            raise RuntimeError(f"{measure.name}: ended after {len(done.token_ids) if done else 0} tokens")
        return done.timings.decode_s if measure.kind == "decode" else done.timings.first_token_s

    def notes(self) -> dict[str, Any]:
        """Which path ran."""
        status = self.llm.status()
        return {key: status[key] for key in ("path", "compiled", "dtype", "max_seq_len") if key in status}


if __name__ == "__main__":
    serve(check, Ours)
