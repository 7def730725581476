"""What every tokenizer offers. Decoding is the concatenation of each token's bytes, read as UTF-8.

The whole text and the streamed text come from the same table of bytes, so they cannot differ, and a token that holds
half a character is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpt_fast.errors import TokenizerError


class Tokenizer:
    """Text to ids in ``[0, vocab_size)`` and back; a back-end adds ``_encode``. Threads may share it.

    ``pieces[id]``: the bytes of token ``id``. ``special``: names of the control tokens, whose bytes are ignored.
    ``bos_token_id``: also where ``encode`` does not add it (GPT-2, Phi-3). ``eos_token_ids``: the tokenizer's own;
    generation_config.json may name more. ``prefix_ids``: what ``encode(bos=True)`` puts in front.
    ``leading_spaces_dropped``: how many spaces ``decode`` drops at most at the start of a text (SentencePiece)."""

    bytewise = True  # ``decode`` concatenates ``token_bytes``; if not, a stream decodes a small window of tokens

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: Mapping[int, str],
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        prefix_ids: tuple[int, ...] = (),
        leading_spaces_dropped: int = 0,
    ) -> None:
        self.vocab_size = len(pieces)  # a model's embedding may have more rows; those ids mean nothing
        self.bos_token_id, self.eos_token_ids, self._prefix_ids = bos_token_id, eos_token_ids, prefix_ids
        self.leading_spaces_dropped = leading_spaces_dropped
        self._special = {id: name.encode() for id, name in special.items()}
        self._text = [b"" if id in special else piece for id, piece in enumerate(pieces)]

    def encode(self, text: str, bos: bool = True, allow_special: bool = False) -> list[int]:
        """The text's token ids. ``bos`` puts BOS in front if the checkpoint wants one; EOS is never appended. Strings
        that look like special tokens are plain text unless ``allow_special``, so that a user cannot forge a turn of a
        chat."""
        ids = self._encode(_without_surrogates(text), allow_special) if text else []
        return [*self._prefix_ids, *ids] if bos else ids

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text that is not empty and valid Unicode, without BOS."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The ids' text; invalid UTF-8 becomes U+FFFD. Raises TokenizerError for an id outside the vocabulary."""
        data = b"".join([self.token_bytes(id, skip_special) for id in ids])
        if self.leading_spaces_dropped:
            data, _ = drop_leading_spaces(data, self.leading_spaces_dropped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes a token adds to the text; of a special token none, or its name when not ``skip_special``."""
        self._check(id)
        return self._text[id] if skip_special else self._special.get(int(id), self._text[id])

    def is_special(self, id: int) -> bool:
        """Whether the id is a control token (BOS, end of turn, padding, unknown ...), not text."""
        self._check(id)
        return int(id) in self._special

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise TokenizerError(f"token id {int(id)} is outside the vocabulary of {self.vocab_size} tokens")


def drop_leading_spaces(data: bytes, at_most: int) -> tuple[bytes, int]:
    """Drops up to ``at_most`` spaces where a text begins. Returns what is left, and how many spaces may still go."""
    left = data.lstrip(b" ")
    dropped = min(at_most, len(data) - len(left))
    kept = data[dropped:]
    return kept, 0 if kept else at_most - dropped


def _without_surrogates(text: str) -> str:
    # A JSON request may hold "\ud83d": half of a UTF-16 pair, which is no character and which no library takes.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
