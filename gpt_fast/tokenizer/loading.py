"""Finds a checkpoint's tokenizer. Files are known by what is in them; their names only say where to look."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpt_fast.errors import TokenizerError, TokenizerMissing
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.settings import Settings, parse_json_object, read_added_tokens, read_json_object, read_settings

Format = Literal["sentencepiece", "tiktoken", "json"]

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_GPT2_END = "<|endoftext|>"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or of one tokenizer file with what lies beside it.

    Of several in a directory the first is taken: SentencePiece's tokenizer.model, tokenizer.json, tiktoken ranks
    (tokenizer.model or ``*.tiktoken``), vocab.json with merges.txt. The first is what the model was trained with; a
    tokenizer.json beside it is a conversion, and some tokenize differently. It is still read for its added tokens and
    for where text gets the dummy prefix, since chat templates are written against it.

    If the library of one is not installed, the next is tried. Nothing is downloaded, unpickled or executed.
    Raises TokenizerMissing if there is none, TokenizerError if the file is corrupt: naming it, and what to do."""
    path = Path(path)
    if path.is_file():
        return _load_file({path: path.read_bytes()}, path, read_settings(path.parent))
    if not path.is_dir():
        raise TokenizerError(f"{path} does not exist; give a checkpoint directory or a tokenizer file")
    missing: ImportError | None = None
    for load in _candidates(path):
        try:
            return load()
        except ImportError as error:
            missing = error
    if missing is not None:
        raise TokenizerError(f"the tokenizer in {path} needs a package: pip install {missing.name}") from missing
    what = "none of tokenizer.model, tokenizer.json, *.tiktoken, or vocab.json with merges.txt is there"
    raise TokenizerMissing(f"{path} has no tokenizer: {what}; copy the model's tokenizer files into it")


def sniff(data: bytes, source: str) -> Format:
    """The format of a tokenizer file from its first bytes. Raises TokenizerError, saying what is wrong, for others."""
    start = data[:4096]
    if not data:
        raise TokenizerError(f"{source} is empty; fetch the file again")
    if start.startswith(b"version https://git-lfs"):
        why = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
        raise TokenizerError(f"{source} {why}")
    if start.startswith((b"\x80", b"PK\x03\x04")):
        raise TokenizerError(f"{source} is a pickle or an archive, which is never opened as a tokenizer")
    if start.lstrip().startswith(b"{"):
        return "json"
    if _RANK_LINE.match(start):
        return "tiktoken"
    if start.startswith(b"\n"):  # the key of a SentencePiece model's first field, its pieces
        return "sentencepiece"
    why = "is neither a SentencePiece model, nor tiktoken ranks, nor a tokenizer.json"
    raise TokenizerError(f"{source} {why}; it starts with {start[:16]!r}; fetch the file again")


def _candidates(directory: Path) -> list[Callable[[], Tokenizer]]:
    settings = read_settings(directory)
    files = [directory / "tokenizer.model", directory / "tokenizer.json", *sorted(directory.glob("*.tiktoken"))]
    found = {file: file.read_bytes() for file in files if file.is_file()}  # each is opened once
    formats = {file: sniff(data, str(file)) for file, data in found.items()}
    rank: list[Format] = ["sentencepiece", "json", "tiktoken"]
    ordered = sorted(formats, key=lambda file: rank.index(formats[file]))
    candidates: list[Callable[[], Tokenizer]] = [partial(_load_file, found, file, settings) for file in ordered]
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        candidates.append(partial(_load_vocab_and_merges, directory, settings))
    return candidates


def _load_file(found: Mapping[Path, bytes], path: Path, settings: Settings) -> Tokenizer:
    """The tokenizer in ``path``, one of the files ``found`` in its directory."""
    data = found[path]
    format = sniff(data, str(path))
    if format == "json":
        from gpt_fast.tokenizer.hf_json import HfJsonTokenizer

        return HfJsonTokenizer(parse_json_object(data, path), settings, source=str(path))
    if format == "tiktoken":
        from gpt_fast.tokenizer.tiktoken_ranks import TiktokenTokenizer

        return TiktokenTokenizer(data, settings, source=str(path))
    from gpt_fast.tokenizer.hf_json import prefixes_every_segment
    from gpt_fast.tokenizer.sentencepiece_model import SentencePieceTokenizer

    beside = path.parent / "tokenizer.json"
    converted: dict[str, Any] = {}
    if beside != path:
        converted = parse_json_object(found[beside], beside) if beside in found else read_json_object(beside)
    added = read_added_tokens(converted, str(beside))
    added |= {token.id: token for token in settings.added}
    return SentencePieceTokenizer(
        data,
        replace(settings, added=tuple(added[id] for id in sorted(added))),
        source=str(path),
        prefix_every_segment=prefixes_every_segment(converted) if converted else settings.legacy is not False,
    )


def _load_vocab_and_merges(directory: Path, settings: Settings) -> Tokenizer:
    from gpt_fast.tokenizer.hf_json import HfJsonTokenizer, gpt2_spec

    vocab = read_json_object(directory / "vocab.json")
    if not settings.special_names and _GPT2_END in vocab:  # GPT-2's own release has no file that names it
        settings = replace(settings, bos_token=_GPT2_END, eos_token=_GPT2_END, special_names=frozenset({_GPT2_END}))
    source = str(directory / "vocab.json with merges.txt")
    merges = (directory / "merges.txt").read_text(encoding="utf-8")
    return HfJsonTokenizer(gpt2_spec(vocab, merges, settings, source), settings, source=source)
