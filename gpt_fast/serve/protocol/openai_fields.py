"""The fields of OpenAI's requests: what each one means here, and what is refused by name.

Fields with an effect become SamplingParams or steer the answer's form. Those that could not change an answer of this
server are accepted in silence (``WITHOUT_EFFECT``). Those that would change it are refused unless they ask for what
happens anyway (``UNSUPPORTED``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import (
    Kind,
    OneOf,
    Struct,
    Text,
    Whole,
    as_given,
    flag,
    json_object,
    kinds_of,
    left_out,
    refuse,
    show,
)
from gpt_fast.params import MAX_LOGPROBS, SamplingParams
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.request import SAMPLING, Prompt, read_fields, read_prompt, require
from gpt_fast.serve.protocol.tool_fields import call_list, label, tool_choice, tool_list

# Notes about the caller, wishes for OpenAI's accounts (nothing is stored here, and all requests are served alike), and
# hints to OpenAI's cache of prompts; the cache here finds common prefixes without them. Special tokens' names, where
# they are shown, have no spaces between them, as in vLLM with fast tokenizers.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
     "store", "service_tier", "spaces_between_special_tokens"}
)  # fmt: skip

# Field: the values besides null that ask for what happens anyway. read_request checks best_of.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "audio", "prediction", "web_search_options", "moderation"), ()),
    # Of a completion: a chat takes tools, tool_choice and parallel_tool_calls (CHAT below).
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False), "suffix": ("",), "modalities": (["text"],), "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # vLLM's
    "chat_template": (), "use_beam_search": (False,), "length_penalty": (1, 1.0), "documents": ([],), "priority": (0,),
}  # fmt: skip
_INSTEAD = {
    "best_of": "only best_of equal to n is possible",
    "chat_template": "the checkpoint's own template is used; chat_template_kwargs reach it",
    "priority": "requests are served in the order in which they come, the sequences of a large one in turn with others",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


def read_request(body: Mapping[str, Any], kinds: Mapping[str, Kind], context: OpenAIContext) -> dict[str, Any]:
    """The fields of ``body``, checked by ``kinds`` (COMPLETION, CHAT or RESPONSE) and by the rules about several
    fields. Raises RequestError naming the field; 404 for a model that is not served."""
    given = read_fields(body, kinds, "unknown_parameter")
    context.check_model(require(given, "model"))
    best_of = given.get("best_of")
    if best_of is not None and (isinstance(best_of, bool) or best_of != given.get("n", 1)):
        raise RequestError(f"best_of is not supported: {_INSTEAD['best_of']}", "best_of", "unsupported_parameter")
    if "stream_options" in given and not given.get("stream"):
        raise RequestError('stream_options is only allowed with "stream": true', "stream_options")
    if given.get("return_origins") and (given.get("logprobs") is None or given["logprobs"] is False):
        raise RequestError("return_origins needs logprobs, which hold one for each token", "return_origins")
    if given.get("stream") and given.get("prompt_logprobs") is not None:
        message = "prompt_logprobs cannot be streamed; they come with the whole answer"
        raise RequestError(message, "stream", "unsupported_value")
    given.setdefault("temperature", context.default_temperature)
    return given


# ---- kinds of fields ------------------------------------------------------------------------------------------------


def _unsupported(value: Any, name: str) -> Any:
    if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise RequestError(f"{name} is not supported{hint}", name, "unsupported_parameter")
    return value


def must_be_empty(value: Any, name: str) -> None:
    """The kind of a field that is there, with nothing in it."""
    if value:
        raise RequestError(f"{name} is not supported", name, "unsupported_parameter")


def response_format(value: Any, name: str) -> Mapping[str, Any] | None:
    """The kind of ``response_format``: the JSON schema that it means as a field of sampling, None for text."""
    form = json_object(value, name).get("type")
    if form == "text":
        return None
    if form == "json_object":
        return {"json_schema": {"type": "object"}}
    OneOf(("text", "json_object", "json_schema"))(form, f"{name}.type")
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    path = f"{name}.json_schema.schema"
    if schema is None:
        raise RequestError(f"{path} is missing; give an object", path, "missing_required_parameter")
    return {"json_schema": json_object(schema, path)}


def _schema(value: Any, name: str) -> Mapping[str, Any]:
    """An object, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            refuse(name, "an object, or a string with its JSON", value)
    return json_object(value, name)


def _grammar(value: Any, name: str) -> str:
    """A grammar in Lark, or in GBNF as llama.cpp and xgrammar write it, which becomes Lark."""
    text = _LARK(value, name)
    if _IS_LARK.search(text):
        return str(text)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:  # refused where it is compiled
        return str(text)
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever the converter meets
        raise RequestError(f"{name} is not usable: {str(error)[:300]}", name, "unusable_grammar") from None


def _as(field: str, kind: Kind) -> Kind:
    """A field under another name: {``field``: what ``kind`` reads}."""
    return lambda value, name: {field: kind(value, name)}


def _structured_outputs(value: Any, name: str) -> Mapping[str, Any] | None:
    """vLLM's object with one of json, json_object, regex, choice, grammar."""
    given = _STRUCTURED(value, name)
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(f"{name}: {first} and {second} exclude each other", f"{name}.{second}")
    for key, read in given.items():
        return {"json_schema": {"type": "object"}} if key == "json_object" else {_STRUCTURED_AS[key]: read}
    return None


def _num_kept(value: Any, name: str) -> int:
    """-1, or how many tokens are kept."""
    count = Whole(-1, 2**31, or_float=True)(value, name)
    return count or refuse(name, "-1, or a whole number from 1", value)


def message_list(value: Any, name: str) -> list[dict[str, Any]]:
    """The kind of ``messages``."""
    if not isinstance(value, list):
        refuse(name, "a list of messages", value, "invalid_type")
    if not value:
        raise RequestError(f"{name} is empty; give at least one message", name)
    return [read_message(message, f"{name}.{i}") for i, message in enumerate(value)]


def read_message(value: Any, name: str) -> dict[str, Any]:
    """One message."""
    message = _MESSAGE(value, name)
    for key in ("tool_calls", "reasoning_content"):
        if message.get(key) and message["role"] != "assistant":
            raise RequestError(f"{name}.{key}: only a message of the assistant has that", f"{name}.{key}")
    if "content" not in message:
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            raise RequestError(f"{name}.content is missing", f"{name}.content", "missing_required_parameter")
        message["content"] = ""  # templates ask whether it is empty; some fail where it is not there
    return message


def _role(value: Any, name: str) -> str:
    return _ROLES[OneOf(tuple(_ROLES))(value, name)]


def _content(value: Any, name: str) -> str:
    return text_parts(value, name, ("text",))


def text_parts(value: Any, name: str, kinds: Collection[str]) -> str:
    """A string, or a list of parts of these ``kinds``, joined by line breaks."""
    if isinstance(value, str):
        return _TEXT(value, name)
    if not isinstance(value, list):
        refuse(name, "a string or a list of text parts", value, "invalid_type")
    return "\n".join([_part(part, f"{name}.{i}", kinds) for i, part in enumerate(value)])


def _part(value: Any, name: str, kinds: Collection[str]) -> str:
    kind = json_object(value, name).get("type")
    if kind not in kinds:
        message = f"{name}.type is {show(kind)}; this server reads text only"
        raise RequestError(message, f"{name}.type", "unsupported_value")
    return _TEXT(value.get("text"), f"{name}.text")


def _prompts(value: Any, name: str) -> list[Prompt]:
    several = isinstance(value, list) and value and isinstance(value[0], (str, list))
    return [read_prompt(one, f"{name}.{i}") for i, one in enumerate(value)] if several else [read_prompt(value, name)]


_TEXT = Text()
# As llguidance tells it, whose own pattern takes minutes for many empty lines.
_IS_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:)")
_LARK = kinds_of(SamplingParams)["grammar"]
_STRUCTURED_AS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_STRUCTURED = Struct({"json": _schema, "json_object": flag, "regex": as_given, "choice": as_given, "grammar": _grammar})
# A role, and the word for it that templates know.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_MESSAGE = Struct(
    {
        **{"role": _role, "content": _content},
        **dict.fromkeys(("name", "tool_call_id"), label),  # short labels that templates may print
        **{"tool_calls": call_list, "reasoning_content": _TEXT},
        # What OpenAI's own answers contain, so that one can be sent back as it came, as long as nothing is in it.
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call"), must_be_empty),
        "parsed": left_out,  # what OpenAI's client has made of the content
    },
    needed=("role",),
)
# The second one is vLLM's.
_STREAM_OPTIONS = {"include_usage": flag, "continuous_usage_stats": flag, "include_obfuscation": must_be_empty}
# SamplingParams checks those of its fields that have its names: OpenAI's, vLLM's and our own.
_BOTH: dict[str, Kind] = {
    **dict.fromkeys(SAMPLING, as_given),
    **dict.fromkeys(WITHOUT_EFFECT, as_given),
    **dict.fromkeys(UNSUPPORTED, _unsupported),
    "best_of": as_given,
    "model": _TEXT,
    "stream": flag,
    "stream_options": Struct(_STREAM_OPTIONS),
    "response_format": response_format,
    # vLLM's
    "structured_outputs": _structured_outputs,
    "guided_json": _as("json_schema", _schema),
    **{f"guided_{name}": _as(name, as_given) for name in ("regex", "choice")},
    "guided_grammar": _as("grammar", _grammar),
    "truncate_prompt_tokens": _num_kept,
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), flag),
    **dict.fromkeys(("draft_counts", "return_origins"), flag),  # our own
}
COMPLETION = _BOTH | {"prompt": _prompts, **dict.fromkeys(("echo", "add_special_tokens"), flag)}
# What makes a prompt of messages.
MESSAGES: dict[str, Kind] = {
    "messages": message_list,
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), flag),
    "chat_template_kwargs": json_object,
    "tools": tool_list,
}
EFFORT = OneOf(("none", "minimal", "low", "medium", "high", "xhigh", "max"))
CHAT: dict[str, Kind] = {
    **_BOTH,
    **MESSAGES,
    "reasoning_effort": EFFORT,
    "max_completion_tokens": as_given,
    "logprobs": flag,
    "top_logprobs": Whole(0, MAX_LOGPROBS, or_float=True),
    "tool_choice": tool_choice,
    "parallel_tool_calls": flag,
}
