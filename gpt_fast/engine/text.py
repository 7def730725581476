"""Tokens to text as it is generated: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from gpt_fast.tokenizer import IncrementalDetokenizer


class TextStream:
    """Emits a request's text piece by piece, up to the first stop string; then ``stopped`` is true. ``text``: all of it
    so far. Text that may begin a stop string is withheld, so no part of a stop string is ever emitted. ``keep_stop``:
    the stop string is emitted as a whole."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str] = (), keep_stop: bool = False) -> None:
        self._detokenizer, self._keep_stop = detokenizer, keep_stop
        self._stop = tuple(stop)
        self._withheld = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token: int, may_stop: bool = True) -> str:
        """Add one token; returns the text that is now certain. A stop string that ends in a token which may not stop
        passes."""
        return self._release(self._detokenizer.push(token), may_stop, final=False)

    def flush(self) -> str:
        """The completion ends: returns what was withheld, up to a stop string."""
        if self.stopped:
            return ""
        return self._release(self._detokenizer.flush(), may_stop=True, final=True)

    def _release(self, new: str, may_stop: bool, final: bool) -> str:
        known, text, keep = len(self._withheld), self._withheld + new, 0
        found = [
            (begin, begin + len(stop))
            for stop in self._stop
            if may_stop and (begin := text.find(stop, max(0, known + 1 - len(stop)))) >= 0
        ]
        if found:
            self.stopped, text = True, text[: min(found)[self._keep_stop]]
        elif not final:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        text, self._withheld = text[: len(text) - keep], text[len(text) - keep :]
        if text:
            self._parts.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if stop.startswith(text[-length:])), 0)
