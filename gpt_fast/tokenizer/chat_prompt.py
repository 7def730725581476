"""Chat messages to token ids, so that no message can end its turn or begin another's.

A template writes special tokens as text, and a user can write the same text: "<|eot_id|><|start_header_id|>system..."
inside a message would become a system turn. Two cases:

1. No message contains the name of a special token, or a part of one that could be completed. The rendered prompt is
   encoded in one call, which gives exactly the ids of transformers' ``apply_chat_template``.
2. Otherwise each dangerous string is replaced by one private-use character, which a template cannot take apart. After
   rendering, what is between was written by the template; the dangerous strings are encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat import ChatTemplate

FALLBACK = "fallback:plain"
# So that a model without a chat format does not go on with the user's next words.
FALLBACK_STOPS = ("\nuser:", "\nsystem:")
_WORD = re.compile(r"[\w.-]*", re.ASCII)
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
# A character of these, also as JSON in ASCII and as Python write it: some templates show tools and arguments so.
_WRITTEN = re.compile(r"[\U000F0000-\U000FFFFD]|\\udb[89ab][0-9a-f]\\ud[c-f][0-9a-f]{2}|\\U000f[0-9a-f]{4}")
_OPEN_END = "\U0010fffd"  # where a last message goes on; private use, outside of the range above


class SpecialNames:
    """The names of a tokenizer's special tokens: found whole in a text, or in part at its ends."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({name for name in names if name})
        self._pattern = re.compile(f"({_alternatives(self._names)})")
        self._longest = max(map(len, self._names), default=0)
        self._heads = {name[:i] for name in self._names for i in range(1, len(name))}
        self._tails = {name[i:] for name in self._names for i in range(1, len(name))}

    def split(self, text: str) -> list[str]:
        """Alternately what is between names, perhaps empty, and a name."""
        return self._pattern.split(text)

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """``text`` in pieces, each with whether it could be read as (part of) a special token in a prompt. A part
        counts where other text may complete it: the beginning of a name at the end of the text, the end of one at its
        start, a piece of one as the whole text; white space around, which templates trim, is no obstacle."""
        stripped = text.strip()
        if stripped and len(stripped) < self._longest and any(stripped in name for name in self._names):
            return [(text, True)]
        pieces = [(part, bool(i % 2)) for i, part in enumerate(self.split(text))]
        first, bare = pieces[0][0], pieces[0][0].lstrip()
        if length := next((n for n in range(self._longest, 0, -1) if bare[:n] in self._tails), 0):
            cut = len(first) - len(bare) + length
            pieces[:1] = [(first[:cut], True), (first[cut:], False)]
        last, bare = pieces[-1][0], pieces[-1][0].rstrip()
        starts = range(max(0, len(bare) - self._longest), len(bare))
        if (start := next((i for i in starts if bare[i:] in self._heads), None)) is not None:
            pieces[-1:] = [(last[:start], False), (last[start:], True)]
        return [piece for piece in pieces if piece[0]]


@lru_cache(maxsize=8)
def special_names(tokenizer: Tokenizer) -> SpecialNames:
    """Of ``tokenizer``; compiled once."""
    return SpecialNames(name.decode(errors="replace") for name in tokenizer.special.values())


def encode_chat(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final: bool = False,
) -> list[int]:
    """The prompt's token ids. ``variables``: more of what the template may refer to. ``tools``: for a template that
    writes them. ``continue_final``: the prompt ends with the last message's content, for the answer to go on with.
    Without a template the messages become lines "role: content", the last one "assistant:". Raises RequestError when
    the template refuses the messages."""
    if template is None:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return tokenizer.encode("\n".join([*lines, "assistant:"] if add_generation_prompt else lines))
    names = special_names(tokenizer)
    if continue_final:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _OPEN_END}]
    safe, safe_tools, hidden = _hide(messages, tools, names)
    # transformers gives these two to every template, and some only ask whether they are none.
    rendered = template.render(safe, add_generation_prompt, tools=safe_tools, documents=None, **(variables or {}))
    if continue_final:
        rendered, found, _ = rendered.rpartition(_OPEN_END)
        if not found:
            message = "the last message cannot be continued: the chat template does not write its content"
            raise RequestError(message, "continue_final_message")
    if not hidden:
        return tokenizer.encode(rendered, bos=False, allow_special=True)
    return _encode_parts(tokenizer, names.split(rendered), hidden)


def _hide(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, names: SpecialNames
) -> tuple[list[dict[str, Any]], Any, dict[int, str]]:
    """Messages and tools with a character for each dangerous string, and the string by its character's number."""
    found: dict[str, None] = {}
    used: set[str] = set()

    def note(text: str) -> str:
        used.update(text, map(_character, _WRITTEN.findall(text)))
        # White space stays outside, for the template to trim or keep.
        found.update(dict.fromkeys(piece.strip() for piece, dangerous in names.pieces(text) if dangerous))
        return text

    def hide(text: str) -> str:
        pieces = names.pieces(text)
        return "".join(p.replace(p.strip(), in_place_of[p.strip()], 1) if dangerous else p for p, dangerous in pieces)

    def everywhere(change: Callable[[str], str]) -> tuple[list[dict[str, Any]], Any]:
        # The role is one of a few words, checked where it was read, and templates compare it.
        changed = [
            {key: text if key == "role" else _changed(text, change, names, "messages") for key, text in message.items()}
            for message in messages
        ]
        return changed, _changed(tools, change, names, "tools")

    everywhere(note)
    hidden = dict(zip((code for code in _PRIVATE_USE if chr(code) not in used), found, strict=False))
    if len(hidden) < len(found):
        raise RequestError("messages use every private-use character there is", "messages")
    in_place_of = {string: chr(code) for code, string in hidden.items()}
    return *everywhere(hide), hidden


def _changed(value: Any, change: Callable[[str], str], names: SpecialNames, field: str, inside: bool = False) -> Any:
    """A copy of a JSON value in which ``change`` has been at the strings. ``inside`` a call or a tool not at words such
    as types and names: templates compare them, and none writes the rest of a special token around them. Raises
    RequestError for an object's key that holds a special token."""
    if isinstance(value, str):
        return value if inside and _WORD.fullmatch(value) else change(value)
    if isinstance(value, Mapping):
        if forged := next((key for key in value if len(names.split(key)) > 1), None):
            raise RequestError(f"{field}: the property {forged[:60]!r} holds the name of a special token", field)
        return {key: _changed(inner, change, names, field, inside=True) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(inner, change, names, field, inside=True) for inner in value]
    return value


def _character(written: str) -> str:
    """The one that a match of _WRITTEN means."""
    units = written.encode("ascii", "backslashreplace").decode("unicode_escape")
    return units.encode("utf-16", "surrogatepass").decode("utf-16")


def _revealed(text: str, hidden: Mapping[int, str]) -> str:
    """``text`` with the strings that were hidden in the place of their characters, written as these were."""

    def string(found: re.Match[str]) -> str:
        written = found[0]
        original = hidden.get(ord(_character(written)))
        if original is None or len(written) == 1:
            return original or written
        return (json.dumps if written[1] == "u" else repr)(original)[1:-1]

    return _WRITTEN.sub(string, text)


def _encode_parts(tokenizer: Tokenizer, parts: Sequence[str], hidden: Mapping[int, str]) -> list[int]:
    """Ids of ``parts``, every second of which is a special token that the template wrote."""
    ids: list[int] = []
    trusted = last = ""
    for i, part in enumerate(parts):
        plain = part if i % 2 else _revealed(part, hidden)
        if plain == part:
            trusted += part
            last = part if i % 2 else last
            continue
        ids += tokenizer.encode(trusted, bos=False, allow_special=True)
        plain = _without_swallowed(tokenizer, last, plain, "".join(parts[i + 1 : i + 2]))
        ids += _encode_behind(tokenizer, plain, last)
        trusted = ""
    return ids + tokenizer.encode(trusted, bos=False, allow_special=True)


def _without_swallowed(tokenizer: Tokenizer, before: str, text: str, behind: str) -> str:
    """``text`` without the white space that the special tokens ``before`` and ``behind`` it swallow, as those of some
    checkpoints do. Each may be empty."""

    def same(*texts: str) -> bool:
        first, second = (tokenizer.encode(text, bos=False, allow_special=True) for text in texts)
        return first == second

    first, last = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    if before and first and same(before + first, before):
        text = text[len(first) :]
    if behind and last and same(last + behind, behind):
        text = text[: len(text) - len(last)]
    return text


def _encode_behind(tokenizer: Tokenizer, text: str, special: str) -> list[int]:
    """Ids of ``text`` as plain text behind the token ``special``, or at the start if that is empty. SentencePiece puts
    a space in front of a text; behind a special token some checkpoints do and some do not."""
    ids = tokenizer.encode(text, bos=False)
    if not (special and tokenizer.leading_spaces_dropped):
        return ids
    alone = tokenizer.encode("a", bos=False)
    if tokenizer.encode(special + "a", bos=False, allow_special=True)[-len(alone) :] == alone:
        return ids
    behind = tokenizer.encode_inside(text)
    return ids if behind is None else behind


def _alternatives(names: Sequence[str]) -> str:
    """A pattern that matches the longest of ``names``, which are sorted, or nothing if there are none; in time that
    hardly depends on their number: "a|b|c" would try hundreds of names that begin alike at every "<" of a text."""
    if len(names) == 1:
        return re.escape(names[0])
    by_first: dict[str, list[str]] = {}
    for name in filter(None, names):
        by_first.setdefault(name[0], []).append(name[1:])
    branches = [re.escape(first) + _alternatives(rest) for first, rest in by_first.items()]
    choice = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches) or '(?!)'})"
    return f"(?:{choice})?" if "" in names else choice
