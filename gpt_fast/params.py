"""What a request may ask for. No torch here: protocol, scheduler and client code validate without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_SAMPLES = 16


class RequestError(ValueError):
    """A request cannot be served as written.

    ``message`` is for the person who wrote it, ``param`` names the field, ``code`` is a stable identifier and
    ``status`` the HTTP status that says the same. ``retry_after_s``: when trying again makes sense.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled and when it ends. Field names as in vLLM.

    Order of operations: grammar (``json_schema``, ``regex``, ``choice``), ``min_tokens``, ``logit_bias``, penalties
    (repetition, then frequency and presence), temperature, min_p, top_k, top_p; what is left is renormalised and
    sampled with noise that depends on (seed, position) alone, so that an answer does not depend on what else is in
    the batch.

    ``max_tokens`` (alias ``max_new_tokens``): most tokens to generate; None: as many as fit.
    ``temperature`` 0 is greedy. None: the checkpoint's own default; where it has none, greedy, unless top_k, top_p
    or min_p is given, which then means 1.0.
    ``top_k`` 0: off. ``top_p`` 1: off. ``min_p`` 0: off, else the least probability relative to the likeliest token.
    ``seed`` None: drawn afresh for each request.
    ``stop``: strings that end the completion and are not part of it. ``stop_token_ids``: the same by token.
    ``ignore_eos``: go on past the end-of-sequence tokens. ``min_tokens``: no end before so many tokens.
    ``presence_penalty`` and ``frequency_penalty`` (OpenAI): subtracted from the logit of every token generated so far,
    once, or once for each time. ``repetition_penalty`` (Keskar et al. 2019, arXiv 1909.05858): divides positive and
    multiplies negative logits of tokens in prompt and completion. ``logit_bias``: token id to a number added.
    ``n``: completions of the same prompt; the i-th one is drawn with seed + i.
    ``logprobs``: log probabilities of each token and of so many likeliest ones, of the model's own distribution, before
    anything above. ``prompt_logprobs``: the same of the prompt's tokens.
    ``json_schema`` (an object), ``regex``, ``choice`` (strings): the completion must match.
    ``timeout_s``: seconds after which the request is aborted.
    """

    max_tokens: int | None = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    timeout_s: float | None = None
    max_new_tokens: dataclasses.InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None) -> None:
        # A dataclass default for an InitVar stays a class attribute, so None here means "not given".
        if max_new_tokens is not None:
            object.__setattr__(self, "max_tokens", max_new_tokens)
        stop = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        elif isinstance(stop, list):
            object.__setattr__(self, "stop", tuple(stop))
        for name in ("stop_token_ids", "choice"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._validate()

    def _validate(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31)
        if self.temperature is not None:
            _number("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, 2**31)
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos must be true or false, not {self.ignore_eos!r}", "ignore_eos", "invalid_type"
            )
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _integer("n", self.n, 1, MAX_SAMPLES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, 86400.0, open_below=True)
        self._validate_stops()
        self._validate_bias()
        self._validate_grammar()

    def _validate_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias", "invalid_type")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias has more than {MAX_LOGIT_BIASES} entries", "logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31)
            _number("logit_bias", bias, -100.0, 100.0)

    def _validate_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} exclude each other", given[1])
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise RequestError("json_schema must be a JSON object", "json_schema", "invalid_type")
        if self.regex is not None and not isinstance(self.regex, str):
            raise RequestError("regex must be a string", "regex", "invalid_type")
        choice = self.choice
        if choice is not None and not (
            isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)
        ):
            raise RequestError("choice must be a list of at least one non-empty string", "choice", "invalid_type")

    @property
    def penalised(self) -> bool:
        """Whether any penalty applies."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def has_grammar(self) -> bool:
        """Whether the completion must match something."""
        return self.json_schema is not None or self.regex is not None or self.choice is not None

    def _validate_stops(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise RequestError("stop must be a string or a list of strings", "stop", "invalid_type")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
        for s in self.stop:
            if not s or len(s) > MAX_STOP_LENGTH:
                raise RequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        if not isinstance(self.stop_token_ids, tuple):
            raise RequestError("stop_token_ids must be a list of token ids", "stop_token_ids", "invalid_type")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31)

    def samples(self) -> tuple[SamplingParams, ...]:
        """``n`` single requests; the i-th has seed + i."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return tuple(dataclasses.replace(self, n=1, seed=seed) for seed in seeds)

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """A copy in which no field of sampling is None, from the checkpoint's ``defaults`` (generation_config.json)."""
        d = defaults or SamplingParams()
        narrowed = any(v is not None for v in (self.top_k, self.top_p, self.min_p))
        temperature = self.temperature
        if temperature is None:
            temperature = d.temperature if d.temperature is not None else (1.0 if narrowed else 0.0)
        return dataclasses.replace(
            self,
            temperature=float(temperature),
            top_k=max(0, _first(self.top_k, d.top_k, 0)),
            top_p=float(_first(self.top_p, d.top_p, 1.0)),
            min_p=float(_first(self.min_p, d.min_p, 0.0)),
        )


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {_show(value)}", name, "invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {_show(value)}", name)


def _number(name: str, value: object, low: float, high: float, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {_show(value)}", name, "invalid_type")
    inside = math.isfinite(value) and low <= value <= high and not (open_below and value == low)
    if not inside:
        least = f"more than {low:g}" if open_below else f"at least {low:g}"
        raise RequestError(f"{name} must be {least} and at most {high:g}, not {_show(value)}", name)


def _show(value: object) -> str:
    """``value`` as a short piece of an error message, never a whole hostile payload."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
