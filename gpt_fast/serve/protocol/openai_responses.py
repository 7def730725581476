"""``POST v1/responses``: OpenAI's newer form of a chat. Items in, items out; streams are named events.

https://platform.openai.com/docs/api-reference/responses. The prompt and what the answer is held to are those of a chat
(openai_chat.py); responses_fields.py reads the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import check_values
from gpt_fast.outputs import Completion, Delta
from gpt_fast.serve.protocol.answer_form import AnswerForm
from gpt_fast.serve.protocol.answer_parts import Part
from gpt_fast.serve.protocol.openai_chat import Chat, understand
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.openai_fields import read_request
from gpt_fast.serve.protocol.request import WireRequest, as_written, require, stream_json
from gpt_fast.serve.protocol.responses_fields import RESPONSE, flat

# Fields of a request that are part of its answer, and what they are where the request has none.
_ECHOED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "user", "top_p"), None),
    **{"metadata": {}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled"},
    **{"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}},
}


class ResponsesRequest(WireRequest):
    """A request that is understood. ``body``: as it came, to be quoted in the answer."""

    _stream_type = "text/event-stream; charset=utf-8"

    def __init__(self, given: dict[str, Any], body: Mapping[str, Any], chat: Chat, context: OpenAIContext) -> None:
        super().__init__(given, (chat.prompt,), chat.params, given.get("stream", False))
        self._head = {"id": f"resp_{context.new_id()}", "object": "response", "created_at": int(context.clock())}
        self._head |= {"model": given["model"], "temperature": chat.params.temperature}
        self._head |= {name: other if body.get(name) is None else body[name] for name, other in _ECHOED.items()}
        self._head |= {"store": False, "previous_response_id": None}
        self._events = _Events()
        self._output = _Output(chat.form, context.new_id, self._events)

    def write_delta(self, index: int, delta: Delta) -> str:
        if not self._events.count:
            for kind in ("response.created", "response.in_progress"):
                self._events.add(kind, response=self._response("in_progress"))
        self._output.push(delta.text)
        if delta.finish_reason is not None:
            self._output.end(_status(delta.finish_reason))
        return self._events.take()

    def write_end(self, completions: Sequence[Completion]) -> str:
        (done,) = completions
        status = _status(done.finish_reason)
        if not self.stream:
            self._output.push(done.text)
            self._output.end(status)
            return json.dumps(self._response(status, done), ensure_ascii=False) + "\n"
        self._events.add(f"response.{status}", response=self._response(status, done))
        return self._events.take()

    def write_error(self, error: RequestError) -> str:
        self._events.add("error", message=error.message, code=error.code, param=error.param)
        return self._events.take()

    def _response(self, status: str, done: Completion | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage: dict[str, Any] | None = None
        if done is not None:
            num_in, num_out = done.num_prompt_tokens, len(done.token_ids)
            usage = {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
            usage["input_tokens_details"] = {"cached_tokens": done.num_cached_tokens, "cache_write_tokens": 0}
            usage["output_tokens_details"] = {"reasoning_tokens": 0}  # thinking is not counted apart
        said = {"status": status, "error": None, "incomplete_details": reason, "output": self._output.items}
        return {**self._head, **said, "usage": usage}


class _Events:
    """The events of a stream that have not been sent, numbered. ``count``: how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self._texts: list[str] = []

    def add(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self.count, **fields}
        self._texts.append(f"event: {kind}\ndata: {stream_json(event)}\n\n")
        self.count += 1

    def take(self) -> str:
        texts, self._texts = self._texts, []
        return "".join(texts)


# What the parts of an answer become: the type of the item, the beginning of its id, and the name of its text in events.
_KINDS = {
    "content": ("message", "msg_", "output_text"),
    "reasoning": ("reasoning", "rs_", "reasoning_text"),
    "call": ("function_call", "fc_", "function_call_arguments"),
}


class _Output:
    """The items of an answer, as its text comes in; each piece is told to ``events``."""

    def __init__(self, form: AnswerForm, new_id: Callable[[], str], events: _Events) -> None:
        self.items: list[dict[str, Any]] = []
        self._calls, self._reader, self._new_id, self._events = form.dialect.calls, form.reader(), new_id, events
        self._open: str | None = None  # the key in _KINDS of the last item, while it grows
        self._text = ""  # of that item

    def push(self, text: str, final: bool = False) -> None:
        for part in self._reader.push(text, final):
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._open:
                self._close("completed")
                self._begin(kind, part)
            if part.kind != "call":
                self._grow(part.text)

    def end(self, status: str) -> None:
        """No more text comes."""
        self.push("", final=True)
        if not self.items:
            self._begin("content", Part("content", ""))
        self._close(status)

    def _begin(self, kind: str, part: Part) -> None:
        type_, prefix, _ = _KINDS[kind]
        item: dict[str, Any] = {"id": prefix + self._new_id(), "type": type_, "status": "in_progress"}
        if kind == "call":
            item |= {"call_id": self._calls.new_id(self._new_id()), "name": part.text, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "content" else {"summary": [], "content": []}
        self.items.append(item)
        self._open, self._text = kind, ""
        self._tell("response.output_item.added", item=item)
        if kind != "call":
            self._tell_text("response.content_part.added", part=self._part())

    def _grow(self, text: str) -> None:
        self._text += text
        self._tell_text(f"response.{self._text_name}.delta", delta=text, **self._no_logprobs)

    def _close(self, status: str) -> None:
        if self._open is None:
            return
        item = self.items[-1]
        if self._open == "call":
            item["arguments"] = self._text
            self._tell_text(f"response.{self._text_name}.done", arguments=self._text, name=item["name"])
        else:
            item["content"] = [self._part()]
            self._tell_text(f"response.{self._text_name}.done", text=self._text, **self._no_logprobs)
            self._tell_text("response.content_part.done", part=self._part())
        item["status"] = status
        self._tell("response.output_item.done", item=item)
        self._open = None

    @property
    def _text_name(self) -> str:
        assert self._open is not None
        return _KINDS[self._open][2]

    @property
    def _no_logprobs(self) -> dict[str, list[Any]]:
        """OpenAI's texts have this list in every event."""
        return {"logprobs": []} if self._open == "content" else {}

    def _part(self) -> dict[str, Any]:
        of_text = {"annotations": []} | self._no_logprobs if self._open == "content" else {}
        return {"type": self._text_name, "text": self._text, **of_text}

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.add(kind, output_index=len(self.items) - 1, **fields)

    def _tell_text(self, kind: str, **fields: Any) -> None:
        where = {} if self._open == "call" else {"content_index": 0}
        self._tell(kind, item_id=self.items[-1]["id"], **where, **fields)


def _status(reason: str) -> str:
    return "completed" if reason == "stop" else "incomplete"


def parse_responses(body: Mapping[str, Any], context: OpenAIContext) -> ResponsesRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong as a path: input.0.content."""
    given = read_request(body, RESPONSE, context)
    for name in _ECHOED:
        check_values(body.get(name), name)
    messages = require(given, "input")
    if "instructions" in given:
        messages = [{"role": "system", "content": given["instructions"]}, *messages]
    effort = given.get("reasoning", {}).get("effort")
    asked = {**given, "messages": messages} | ({} if effort is None else {"reasoning_effort": effort})
    try:
        chat = understand(asked, context)
    except RequestError as error:
        raise as_written(flat(error), given) from None
    return ResponsesRequest(given, body, chat, context)
