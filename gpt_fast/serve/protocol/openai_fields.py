"""The fields of OpenAI's requests: what each one means here, and what is refused by name.

Three kinds. Those with an effect become SamplingParams or steer the answer's form. Those that could not change an
answer of this server are accepted in silence (``WITHOUT_EFFECT``). Those that would change it, but are not supported,
are refused unless they ask for what happens anyway (``UNSUPPORTED``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams, show
from gpt_fast.serve.protocol.fields import check_values, default_tokens, is_number, kind, unknown
from gpt_fast.serve.protocol.native import bias_by_id

_SAME_NAME = (  # in SamplingParams; the first line is OpenAI's, the others are vLLM's and our own
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "n"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("json_schema", "regex", "choice", "timeout_s"),
)
_BOTH = (*_SAME_NAME, "model", "max_tokens", "logit_bias", "logprobs", "stream", "stream_options", "response_format")
COMPLETION = frozenset({*_BOTH, "prompt", "echo"})
CHAT = frozenset(
    {*_BOTH, "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "chat_template_kwargs"}
)

# Notes about the caller, and hints to OpenAI's own cache of prompts; ours finds common prefixes without them.
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)

# Field: values besides null that ask for nothing. best_of has a rule of its own.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
    "moderation": (),
    # vLLM's
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_INSTEAD = {
    "best_of": "only best_of equal to n is possible",
    "prompt_logprobs": "POST v1/completions with echo and logprobs",
    "chat_template": "the checkpoint's own template is used; chat_template_kwargs reach it",
    "structured_outputs": "use response_format, json_schema, regex or choice",
    "guided_json": "use response_format or json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use choice",
}
_ANY_OBJECT = {"type": "object"}


def read_fields(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """What ``body`` has of the fields with an effect and is not null. Raises RequestError naming any other field."""
    given = {}
    for name, value in body.items():
        check_values(name, name)
        if value is None and (name in known or name in UNSUPPORTED or name in WITHOUT_EFFECT):
            continue
        if name in known:
            check_values(name, value)
            given[name] = value
        elif name in UNSUPPORTED:
            _refuse_unless_neutral(name, value, body)
        elif name not in WITHOUT_EFFECT:
            raise RequestError(unknown(name, known), name[:100], "unknown_parameter")
    return given


def read_params(
    given: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    default_max_tokens: int | None,
    default_temperature: float | None,
) -> SamplingParams:
    """Sampling as ``given`` asks for it, and as the caller has read what the two endpoints spell differently.

    The defaults are for requests that do not say. Raises RequestError, naming the field as the client wrote it.
    """
    values = {name: given[name] for name in _SAME_NAME if name in given}
    values |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "max_tokens": max_tokens}
    if "logit_bias" in given:
        bias = given["logit_bias"]
        values["logit_bias"] = bias_by_id(bias) if isinstance(bias, Mapping) else bias
    if "response_format" in given:
        schema = _schema(given["response_format"])
        other = next((name for name in ("json_schema", "regex", "choice") if name in given), None)
        if schema is not None and other is not None:
            raise RequestError(f"response_format and {other} exclude each other", other)
        if schema is not None:
            values["json_schema"] = schema
    if max_tokens is None and default_max_tokens is not None:
        values["max_tokens"] = default_tokens(default_max_tokens, values)
    # OpenAI documents 1; a checkpoint that comes with a temperature of its own knows better.
    values.setdefault("temperature", 1.0 if default_temperature is None else default_temperature)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise as_written(error, given) from None


def as_written(error: RequestError, given: Mapping[str, Any]) -> RequestError:
    """``error`` about a field of SamplingParams or the prompt, with the field named as the client wrote it."""
    aliases = {
        "max_tokens": ("max_tokens", "max_completion_tokens"),
        "json_schema": ("json_schema", "response_format"),
        "logprobs": ("top_logprobs", "logprobs"),
        "prompt_logprobs": ("logprobs",),
        "prompt": ("prompt", "messages"),
    }
    written = next((name for name in aliases.get(error.param or "", ()) if name in given), error.param)
    if written == error.param or written is None or error.param is None:
        return error
    message = error.message
    if message.startswith(error.param):
        message = written + message[len(error.param) :]
    return RequestError(message, written, error.code, error.status, error.retry_after_s)


def read_switch(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that must be true or false."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {kind(value)}", name, "invalid_type")
    return value


class StreamOptions(NamedTuple):
    """``include_usage``: a stream ends with the usage. ``continuous_usage_stats`` (vLLM's): every event has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def read_stream_options(given: Mapping[str, Any], stream: bool) -> StreamOptions:
    """The field ``stream_options``. Raises RequestError naming what is wrong in it."""
    options = given.get("stream_options")
    if options is None:
        return StreamOptions()
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options must be an object, not {kind(options)}", "stream_options", "invalid_type")
    if not stream:
        raise RequestError('stream_options is only allowed with "stream": true', "stream_options")
    for name, value in options.items():
        path = f"stream_options.{name[:100]}"
        if name not in (*StreamOptions._fields, "include_obfuscation"):
            raise RequestError(f"unknown field {path}", path, "unknown_parameter")
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{path} must be true or false, not {kind(value)}", path, "invalid_type")
    if options.get("include_obfuscation"):
        path = "stream_options.include_obfuscation"
        raise RequestError(f"{path} is not supported", path, "unsupported_parameter")
    return StreamOptions(*(bool(options.get(name)) for name in StreamOptions._fields))


def require(given: Mapping[str, Any], name: str) -> Any:
    """The field's value. Raises RequestError if it is absent or null."""
    if name not in given:
        raise RequestError(f"{name} is missing", name, "missing_required_parameter")
    return given[name]


def check_model(given: Mapping[str, Any], models: Sequence[str]) -> str:
    """The model that is asked for. Raises RequestError, 404 if it is not one of ``models``."""
    model = require(given, "model")
    if not isinstance(model, str):
        raise RequestError(f"model must be a string, not {kind(model)}", "model", "invalid_type")
    if model not in models:
        served = ", ".join(map(repr, models))
        message = f"the model {show(model)} does not exist here; served: {served}"
        raise RequestError(message, "model", "model_not_found", 404)
    return model


def _refuse_unless_neutral(name: str, value: Any, body: Mapping[str, Any]) -> None:
    neutral = (body.get("n") or 1,) if name == "best_of" else UNSUPPORTED[name]
    if not any(_same_type(value, other) and value == other for other in neutral):
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise RequestError(f"{name} is not supported{hint}", name, "unsupported_parameter")


def _same_type(one: Any, other: Any) -> bool:
    return type(one) is type(other) or (is_number(one) and is_number(other))


def _schema(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema that ``response_format`` means, None for text."""
    if not isinstance(response_format, Mapping):
        message = f"response_format must be an object, not {kind(response_format)}"
        raise RequestError(message, "response_format", "invalid_type")
    form = response_format.get("type")
    if form == "text":
        return None
    if form == "json_object":
        return _ANY_OBJECT
    if form != "json_schema":
        message = f'response_format.type must be "text", "json_object" or "json_schema", not {show(form)}'
        raise RequestError(message, "response_format.type")
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        path = "response_format.json_schema.schema"
        code = "missing_required_parameter" if schema is None else "invalid_type"
        raise RequestError(f"{path} must be an object, not {kind(schema)}", path, code)
    return schema
