"""Messages of a chat to a prompt: by the checkpoint's template, with the variables that a request may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import check_values, texts_of, values_in
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat_prompt import encode_chat, special_names
from gpt_fast.tokenizer.chat_tools import describe_tools

_OF_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"}
)


def begins_answer(given: Mapping[str, Any]) -> bool:
    """Whether the prompt ends where an answer of the assistant begins. Raises RequestError for a contradiction."""
    goes_on = given.get("continue_final_message", False)
    if goes_on and given.get("add_generation_prompt"):
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(message, "continue_final_message")
    return bool(given.get("add_generation_prompt", not goes_on))


def chat_prompt(
    given: Mapping[str, Any], context: OpenAIContext, tools: list[dict[str, Any]]
) -> tuple[Tokenizer, list[int]]:
    """The token ids of the messages in ``given``, with ``tools`` as the checkpoint knows them; and whose ids they are.
    Raises RequestError."""
    messages: list[dict[str, Any]] = given["messages"]
    variables = _variables(given, context)
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer; POST v1/completions takes token ids", "messages")
    dialect = context.dialect
    key = "reasoning_content" if dialect.thinking is None else dialect.thinking.key
    messages = [_with_thinking(message, key) for message in messages]
    called = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (tools and not dialect.writes_tools) or (called and not dialect.reads_calls):
        messages, tools = describe_tools(messages, tools), []
    goes_on = given.get("continue_final_message", False)
    more: dict[str, Any] = {"variables": variables, "tools": tools or None, "continue_final": goes_on}
    return context.tokenizer, encode_chat(context.template, context.tokenizer, messages, begins_answer(given), **more)


def _with_thinking(message: dict[str, Any], key: str) -> dict[str, Any]:
    """``message`` with its thinking under ``key``. Beside text and calls gpt-oss' template takes no thinking. A few
    other templates know another name, by which transformers gives it too."""
    if key == "reasoning_content":
        return message if key not in message else {"thinking": message[key], **message}
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "reasoning_content" not in message or ("tool_calls" in message and message["content"]):
        return rest
    return {**rest, key: message["reasoning_content"]}


def _variables(given: Mapping[str, Any], context: OpenAIContext) -> Mapping[str, Any]:
    """``chat_template_kwargs``, which may not take the place of what the template gets anyway, and
    ``reasoning_effort``, which is a variable too."""
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
    return {**variables, **_effort(given, context)}


def _effort(given: Mapping[str, Any], context: OpenAIContext) -> Mapping[str, Any]:
    """How much the model shall think, for a template that asks for it."""
    field = "reasoning_effort"
    if field not in given:
        return {}
    if field in given.get("chat_template_kwargs", {}):
        raise RequestError(f"{field} is among chat_template_kwargs too; give one of them", field)
    if context.dialect.reads_effort:
        return {field: given[field]}
    if given[field] == "none" and context.dialect.thinking is None:
        return {}
    message = f"{field} is not supported: the checkpoint's chat template has no such variable"
    raise RequestError(message, field, "unsupported_parameter")
