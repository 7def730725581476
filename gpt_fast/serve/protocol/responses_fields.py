"""The fields of ``POST v1/responses``, read as the fields of a chat: items of ``input`` become its messages.

The server keeps no answers. ``store`` is taken and changes nothing, as the answer's ``"store": false`` says;
``previous_response_id`` and references to items are refused: send the earlier items as ``input`` again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, OneOf, Struct, Text, Whole, as_given, flag, json_object, refuse, show
from gpt_fast.serve.protocol.openai_fields import (
    EFFORT,
    WITHOUT_EFFECT,
    must_be_empty,
    read_message,
    response_format,
    text_parts,
)
from gpt_fast.serve.protocol.request import SAMPLING
from gpt_fast.serve.protocol.tool_fields import ToolChoice, tool_choice, tool_list

_TEXT = Text()
_KEPT = "this server keeps no answers; send the earlier items as input"


def _refused(value: Any, name: str) -> None:
    raise RequestError(f"{name} is not supported: {_KEPT}", name, "unsupported_parameter")


def _only(*values: Any) -> Kind:
    """Nothing but what happens anyway."""

    def read(value: Any, name: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            raise RequestError(f"{name} {show(value)} is not supported", name, "unsupported_parameter")
        return value

    return read


def _metadata(value: Any, name: str) -> Mapping[str, Any]:
    """An object of strings."""
    if not all(isinstance(text, str) for text in json_object(value, name).values()):
        raise RequestError(f"{name} has a value that is not a string", name, "invalid_type")
    return value  # type: ignore[no-any-return]


def _input(value: Any, name: str) -> list[dict[str, Any]]:
    """A text, or a list of items, as messages: thinking, text and calls of one turn are separate items here,
    and one message of a chat."""
    if isinstance(value, str):
        return [read_message({"role": "user", "content": value}, name)]
    if not isinstance(value, list) or not value:
        refuse(name, "a string or a list of at least one item", value, "invalid_type")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        try:
            message = read_message(_message(item, f"{name}.{i}"), f"{name}.{i}")
        except RequestError as error:
            raise flat(error) from None
        if messages and _belong_together(messages[-1], message):
            calls = [*messages[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            said = {key: text for key, text in message.items() if text}
            messages[-1] |= said | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    return messages


def _belong_together(first: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether both are one message of the assistant: thinking, then text, then calls."""
    if not first["role"] == then["role"] == "assistant":
        return False
    stages = [2 if "tool_calls" in message else 1 if message["content"] else 0 for message in (first, then)]
    return stages[0] < stages[1] or stages == [2, 2]


def _message(value: Any, name: str) -> dict[str, Any]:
    """The message that one item means, to be read as a chat's."""
    given = json_object(value, name).get("type")  # null counts as not given
    kind = "message" if given is None else OneOf(tuple(_ITEMS))(given, f"{name}.type")
    item = _ITEMS[kind](value, name)
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    if kind == "function_call_output":
        content = text_parts(item["output"], f"{name}.output", _PARTS)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    if kind == "reasoning":
        thinking = text_parts(item.get("content") or item.get("summary") or "", f"{name}.content", _PARTS)
        return {"role": "assistant", "content": "", "reasoning_content": thinking}
    return {"role": item["role"], "content": text_parts(item["content"], f"{name}.content", _PARTS)}


def _tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Functions, in the form of a chat's tools."""
    if not isinstance(value, list):
        refuse(name, "a list of tools", value, "invalid_type")
    tools = []
    for i, tool in enumerate(value):
        fields = dict(json_object(tool, f"{name}.{i}"))
        if (kind := fields.pop("type", None)) != "function":
            message = f"{name}.{i}.type is {show(kind)}; only functions can be called here"
            raise RequestError(message, f"{name}.{i}.type", "unsupported_value")
        tools.append({"type": "function", "function": {k: v for k, v in fields.items() if v is not None}})
    try:
        return tool_list(tools, name)
    except RequestError as error:
        raise flat(error) from None


def _tool_choice(value: Any, name: str) -> ToolChoice:
    if isinstance(value, Mapping) and value.get("type") == "function":
        value = {"type": "function", "function": {k: v for k, v in value.items() if k != "type"}}
    try:
        return tool_choice(value, name)
    except RequestError as error:
        raise flat(error) from None


_FLAT = (
    *((".tool_calls.0.id", ".call_id"), (".tool_calls.0", ""), (".function.", "."), (".function:", ":")),
    ("reasoning_effort", "reasoning.effort"),
)


def flat(error: RequestError) -> RequestError:
    """``error`` with its path as it is here, where functions and their calls are flat, and thinking has an object."""
    texts = [error.message, error.param or ""]
    for chat, here in _FLAT:
        texts = [text.replace(chat, here) for text in texts]
    return RequestError(texts[0], texts[1] or None, error.code, error.status, error.retry_after_s)


def _text(value: Any, name: str) -> Mapping[str, Any] | None:
    """What the answer must match, by ``text.format``: as ``response_format`` is read."""
    form = _TEXT_OPTIONS(value, name).get("format")
    if form is None or form.get("type") != "json_schema":
        return None if form is None else response_format(form, f"{name}.format")
    if "schema" not in form:
        path = f"{name}.format.schema"
        raise RequestError(f"{path} is missing; give an object", path, "missing_required_parameter")
    return {"json_schema": json_object(form["schema"], f"{name}.format.schema")}


_TEXT_OPTIONS = Struct({"format": json_object, "verbosity": _only("medium")})
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_STATE = {"id": as_given, "status": as_given, "type": as_given}  # what our own items have, which are sent back
_ITEMS: dict[str, Struct] = {
    "message": Struct({**_STATE, "role": as_given, "content": as_given, "phase": as_given}, needed=("role", "content")),
    "function_call": Struct(
        {
            **_STATE,
            "call_id": _TEXT,
            "name": _TEXT,
            "arguments": _TEXT,
            "parsed_arguments": as_given,  # OpenAI's client's own
            **dict.fromkeys(("namespace", "caller"), must_be_empty),
        },
        needed=("call_id", "name", "arguments"),
    ),
    "function_call_output": Struct({**_STATE, "call_id": _TEXT, "output": as_given}, needed=("call_id", "output")),
    "reasoning": Struct({**_STATE, "summary": as_given, "content": as_given, "encrypted_content": must_be_empty}),
}
# Those of sampling that mean the same here.
_SAMPLED = set(SAMPLING) - {"n", "max_tokens", "logprobs", "prompt_logprobs"}
RESPONSE: dict[str, Kind] = {
    **dict.fromkeys(_SAMPLED, as_given),
    **dict.fromkeys((*WITHOUT_EFFECT, "stream_options"), as_given),
    **{"user": _TEXT, "metadata": _metadata},  # which the answer quotes
    **{"model": _TEXT, "input": _input, "instructions": _TEXT, "stream": flag},
    "max_output_tokens": Whole(1, 2**31, or_float=True),
    **{"tools": _tools, "tool_choice": _tool_choice, "parallel_tool_calls": flag, "text": _text},
    "chat_template_kwargs": json_object,
    "top_logprobs": _only(0),
    "include": _only([], ["reasoning.encrypted_content"]),  # thinking is not encrypted here
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _refused),
    "background": _only(False),
    "truncation": _only("disabled"),
    "reasoning": Struct({"effort": EFFORT, "summary": as_given, "generate_summary": as_given}),
    "max_tool_calls": as_given,
}
