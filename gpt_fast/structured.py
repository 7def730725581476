"""Completions that must match a JSON schema, a regular expression or one of several strings, by llguidance.

llguidance is an optional package; a request that needs it where it is not installed is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from gpt_fast.params import RequestError, SamplingParams
from gpt_fast.tokenizer import Tokenizer

_FIELDS = ("json_schema", "regex", "choice")
_START = "\n"  # no tokenizer joins what follows to it


class GrammarCompiler:
    """Makes grammars over one tokenizer. ``vocab_size`` is the model's; ids beyond the tokenizer's are not allowed."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiled: Any = None  # llguidance's view of the vocabulary, built at first use

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar that ``params`` asks for, or None. Raises RequestError naming the field."""
        field = next((name for name in _FIELDS if getattr(params, name) is not None), None)
        if field is None:
            return None
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                f"{field} needs the optional package llguidance on the server: pip install llguidance",
                field,
                "not_installed",
            ) from None
        if self._tokenizer is None:
            raise RequestError(f"{field} needs a tokenizer, and this checkpoint has none", field)
        source = _source(params, LLMatcher, field)
        error = LLMatcher.validate_grammar(source, self._vocabulary())
        if error:
            raise RequestError(f"{field} is not usable: {error.strip().splitlines()[0][:300]}", field)
        return Grammar(LLMatcher(self._vocabulary(), source, log_level=0), self._vocab_size)

    def _vocabulary(self) -> Any:
        if self._compiled is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            assert self._tokenizer is not None
            self._compiled = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_token_ids)))
        return self._compiled


class Grammar:
    """The state of one completion against its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Tensor:
        """[V] bool: the tokens that may come next. Raises RuntimeError when the grammar became too complex."""
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        known = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        count = min(self._vocab_size, known.numel())
        allowed[:count] = known[:count]
        if self._matcher.is_error() or not bool(allowed.any()):
            raise RuntimeError(f"the grammar cannot go on: {self._matcher.get_error() or 'no token fits'}")
        return allowed

    def advance(self, token: int) -> None:
        """Take note of the token that came."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the completion matches and nothing could follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


def _source(params: SamplingParams, matcher: Any, field: str) -> str:
    if params.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        return str(matcher.grammar_from_lark(f"start: {choices}"))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    try:
        # One spelling of JSON: with free white space a weak model can go on with blanks for ever.
        spelling = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return str(matcher.grammar_from_json_schema(json.dumps(params.json_schema), overrides=spelling))
    except ValueError as error:
        raise RequestError(f"{field} is not usable: {error}", field) from None


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in ids]
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else (self.special_token_ids or [0])[0]
        self._tokenizer = tokenizer
        self._start = tokenizer.encode(_START, bos=False)
        self._longest: dict[bytes, int] = {}
        for i in reversed(ids):
            if i not in self.special_token_ids and self.tokens[i]:
                self._longest[self.tokens[i]] = i
        self._max_bytes = max(map(len, self._longest), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of ``text`` as it stands inside a text, that is without the space that SentencePiece puts first."""
        try:
            ids = self._tokenizer.encode(_START + text.decode("utf-8"), bos=False)
        except UnicodeDecodeError:
            return self._greedy(text)
        start = len(self._start)
        # Some tokenizers drop or join blanks: what does not spell the text is of no use here.
        spelled = ids[:start] == self._start and b"".join(self.tokens[i] for i in ids[start:]) == text
        return ids[start:] if spelled else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at every place: valid, though not always what the tokenizer would choose."""
        ids, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._max_bytes), at, -1):
                if text[at:end] in self._longest:
                    ids.append(self._longest[text[at:end]])
                    break
            else:
                end = at + 1  # no token has this byte: llguidance then checks byte by byte
            at = end
        return ids
