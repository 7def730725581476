"""An answer's text, piece by piece, to its parts: thinking, content, calls of functions and their arguments.

The grammar has held calls to one spelling (chat_grammar.py), so a call is a fixed text, a JSON object, and a fixed text
again. Whatever looks like a call and is none stays content; nothing is lost, and no text makes the reader fail.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpt_fast.tokenizer.chat_formats import Dialect

Kind = Literal["content", "reasoning", "call", "arguments"]


class Part(NamedTuple):
    """A piece of an answer. ``call``: one begins, and ``text`` is the function's name; ``arguments`` go on with it."""

    kind: Kind
    text: str


class AnswerReader:
    """Takes the answer of one sequence apart. ``names``: the functions that it may call; none: calls are text.
    ``thinking``: the prompt has begun the thinking.

    ``num_calls``: calls so far. ``in_call``: the last one has no end yet."""

    def __init__(self, dialect: Dialect, names: Sequence[str] = (), thinking: bool = False) -> None:
        form = dialect.calls
        self._last = form.closing + form.after
        # Arguments are objects, so their brace is part of what begins a call.
        self._first = {text + "{": name for name in names for text in form.first(name)}
        later = {form.later(name): name for name in names}
        self._later = {form.closing + text + "{": name for text, name in later.items() if text is not None}
        self._markers = {state: _Markers(kinds, self._first) for state, kinds in _kinds(dialect).items()}
        self._markers["reasoning"].forget(self._first)
        if form.at_start:
            self._markers["content"].forget(self._first)
        thinking = thinking and dialect.thinking is not None
        self._kind: Kind = "reasoning" if thinking else "content"
        self._held = ""  # text that is not understood yet
        self._object: _ObjectEnd | None = None  # inside arguments
        self._behind = False  # a call's arguments have ended, and what is behind them has not come
        self._said = False  # there has been content
        self._fresh = thinking  # nothing has come since the marker: white space is dropped
        self.num_calls = 0

    @property
    def in_call(self) -> bool:
        return self._object is not None

    def push(self, text: str, final: bool = False) -> list[Part]:
        """The parts that are certain now; at the ``final`` push, all of them. Joined by kind they do not depend on how
        the text was cut."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts, final):
            pass
        return parts

    def _step(self, parts: list[Part], final: bool) -> bool:
        """Understand one piece more of what is held; False: that needs more text."""
        if self._object is not None:
            return self._arguments(parts, self._object)
        return self._behind_call(parts, final) if self._behind else self._text(parts, final)

    def _text(self, parts: list[Part], final: bool) -> bool:
        state = "reasoning" if self._kind == "reasoning" else "content" if self._said else "start"
        markers = self._markers[state]
        found = markers.pattern.search(self._held)
        if found is None:
            sure = len(self._held) if final else markers.num_sure(self._held)
            certain = self._held[:sure]
            self._say(parts, certain.rstrip() if final and state == "reasoning" else certain)
            self._held = self._held[sure:]
            return False
        before, marker, rest = self._held[: found.start()], found.group(), self._held[found.end() :]
        if before.strip() and state == "start" and marker not in self._markers["content"].texts:
            self._say(parts, before)  # so this is not the start, and the marker is a word
            self._held = marker + rest
            return True
        self._say(parts, before.rstrip())
        if marker in self._first:
            self._begin_call(parts, self._first[marker], rest)
        else:
            self._kind, self._held, self._fresh = markers.kinds[marker], rest, True
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        text = text.lstrip() if self._fresh else text
        if text:
            self._fresh = False
            self._said = self._said or (self._kind == "content" and not text.isspace())
            parts.append(Part(self._kind, text))

    def _begin_call(self, parts: list[Part], name: str, rest: str) -> None:
        parts.append(Part("call", name))
        self._object, self._held, self._said = _ObjectEnd(), "{" + rest, True
        self.num_calls += 1

    def _arguments(self, parts: list[Part], inside: _ObjectEnd) -> bool:
        end = inside.find(self._held)
        parts.append(Part("arguments", self._held[:end]))
        if end is None:
            self._held = ""
            return False
        self._held, self._object, self._behind = self._held[end:], None, True
        return True

    def _behind_call(self, parts: list[Part], final: bool) -> bool:
        if text := next((text for text in self._later if self._held.startswith(text)), None):
            self._behind = False
            self._begin_call(parts, self._later[text], self._held[len(text) :])
            return True
        undecided = any(text.startswith(self._held) for text in (*self._later, self._last))
        if undecided and not final:
            return False
        # The calls are over. What comes behind them is content, except a beginning of more that was cut off.
        rest = "" if undecided else self._held.removeprefix(self._last)
        self._behind, self._kind, self._fresh, self._held = False, "content", True, rest
        return True


class _Markers:
    """What ends a piece of text: markers with the kind of text behind them, and the beginnings of calls."""

    def __init__(self, kinds: Mapping[str, Kind], calls: Iterable[str]) -> None:
        self.kinds = kinds
        self._set([*kinds, *calls])

    def _set(self, texts: Sequence[str]) -> None:
        self.texts = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")

    def forget(self, calls: Collection[str]) -> None:
        self._set([text for text in self.texts if text not in calls])

    def num_sure(self, text: str) -> int:
        """Characters of ``text``, in which no marker is, that do not belong to one that may come. White space in front
        of a marker is dropped, so at the end it is not sure."""
        if not self.texts:
            return len(text)
        starts = range(max(0, len(text) - len(self.texts[0]) + 1), len(text))
        begun = (i for i in starts if any(marker.startswith(text[i:]) for marker in self.texts))
        return len(text[: next(begun, len(text))].rstrip())


class _ObjectEnd:
    """Finds where a JSON object ends, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The index behind the brace that closes it, or None while there is none in ``text``, the next piece."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def _kinds(dialect: Dialect) -> dict[str, dict[str, Kind]]:
    """Markers and what comes behind each: at the start of an answer, in the middle of its content, and in thinking.
    Only a format that also marks the answer may think again behind content; else a marker's word is a word there."""
    thinking = dialect.thinking
    if thinking is None:
        return {"start": {}, "content": {}, "reasoning": {}}
    framed: dict[str, Kind] = {text: "content" for text in (thinking.answer, *thinking.others) if text}
    begin: dict[str, Kind] = {thinking.opening: "reasoning"}
    return {
        "start": framed | begin,
        "content": framed | begin if thinking.answer else {},
        "reasoning": framed | {thinking.closing: "content"},
    }
