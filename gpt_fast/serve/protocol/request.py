"""What the wire protocols share: a request that is understood, and the reading of its fields. No torch, no HTTP here.

A protocol makes a :class:`WireRequest` of each HTTP request. The server gives ``sequences`` to the engine, hands every
delta back to :meth:`WireRequest.write_delta` and sends what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, Text, kinds_of, refuse, unknown
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import SamplingParams

SAMPLING = kinds_of(SamplingParams)
# A field of SamplingParams, or of the prompt: the names under which the protocols know it.
_WRITTEN = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_new_tokens"),
    "json_schema": ("json_schema", "response_format"),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    "prompt": ("prompt", "messages"),
}


class Page(NamedTuple):
    """An answer that needs no model."""

    content_type: str
    body: str


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence for the engine. ``prompt``: text, or token ids as they are."""

    prompt: str | list[int]
    params: SamplingParams


class WireRequest(Protocol):
    """One HTTP request that is understood: what to generate, and how its answer is written."""

    @property
    def sequences(self) -> tuple[SequenceRequest, ...]: ...  # params.n > 1 stands for that many in a row
    @property
    def stream(self) -> bool: ...  # the answer goes out piece by piece
    @property
    def content_type(self) -> str: ...  # of the answer, streamed or not

    def as_written(self, error: RequestError) -> RequestError:
        """``error`` of the engine about a sequence, its field named as the client wrote it."""

    def write_delta(self, index: int, delta: Delta) -> str:
        """What to send, streaming, when sequence ``index`` has something new (its last delta has the completion);
        empty to send nothing."""

    def write_end(self, completions: Sequence[Completion]) -> str:
        """What to send when all sequences have ended: streaming, the closing words; else the whole answer."""

    def write_error(self, error: RequestError) -> str:
        """What to send, streaming, when the answer cannot go on after its status has been sent."""


def as_given(value: Any, name: str) -> Any:
    """The kind of a field that something else checks: SamplingParams, or a rule about several fields."""
    return value


def read_fields(body: Mapping[str, Any], kinds: Mapping[str, Kind], code: str, hint: str = "") -> dict[str, Any]:
    """The fields of ``body``, each as its kind reads it. Null counts as not given. Raises RequestError; a field without
    a kind has ``code``, and ``hint`` at the end of its message."""
    for name in body:
        if name not in kinds:
            raise RequestError(unknown(name, kinds) + hint, name[:100], code)
    return {name: kinds[name](value, name) for name, value in body.items() if value is not None}


def read_sampling(given: Mapping[str, Any], default_max_tokens: int | None, **values: Any) -> SamplingParams:
    """Sampling as the fields ``given`` ask for it; ``values`` are those that the protocol spells in its own way. Where
    ``max_tokens`` is None, ``default_max_tokens`` applies, raised to the request's ``min_tokens``. Raises RequestError,
    naming the field as the client wrote it."""
    values = {name: given[name] for name in SAMPLING if name in given} | values
    if values.get("max_tokens") is None and default_max_tokens is not None:
        values["max_tokens"] = max(default_max_tokens, SAMPLING["min_tokens"](given.get("min_tokens", 0), "min_tokens"))
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise as_written(error, given) from None


def as_written(error: RequestError, given: Mapping[str, Any]) -> RequestError:
    """``error`` about a field of SamplingParams or the prompt, with the field named as the client wrote it."""
    param = error.param
    written = next((name for name in _WRITTEN.get(param or "", ()) if name in given), param)
    if param is None or written is None or written == param:
        return error
    message = written + error.message[len(param) :] if error.message.startswith(param) else error.message
    return RequestError(message, written, error.code, error.status, error.retry_after_s)


def read_prompt(value: Any, name: str) -> str | list[int]:
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
