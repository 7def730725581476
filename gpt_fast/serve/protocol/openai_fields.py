"""The fields of OpenAI's requests: what each one means here, and what is refused by name.

Fields with an effect become SamplingParams or steer the answer's form. Those that could not change an answer of this
server are accepted in silence (``WITHOUT_EFFECT``). Those that would change it are refused unless they ask for what
happens anyway (``UNSUPPORTED``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, OneOf, Struct, Text, Whole, as_given, flag, json_object, refuse, show
from gpt_fast.params import MAX_LOGPROBS
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.request import SAMPLING, Prompt, read_fields, read_prompt, require
from gpt_fast.serve.protocol.tool_fields import call_list, label, tool_choice, tool_list

# Notes about the caller, and hints to OpenAI's cache of prompts; the cache here finds common prefixes without them.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)

# Field: the values besides null that ask for what happens anyway. read_request checks best_of.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "audio", "prediction", "web_search_options", "moderation"), ()),
    # Of a completion: a chat takes tools, tool_choice and parallel_tool_calls (CHAT below).
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False), "suffix": ("",), "modalities": (["text"],), "reasoning_effort": ("none",),
    "verbosity": ("medium",), "service_tier": ("auto", "default"), "store": (False,),
    # vLLM's
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("prompt_logprobs", "chat_template"), ()),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "length_penalty": (1, 1.0), "documents": ([],), "structured_outputs": ({},),
}  # fmt: skip
_INSTEAD = {
    "best_of": "only best_of equal to n is possible",
    "prompt_logprobs": "POST v1/completions with echo and logprobs",
    "chat_template": "the checkpoint's own template is used; chat_template_kwargs reach it",
    "structured_outputs": "use response_format, json_schema, regex or choice",
    "guided_json": "use response_format or json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use choice",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


def read_request(body: Mapping[str, Any], kinds: Mapping[str, Kind], context: OpenAIContext) -> dict[str, Any]:
    """The fields of ``body``, checked by ``kinds`` (COMPLETION or CHAT) and by the rules about several fields. Raises
    RequestError naming the field; 404 for a model that is not served."""
    given = read_fields(body, kinds, "unknown_parameter")
    model = require(given, "model")
    if model not in context.models:
        message = f"the model {show(model)} does not exist here; served: {', '.join(map(repr, context.models))}"
        raise RequestError(message, "model", "model_not_found", 404)
    best_of = given.get("best_of")
    if best_of is not None and (isinstance(best_of, bool) or best_of != given.get("n", 1)):
        raise RequestError(f"best_of is not supported: {_INSTEAD['best_of']}", "best_of", "unsupported_parameter")
    if "stream_options" in given and not given.get("stream"):
        raise RequestError('stream_options is only allowed with "stream": true', "stream_options")
    if given.get("return_origins") and (given.get("logprobs") is None or given["logprobs"] is False):
        raise RequestError("return_origins needs logprobs, which hold one for each token", "return_origins")
    given.setdefault("temperature", context.default_temperature)
    return given


# ---- kinds of fields ------------------------------------------------------------------------------------------------


def _unsupported(value: Any, name: str) -> Any:
    if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise RequestError(f"{name} is not supported{hint}", name, "unsupported_parameter")
    return value


def _must_be_empty(value: Any, name: str) -> None:
    if value:
        raise RequestError(f"{name} is not supported", name, "unsupported_parameter")


def _response_format(value: Any, name: str) -> Mapping[str, Any] | None:
    """The JSON schema that it means, None for text."""
    form = json_object(value, name).get("type")
    if form == "text":
        return None
    if form == "json_object":
        return {"type": "object"}
    OneOf(("text", "json_object", "json_schema"))(form, f"{name}.type")
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    path = f"{name}.json_schema.schema"
    if schema is None:
        raise RequestError(f"{path} is missing; give an object", path, "missing_required_parameter")
    return json_object(schema, path)


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(name, "a list of messages", value, "invalid_type")
    if not value:
        raise RequestError(f"{name} is empty; give at least one message", name)
    read = (_message(message, f"{name}.{i}") for i, message in enumerate(value))
    return [{key: text for key, text in message.items() if text is not None} for message in read]


def _message(value: Any, name: str) -> dict[str, Any]:
    message = _MESSAGE(value, name)
    for key in ("tool_calls", "reasoning_content"):
        if message.get(key) and message["role"] != "assistant":
            raise RequestError(f"{name}.{key}: only a message of the assistant has that", f"{name}.{key}")
    if "content" not in message:
        if not message.get("tool_calls"):
            raise RequestError(f"{name}.content is missing", f"{name}.content", "missing_required_parameter")
        message["content"] = ""  # templates ask whether it is empty; some fail where it is not there
    return message


def _role(value: Any, name: str) -> str:
    return _ROLES[OneOf(tuple(_ROLES))(value, name)]


def _content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return _TEXT(value, name)
    if not isinstance(value, list):
        refuse(name, "a string or a list of text parts", value, "invalid_type")
    return "\n".join([_part(part, f"{name}.{i}") for i, part in enumerate(value)])


def _part(value: Any, name: str) -> str:
    kind = json_object(value, name).get("type")
    if kind != "text":
        message = f"{name}.type is {show(kind)}; this server reads text only"
        raise RequestError(message, f"{name}.type", "unsupported_value")
    return _TEXT(value.get("text"), f"{name}.text")


def _prompts(value: Any, name: str) -> list[Prompt]:
    several = isinstance(value, list) and value and isinstance(value[0], (str, list))
    return [read_prompt(one, f"{name}.{i}") for i, one in enumerate(value)] if several else [read_prompt(value, name)]


_TEXT = Text()
# A role, and the word for it that templates know.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_MESSAGE = Struct(
    {
        **{"role": _role, "content": _content},
        **dict.fromkeys(("name", "tool_call_id"), label),  # short labels that templates may print
        **{"tool_calls": call_list, "reasoning_content": _TEXT},
        # What OpenAI's own answers contain, so that one can be sent back as it came, as long as nothing is in it.
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call"), _must_be_empty),
    },
    needed=("role",),
)
# The second one is vLLM's.
_STREAM_OPTIONS = {"include_usage": flag, "continuous_usage_stats": flag, "include_obfuscation": _must_be_empty}
# SamplingParams checks those of its fields that have its names: OpenAI's, vLLM's and our own.
_BOTH: dict[str, Kind] = {
    **dict.fromkeys(SAMPLING, as_given),
    **dict.fromkeys(WITHOUT_EFFECT, as_given),
    **dict.fromkeys(UNSUPPORTED, _unsupported),
    "best_of": as_given,
    "model": _TEXT,
    "stream": flag,
    "stream_options": Struct(_STREAM_OPTIONS),
    "response_format": _response_format,
    **dict.fromkeys(("draft_counts", "return_origins"), flag),  # our own
}
COMPLETION = _BOTH | {"prompt": _prompts, "echo": flag}
CHAT = _BOTH | {
    "messages": _messages,
    "max_completion_tokens": as_given,
    "logprobs": flag,
    "top_logprobs": Whole(0, MAX_LOGPROBS, or_float=True),
    "add_generation_prompt": flag,
    "chat_template_kwargs": json_object,
    "tools": tool_list,
    "tool_choice": tool_choice,
    "parallel_tool_calls": flag,
}
