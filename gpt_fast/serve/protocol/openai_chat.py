"""``POST v1/chat/completions``: messages in, one or more assistant messages out.

Content is text: a string, or a list of text parts, which are joined by line breaks. Images, audio, files and tool
calls are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import check_values, texts_of, values_in
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import MAX_STOP_STRINGS
from gpt_fast.serve.protocol.openai_common import (
    OpenAIContext,
    OpenAIRequest,
    check_count,
    check_length,
    finite,
    token_bytes,
)
from gpt_fast.serve.protocol.openai_fields import CHAT, read_params, read_request, require
from gpt_fast.tokenizer.chat_prompt import FALLBACK_STOPS, encode_chat, special_names

_OF_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"}
)


class ChatRequest(OpenAIRequest):
    """A chat request that is understood."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._begun: set[int] = set()

    def _chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            # A token's text may come later than its log probability: half characters wait for their other half.
            logprobs = self._logprobs(delta.logprobs) if self._wants_logprobs else None
            chunks.append(_chunk(index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(_chunk(index, {}, None, delta.finish_reason))
        return chunks

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.logprobs or ()) if self._wants_logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        content = []
        for entry in map(finite, entries):
            top = [self._token(token, logprob) for token, logprob in entry.top]
            content.append(self._token(entry.token, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token).decode(errors="replace")
        # A special token has no bytes, so that the bytes of all tokens joined are the text.
        return {"token": name, "logprob": logprob, "bytes": list(token_bytes(self.context.tokenizer, token) or b"")}


def parse_chat(body: Mapping[str, Any], context: OpenAIContext) -> ChatRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong as a path: messages.0.content."""
    given = read_request(body, CHAT, context.models)
    messages = require(given, "messages")
    if "max_tokens" in given and "max_completion_tokens" in given:
        message = "max_completion_tokens and max_tokens are the same field; give one of them"
        raise RequestError(message, "max_completion_tokens")
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if num_top and not wanted:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    asked_as = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
    params = read_params(
        given,
        None,
        context.default_temperature,
        max_tokens=given.get(asked_as),
        logprobs=num_top if wanted else None,
        **({"stop": _fallback_stops(given)} if context.template is None else {}),
    )
    variables = _variables(given, context)
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer; POST v1/completions takes token ids", "messages")
    generate = given.get("add_generation_prompt", True)
    prompt = encode_chat(context.template, context.tokenizer, messages, generate, variables)
    check_length(prompt, params.max_tokens if asked_as in given else None, context, "messages", asked_as)
    check_count(1, params.n, context, "messages")
    return ChatRequest(given, (prompt,), params, context)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _fallback_stops(given: Mapping[str, Any]) -> Any:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list):
        return stop  # refused where all stops are checked
    # As many as fit beside the client's own; if those are too many already, the refusal must say so.
    return [*stop, *FALLBACK_STOPS][: max(MAX_STOP_STRINGS, len(stop))]


def _variables(given: Mapping[str, Any], context: OpenAIContext) -> Mapping[str, Any]:
    """``chat_template_kwargs``, which may not take the place of what the template gets anyway."""
    field = "chat_template_kwargs"
    variables: Mapping[str, Any] = given.get(field, {})
    check_values(variables, field)
    if variables and context.template is None:
        raise RequestError(f"{field} has no effect: this checkpoint has no chat template", field)
    for name, value in variables.items():
        path = f"{field}.{name[:100]}"
        if name in _OF_TEMPLATE or not name.isidentifier():
            raise RequestError(f"{path} is not a variable that may be set", path)
        texts = (text for item in values_in(value) for text in texts_of(item))
        if context.tokenizer is not None and any(len(special_names(context.tokenizer).split(t)) > 1 for t in texts):
            raise RequestError(f"{path} holds the name of a special token", path)
    return variables
