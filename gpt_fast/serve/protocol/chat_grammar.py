"""The grammar of an answer that calls functions or thinks, in llguidance's form of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Arguments follow their schema. Where a call is
demanded, the whole answer is held to the format; where the model may choose, the text is free up to the marker of a
call. Thinking is free up to its end. Tools come from libraries and other servers, so what a grammar cannot express of
their schemas is left out, unless they are strict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpt_fast.engine.closed_schema import ONE_SPELLING, close_objects
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.tool_fields import ToolChoice, without_descriptions
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat_formats import NAME, CallFormat, Dialect
from gpt_fast.tokenizer.chat_prompt import special_names

# What may come next when an answer begins: thinking if the model likes, thinking that the prompt has begun, or none.
MAY_THINK, THINKS, NO_THINKING = "may think", "thinks", "no thinking"


def answer_grammar(
    dialect: Dialect,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    several: bool,
    content: SamplingParams,
    thinking: str,
) -> str:
    """The grammar, in Lark, of an answer with calls of ``tools`` as ``choice`` wants: ``several``, or one at most.
    ``content``: what the text must match where there is no call. ``thinking``: MAY_THINK, THINKS or NO_THINKING."""
    lark = _Lark(tokenizer)
    alternatives = []
    if choice.mode in ("none", "auto"):
        alternatives.append(_content(lark, dialect, content))
    if choice.mode != "none":
        called = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
        preceded = choice.mode == "auto" and content.grammar_field is None
        alternatives.append(_calls(lark, dialect.calls, called, several and choice.mode != "named", preceded))
        if dialect.calls.at_start and "FREE" in lark.rules:
            lark.rules["FREE"] = r"/(\s*[^\s{](.|\n)*)?/"  # a brace begins a call
    return lark.source(_thinking(lark, dialect, thinking) + f"({' | '.join(alternatives)})")


_ANY = r"/(.|\n)*/"  # special tokens are no part of it


class _Lark:
    """Rules of a grammar, by name, and how texts are written in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = special_names(tokenizer)
        self._ids = {name.decode(errors="replace"): id for id, name in tokenizer.special.items()}
        self.rules: dict[str, str] = {}
        self._num_heads = 0

    def literal(self, text: str) -> str:
        """``text`` in which names of special tokens are those tokens."""
        parts = [part for part in self._special.split(text) if part]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts)

    def free(self) -> str:
        """Any text."""
        self.rules.setdefault("FREE", _ANY)
        return "FREE"

    def until(self, marker: str) -> str:
        """Any text up to the first ``marker``, and that."""
        first, *rest = [part for part in self._special.split(marker) if part]
        self.rules.setdefault("BEFORE", _ANY)
        if first in self._ids:  # no text contains a special token
            return f"BEFORE {self.literal(marker)}"
        self._num_heads += 1
        head = f"head_{self._num_heads}"
        self.rules[f"{head}[lazy]"] = f"BEFORE {self.literal(first)}"
        return f"{head} {self.literal(''.join(rest))}".rstrip()

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {rule}" for name, rule in self.rules.items())]) + "\n"


def _thinking(lark: _Lark, dialect: Dialect, thinking: str) -> str:
    form = dialect.thinking
    if form is None or thinking == NO_THINKING:
        return ""
    rest = lark.until(form.closing)
    if not form.answer:
        lark.rules["GAP"] = r"/\n{0,2}/"
        rest += " GAP"
    return f"{rest} " if thinking == THINKS else f"({lark.literal(form.opening)} {rest})? "


def _content(lark: _Lark, dialect: Dialect, params: SamplingParams) -> str:
    if params.json_schema is not None:
        lark.rules["content"] = _json(params.json_schema, "json_schema")
    elif params.pattern is not None:
        lark.rules["content"] = _regex(params.pattern)
    text = "content" if params.grammar_field is not None else lark.free()
    return f"{lark.literal(dialect.thinking.answer)} {text}" if dialect.thinking is not None else text


def _calls(lark: _Lark, form: CallFormat, tools: Sequence[Mapping[str, Any]], several: bool, preceded: bool) -> str:
    """One call or ``several``, ``preceded`` by text or not."""
    lark.rules["call"] = " | ".join(_call(lark, form, i, tool["function"]) for i, tool in enumerate(tools))
    begin = " | ".join(lark.literal(before) for before in form.before if before)
    return " ".join(
        (
            lark.until(form.marker) if preceded and form.marker else lark.literal(form.marker),
            f"({begin}){'?' if '' in form.before else ''}" if begin else "",
            "call",
            f"({lark.literal(form.between)} call)*" if several and form.between is not None else "",
            lark.literal(form.after),
        )
    )


def _call(lark: _Lark, form: CallFormat, number: int, function: Mapping[str, Any]) -> str:
    parameters = without_descriptions({"type": "object", **function["parameters"]})
    strict = function.get("strict", False)
    schema = parameters if strict else _without_looks(parameters)
    lark.rules[f"arguments_{number}"] = _json(schema, f"tools.{number}.function.parameters", lenient=not strict)
    opening = form.opening.replace(NAME, function["name"])
    return f"{lark.literal(opening)} arguments_{number} {lark.literal(form.closing)}"


def _regex(regex: str) -> str:
    """``regex`` between slashes, on one line: slashes and line ends inside are escaped, unless they are already."""
    escaped = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\.|/|\n", lambda found: escaped.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"


def _json(schema: Mapping[str, Any], name: str, lenient: bool = False) -> str:
    """``lenient``: what llguidance does not know of a schema (uniqueItems, not, a rare format) is no error."""
    options = ONE_SPELLING | {"lenient": lenient}
    return "%json " + json.dumps({**close_objects(schema, name), "x-guidance": options})


_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]")


def _without_looks(schema: Any) -> Any:
    """``schema`` without the patterns that look ahead, behind, or back to a group, which llguidance cannot compile.
    Libraries write them for decimal numbers (pydantic) and e-mail addresses (zod)."""
    if isinstance(schema, list):
        return [_without_looks(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: inner if key in ("enum", "const") else _without_looks(inner)
        for key, inner in schema.items()
        if not (key == "pattern" and isinstance(inner, str) and _LOOKS.search(inner))
    }
