"""Token ids to text, one at a time, as it can be shown to a reader."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from gpt_fast.tokenizer.protocol import Tokenizer, drop_leading_spaces

# A UTF-8 character has at most 4 bytes, so what is unfinished at the end of a text lies in its last 3.
_MAX_UNFINISHED_BYTES = 3
# Tokens before the window's new ones, so that a decoder that joins words sees what they are joined to.
_WINDOW_CONTEXT = 5
# No character needs more tokens than it has bytes; text that is still unfinished after this is simply invalid.
_MAX_PENDING_TOKENS = 8


class IncrementalDetokenizer:
    """Streams the text of generated tokens: the pushes and the flush joined are what ``decode`` gives at once.

    ``prompt_ids`` are the tokens before: their text is not returned, but it decides whether a leading space is the
    dummy prefix of a text's start or a space between words, and it may end in half a character. The cost of a push
    does not grow with the text.

    ``padded``: ids past the tokenizer's vocabulary have no text. Models pad their vocabulary, and an untrained or
    broken one may choose such a token; that must not end a stream. Without a tokenizer no id has text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        skip_special: bool = True,
        *,
        padded: bool = False,
    ) -> None:
        self._stream: _ByteStream | _WindowStream | None = None
        self._num_known = float("inf")
        if tokenizer is not None:
            if padded:
                self._num_known = tokenizer.vocab_size
                prompt_ids = [id for id in prompt_ids if id < self._num_known]
            kind = _ByteStream if tokenizer.bytewise else _WindowStream
            self._stream = kind(tokenizer, prompt_ids, skip_special)

    def push(self, id: int) -> str:
        """The text that is certain now; empty while a character is unfinished. Raises TokenizerError for a bad id."""
        return self._stream.push(id) if self._stream is not None and id < self._num_known else ""

    def flush(self) -> str:
        """The rest at the end of the stream: an unfinished character as U+FFFD, else nothing."""
        return self._stream.flush() if self._stream is not None else ""


class _ByteStream:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._droppable_spaces = tokenizer.leading_spaces_dropped
        for id in prompt_ids:  # ends with the first token that has text
            if not self._droppable_spaces:
                break
            self._take(id)
        self._decoder.decode(self._tail(prompt_ids))

    def _tail(self, ids: Sequence[int]) -> bytes:
        """At least the last bytes of the ids' text: UTF-8 finds its character boundaries from anywhere."""
        tail = b""
        for id in reversed(ids):
            tail = self._tokenizer.token_bytes(id, self._skip_special) + tail
            if len(tail) > _MAX_UNFINISHED_BYTES:
                break
        return tail

    def _take(self, id: int) -> bytes:
        data = self._tokenizer.token_bytes(id, self._skip_special)
        if self._droppable_spaces:
            data, self._droppable_spaces = drop_leading_spaces(data, self._droppable_spaces)
        return data

    def push(self, id: int) -> str:
        return self._decoder.decode(self._take(id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For decoders that are more than a concatenation (WordPiece ...): compares the text of a few tokens with and
    without the new ones, as text-generation-inference and vLLM do."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Special tokens that are skipped are no context, so the window is counted in tokens that have text.
        textual = (id for id in reversed(prompt_ids) if not (skip_special and tokenizer.is_special(id)))
        self._context = list(itertools.islice(textual, _WINDOW_CONTEXT))[::-1]
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        self._tokenizer.token_bytes(id)  # refuses a bad id before it gets into the window
        if self._skip_special and self._tokenizer.is_special(id):
            return ""
        self._pending.append(id)
        text = self._new_text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip_special)
        return self._tokenizer.decode(self._context + self._pending, self._skip_special)[len(before) :]

    def _advance(self) -> None:
        self._context = (self._context + self._pending)[-_WINDOW_CONTEXT:]
        self._pending = []
