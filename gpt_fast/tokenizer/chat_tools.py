"""Tools for checkpoints whose chat template does not know them, or that have none: described in words, in the format of
Hermes, which many models have seen. The grammar makes even a model that has not seen it write calls that parse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpt_fast.tokenizer.chat_formats import HERMES

_INTRODUCTION = """You may call functions. They are, as JSON, one a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "the name", "arguments": {{"the argument": "its value"}}}}
</tool_call>"""


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` as a template without tools takes them, with ``tools`` (OpenAI's objects) described in front: in the
    first message if that is the system's or the user's, because not every template has a system message. Calls and
    their results become text; results go to the model as words of the user."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        results = message["role"] == "tool"
        text = f"<tool_response>\n{message['content']}\n</tool_response>" if results else _with_calls(message)
        if results and plain and plain[-1].get("results"):  # turns have to alternate in many templates
            plain[-1]["content"] += "\n" + text
            continue
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        plain.append(kept | {"role": "user" if results else message["role"], "content": text, "results": results})
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=lines)
        if plain[0]["role"] == "assistant":
            plain.insert(0, {"role": "user", "content": ""})
        plain[0]["content"] = f"{introduction}\n\n{plain[0]['content']}".rstrip()
    return [{key: value for key, value in message.items() if key != "results"} for message in plain]


def _with_calls(message: Mapping[str, Any]) -> str:
    pieces = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        pieces.append(HERMES.first(function["name"])[0] + arguments + HERMES.closing)
    return "\n".join(pieces)
