"""What a request may ask for. No torch here: protocol, scheduler and client code validate without it."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt_fast.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
MAX_SAMPLES = 16
# Of what a completion must match. Within them a grammar compiles in about half a second.
MAX_CHOICES = 2000
MAX_SCHEMA_VALUES = 5000  # objects, lists, strings, numbers
MAX_GRAMMAR_CHARS = 65536
RETRY_AFTER_S = 1  # what a client is told to wait whom the server is too busy for
MAX_SHOWN = 300  # characters of a failure that are logged or told: it may quote what a client sent
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: logits divided by it would be no finite numbers

# Field: least and largest value. What is optional may be None as well.
INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, 2**31),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, 2**31),
    "n": (1, MAX_SAMPLES),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
    "timeout_s": (0.0, 86400.0),
}
_MORE_THAN_LEAST = ("top_p", "repetition_penalty", "timeout_s")  # here the least value itself is not allowed
OPTIONAL = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs", "timeout_s")


def try_later(message: str) -> RequestError:
    """What a request is refused with that could be served at another time: 503, with the time to come back."""
    return RequestError(f"{message}; try again later", None, "queue_full", 503, RETRY_AFTER_S)


def brief(error: BaseException) -> str:
    """For the log: where ``error`` was raised, and the beginning of what it says."""
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}\n" + "".join(traceback.format_tb(error.__traceback__))


def without_frames(error: Exception) -> Exception:
    """``error``, to be kept: it no longer holds the variables of the functions that it was raised through."""
    error.__context__ = None
    return error.with_traceback(None)


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled and when it ends. Field names as in vLLM. Integers may be written as 5 or 5.0.

    Order of operations: grammar (``json_schema``, ``regex``, ``choice``), ``min_tokens``, ``logit_bias``, penalties
    (repetition, then frequency and presence), temperature, min_p, top_k, top_p; what is left is renormalised and
    sampled with noise that depends on (seed, position) alone, so that an answer does not depend on what else is in
    the batch.

    ``max_tokens`` (alias ``max_new_tokens``): most tokens to generate; None: as many as fit.
    ``temperature`` 0 is greedy, and so is less than GREEDY_BELOW. None: the checkpoint's own default; where it has
    none, greedy, unless top_k, top_p or min_p is given, which then means 1.0.
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
    ``json_schema`` (an object), ``regex``, ``choice`` (strings): the completion must match. MAX_CHOICES,
    MAX_SCHEMA_VALUES and MAX_GRAMMAR_CHARS limit them.
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
        # Each number in its own type: JSON has one kind of number, so 1 and 1.0 are the same.
        for name in (*INTEGERS, *NUMBERS):
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            number: int | float
            if name in INTEGERS:
                number = integer(name, value, *INTEGERS[name])
            else:
                number = _number(name, value, *NUMBERS[name], name in _MORE_THAN_LEAST)
            object.__setattr__(self, name, number)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos must be true or false, not {show(self.ignore_eos)}", "ignore_eos", "invalid_type"
            )
        self._validate_stops()
        self._validate_bias()
        self._validate_grammar()

    def _validate_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias", "invalid_type")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias has more than {MAX_LOGIT_BIASES} entries", "logit_bias")
        biases = {
            integer("logit_bias", token, 0, 2**31): _number("logit_bias", bias, -100.0, 100.0)
            for token, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)

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
        if choice is not None and len(choice) > MAX_CHOICES:
            raise RequestError(f"choice has {len(choice)} strings, at most {MAX_CHOICES} are allowed", "choice")
        for name in given:
            _check_grammar_size(name, getattr(self, name))

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
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            message = f"stop_token_ids has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKENS} are allowed"
            raise RequestError(message, "stop_token_ids")
        tokens = tuple(integer("stop_token_ids", token, 0, 2**31) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tokens)

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
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=max(0, _first(self.top_k, d.top_k, 0)),
            top_p=_first(self.top_p, d.top_p, 1.0),
            min_p=_first(self.min_p, d.min_p, 0.0),
        )


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def integer(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an integer; 5.0 is one. Raises RequestError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {show(value)}", name, "invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {show(value)}", name)
    return value


def _number(name: str, value: object, low: float, high: float, open_below: bool = False) -> float:
    """``value`` as a float. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {show(value)}", name, "invalid_type")
    if not low <= value <= high or (open_below and value == low):  # NaN is not between anything
        least = f"more than {low:g}" if open_below else f"at least {low:g}"
        raise RequestError(f"{name} must be {least} and at most {high:g}, not {show(value)}", name)
    return float(value)


def _check_grammar_size(name: str, grammar: object) -> None:
    """Raise RequestError for what would take long to compile. Not recursive: a schema may be nested deeply."""
    num_values = num_chars = 0
    pending = [grammar]
    while pending:
        item = pending.pop()
        num_values += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            num_chars += sum(len(str(key)) for key in item)
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
        if num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{name} has more than {MAX_GRAMMAR_CHARS} characters", name, "grammar_too_large")
        if num_values > MAX_SCHEMA_VALUES:
            message = f"{name} has more than {MAX_SCHEMA_VALUES} values (objects, lists, strings, numbers)"
            raise RequestError(message, name, "grammar_too_large")


def show(value: object) -> str:
    """``value`` as a short piece of an error message, never a whole hostile payload."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number of more than 64 bits"
    text = repr(value if not isinstance(value, str) else value[:60])
    return text if len(text) <= 60 else text[:57] + "..."
