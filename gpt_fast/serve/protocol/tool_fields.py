"""The fields of OpenAI's chat API that are about functions: ``tools``, ``tool_choice``, and calls inside messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpt_fast.errors import RequestError
from gpt_fast.fields import OneOf, Struct, Text, check_values, flag, json_object, left_out, refuse, show
from gpt_fast.params import MAX_GRAMMAR_CHARS, MAX_SCHEMA_VALUES

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's rule, and the dots of MCP's names
_LABEL = re.compile(r"[^\s<|\\/>]{1,64}")  # OpenAI's rule for a participant's name
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolChoice(NamedTuple):
    """``mode``: "none", "auto", "required", or "named", the function ``name``."""

    mode: str
    name: str | None = None


def tool_list(value: Any, name: str) -> list[dict[str, Any]]:
    """The kind of ``tools``: OpenAI's objects, each with ``parameters`` that describe an object."""
    if not isinstance(value, list):
        refuse(name, "a list of tools", value, "invalid_type")
    check_values(value, name)
    num_values, num_chars = check_values(without_descriptions(value), name)
    if num_chars > MAX_GRAMMAR_CHARS or num_values > MAX_SCHEMA_VALUES:
        limits = f"{MAX_GRAMMAR_CHARS} characters or {MAX_SCHEMA_VALUES} values (objects, lists, strings, numbers)"
        limits += ", descriptions not counted"
        raise RequestError(f"{name} has more than {limits}", name, "grammar_too_large")
    tools = [_tool(each, f"{name}.{i}") for i, each in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((i for i, each in enumerate(names) if each in names[:i]), None):
        path = f"{name}.{twice}.function.name"
        raise RequestError(f"{path}: there are two functions {show(names[twice])}", path)
    return tools


def without_descriptions(value: Any) -> Any:
    """A tool or a schema without what it says to people and the model; a grammar knows nothing of that, and it is most
    of what there is. A property may be called title or description: it is no string."""
    if isinstance(value, list):
        return [without_descriptions(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: inner if key in ("enum", "const") else without_descriptions(inner)
        for key, inner in value.items()
        if not (key in ("description", "title") and isinstance(inner, str))
    }


def tool_choice(value: Any, name: str) -> ToolChoice:
    """The kind of ``tool_choice``."""
    if isinstance(value, str):
        return ToolChoice(OneOf(("none", "auto", "required"))(value, name))
    if not isinstance(value, Mapping):
        takes = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        refuse(name, takes, value, "invalid_type")
    return ToolChoice("named", _CHOICE(value, name)["function"]["name"])


def chosen(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], ToolChoice]:
    """The tools of a request, and which of them its answer may call: none, where it has no tools. Raises RequestError
    for a choice of what is not there."""
    tools: list[dict[str, Any]] = given.get("tools", [])
    choice: ToolChoice = given.get("tool_choice", ToolChoice("auto"))
    names = [tool["function"]["name"] for tool in tools]
    if choice.mode in ("required", "named") and not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.mode == "named" and choice.name not in names:
        path = "tool_choice.function.name"
        raise RequestError(f"{path}: the tools have no function {show(choice.name)}", path)
    return tools, choice if tools else ToolChoice("none")


def call_list(value: Any, name: str) -> list[dict[str, Any]] | None:
    """The kind of a message's ``tool_calls``: the arguments as an object, which is how chat templates take them."""
    if not isinstance(value, list):
        refuse(name, "a list of calls", value, "invalid_type")
    return [_CALL(each, f"{name}.{i}") for i, each in enumerate(value)] or None


def label(value: Any, name: str) -> str:
    """The kind of a call's id, or of a participant's name."""
    if isinstance(value, str) and _LABEL.fullmatch(value):
        return value
    raise RequestError(f"{name} must have 1 to 64 characters without white space, <, >, |, / and \\", name)


def _tool(value: Any, name: str) -> dict[str, Any]:
    tool = _TOOL(value, name)
    function = tool["function"]
    path = f"{name}.function.parameters"
    parameters = function.setdefault("parameters", _NO_ARGUMENTS)
    if (kind := parameters.get("type", "object")) != "object":
        raise RequestError(f'{path}.type must be "object", not {show(kind)}', f"{path}.type")
    return tool


def _function_name(value: Any, name: str) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    refuse(name, "a name of 1 to 64 letters, digits, and the characters _ . -", value)


def _arguments(value: Any, name: str) -> Mapping[str, Any]:
    text = Text()(value, name)
    try:
        read = json.loads(text) if text.strip() else {}  # of a function without any, some clients send nothing
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        refuse(name, "a string with a JSON object", value)
    check_values(read, name)
    return read


_FUNCTION_TYPE = OneOf(("function",))
_TOOL = Struct(
    {
        "type": _FUNCTION_TYPE,
        "function": Struct(
            # Arguments follow the schema strict or not; strict is refused where a grammar cannot express all of it.
            {"name": _function_name, "description": Text(), "parameters": json_object, "strict": flag},
            needed=("name",),
        ),
    },
    needed=("type", "function"),
)
_CHOICE = Struct(
    {"type": _FUNCTION_TYPE, "function": Struct({"name": _function_name}, needed=("name",))},
    needed=("type", "function"),
)
_CALL = Struct(
    {
        "id": label,
        "type": _FUNCTION_TYPE,
        "index": left_out,  # of a stream's delta; some clients keep it
        "function": Struct(
            # OpenAI's client parses the arguments, and sends what it made of them along.
            {"name": _function_name, "arguments": _arguments, "parsed_arguments": left_out},
            needed=("name", "arguments"),
        ),
    },
    needed=("function",),
)
