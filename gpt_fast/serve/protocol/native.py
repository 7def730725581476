"""This project's own request and answer: ``{"prompt": ..., "max_new_tokens": 50, "temperature": 0.8, ...}``.

A completion is streamed as plain text, or comes in one piece as JSON with ``"stream": false``. What is refused is
told as ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.fields import default_tokens
from gpt_fast.serve.protocol.job import SequenceRequest

TEXT_TYPE = "text/plain; charset=utf-8"
JSON_TYPE = "application/json"

_ALIASES = {"max_new_tokens": "max_tokens"}  # as the user may write it: as SamplingParams has it
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SWITCHES = ("stream", "return_token_ids")
FIELDS = tuple(sorted({"prompt", *_ALIASES, *_SAMPLING, *_SWITCHES}))


@dataclass(frozen=True)
class NativeJob:
    """A request that is understood and whose values are possible; whether it fits the model, the engine says."""

    sequences: tuple[SequenceRequest, ...]
    stream: bool
    return_token_ids: bool = False

    @property
    def content_type(self) -> str:
        return TEXT_TYPE if self.stream else JSON_TYPE

    def named(self, error: RequestError) -> RequestError:
        """The engine's names are this protocol's."""
        return error

    def delta(self, index: int, delta: Delta) -> str:
        """The text itself."""
        return delta.text

    def end(self, completions: Sequence[Completion]) -> str:
        """Nothing after a stream; else the whole answer."""
        return "" if self.stream else completion_body(completions[0], self.return_token_ids)

    def broken(self, error: RequestError) -> str:
        """The error as a line of its own: status and headers are gone, the body is the only place left to say it."""
        return "\n" + error_body(error)


def parse_request(
    body: Mapping[str, Any], default_max_tokens: int | None = None, default_stream: bool = True
) -> NativeJob:
    """``body`` as a request. A field that is null counts as not given, except ``prompt``.

    Raises RequestError, naming the field as it was written.
    """
    for name in body:
        if name not in FIELDS:
            raise RequestError(_unknown(name), name[:100], "unknown_field")
    if "prompt" not in body:
        raise RequestError("prompt is missing", "prompt", "missing_field")
    prompt = _prompt(body["prompt"])
    given = {name: value for name, value in body.items() if value is not None}
    stream = _switch(given, "stream", default_stream)
    return_token_ids = _switch(given, "return_token_ids", False)
    if return_token_ids and stream:
        message = 'return_token_ids needs "stream": false; streamed text has no room for ids'
        raise RequestError(message, "return_token_ids")
    params = _params(given, default_max_tokens)
    if params.n != 1:
        raise RequestError("n must be 1 here; v1/completions gives several samples", "n")
    if stream and (params.logprobs is not None or params.prompt_logprobs is not None):
        name = "logprobs" if params.logprobs is not None else "prompt_logprobs"
        raise RequestError(f'{name} needs "stream": false; streamed text has no room for numbers', name)
    return NativeJob((SequenceRequest(prompt, params),), stream, return_token_ids)


def completion_body(completion: Completion, return_token_ids: bool = False) -> str:
    """The whole answer to a request with ``"stream": false``."""
    answer: dict[str, Any] = {"text": completion.text}
    if return_token_ids:
        answer["token_ids"] = list(completion.token_ids)
    num_new = len(completion.token_ids)
    answer["finish_reason"] = completion.finish_reason
    if completion.logprobs is not None:
        answer["logprobs"] = [_logprobs(entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [
            None if entry is None else _logprobs(entry) for entry in completion.prompt_logprobs
        ]
    answer["usage"] = {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": completion.num_prompt_tokens + num_new,
        "cached_tokens": completion.num_cached_tokens,
    }
    return json.dumps(answer, ensure_ascii=False) + "\n"


def error_body(error: RequestError) -> str:
    """What a refused or failed request is answered with. ASCII, so that whatever it quotes can be sent."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if error.retry_after_s is not None:
        body["retry_after"] = error.retry_after_s
    return json.dumps({"error": body}) + "\n"


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return {"token_id": entry.token, "logprob": entry.logprob, "top": top}


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"prompt is not valid text: half of a surrogate pair at character {error.start}"
            raise RequestError(message, "prompt", "invalid_text") from None
        return prompt
    if not isinstance(prompt, list):
        message = f"prompt must be a string or a list of token ids, not {_kind(prompt)}"
        raise RequestError(message, "prompt", "invalid_type")
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one token id", "prompt")
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            message = f"prompt[{position}] is {_kind(token)}; a list must hold token ids, which are integers"
            raise RequestError(message, "prompt", "invalid_type")
        if not 0 <= token < 2**31:
            raise RequestError(f"prompt[{position}] is no token id: it is negative or too large", "prompt")
    return prompt


def _params(given: Mapping[str, Any], default_max_tokens: int | None) -> SamplingParams:
    for alias, name in _ALIASES.items():
        if alias in given and name in given:
            raise RequestError(f"{alias} and {name} are the same field; give one of them", alias)
    values = {name: value for name, value in given.items() if name in _SAMPLING or name in _ALIASES}
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = bias_by_id(values["logit_bias"])
    for name, value in values.items():
        _check_text(name, value)
        if isinstance(value, int) and abs(value) >= 2**64:  # math.isfinite would overflow further down
            raise RequestError(f"{name} is out of range", name)
    if default_max_tokens is not None and not any(n in values for n in ("max_tokens", "max_new_tokens")):
        values["max_tokens"] = default_tokens(default_max_tokens, values)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        written = next((a for a, name in _ALIASES.items() if name == error.param and a in values), None)
        if written is None or error.param is None:
            raise
        message = error.message.replace(error.param, written)
        raise RequestError(message, written, error.code, error.status) from None


def bias_by_id(biases: Mapping[Any, Any]) -> dict[int, Any]:
    """``logit_bias`` with the ids as numbers: JSON has them as strings. Raises RequestError."""
    for token in biases:
        if not (isinstance(token, int) or (isinstance(token, str) and token.isdecimal() and len(token) < 12)):
            raise RequestError(f"logit_bias has the key {str(token)[:40]!r}, which is no token id", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _check_text(name: str, value: Any) -> None:
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise RequestError(
                    f"{name} is not valid text: half of a surrogate pair", name, "invalid_text"
                ) from None


def _switch(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {_kind(value)}", name, "invalid_type")
    return value


def _unknown(name: str) -> str:
    shown = name if len(name) <= 60 else name[:57] + "..."
    close = difflib.get_close_matches(shown, FIELDS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown field {shown!r}{hint}; known fields: {', '.join(FIELDS)}"


def _kind(value: Any) -> str:
    kinds = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "an array"}
    return "null" if value is None else kinds.get(type(value), "an object")
