"""This project's own request and answer: ``{"prompt": ..., "max_new_tokens": 50, "temperature": 0.8, ...}``.

A completion is streamed as plain text, or comes in one piece as JSON with ``"stream": false``. A stream that has more
to say of its tokens than their text (``logprobs``, ``return_origins`` ...) is JSON too, one object a line. What is
refused is told as ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, as_given, flag
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.request import (
    SAMPLING,
    Prompt,
    WireRequest,
    draft_counts,
    error_body,
    finite,
    read_fields,
    read_prompt,
    read_sampling,
    require,
    stream_json,
    token_counts,
)


def _prompt(value: Any, name: str) -> Prompt:
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
    "return_origins": flag,
    "draft_counts": flag,
}
FIELDS = tuple(sorted(_KINDS))
# What plain text has no room for.
MORE_THAN_TEXT = ("return_token_ids", "return_origins", "draft_counts", "logprobs", "prompt_logprobs")
LINES_TYPE = "application/x-ndjson"


class NativeRequest(WireRequest):
    """One prompt, one completion."""

    _stream_type = "text/plain; charset=utf-8"

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._lines = self.stream and any(self.given.get(name, False) is not False for name in MORE_THAN_TEXT)
        if self._lines:
            self.content_type = LINES_TYPE

    def write_delta(self, index: int, delta: Delta) -> str:
        return stream_json(self._part(delta)) + "\n" if self._lines else delta.text

    def write_end(self, completions: Sequence[Completion]) -> str:
        if self.stream and not self._lines:
            return ""
        (completion,) = completions
        answer = {} if self.stream else self._part(completion)
        answer["finish_reason"] = completion.finish_reason
        if (entries := completion.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = [None if entry is None else _logprobs(entry) for entry in entries]
        usage = token_counts(completion.num_prompt_tokens, len(completion.token_ids))
        answer["usage"] = usage | {"cached_tokens": completion.num_cached_tokens}
        if self.given.get("draft_counts"):
            answer["usage"] |= draft_counts(completions)
        return (stream_json(answer) if self._lines else json.dumps(answer, ensure_ascii=False)) + "\n"

    def write_error(self, error: RequestError) -> str:
        """The error in a line below the text: the status and the headers have been sent, only the body is left."""
        return error_body(error) if self._lines else "\n" + error_body(error)

    def _part(self, part: Delta | Completion) -> dict[str, Any]:
        """The text of ``part``, and of its tokens what was asked for."""
        written: dict[str, Any] = {"text": part.text}
        if self.given.get("return_token_ids"):
            written["token_ids"] = list(part.token_ids)
        if self.given.get("return_origins"):
            written["origins"] = list(part.origins or ("plain",) * len(part.token_ids))
        if self.params.logprobs is not None:
            written["logprobs"] = [_logprobs(entry) for entry in part.logprobs or ()]
        return written


def parse_request(
    body: Mapping[str, Any], default_max_tokens: int | None = None, default_stream: bool = True
) -> NativeRequest:
    """``body``, understood: its values are possible. Whether it fits the model, the engine says. A field that is null
    counts as not given. Raises RequestError, naming the field as it was written."""
    given = read_fields(body, _KINDS, "unknown_field", f"; known fields: {', '.join(FIELDS)}")
    prompt = require(given, "prompt", "missing_field")
    params = read_sampling(given, SamplingParams.max_tokens if default_max_tokens is None else default_max_tokens)
    if params.n != 1:
        raise RequestError("n must be 1 here; v1/completions gives several samples", "n")
    stream = given.get("stream", default_stream)
    return NativeRequest(given, [prompt], params, stream)


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": finite(logprob)} for token, logprob in entry.top]
    return {"token_id": entry.token, "logprob": finite(entry.logprob), "top": top}
