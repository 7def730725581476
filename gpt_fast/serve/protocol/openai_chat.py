"""``POST v1/chat/completions``: messages in, one or more assistant messages out.

Content is text: a string, or a list of text parts, which are joined by line breaks. The role "developer" is handed to
the template as "system", the word that templates know. Images, audio, files and tool calls are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import MAX_LOGPROBS, MAX_STOP_STRINGS, integer, show
from gpt_fast.serve.protocol.chat_prompt import FALLBACK_STOPS, encode_chat, special_names
from gpt_fast.serve.protocol.fields import kind, unknown
from gpt_fast.serve.protocol.openai_common import (
    Ask,
    OpenAIContext,
    OpenAIJob,
    check_count,
    check_length,
    finite,
    token_bytes,
    token_name,
)
from gpt_fast.serve.protocol.openai_fields import (
    CHAT,
    check_model,
    read_fields,
    read_params,
    read_stream_options,
    read_switch,
    require,
)

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_NAMES = ("name", "tool_call_id")  # short labels that templates may print
_LABEL = re.compile(r"[^\s<|\\/>]{1,64}")  # OpenAI's rule for a participant's name
# What OpenAI's own answers contain, so that one can be sent back as it came, as long as nothing is in it.
_EMPTY_IN_MESSAGE = ("refusal", "annotations", "audio", "tool_calls", "function_call")
_OF_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"}
)


class ChatJob(OpenAIJob):
    """A chat request, understood."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, ask: Ask, context: OpenAIContext) -> None:
        super().__init__(ask, context)
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

    @property
    def _wants_logprobs(self) -> bool:
        return self.ask.params.logprobs is not None

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        content = []
        for entry in map(finite, entries):
            top = [self._token(token, logprob) for token, logprob in entry.top]
            content.append(self._token(entry.token, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.context.tokenizer
        name = token_name(tokenizer, token).decode(errors="replace")
        # A special token has no bytes, so that the bytes of all tokens joined are the text.
        return {"token": name, "logprob": logprob, "bytes": list(token_bytes(tokenizer, token) or b"")}


def parse_chat(body: Mapping[str, Any], context: OpenAIContext) -> ChatJob:
    """``body`` as a job. Raises RequestError naming the field that is wrong, as a path such as messages.0.content."""
    given = read_fields(body, CHAT)
    model = check_model(given, context.models)
    messages = _messages(require(given, "messages"))
    asked_as, max_tokens = _max_tokens(given)
    params = read_params(
        given | ({"stop": _fallback_stops(given)} if context.template is None else {}),
        max_tokens=max_tokens,
        logprobs=_num_logprobs(given),
        default_max_tokens=context.chat_max_tokens,
        default_temperature=context.default_temperature,
    )
    stream = read_switch(given, "stream")
    options = read_stream_options(given, stream)
    variables = _variables(given, context)
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer; POST v1/completions takes token ids", "messages")
    generate = read_switch(given, "add_generation_prompt", True)
    prompt = encode_chat(context.template, context.tokenizer, messages, generate, variables)
    check_length(prompt, params.max_tokens if max_tokens is not None else None, context, "messages", asked_as)
    check_count(1, params.n, context, "messages")
    return ChatJob(Ask(model, (prompt,), params, given, stream, options), context)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise RequestError(f"messages must be a list of messages, not {kind(messages)}", "messages", "invalid_type")
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} must be an object, not {kind(message)}", path, "invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(map(repr, _ROLES))
        raise RequestError(f"{path}.role must be one of {known}, not {show(role)}", f"{path}.role")
    read = {"role": _ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    for name, value in message.items():
        field = f"{path}.{name[:100]}"
        if name in _NAMES and value is not None:
            if not (isinstance(value, str) and _LABEL.fullmatch(value)):
                message_ = f"{field} must have 1 to 64 characters without white space, <, >, |, / and \\"
                raise RequestError(message_, field)
            read[name] = value
        elif name in _EMPTY_IN_MESSAGE and value not in (None, []):
            raise RequestError(f"{field} is not supported", field, "unsupported_parameter")
        elif name not in ("role", "content", *_NAMES, *_EMPTY_IN_MESSAGE):
            raise RequestError(f"{path}: {unknown(name, ('role', 'content', *_NAMES))}", field, "unknown_parameter")
    return read


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{path} is missing", path, "missing_required_parameter")
    if not isinstance(content, list):
        message = f"{path} must be a string or a list of text parts, not {kind(content)}"
        raise RequestError(message, path, "invalid_type")
    return "\n".join([_part(part, f"{path}.{i}") for i, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{path} must be an object, not {kind(part)}", path, "invalid_type")
    if part.get("type") != "text":
        message = f"{path}.type is {show(part.get('type'))}; this server reads text only"
        raise RequestError(message, f"{path}.type", "unsupported_value")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{path}.text must be a string, not {kind(text)}", f"{path}.text", "invalid_type")
    return text


def _max_tokens(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """The name the client used, and the number if there is one."""
    if "max_tokens" in given and "max_completion_tokens" in given:
        message = "max_completion_tokens and max_tokens are the same field; give one of them"
        raise RequestError(message, "max_completion_tokens")
    name = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
    return name, given.get(name)


def _num_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = read_switch(given, "logprobs")
    num_top = given.get("top_logprobs")
    if num_top is None:
        return 0 if wanted else None
    num_top = integer("top_logprobs", num_top, 0, MAX_LOGPROBS)
    if not wanted and num_top > 0:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    return num_top if wanted else None


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
    variables = given.get(field, {})
    if not isinstance(variables, Mapping):
        raise RequestError(f"{field} must be an object, not {kind(variables)}", field, "invalid_type")
    if variables and context.template is None:
        raise RequestError(f"{field} has no effect: this checkpoint has no chat template", field)
    for name, value in variables.items():
        path = f"{field}.{name[:100]}"
        if name in _OF_TEMPLATE or not name.isidentifier():
            raise RequestError(f"{path} is not a variable that may be set", path)
        if context.tokenizer is not None and _holds_special(value, context):
            raise RequestError(f"{path} holds the name of a special token", path)
    return variables


def _holds_special(value: Any, context: OpenAIContext) -> bool:
    assert context.tokenizer is not None
    names = special_names(context.tokenizer)
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str) and len(names.split(item)) > 1:
            return True
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
    return False
