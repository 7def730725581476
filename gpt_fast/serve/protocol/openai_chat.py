"""``POST v1/chat/completions``: messages in, one or more assistant messages out.

Content is text: a string, or a list of text parts, which are joined by line breaks. Images, audio and files are refused
by name. Calls of functions and thinking are parts of the answer's text, which are told apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import MAX_STOP_STRINGS, SamplingParams
from gpt_fast.serve.protocol.answer_form import AnswerForm
from gpt_fast.serve.protocol.answer_parts import AnswerReader, Part
from gpt_fast.serve.protocol.chat_messages import begins_answer, chat_prompt
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIRequest, choice_of
from gpt_fast.serve.protocol.openai_fields import CHAT, read_request
from gpt_fast.serve.protocol.request import SAMPLING, as_written, finite, read_sampling, require
from gpt_fast.serve.protocol.tool_fields import chosen
from gpt_fast.tokenizer.chat_prompt import FALLBACK_STOPS


class ChatRequest(OpenAIRequest):
    """A chat request that is understood."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, *facts: Any, form: AnswerForm) -> None:
        super().__init__(*facts)
        self._form = form
        self._messages: dict[int, Message] = {}  # of sequences that have been streamed from

    def _chunks(self, index: int, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = [choice_of(index, {"delta": {"role": "assistant", "content": ""}})] if first else []
        if first:
            self._messages[index] = self._new_message()
        message = self._messages[index]
        news = message.push(delta.text, final=delta.finish_reason is not None)
        # Log probabilities of tokens whose text is held back, or is no part of the message, come without a text.
        if not news and (delta.logprobs or (self._returns_ids and delta.token_ids)):
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

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # A chat has one prompt, so vLLM has what is said of it beside the choices.
        names = ("prompt_token_ids", "prompt_logprobs")
        of_prompt = {name: choice.pop(name) for choice in choices for name in names if name in choice}
        return super()._frame(kind, choices) | of_prompt

    def _new_message(self) -> Message:
        calls, new_id = self._form.dialect.calls, self.context.new_id
        return Message(self._form.reader(), lambda: calls.new_id(new_id()))

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
        # The bytes of all tokens joined are the text, so a special token has some only where that shows it.
        given = self._token_bytes(token, self.params.skip_special_tokens) or b""
        return {"token": name, "logprob": finite(logprob), "bytes": list(given)}


class Message:
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


class Chat(NamedTuple):
    """What a chat asks of the engine, and the form of its answer."""

    prompt: list[int]
    params: SamplingParams
    form: AnswerForm


def parse_chat(body: Mapping[str, Any], context: OpenAIContext) -> ChatRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong as a path: messages.0.content."""
    given = read_request(body, CHAT, context)
    chat = understand(given, context)
    return ChatRequest(given, (chat.prompt,), chat.params, context, form=chat.form)


def understand(given: dict[str, Any], context: OpenAIContext) -> Chat:
    """What the fields ``given`` of a chat mean, as CHAT reads them. Raises RequestError naming the field."""
    try:
        return _understand(given, context)
    except RecursionError:
        raise RequestError("the tools or messages are nested too deeply", "tools") from None


def _understand(given: dict[str, Any], context: OpenAIContext) -> Chat:
    require(given, "messages")
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if num_top and not wanted:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    if context.template is None:
        stops = SAMPLING["stop"](given.get("stop", ()), "stop")
        given["stop"] = [*stops, *FALLBACK_STOPS][:MAX_STOP_STRINGS]  # as many as fit beside the client's own
    tools, choice = chosen(given)
    params = read_sampling(given, None, logprobs=num_top if wanted else None)
    offered = tools if choice.mode != "none" else []
    context = context.with_tools(offered)
    tokenizer, prompt = chat_prompt(given, context, offered)
    form = AnswerForm(context.dialect, tokenizer, offered, choice)
    form = form.behind(prompt) if begins_answer(given) else form
    try:
        params = form.hold(params, given.get("parallel_tool_calls", True))
    except RequestError as error:
        raise as_written(error, given) from None
    prompt = context.fitted(prompt, given, params, "messages")
    context.check_count(1, params.n, "messages")
    return Chat(prompt, params, form)
