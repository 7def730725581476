"""What the wire protocols share: requests that are understood, the reading of their fields, errors. No torch here."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, Text, kinds_of, refuse, unknown
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import GRAMMARS, SamplingParams

JSON_TYPE = "application/json"
# What requests may set; the other two follow from a chat's tools and template.
SAMPLING = {k: v for k, v in kinds_of(SamplingParams).items() if k not in ("grammar", "shown_special_tokens")}
# A field of SamplingParams, or of the prompt: the names under which the protocols know it.
WRITTEN = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
    "json_schema": ("json_schema", "response_format", "guided_json", "structured_outputs", "text"),
    "regex": ("regex", "guided_regex", "structured_outputs"),
    "choice": ("choice", "guided_choice", "structured_outputs"),
    "grammar": ("guided_grammar", "tools", "structured_outputs", "response_format", "text", *GRAMMARS),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    "prompt": ("prompt", "messages", "input"),
    "messages": ("messages", "input"),
}
# Fields of OpenAI and vLLM that say what an answer must match: read as {field of SamplingParams: value}, or None.
MATCHES = (
    *("response_format", "text", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
Prompt = str | list[int]  # text, or token ids as they are


class Piece(NamedTuple):
    """The next part of an answer. ``plain``: it is the first and the last, so the answer was never a stream.
    ``headers``: names and values, beside those that every answer has."""

    text: str
    content_type: str
    last: bool = True
    plain: bool = True
    headers: tuple[tuple[str, str], ...] = ()


class WireRequest(ABC):
    """One HTTP request that is understood: the prompts for the engine, and how its answer is written.

    ``given``: the fields as the client wrote them. Each prompt has ``params.n`` sequences. They are numbered: those of
    the first prompt, then those of the second. ``stream``: the answer goes out piece by piece. ``least_bytes``: that
    an answer has for each log probability of the prompt."""

    least_bytes = 30
    _stream_type: str  # content type

    def __init__(self, given: dict[str, Any], prompts: Sequence[Prompt], params: SamplingParams, stream: bool) -> None:
        self.given, self.prompts, self.params, self.stream = given, prompts, params, stream
        self.content_type = self._stream_type if stream else JSON_TYPE

    @abstractmethod
    def write_delta(self, index: int, delta: Delta) -> str:
        """What to send, streaming, when sequence ``index`` has something new; may be empty."""

    @abstractmethod
    def write_end(self, completions: Sequence[Completion]) -> str:
        """What to send when all sequences have ended: streaming, the closing words; else the whole answer."""

    @abstractmethod
    def write_error(self, error: RequestError) -> str:
        """What to send, streaming, when the answer cannot go on after its status has been sent."""


def read_fields(body: Mapping[str, Any], kinds: Mapping[str, Kind], code: str, hint: str = "") -> dict[str, Any]:
    """The fields of ``body``, each as its kind reads it. Null counts as not given. Raises RequestError; a field without
    a kind has ``code``, and ``hint`` at the end of its message."""
    for name in body:
        if name not in kinds:
            raise RequestError(unknown(name, kinds) + hint, name[:100], code)
    return {name: kinds[name](value, name) for name, value in body.items() if value is not None}


def require(given: Mapping[str, Any], name: str, code: str = "missing_required_parameter") -> Any:
    """The field's value. Raises RequestError if it is absent or null."""
    if name not in given:
        raise RequestError(f"{name} is missing", name, code)
    return given[name]


def read_sampling(given: Mapping[str, Any], default_max_tokens: int | None, **values: Any) -> SamplingParams:
    """Sampling as the fields ``given`` ask for it; ``values`` take the place of fields. Without a number of tokens to
    generate, ``default_max_tokens`` applies, raised to ``min_tokens``. Raises RequestError, naming the field as the
    client wrote it."""
    names = [name for name in WRITTEN["max_tokens"] if name in given]
    if len(names) > 1:
        raise RequestError(f"{names[1]} and {names[0]} are the same field; give one of them", names[1])
    values = {name: given[name] for name in SAMPLING if name in given} | values
    most = given[names[0]] if names else default_max_tokens
    if not names and most is not None:
        most = max(most, SAMPLING["min_tokens"](given.get("min_tokens", 0), "min_tokens"))
    values["max_tokens"] = most
    matching = [name for name in (*MATCHES, *GRAMMARS) if given.get(name) is not None]
    if len(matching) > 1:
        raise RequestError(f"{matching[0]} and {matching[1]} exclude each other", matching[1])
    if matching and matching[0] in MATCHES:
        values |= given[matching[0]]
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise as_written(error, given) from None


def as_written(error: RequestError, given: Mapping[str, Any]) -> RequestError:
    """``error`` about a field of SamplingParams or the prompt, with the field named as the client wrote it."""
    param = error.param or ""
    written = next((name for name in WRITTEN.get(param, ()) if given.get(name) is not None), param)
    if written == param:
        return error
    message = written + error.message[len(param) :] if error.message.startswith(param) else error.message
    return RequestError(message, written, error.code, error.status, error.retry_after_s)


def read_prompt(value: Any, name: str) -> Prompt:
    """The kind of a prompt: a string or a list of token ids."""
    if isinstance(value, str):
        return Text()(value, name)
    if not isinstance(value, list):
        refuse(name, "a string or a list of token ids", value, "invalid_type")
    if not value:
        raise RequestError(f"{name} is an empty list; give at least one token id", name)
    for i, token in enumerate(value):  # a kind for each token would take longer than parsing the body
        if type(token) is not int:
            refuse(f"{name}.{i}", "a token id, which is an integer", token, "invalid_type")
        if not 0 <= token < 2**31:
            raise RequestError(f"{name}.{i} is no token id: it is negative or too large", f"{name}.{i}")
    return value


def token_counts(num_prompt: int, num_new: int) -> dict[str, Any]:
    """The fields of ``usage`` that every answer has."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def draft_counts(completions: Sequence[Completion]) -> dict[str, Any]:
    """The fields of ``usage`` that ``draft_counts`` asks for, by llama.cpp's names: tokens that were drafted, and those
    of them that were right."""
    return {
        "draft_n": sum(completion.num_drafted for completion in completions),
        "draft_n_accepted": sum(completion.num_accepted for completion in completions),
    }


def finite(logprob: float) -> float:
    """``logprob``, or -9999 for minus infinity, which JSON does not have: OpenAI's word for "very unlikely"."""
    return max(-9999.0, logprob)


def stream_json(value: Mapping[str, Any]) -> str:
    """``value`` in a stream. ASCII: some readers of lines and events take U+2028 and U+0085 for line ends."""
    return json.dumps(value, separators=(",", ":"))


def error_body(error: RequestError) -> str:
    """What a refused or failed request is answered with. ASCII, so that whatever it quotes can be sent."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if error.retry_after_s is not None:
        body["retry_after"] = error.retry_after_s
    return json.dumps({"error": body}) + "\n"
