"""``POST v1/chat/completions``: messages in, one or more assistant messages out.

Content is text: a string, or a list of text parts, which are joined by line breaks. Images, audio, files and tool
calls are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import check_values, texts_of, values_in
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import MAX_STOP_STRINGS
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIRequest, choice_of
from gpt_fast.serve.protocol.openai_fields import CHAT, read_request
from gpt_fast.serve.protocol.request import SAMPLING, read_sampling, require
from gpt_fast.tokenizer.chat_prompt import FALLBACK_STOPS, encode_chat, special_names

_OF_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"}
)


class ChatRequest(OpenAIRequest):
    """A chat request that is understood."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def _chunks(self, index: int, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = [choice_of(index, {"delta": {"role": "assistant", "content": ""}})] if first else []
        if delta.text or delta.logprobs:
            # A token's text may come later than its log probability: half characters wait for their other half.
            chunks.append(choice_of(index, {"delta": {"content": delta.text}}, self._logprobs(delta)))
        if delta.finish_reason is not None:
            chunks.append(choice_of(index, {"delta": {}}, None, delta.finish_reason))
        return chunks

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return choice_of(index, {"message": message}, self._logprobs(completion), completion.finish_reason)

    def _logprobs(self, part: Delta | Completion) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        content, entries = [], part.logprobs or ()
        for entry, origin in zip(entries, self._origins(part, len(entries)), strict=True):
            top = [self._token(token, logprob) for token, logprob in entry.top]
            content.append(self._token(entry.token, entry.logprob) | {"top_logprobs": top})
            if origin is not None:
                content[-1]["origin"] = origin
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token).decode(errors="replace")
        # A special token has no bytes, so that the bytes of all tokens joined are the text.
        return {"token": name, "logprob": self._finite(logprob), "bytes": list(self._token_bytes(token) or b"")}


def parse_chat(body: Mapping[str, Any], context: OpenAIContext) -> ChatRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong as a path: messages.0.content."""
    given = read_request(body, CHAT, context)
    messages = require(given, "messages")
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if num_top and not wanted:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    if context.template is None:
        stops = SAMPLING["stop"](given.get("stop", ()), "stop")
        given["stop"] = [*stops, *FALLBACK_STOPS][:MAX_STOP_STRINGS]  # as many as fit beside the client's own
    params = read_sampling(given, None, logprobs=num_top if wanted else None)
    variables = _variables(given, context)
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer; POST v1/completions takes token ids", "messages")
    generate = given.get("add_generation_prompt", True)
    prompt = encode_chat(context.template, context.tokenizer, messages, generate, variables)
    context.check_length(prompt, given, params, "messages")
    context.check_count(1, params.n, "messages")
    return ChatRequest(given, (prompt,), params, context)


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
