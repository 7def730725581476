"""Byte-pair encodings as tiktoken's rank files (https://github.com/openai/tiktoken): Llama 3 and Qwen. A file has a
line ``base64(token bytes) rank`` for each token, and nothing else. ``VOCABULARIES`` has the rest: the regular
expression that splits text before merging, and the special tokens."""

from __future__ import annotations

import base64
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from gpt_fast.errors import TokenizerError
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.settings import Settings

# The two differ in how many digits a token may have.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = _PATTERN.replace("DIGITS", "{1,3}")
QWEN_PATTERN = _PATTERN.replace("DIGITS", "")

# The regular expression engine gives up on very long runs, so these are cut, at the length that Llama 3's code uses.
_MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")

# llama-models, models/llama3/tokenizer.py. Llama 3 and 3.1 share the file and these slots; 3.1 gave names to some that
# 3 had reserved, which renumbered the reserved ones after them.
_LLAMA3_NAMES = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id step_id "
    "start_header_id end_header_id eom_id eot_id python_tag image"
)


class Vocabulary(NamedTuple):
    """What a rank file does not say."""

    name: str
    pattern: str
    special_names: list[str]  # of the tokens <|name|>, whose ids follow the ranks
    bos_token: str | None
    eos_tokens: tuple[str, ...]
    normalize: Callable[[str], str] = str  # done before splitting


# By the number of ranks, the one fact in a file that tells which it is.
VOCABULARIES = {
    128_000: Vocabulary(
        name="Llama 3",
        pattern=LLAMA3_PATTERN,
        special_names=[*_LLAMA3_NAMES.split(), *(f"reserved_special_token_{i}" for i in range(2, 246))],
        bos_token="<|begin_of_text|>",
        eos_tokens=("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    ),
    151_643: Vocabulary(
        name="Qwen",
        pattern=QWEN_PATTERN,
        special_names=["endoftext", "im_start", "im_end", *(f"extra_{i}" for i in range(205))],
        bos_token=None,
        eos_tokens=("<|endoftext|>", "<|im_end|>"),
        normalize=partial(unicodedata.normalize, "NFC"),
    ),
}


def _cut_runs(text: str) -> Iterator[str]:
    """``text`` in pieces, in none of which a run of white space, or of anything else, is longer than _MAX_RUN_CHARS."""
    begin = 0
    for run in _RUN.finditer(text):
        for end in range(run.start() + _MAX_RUN_CHARS, run.end() + 1, _MAX_RUN_CHARS):
            yield text[begin:end]
            begin = end
    if begin < len(text):
        yield text[begin:]


class TiktokenTokenizer(Tokenizer):
    """A rank file with the split and the special tokens of its row in ``VOCABULARIES``. ``added_tokens_decoder`` of a
    tokenizer_config.json beside the file renames special tokens and adds to them."""

    def __init__(self, data: bytes, settings: Settings, *, source: str) -> None:
        """Raises TokenizerError, naming ``source``, for malformed lines and for a vocabulary that has no row."""
        import tiktoken

        ranks = parse_ranks(data, source)
        row = VOCABULARIES.get(len(ranks))
        if row is None:
            known = ", ".join(f"{row.name} ({size})" for size, row in VOCABULARIES.items())
            why = "either it is incomplete, or its split pattern is unknown; use the model's tokenizer.json instead"
            raise TokenizerError(f"{source} has {len(ranks)} ranks, which is no vocabulary known here ({known}): {why}")
        special = {id: f"<|{name}|>" for id, name in enumerate(row.special_names, start=len(ranks))}
        special |= {token.id: token.content for token in settings.added if token.id >= len(ranks)}
        ids = {name: id for id, name in special.items()}
        bos = ids.get(settings.bos_token or row.bos_token or "")
        eos_names = dict.fromkeys((*row.eos_tokens, settings.eos_token or ""))
        super().__init__(
            {rank: piece for piece, rank in ranks.items()},
            special,
            bos_token_id=bos,
            eos_token_ids=tuple(ids[name] for name in eos_names if name in ids),
            prefix_ids=settings.prefix(bos, (bos,) if row.bos_token and bos is not None else ()),
        )
        self._normalize, self._special_ids = row.normalize, ids
        names = sorted(ids, key=len, reverse=True)  # the longest first, where one begins like another
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._encoding = tiktoken.Encoding(
            row.name, pat_str=row.pattern, mergeable_ranks=ranks, special_tokens=ids, explicit_n_vocab=None
        )

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        # Special tokens go first: no cut and no normalization of what is around them may reach into one.
        parts = self._special_pattern.split(text) if allow_special else [text]
        encoded = ([self._special_ids[p]] if i % 2 else self._encode_plain(p) for i, p in enumerate(parts) if p)
        return list(itertools.chain.from_iterable(encoded))

    def _encode_plain(self, text: str) -> list[int]:
        text = self._normalize(text)
        runs = [text] if len(text) <= _MAX_RUN_CHARS else _cut_runs(text)
        return list(itertools.chain.from_iterable(map(self._encoding.encode_ordinary, runs)))


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    """The ranks of a tiktoken file by token bytes. Raises TokenizerError naming the first line that is malformed."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            why = f"{line[:40]!r} is not a base64 token and its rank; fetch the file again"
            raise TokenizerError(f"{source}, line {number}: {why}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{source}: the ranks are not 0 to {len(ranks) - 1}, once each; fetch the file again")
    if any(bytes([value]) not in ranks for value in range(256)):
        raise TokenizerError(f"{source}: not every single byte has a rank, so some text has no tokens; fetch it again")
    return ranks
