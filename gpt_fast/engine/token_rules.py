"""Tokens that a request allows by name: ``allowed_token_ids`` and ``bad_words``. V: the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import Tokenizer


class TokenRules:
    """What one request allows. As in vLLM a bad word is a sequence of tokens, and where the completion ends with all
    but the last of them, that last one is forbidden. ``num_read``: how many tokens at the end decide that."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._mask = torch.ones(vocab_size, dtype=torch.bool)
        if params.allowed_token_ids is not None:
            self._mask.zero_()[list(params.allowed_token_ids)] = True
        self._longer: list[tuple[tuple[int, ...], int]] = []  # beginning of a bad word, and its last token
        for *beginning, last in _spellings(params.bad_words, tokenizer, vocab_size):
            if beginning:
                self._longer.append((tuple(beginning), last))
            else:
                self._mask[last] = False
        self.num_read = max((len(beginning) for beginning, _ in self._longer), default=0)
        self._names = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
        self._names += ["bad_words"] if params.bad_words else []

    @staticmethod
    def of(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> TokenRules | None:
        """The rules of ``params``, None if it has none. Raises RequestError for bad words without a tokenizer."""
        if params.allowed_token_ids is None and not params.bad_words:
            return None
        if params.bad_words and tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this checkpoint has none", "bad_words")
        return TokenRules(params, tokenizer, vocab_size)

    def mask(self, generated: Sequence[int], grammar: Tensor | None) -> Tensor:
        """[V] bool: what may follow the tokens ``generated`` so far, of which the last ``num_read`` are enough, of what
        the ``grammar`` [V] allows."""
        tail = tuple(generated[max(0, len(generated) - self.num_read) :])
        mask = self._mask if grammar is None else self._mask & grammar
        if forbidden := [last for beginning, last in self._longer if tail[-len(beginning) :] == beginning]:
            mask = mask.clone()
            mask[forbidden] = False
        return mask

    def contradiction(self) -> RequestError:
        """For a place where nothing may follow."""
        names = " and ".join(self._names)
        return RequestError(f"{names} leave no token that may follow here", self._names[0], "contradiction")


def _spellings(words: Iterable[str], tokenizer: Tokenizer | None, vocab_size: int) -> set[tuple[int, ...]]:
    """The token sequences of each word, alone and behind a space, at the start of a text and inside one. Of those with
    an id that the model does not have, none."""
    if tokenizer is None:
        return set()
    found = set()
    for text in {text for word in words for text in (word, " " + word.lstrip())}:
        found |= {tuple(tokenizer.encode(text, bos=False)), tuple(tokenizer.encode_inside(text) or ())}
    return {ids for ids in found if ids and max(ids) < vocab_size}
