"""This project's own request and answer: ``{"prompt": ..., "max_new_tokens": 50, "temperature": 0.8, ...}``.

A completion is streamed as plain text, or comes in one piece as JSON with ``"stream": false``. What is refused is
told as ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, flag
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.request import SAMPLING, SequenceRequest, as_given, read_fields, read_prompt, read_sampling

TEXT_TYPE = "text/plain; charset=utf-8"
JSON_TYPE = "application/json"


def _prompt(value: Any, name: str) -> str | list[int]:
    try:
        return read_prompt(value, name)
    except RequestError as error:
        error.param = name  # this protocol's errors name a field, not what is inside it
        raise


_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*SAMPLING, "max_new_tokens"), as_given),
    "prompt": _prompt,
    "stream": flag,
    "return_token_ids": flag,
}
FIELDS = tuple(sorted(_KINDS))


@dataclass(frozen=True)
class NativeRequest:
    """A request that is understood and whose values are possible; whether it fits the model, the engine says."""

    sequences: tuple[SequenceRequest, ...]
    stream: bool
    return_token_ids: bool = False

    @property
    def content_type(self) -> str:
        return TEXT_TYPE if self.stream else JSON_TYPE

    def as_written(self, error: RequestError) -> RequestError:
        return error

    def write_delta(self, index: int, delta: Delta) -> str:
        return delta.text

    def write_end(self, completions: Sequence[Completion]) -> str:
        return "" if self.stream else completion_body(completions[0], self.return_token_ids)

    def write_error(self, error: RequestError) -> str:
        """The error in a line below the text: the status and the headers have been sent, only the body is left."""
        return "\n" + error_body(error)


def parse_request(
    body: Mapping[str, Any], default_max_tokens: int | None = None, default_stream: bool = True
) -> NativeRequest:
    """``body`` as a request. A field that is null counts as not given. Raises RequestError, naming the field as it was
    written."""
    given = read_fields(body, _KINDS, "unknown_field", f"; known fields: {', '.join(FIELDS)}")
    if "prompt" not in given:
        raise RequestError("prompt is missing", "prompt", "missing_field")
    if "max_tokens" in given and "max_new_tokens" in given:
        raise RequestError("max_new_tokens and max_tokens are the same field; give one of them", "max_new_tokens")
    default = SamplingParams.max_tokens if default_max_tokens is None else default_max_tokens
    params = read_sampling(given, default, max_tokens=given.get("max_new_tokens", given.get("max_tokens")))
    if params.n != 1:
        raise RequestError("n must be 1 here; v1/completions gives several samples", "n")
    stream = given.get("stream", default_stream)
    for name in ("return_token_ids", "logprobs", "prompt_logprobs"):
        if stream and given.get(name, False) is not False:
            raise RequestError(f'{name} needs "stream": false; streamed text has no room for it', name)
    return NativeRequest((SequenceRequest(given["prompt"], params),), stream, given.get("return_token_ids", False))


def completion_body(completion: Completion, return_token_ids: bool = False) -> str:
    """The whole answer to a request with ``"stream": false``."""
    answer: dict[str, Any] = {"text": completion.text}
    if return_token_ids:
        answer["token_ids"] = list(completion.token_ids)
    answer["finish_reason"] = completion.finish_reason
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(completion, name)) is not None:
            answer[name] = [None if entry is None else _logprobs(entry) for entry in entries]
    usage = token_counts(completion.num_prompt_tokens, len(completion.token_ids))
    answer["usage"] = usage | {"cached_tokens": completion.num_cached_tokens}
    return json.dumps(answer, ensure_ascii=False) + "\n"


def token_counts(num_prompt: int, num_new: int) -> dict[str, Any]:
    """The fields of ``usage`` that every answer has."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


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
