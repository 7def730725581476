"""Completions that must match a JSON schema, a regular expression, one of several strings or a grammar, by llguidance.

llguidance is optional; without it a request that needs it is refused by name. Compiling takes up to a second, without
Python's lock, in the thread that calls ``compile``. Every request has its own compiled grammar: two that shared one
would share its cache of lexer states, and what one of them wrote would decide when the other meets a limit. All
grammars in use share a budget of memory.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_fast.engine.closed_schema import ONE_SPELLING, close_objects
from gpt_fast.engine.lark_limits import check_lark, with_room
from gpt_fast.errors import MAX_SHOWN, RequestError, try_later
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import Tokenizer

MAX_LIVE_CHARS = 2**20  # of the grammars of all requests that are queued or running; a compiled one has 200 bytes each
# Limits of llguidance. Its own are 2,000, which a schema of 500 optional properties meets, and 1,000,000, with which
# "((((a{50}){50}){50}){50})" takes a second and 200 MB to refuse.
MAX_ITEMS_IN_ROW = 20_000
LEXER_FUEL = 200_000
MAX_FORCED_BYTES = 8192  # of text with no choice in it: each of its tokens costs the batch 0.1 ms for every 1,000 bytes
REHEARSAL = 4  # tokens


class GrammarCompiler:
    """Makes grammars over one tokenizer, in any thread. Further ids below the model's ``vocab_size`` are forbidden."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: Any = None  # llguidance's view of the vocabulary, built at first use
        self._building = threading.Lock()
        self._counting = threading.RLock()  # a grammar may be collected, and counted off, while another is counted
        self.live_chars = 0

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar that ``params`` asks for, or None. Raises RequestError naming the field: 400 for a grammar that
        is wrong, too large or matches nothing, 503 when those of other requests take all the memory for grammars."""
        if (field := params.grammar_field) is None:
            return None
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError:
            message = f"{field} needs the optional package llguidance on the server: pip install llguidance"
            raise RequestError(message, field, "not_installed") from None
        if self._tokenizer is None:
            raise RequestError(f"{field} needs a tokenizer, and this checkpoint has none", field)
        source = _source(params, LLMatcher, field)
        with self._building:
            if self._vocabulary is None:
                vocabulary = _Vocabulary(self._tokenizer, self._eos_token_ids)
                ends = list(self._eos_token_ids or (vocabulary.eos_token_id,))  # any of them may end a completion
                self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends)
        # Verbose errors would quote the whole grammar.
        limits = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        self._count(len(source))
        try:
            build = partial(LLMatcher, self._vocabulary, source, log_level=0, limits=limits)
            matcher = build() if params.grammar is None else with_room(build)
            for which in (0, -1):
                self._rehearse(CompiledGrammar(matcher.deep_copy(), self._vocab_size, field), which)
            grammar = CompiledGrammar(matcher, self._vocab_size, field)
        except BaseException:
            self._count(-len(source))
            raise
        weakref.finalize(grammar, self._count, -len(source)).atexit = False
        return grammar

    def _rehearse(self, grammar: CompiledGrammar, which: int) -> None:
        """Take a few tokens, so that most grammars that match nothing or are too complex are refused at once."""
        for _ in range(REHEARSAL):
            ids = [i for i in grammar.allowed().nonzero()[:, 0].tolist() if i not in self._eos_token_ids]
            if ids:
                grammar.advance(ids[which])
            if not ids or grammar.complete:
                return

    def _count(self, num_chars: int) -> None:
        with self._counting:
            if num_chars > 0 and self.live_chars + num_chars > MAX_LIVE_CHARS:
                raise try_later("the grammars of other requests take all the memory there is for them")
            self.live_chars += num_chars


class CompiledGrammar:
    """The state of one completion against its grammar, which the request's ``field`` asked for."""

    def __init__(self, matcher: Any, vocab_size: int, field: str, first: CompiledGrammar | None = None) -> None:
        self._matcher, self._vocab_size, self._field = matcher, vocab_size, field
        self._first = first  # whose memory this one shares: it is there, and counted, as long as this one is
        self._allowed: Tensor | None = None  # of the present state

    def copy(self) -> CompiledGrammar:
        """Another completion in the same state, almost for nothing."""
        return CompiledGrammar(self._matcher.deep_copy(), self._vocab_size, self._field, self._first or self)

    def allowed(self) -> Tensor:
        """[V] bool: the tokens that may come next. Raises RequestError when there are none, or when the grammar has
        become too complex."""
        if self._allowed is None:
            if len(self._matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
                message = f"{self._field} asks for more than {MAX_FORCED_BYTES} bytes of text without any choice in it"
                raise RequestError(message, self._field, "grammar_too_large")
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            known = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            count = min(self._vocab_size, known.numel())
            allowed[:count] = known[:count]
            if self._matcher.is_error() or not bool(allowed.any()):
                why = _why(self._matcher.get_error() or "NoExtension")
                raise RequestError(f"{self._field} is not usable: {why}", self._field, "unusable_grammar")
            self._allowed = allowed
        return self._allowed

    def along(self, drafts: Sequence[int]) -> list[Tensor]:
        """[V] bool each: the tokens that may come next, and then behind each of ``drafts``, up to the first draft that
        is forbidden or ends the text. The state stays as it is. Raises as :meth:`allowed` does."""
        masks, num_advanced = [self.allowed()], 0
        try:
            for draft in drafts:
                if not masks[-1][draft]:
                    break
                self.advance(draft)
                num_advanced += 1
                if self.complete:
                    break
                masks.append(self.allowed())
        except RequestError:  # behind a draft that may be wrong: if it is right, the next step raises it again
            pass
        finally:
            if num_advanced:
                self.rollback(num_advanced)
        return masks

    def advance(self, token: int) -> None:
        """Take note of the token that came, one that is allowed."""
        self._matcher.consume_token(token)
        self._allowed = None

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` that came."""
        self._matcher.rollback(num_tokens)
        self._allowed = None

    @property
    def complete(self) -> bool:
        """Whether the completion matches and nothing could follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


def _why(error: str) -> str:
    """llguidance's ``error`` in one line: its first, and the one that says what is wrong with a regular expression."""
    first, *others = error.strip().splitlines()
    if first.startswith("NoExtension"):
        return "no text matches it"
    reasons = [line.removeprefix("error: ")[:MAX_SHOWN] for line in others if line.startswith("error: ")]
    return " ".join([first[:MAX_SHOWN], *reasons[:1]])


def _source(params: SamplingParams, matcher: Any, field: str) -> str:
    if params.grammar is not None:
        check_lark(params.grammar, field)
        return str(matcher.grammar_from_lark(params.grammar))
    if params.pattern is not None:
        return str(matcher.grammar_from_regex(params.pattern))
    try:
        closed = close_objects(params.json_schema or {}, field)
        return str(matcher.grammar_from_json_schema(json.dumps(closed), overrides=ONE_SPELLING))
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not usable: {str(error)[:300]}", field) from None


class _Vocabulary:
    """A tokenizer as llguidance wants it: called with a text, it gives the ids."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        ids = range(tokenizer.vocab_size)
        # What ends a completion is no text within it, whatever the tokenizer takes it for.
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i) or i in eos_token_ids]
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in ids]
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else (self.special_token_ids or [0])[0]
        self._tokenizer = tokenizer
        tokenizer.encode_inside("")  # refuses a vocabulary without a line break now, not within a step
        texts = set(ids).difference(self.special_token_ids)
        self._ids = {self.tokens[i]: i for i in reversed(ids) if i in texts and self.tokens[i]}
        self._max_bytes = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Token ids of ``text`` inside a longer text."""
        ids = self._tokenizer.encode_inside(text)
        if ids is None or b"".join(self.tokens[i] for i in ids) != text.encode():
            return self._greedy(text.encode())  # some tokenizers drop or join blanks
        return ids

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at every place: valid, though not always what the tokenizer would choose."""
        ids, at = list[int](), 0
        while at < len(text):
            pieces = (text[at:end] for end in range(min(len(text), at + self._max_bytes), at, -1))
            piece = next((piece for piece in pieces if piece in self._ids), b"")
            ids += [self._ids[piece]] if piece else []
            at += len(piece) or 1  # no token has this byte: llguidance then checks byte by byte
        return ids
