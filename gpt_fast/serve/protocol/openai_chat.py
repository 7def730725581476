"""``POST v1/chat/completions``: messages in, one or more assistant messages out.

Content is text: a string, or a list of text parts, which are joined by line breaks. Images, audio and files are refused
by name. Calls of functions and thinking are parts of the answer's text, which are told apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import check_values, texts_of, values_in
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import MAX_STOP_STRINGS
from gpt_fast.serve.protocol.answer_form import AnswerForm
from gpt_fast.serve.protocol.answer_parts import AnswerReader, Part
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIRequest, choice_of
from gpt_fast.serve.protocol.openai_fields import CHAT, read_request
from gpt_fast.serve.protocol.request import SAMPLING, as_written, read_sampling, require
from gpt_fast.serve.protocol.tool_fields import chosen
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat_prompt import FALLBACK_STOPS, encode_chat, special_names
from gpt_fast.tokenizer.chat_tools import describe_tools

_OF_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"}
)


class ChatRequest(OpenAIRequest):
    """A chat request that is understood."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, *facts: Any, form: AnswerForm) -> None:
        super().__init__(*facts)
        self._form = form
        self._messages: dict[int, _Message] = {}  # of sequences that have been streamed from

    def _chunks(self, index: int, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = [choice_of(index, {"delta": {"role": "assistant", "content": ""}})] if first else []
        if first:
            self._messages[index] = self._new_message()
        message = self._messages[index]
        news = message.push(delta.text, final=delta.finish_reason is not None)
        # Log probabilities of tokens whose text is held back, or is no part of the message, come without a text.
        if delta.logprobs and not news:
            news = [{"content": ""}]
        for i, each in enumerate(news):
            chunks.append(choice_of(index, {"delta": each}, self._logprobs(delta, told=i > 0)))
        if delta.finish_reason is not None:
            chunks.append(choice_of(index, {"delta": {}}, None, message.reason(delta.finish_reason)))
        return chunks

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = self._new_message()
        message.push(completion.text, final=True)
        logprobs = self._logprobs(completion)
        return choice_of(index, {"message": message.whole()}, logprobs, message.reason(completion.finish_reason))

    def _new_message(self) -> _Message:
        length = self._form.dialect.calls.id_length
        new_id = self.context.new_id
        return _Message(self._form.reader(), lambda: new_id()[:length] if length else f"call_{new_id()}")

    def _logprobs(self, part: Delta | Completion, told: bool = False) -> dict[str, Any] | None:
        """Those of ``part``; of none of it if they are ``told`` already, in another chunk."""
        if self.params.logprobs is None:
            return None
        content: list[dict[str, Any]] = []
        entries = part.logprobs or ()
        for entry, origin in () if told else zip(entries, self._origins(part, len(entries)), strict=True):
            top = [self._token(token, logprob) for token, logprob in entry.top]
            content.append(self._token(entry.token, entry.logprob) | {"top_logprobs": top})
            if origin is not None:
                content[-1]["origin"] = origin
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token).decode(errors="replace")
        # A special token has no bytes, so that the bytes of all tokens joined are the text.
        return {"token": name, "logprob": self._finite(logprob), "bytes": list(self._token_bytes(token) or b"")}


class _Message:
    """An assistant's message as its text comes in: the news for a stream, and the whole."""

    def __init__(self, reader: AnswerReader, new_id: Callable[[], str]) -> None:
        self._reader, self._new_id = reader, new_id
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str, final: bool) -> list[dict[str, Any]]:
        """OpenAI's deltas for more ``text`` of the answer; it is the last at the ``final`` push."""
        return [self._delta(part) for part in self._reader.push(text, final)]

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.kind == "call":
            head, function = {"id": self._new_id(), "type": "function"}, {"name": part.text, "arguments": ""}
            self._calls.append({**head, "function": function})
            # A copy, because the call's arguments grow.
            return {"tool_calls": [{"index": len(self._calls) - 1, **head, "function": dict(function)}]}
        if part.kind == "arguments":
            self._calls[-1]["function"]["arguments"] += part.text
            return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": part.text}}]}
        key = "content" if part.kind == "content" else "reasoning_content"
        self._texts[key] += part.text
        return {key: part.text}

    def whole(self) -> dict[str, Any]:
        content, thinking = self._texts["content"], self._texts["reasoning_content"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thinking:
            message["reasoning_content"] = thinking
        if self._calls:
            message["tool_calls"] = self._calls
        if not content and (thinking or self._calls):
            message["content"] = None
        return message

    def reason(self, reason: str) -> str:
        """Why the answer ended: the engine's ``reason``, unless it ended with calls."""
        return "tool_calls" if reason == "stop" and self._calls and not self._reader.in_call else reason


def parse_chat(body: Mapping[str, Any], context: OpenAIContext) -> ChatRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong as a path: messages.0.content."""
    try:
        return _parse(read_request(body, CHAT, context), context)
    except RecursionError:
        raise RequestError("the tools or messages are nested too deeply", "tools") from None


def _parse(given: dict[str, Any], context: OpenAIContext) -> ChatRequest:
    messages = require(given, "messages")
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if num_top and not wanted:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    if context.template is None:
        stops = SAMPLING["stop"](given.get("stop", ()), "stop")
        given["stop"] = [*stops, *FALLBACK_STOPS][:MAX_STOP_STRINGS]  # as many as fit beside the client's own
    tools, choice = chosen(given)
    params = read_sampling(given, None, logprobs=num_top if wanted else None)
    variables = _variables(given, context)
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer; POST v1/completions takes token ids", "messages")
    generate = given.get("add_generation_prompt", True)
    offered = tools if choice.mode != "none" else []
    prompt = _prompt(context, context.tokenizer, messages, generate, variables, offered)
    form = AnswerForm(context.dialect, context.tokenizer, offered, choice)
    form = form.behind(prompt) if generate else form
    try:
        params = form.hold(params, given.get("parallel_tool_calls", True))
    except RequestError as error:
        raise as_written(error, given) from None
    context.check_length(prompt, given, params, "messages")
    context.check_count(1, params.n, "messages")
    return ChatRequest(given, (prompt,), params, context, form=form)


def _prompt(
    context: OpenAIContext,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    generate: bool,
    variables: Mapping[str, Any],
    tools: list[dict[str, Any]],
) -> list[int]:
    """Token ids of ``messages``, with ``tools`` as the checkpoint knows them."""
    dialect = context.dialect
    if dialect.thinking is not None and dialect.thinking.key != "reasoning_content":
        messages = [_with_thinking(message, dialect.thinking.key) for message in messages]
    called = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (tools and not dialect.writes_tools) or (called and not dialect.reads_calls):
        messages, tools = describe_tools(messages, tools), []
    return encode_chat(context.template, tokenizer, messages, generate, variables, tools or None)


def _with_thinking(message: dict[str, Any], key: str) -> dict[str, Any]:
    """``message`` with its thinking under ``key``. Beside text and calls gpt-oss' template takes no thinking."""
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "reasoning_content" not in message or ("tool_calls" in message and message["content"]):
        return rest
    return {**rest, key: message["reasoning_content"]}


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
