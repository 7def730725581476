"""Requests that mix every parameter that sampling knows. The same ones for the same seed, text and vocabulary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpt_fast import SamplingParams

LONGEST = 300  # tokens of a prompt, and of an answer
_OFTEN = ("he ", "nd t", " the", ". ", "ed", "\n", "a", "tle", "oo")  # stop strings that stories are full of
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "green", "blue"]},
)  # fmt: skip
_PATTERNS = ("[a-z ]{4,60}[.]", "[0-9]{3}-[a-f]{2,6}", "(yes|no)( (yes|no)){0,20}", "A[a-z]+( [a-z]+){3}!")
_CHOICES = (("red fox", "red ox", "blue fish"), ("Lily", "Lily and Tom", "Tom"))


class Ask(NamedTuple):
    """One completion that is wanted. ``prompt``: token ids. What else happens to it, where a run lets such things
    happen: ``pauses_at`` uncollected tokens, and is cancelled after ``gone_after`` tokens."""

    prompt: list[int]
    params: SamplingParams
    pauses_at: int | None
    gone_after: int | None


class Mix:
    """Draws requests. ``story``: token ids of a text that prompts are cut from; prompt and answer together have at most
    ``context`` tokens."""

    def __init__(self, story: Sequence[int], vocab_size: int, context: int, seed: int) -> None:
        self._story, self._vocab_size, self._context = story, vocab_size, context
        self._draw = random.Random(seed)
        self._shared = [self._cut(self._draw.randrange(20, 200)) for _ in range(4)]

    def requests(self, count: int) -> list[Ask]:
        """``count`` requests; those with ``n`` > 1 are as many entries."""
        asks = []
        for i in range(count):
            prompt, draw = self._prompt(), self._draw
            params = SamplingParams(seed=i, **self._fields(len(prompt)))
            pauses_at = draw.choice((1, 2, 5)) if draw.random() < 0.2 else None
            gone_after = draw.randrange(0, 40) if draw.random() < 0.1 else None
            asks += [Ask(prompt, own, pauses_at, gone_after) for own in params.samples()]
        return asks

    def _length(self, most: int) -> int:
        """From 1 to ``most``; short ones are as frequent as long ones."""
        return min(most, int(math.exp(self._draw.uniform(0, math.log(most + 1)))))

    def _cut(self, count: int) -> list[int]:
        begin = self._draw.randrange(len(self._story) - count)
        return list(self._story[begin : begin + count])

    def _prompt(self) -> list[int]:
        """Of a story, of random tokens, of a beginning that others have, or of a piece again and again."""
        draw, most = self._draw, min(LONGEST, self._context // 2)
        kind = draw.random()
        if kind < 0.4:
            return self._cut(self._length(most))
        if kind < 0.5:
            return [draw.randrange(3, self._vocab_size) for _ in range(self._length(most))]
        if kind < 0.75:
            return [*draw.choice(self._shared)[: most - 20], *self._cut(self._length(20))]
        piece = self._cut(draw.randrange(2, 12))
        return (piece * most)[: max(12, self._length(most))]

    def _fields(self, num_prompt: int) -> dict[str, Any]:
        draw = self._draw
        most = self._length(min(LONGEST, self._context - num_prompt))
        fields: dict[str, Any] = {"max_tokens": most}
        if draw.random() < 0.65:
            fields["temperature"] = draw.choice((0.3, 0.7, 1.0, 1.0, 1.4, 2.0, draw.uniform(0.3, 2)))
        else:
            fields["temperature"] = 0.0
        if draw.random() < 0.12:
            fields |= self._grammar() | ({"logprobs": 2} if draw.random() < 0.4 else {})
            return fields | ({"min_tokens": min(most, 5)} if draw.random() < 0.1 else {})  # which may end in an error
        rare: dict[str, tuple[float, Any]] = {
            "top_k": (0.2, lambda: draw.choice((1, 5, 40, 300))),
            "top_p": (0.25, lambda: draw.choice((0.3, 0.8, 0.95))),
            "min_p": (0.12, lambda: draw.choice((0.01, 0.1, 0.4))),
            "repetition_penalty": (0.15, lambda: draw.choice((0.8, 1.1, 1.5))),
            "presence_penalty": (0.12, lambda: draw.choice((-0.5, 0.4, 1.5))),
            "frequency_penalty": (0.12, lambda: draw.choice((-0.1, 0.2, 1.0))),
            "logit_bias": (0.15, self._biases),
            "min_tokens": (0.15, lambda: draw.randint(0, most)),
            "stop": (0.25, lambda: tuple(draw.sample(_OFTEN, draw.randint(1, 3)))),
            "stop_token_ids": (0.15, lambda: tuple(self._cut(draw.randint(1, 3)))),
            "ignore_eos": (0.3, lambda: True),
            "include_stop_str_in_output": (0.12, lambda: True),
            "skip_special_tokens": (0.08, lambda: False),
            "bad_words": (0.1, lambda: tuple(draw.sample(_OFTEN, draw.randint(1, 3)))),
            "allowed_token_ids": (0.06, lambda: tuple(range(3, draw.choice((50, 500))))),
            "logprobs": (0.35, lambda: draw.choice((0, 1, 5, 20))),
            "prompt_logprobs": (0.1, lambda: draw.choice((0, 3))),
            "n": (0.08, lambda: draw.choice((2, 3))),
        }
        return fields | {name: make() for name, (share, make) in rare.items() if draw.random() < share}

    def _biases(self) -> dict[int, float]:
        return {token: self._draw.choice((-100.0, -2.0, 1.5, 4.0)) for token in self._cut(self._draw.randint(1, 6))}

    def _grammar(self) -> dict[str, Any]:
        made = {"json_schema": _SCHEMAS, "regex": _PATTERNS, "choice": _CHOICES}
        name = self._draw.choice(list(made))
        return {name: self._draw.choice(made[name])}
