"""How checkpoints write tool calls and thinking into their text: one row for each format.

A row drives both sides: the grammar that holds an answer to it (serve/protocol/chat_grammar.py) and the reader that
takes the answer apart again (serve/protocol/answer_parts.py). Sources: the model cards and chat templates of Hermes 2
Pro, Qwen 2.5 and 3, Llama 3.1 and 3.2, Mistral 0.3 to Small 3, and https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.chat import variables_of

NAME = "NAME"  # in ``opening``: the place of the function's name


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: ``marker``, one of ``before``, then ``opening`` arguments ``closing`` for each call, with
    ``between`` between two of them, and ``after`` at the end. The arguments are one JSON object.

    ``marks``: strings that a template of this format holds, all of them. ``foreign``: strings of formats that share
    the marks. ``between`` None: an answer has one call at most. ``at_start``: there is no marker, so calls are the
    whole answer, and one that begins with a brace is a call."""

    name: str
    marks: tuple[str, ...]
    opening: str
    closing: str = ""
    marker: str = ""
    before: tuple[str, ...] = ("",)
    between: str | None = None
    after: str = ""
    foreign: tuple[str, ...] = ()
    at_start: bool = False
    id_length: int = 0  # that the template insists on; 0: any

    def new_id(self, drawn: str) -> str:
        """The id of a new call, of ``drawn``, hexadecimal digits that no other has."""
        return drawn[: self.id_length] if self.id_length else f"call_{drawn}"

    def first(self, name: str) -> list[str]:
        """The ways in which the first call begins, up to its arguments, when it is one of the function ``name``."""
        return [self.marker + before + self.opening.replace(NAME, name) for before in self.before]

    def later(self, name: str) -> str | None:
        """How a call behind another one begins."""
        return None if self.between is None else self.between + self.opening.replace(NAME, name)


@dataclass(frozen=True)
class ThinkingFormat:
    """How thinking is set apart from the answer. ``answer``: what stands in front of the answer itself. ``others``:
    what else the model writes between its messages, which is no text of either. ``key``: the field of an assistant's
    message in which the template expects earlier thinking."""

    marks: tuple[str, ...]
    opening: str
    closing: str
    answer: str = ""
    others: tuple[str, ...] = ()
    key: str = "reasoning_content"


HERMES = CallFormat(
    "hermes",
    marks=("<tool_call>",),
    # Qwen3-Coder, GLM-4.5 and MiniMax-M3 put no JSON behind the same marker, Apriel 1.5 a list behind another one.
    foreign=("<function=", "<arg_key>", "<invoke", "<tool_calls>"),
    marker="<tool_call>",
    opening='\n{"name": "NAME", "arguments": ',
    closing="}\n</tool_call>",
    between="\n<tool_call>",
)
_ANALYSIS, _FINAL, _NEXT = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"
# The first row whose marks a template holds is its format.
CALL_FORMATS = (
    CallFormat(
        "harmony",
        marks=("<|channel|>", "functions."),
        opening="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    ),
    CallFormat(
        "mistral",
        marks=("[TOOL_CALLS]",),
        foreign=("[ARGS]",),
        marker="[TOOL_CALLS]",
        before=("[", " ["),
        opening='{"name": "NAME", "arguments": ',
        closing="}",
        between=", ",
        after="]",
        id_length=9,
    ),
    CallFormat(
        "mistral-args",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        foreign=("[CALL_ID]",),
        marker="[TOOL_CALLS]",
        opening="NAME[ARGS]",
        between="[TOOL_CALLS]",
        id_length=9,
    ),
    HERMES,
    CallFormat(
        "llama3",
        marks=("<|start_header_id|>", '"parameters": '),
        before=("", "<|python_tag|>"),
        opening='{"name": "NAME", "parameters": ',
        closing="}",
        at_start=True,  # and no second call: the templates refuse a message with two
    ),
)
THINKING_FORMATS = (
    ThinkingFormat(
        marks=("<|channel|>", "analysis"),
        opening=_ANALYSIS,
        closing=_NEXT,
        answer=_FINAL,
        others=("<|end|>", "<|start|>assistant", "<|channel|>commentary<|message|>"),
        key="thinking",
    ),
    ThinkingFormat(marks=("</think>",), opening="<think>", closing="</think>"),
    ThinkingFormat(marks=("[/THINK]",), opening="[THINK]", closing="[/THINK]"),
)


@dataclass(frozen=True)
class Dialect:
    """What a chat template speaks. ``writes_tools``: it puts tools into the prompt itself, in the format ``calls``; if
    not, the tools are described in words (tokenizer/chat_tools.py). ``reads_calls``: earlier calls and their results
    are messages that it knows. ``reads_effort``: its variable ``reasoning_effort`` says how much to think."""

    calls: CallFormat = HERMES
    writes_tools: bool = False
    reads_calls: bool = False
    thinking: ThinkingFormat | None = None
    reads_effort: bool = False


def find_dialect(source: str | None) -> Dialect:
    """The dialect of the chat template with this text; None: there is no template."""
    if source is None:
        return Dialect()
    calls = next((row for row in CALL_FORMATS if _holds(source, row)), None)
    thinking = next((row for row in THINKING_FORMATS if all(mark in source for mark in row.marks)), None)
    variables = variables_of(source)
    effort = "reasoning_effort" in variables
    # Old templates of Llama 3 never look at the tools, that of SmolLM3 looks for them elsewhere.
    if calls is None or "tools" not in variables:
        return Dialect(reads_calls="tool" in source, thinking=thinking, reads_effort=effort)
    return Dialect(calls, writes_tools=True, reads_calls=True, thinking=thinking, reads_effort=effort)


def _holds(source: str, row: CallFormat) -> bool:
    return all(mark in source for mark in row.marks) and not any(mark in source for mark in row.foreign)


def special_in(tokenizer: Tokenizer, texts: list[str]) -> tuple[int, ...]:
    """Ids of the special tokens whose names are in ``texts``."""
    named = ((id, name.decode(errors="replace")) for id, name in tokenizer.special.items() if name)
    return tuple(id for id, name in named if any(name in text for text in texts))
