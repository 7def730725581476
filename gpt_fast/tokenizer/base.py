"""What every tokenizer offers. Decoding is the concatenation of each token's bytes, read as UTF-8, so a token may hold
half a character, and streamed text cannot differ from text that is decoded at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from gpt_fast.errors import TokenizerError


class Tokenizer:
    """Text to ids in ``[0, vocab_size)`` and back; a back-end adds ``_encode``. Threads may share it.

    ``pieces``: the bytes of tokens by id. ``special``: names of the control tokens by id; they are no text. An id below
    the largest that is in neither is special and has no name. ``bos_token_id``: also where ``encode`` does not add it
    (GPT-2, Phi-3). ``eos_token_ids``: the tokenizer's own; generation_config.json may name more. ``prefix_ids``: what
    ``encode(bos=True)`` puts in front. ``leading_spaces_dropped``: how many spaces ``decode`` drops at most at the
    start of a text (SentencePiece)."""

    bytewise = True  # ``decode`` concatenates ``token_bytes``; if not, a stream decodes a small window of tokens

    def __init__(
        self,
        pieces: Mapping[int, bytes],
        special: Mapping[int, str],
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        prefix_ids: tuple[int, ...] = (),
        leading_spaces_dropped: int = 0,
    ) -> None:
        ids = range(1 + max([*pieces, *special], default=-1))
        self.vocab_size = len(ids)  # a model's embedding may have more rows; those ids mean nothing
        self.bos_token_id, self.eos_token_ids, self._prefix_ids = bos_token_id, eos_token_ids, prefix_ids
        self.leading_spaces_dropped = leading_spaces_dropped
        self.special = {id: special.get(id, "").encode() for id in ids if id in special or id not in pieces}
        self._text = [b"" if id in self.special else pieces[id] for id in ids]

    def encode(self, text: str, bos: bool = True, allow_special: bool = False) -> list[int]:
        """The text's token ids. ``bos`` puts BOS in front if the checkpoint wants one; EOS is never appended. Strings
        that look like special tokens are plain text unless ``allow_special``, so that a user cannot forge a turn of a
        chat. Raises RequestError for a text that the vocabulary cannot spell, which few vocabularies have."""
        if not text.isascii():  # JSON may spell half of a UTF-16 pair, which is no character and which no library takes
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._encode(text, allow_special) if text else []
        return [*self._prefix_ids, *ids] if bos else ids

    def encode_inside(self, text: str) -> list[int] | None:
        """The ids of ``text`` within a longer text: without the space that SentencePiece puts first. None from a
        tokenizer that joins a line break in front to it, which hardly any does."""
        ids, start = self.encode("\n" + text, bos=False), self._line_break
        return ids[len(start) :] if ids[: len(start)] == start else None

    @cached_property
    def _line_break(self) -> list[int]:
        return self.encode("\n", bos=False)

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text that is not empty and valid Unicode, without BOS."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The ids' text; invalid UTF-8 becomes U+FFFD. Raises TokenizerError for an id outside the vocabulary."""
        data = b"".join([self.token_bytes(id, skip_special) for id in ids])
        return drop_leading_spaces(data, self.leading_spaces_dropped)[0].decode("utf-8", errors="replace")

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes a token adds to the text; of a special token none, or its name when not ``skip_special``."""
        self._check(id)
        return self._text[id] if skip_special else self.special.get(int(id), self._text[id])

    def is_special(self, id: int) -> bool:
        """Whether the id is a control token (BOS, end of turn, padding, unknown ...), not text."""
        self._check(id)
        return int(id) in self.special

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise TokenizerError(f"token id {int(id)} is outside the vocabulary of {self.vocab_size} tokens")


def drop_leading_spaces(data: bytes, at_most: int) -> tuple[bytes, int]:
    """Drops up to ``at_most`` spaces where a text begins. Returns what is left, and how many spaces may still go."""
    kept = data[min(at_most, len(data) - len(data.lstrip(b" "))) :]
    return kept, 0 if kept else at_most - len(data)
