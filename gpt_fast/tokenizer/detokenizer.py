"""Token ids to text, one at a time, as it can be shown to a reader."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Collection, Sequence

from gpt_fast.tokenizer.base import Tokenizer, drop_leading_spaces

# A UTF-8 character has at most 4 bytes, so what is unfinished at the end of a text lies in its last 3.
_MAX_UNFINISHED_BYTES = 3
# Tokens before the window's new ones, so that a decoder that joins words sees what they are joined to.
_WINDOW_CONTEXT = 5
# No character needs more tokens than it has bytes; text that is still unfinished after this is simply invalid.
_MAX_PENDING_TOKENS = 8
_NO_TOKENIZER = Tokenizer({}, {})


class IncrementalDetokenizer:
    """Streams the text of generated tokens: the pushes and the flush joined are what ``decode`` gives at once.

    ``prompt_ids``: the tokens before. Their text is not returned, but it decides whether a leading space is the dummy
    prefix of a text or a space between words, and it may end in half a character. Ids past the tokenizer's vocabulary
    have no text: models pad their vocabulary, and a broken one may choose such a token. Without a tokenizer no id has
    text. ``shown``: special tokens whose names count as text. ``every_space``: none is a dummy, also where no text is
    before. The cost of a push does not grow with the text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        shown: Collection[int] = (),
        every_space: bool = False,
    ) -> None:
        self._tokenizer, self._shown = tokenizer or _NO_TOKENIZER, frozenset(shown)
        known = [id for id in prompt_ids if id < self._tokenizer.vocab_size]
        self._window = None if self._tokenizer.bytewise else _Window(self._tokenizer, known)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._droppable_spaces = 0 if every_space else self._tokenizer.leading_spaces_dropped
        for id in known:
            if not self._droppable_spaces:
                break  # a token has text
            self._take(id)
        tail = b""  # at least the last bytes: UTF-8 finds its character boundaries from anywhere
        for id in reversed(known):
            tail = self._tokenizer.token_bytes(id) + tail
            if len(tail) > _MAX_UNFINISHED_BYTES:
                break
        self._decoder.decode(tail)

    def _take(self, id: int) -> bytes:
        data = self._tokenizer.token_bytes(id)
        if self._droppable_spaces:
            data, self._droppable_spaces = drop_leading_spaces(data, self._droppable_spaces)
        return data

    def push(self, id: int) -> str:
        """The text that is certain now; empty while a character is unfinished."""
        if id >= self._tokenizer.vocab_size:
            return ""
        if id in self._shown and self._tokenizer.is_special(id):
            self._droppable_spaces = 0
            return self.flush() + self._tokenizer.token_bytes(id, skip_special=False).decode(errors="replace")
        return self._window.push(id) if self._window else self._decoder.decode(self._take(id))

    def flush(self) -> str:
        """The rest at the end of the stream: an unfinished character as U+FFFD, else nothing."""
        return self._window.new_text(final=True) if self._window else self._decoder.decode(b"", final=True)


class _Window:
    """For decoders that are more than a concatenation (WordPiece ...): compares the text of a few tokens with and
    without the new ones, as text-generation-inference and vLLM do."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Special tokens are no context, so the window is counted in tokens that have text.
        textual = (id for id in reversed(prompt_ids) if not tokenizer.is_special(id))
        self._context = list(itertools.islice(textual, _WINDOW_CONTEXT))[::-1]
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        if self._tokenizer.is_special(id):
            return ""
        self._pending.append(id)
        return self.new_text(final=len(self._pending) >= _MAX_PENDING_TOKENS)

    def new_text(self, final: bool) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)[len(before) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return ""
        self._context = (self._context + self._pending)[-_WINDOW_CONTEXT:]
        self._pending = []
        return text
