"""What a request may ask for. No torch here: protocol, scheduler and client code validate without it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, ListOf, Real, Text, Whole, check_fields, check_values, json_object

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65536
MAX_BAD_WORDS = 256
MAX_LOGIT_BIASES = 1024
MAX_SAMPLES = 16
MAX_SEED = 2**64 - 1
# Of what a completion must match. Within them a grammar compiles in about half a second.
MAX_CHOICES = 2000
MAX_SCHEMA_VALUES = 5000  # objects, lists, strings, numbers
MAX_GRAMMAR_CHARS = 65536
GRAMMARS = ("json_schema", "regex", "choice", "grammar")  # fields that say what a completion must match; one at most
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: logits divided by it would be no finite numbers


def _token_biases(value: Any, name: str) -> dict[int, float]:
    """Token id to a number that is added to its logit. JSON has ids as strings."""
    biases = json_object(value, name)
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(f"{name} has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed", name)
    read = {}
    for token, bias in biases.items():
        if isinstance(token, str) and not (token.isdecimal() and len(token) < 12):
            raise RequestError(f"{name} has the key {token[:40]!r}, which is no token id", name)
        read[_TOKEN(int(token) if isinstance(token, str) else token, name)] = _BIAS(bias, name)
    return read


def _grammar(kind: Kind) -> Kind:
    """``kind``, of a size that compiles in a short time."""

    def read(value: Any, name: str) -> Any:
        value = kind(value, name)
        num_values, num_chars = check_values(value, name)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{name} has more than {MAX_GRAMMAR_CHARS} characters", name, "grammar_too_large")
        if num_values > MAX_SCHEMA_VALUES:
            message = f"{name} has more than {MAX_SCHEMA_VALUES} values (objects, lists, strings, numbers)"
            raise RequestError(message, name, "grammar_too_large")
        return value

    return read


_TOKEN = Whole(0, 2**31, or_float=True)
_BIAS = Real(-100, 100)
_STOP = f"strings of 1 to {MAX_STOP_LENGTH} characters"
_STOPS = ListOf(Text(1, MAX_STOP_LENGTH), _STOP, most=MAX_STOP_STRINGS, or_text=True)
_BAD_WORDS = ListOf(Text(1, MAX_STOP_LENGTH), _STOP, most=MAX_BAD_WORDS)
_ALLOWED = ListOf(_TOKEN, "token ids", least=1, most=MAX_ALLOWED_TOKENS)
_LOGPROBS = Whole(0, MAX_LOGPROBS, or_float=True)


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled and when it ends. Field names as in vLLM. Integers may be written as 5 or 5.0.

    Order of operations: what is allowed (the grammar of ``json_schema``, ``regex``, ``choice`` or ``grammar``;
    ``allowed_token_ids``, ``bad_words``), ``min_tokens``, ``logit_bias``, penalties (repetition, then frequency and
    presence), temperature, min_p, top_k, top_p; then a draw by ``seed`` and position.

    ``max_tokens`` (alias ``max_new_tokens``): most tokens to generate; None: as many as fit.
    ``temperature`` 0 is greedy, and so is less than GREEDY_BELOW. None: the checkpoint's own default; where it has
    none, greedy, unless top_k, top_p or min_p is given, which then means 1.0.
    ``top_k`` 0: off. ``top_p`` 1: off. ``min_p`` 0: off, else the least probability relative to the likeliest token.
    ``seed`` None: drawn afresh for each request.
    ``stop``: strings that end the completion and are not part of it. ``stop_token_ids``: the same by token.
    ``include_stop_str_in_output``: what ends the completion is part of its text, be it a string or a token.
    ``ignore_eos``: go on past the end-of-sequence tokens. ``min_tokens``: the completion does not end before it has
    this number of tokens.
    ``presence_penalty`` and ``frequency_penalty`` (OpenAI): subtracted from the logit of every token generated so far,
    once, or once for each time. ``repetition_penalty`` (Keskar et al. 2019, arXiv 1909.05858): divides positive and
    multiplies negative logits of tokens in prompt and completion; None: the checkpoint's own default, or 1, which does
    nothing. ``logit_bias``: token id to a number added.
    ``allowed_token_ids``: no other token comes; those that end the completion count as others. ``bad_words``: strings
    that do not come as a whole, spelled as the tokenizer spells them, alone or behind a space; a word inside a longer
    token is not found.
    ``n``: completions of the same prompt; the i-th one is drawn with seed + i.
    ``logprobs``: the number of likeliest tokens whose log probabilities come with each token's. They are those of the
    model's distribution, before anything above. ``prompt_logprobs``: the same of the prompt's tokens.
    ``json_schema`` (an object), ``regex``, ``choice`` (strings), ``grammar`` (in llguidance's form of Lark): the
    completion must match. MAX_CHOICES, MAX_SCHEMA_VALUES and MAX_GRAMMAR_CHARS limit them. An object of the schema that
    names properties has no others, unless it says ``additionalProperties``.
    ``skip_special_tokens`` False: the names of all special tokens are part of the text. ``shown_special_tokens``: ids
    of special tokens whose names are, as if they were words.
    ``timeout_s``: seconds after which the request is aborted."""

    max_tokens: Annotated[int | None, Whole(1, 2**31, or_float=True)] = 128
    temperature: Annotated[float | None, Real(0, 100)] = None
    top_k: Annotated[int | None, Whole(-1, 2**31, or_float=True)] = None
    top_p: Annotated[float | None, Real(0, 1, above=True)] = None
    min_p: Annotated[float | None, Real(0, 1)] = None
    seed: Annotated[int | None, Whole(-(2**63), MAX_SEED, or_float=True)] = None
    stop: Annotated[tuple[str, ...], _STOPS] = ()
    stop_token_ids: Annotated[tuple[int, ...], ListOf(_TOKEN, "token ids", most=MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    min_tokens: Annotated[int, Whole(0, 2**31, or_float=True)] = 0
    presence_penalty: Annotated[float, Real(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Real(-2, 2)] = 0.0
    repetition_penalty: Annotated[float | None, Real(0.001, 100)] = None
    logit_bias: Annotated[Mapping[int, float], _token_biases] = field(default_factory=dict)
    bad_words: Annotated[tuple[str, ...], _BAD_WORDS] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, _ALLOWED] = None
    n: Annotated[int, Whole(1, MAX_SAMPLES, or_float=True)] = 1
    logprobs: Annotated[int | None, _LOGPROBS] = None
    prompt_logprobs: Annotated[int | None, _LOGPROBS] = None
    json_schema: Annotated[Mapping[str, Any] | None, _grammar(json_object)] = None
    regex: Annotated[str | None, _grammar(Text())] = None
    choice: Annotated[tuple[str, ...] | None, _grammar(ListOf(Text(1), "non-empty strings", 1, MAX_CHOICES))] = None
    grammar: Annotated[str | None, _grammar(Text(1))] = None
    skip_special_tokens: bool = True
    shown_special_tokens: Annotated[tuple[int, ...], ListOf(_TOKEN, "token ids", most=MAX_STOP_TOKENS)] = ()
    timeout_s: Annotated[float | None, Real(0, 86400, above=True)] = None
    max_new_tokens: dataclasses.InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None) -> None:
        # A dataclass default for an InitVar stays a class attribute, so None here means "not given".
        if max_new_tokens is not None:
            object.__setattr__(self, "max_tokens", max_new_tokens)
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens")
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} exclude each other", given[1])

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty not in (None, 1.0)

    @property
    def pattern(self) -> str | None:
        """The regular expression that ``regex`` or ``choice`` asks for; None: neither does."""
        # More than 2,000 alternatives of a grammar would exceed a limit of the parser.
        return self.regex if self.choice is None else "|".join(map(re.escape, self.choice))

    @property
    def grammar_field(self) -> str | None:
        """The field of GRAMMARS that says what the completion must match; None: it may be any text."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    def samples(self) -> tuple[SamplingParams, ...]:
        """``n`` single requests; the i-th has seed + i, and behind the largest seed comes 0."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else _next_seed(self.seed, i) for i in range(self.n)]
        return tuple(dataclasses.replace(self, n=1, seed=seed) for seed in seeds)

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """A copy in which no field of sampling is None, from the checkpoint's ``defaults`` (generation_config.json)."""
        d = defaults or SamplingParams()
        narrowed = any(v is not None for v in (self.top_k, self.top_p, self.min_p))
        temperature = _first(self.temperature, d.temperature, 1.0 if narrowed else 0.0)
        return dataclasses.replace(
            self,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=max(0, _first(self.top_k, d.top_k, 0)),
            top_p=_first(self.top_p, d.top_p, 1.0),
            min_p=_first(self.min_p, d.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, d.repetition_penalty, 1.0),
        )


def _next_seed(seed: int, i: int) -> int:
    return seed + i if seed + i <= MAX_SEED else seed + i - MAX_SEED - 1


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)
