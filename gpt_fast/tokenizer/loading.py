"""Finds a checkpoint's tokenizer. Files are known by what is in them; their names only say where to look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpt_fast.errors import TokenizerError, TokenizerMissing
from gpt_fast.gguf import is_gguf
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.gguf_vocabulary import load_gguf
from gpt_fast.tokenizer.hf_json import HfJsonTokenizer, gpt2_spec
from gpt_fast.tokenizer.sentencepiece_model import SentencePieceTokenizer
from gpt_fast.tokenizer.settings import Settings, parse_json_object, read_json_object, read_settings
from gpt_fast.tokenizer.tiktoken_ranks import TiktokenTokenizer

_PREFERRED = ("sentencepiece", "json", "tiktoken", "gpt2")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_GPT2_END = "<|endoftext|>"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, of one tokenizer file with what lies beside it, or of a GGUF file.

    Of several in a directory the first is taken: SentencePiece's tokenizer.model, tokenizer.json, tiktoken ranks
    (tokenizer.model or ``*.tiktoken``), vocab.json with merges.txt. The first is what the model was trained with; a
    tokenizer.json beside it is a conversion, and some tokenize differently. It is still read for its added tokens and
    for where text gets the dummy prefix, since chat templates are written against it.

    If the library of one is not installed, the next is tried. Nothing is downloaded, unpickled or executed.
    Raises TokenizerMissing if there is none, TokenizerError if the file is corrupt: naming it, and what to do."""
    path = Path(path)
    if not path.exists():
        raise TokenizerError(f"{path} does not exist; give a checkpoint directory or a tokenizer file")
    if is_gguf(path):
        return load_gguf(path)
    directory = path if path.is_dir() else path.parent
    names = ["tokenizer.model", "tokenizer.json", *sorted(file.name for file in directory.glob("*.tiktoken"))]
    files = [directory / name for name in names] if path.is_dir() else [path, directory / "tokenizer.json"]
    found = {file: file.read_bytes() for file in files if file.is_file()}  # each is opened once
    formats = {file: sniff(data, str(file)) for file, data in found.items() if path in (file, directory)}
    if path.is_dir() and (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        formats[path / "vocab.json"] = "gpt2"
    settings = read_settings(directory)
    missing: ImportError | None = None
    for file in sorted(formats, key=lambda file: _PREFERRED.index(formats[file])):
        try:
            return _load(formats[file], file, found, settings)
        except ImportError as error:
            missing = error
    if missing is not None:
        raise TokenizerError(f"the tokenizer in {path} needs a package: pip install {missing.name}") from missing
    what = "none of tokenizer.model, tokenizer.json, *.tiktoken, or vocab.json with merges.txt is there"
    raise TokenizerMissing(f"{path} has no tokenizer: {what}; copy the model's tokenizer files into it")


def sniff(data: bytes, source: str) -> str:
    """The format of a tokenizer file from its first bytes. Raises TokenizerError, saying what is wrong, for others."""
    start = data[:4096]
    if not data:
        raise TokenizerError(f"{source} is empty; fetch the file again")
    if start.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{source} is a Git LFS pointer, not the file; run `git lfs pull` in its repository")
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


def _load(format: str, path: Path, found: Mapping[Path, bytes], settings: Settings) -> Tokenizer:
    """The tokenizer in ``path``. ``found``: the content of the files, of a tokenizer.json beside it too."""
    source = str(path)
    if format == "json":
        return HfJsonTokenizer(parse_json_object(found[path], path), settings, source=source)
    if format == "tiktoken":
        return TiktokenTokenizer(found[path], settings, source=source)
    if format == "sentencepiece":
        beside = path.parent / "tokenizer.json"
        converted = parse_json_object(found[beside], beside) if beside in found and beside != path else {}
        return SentencePieceTokenizer(found[path], settings, converted, source=source)
    vocab = read_json_object(path)
    if not settings.special_names and _GPT2_END in vocab:  # GPT-2's own release has no file that names it
        settings = replace(settings, bos_token=_GPT2_END, eos_token=_GPT2_END, special_names=frozenset({_GPT2_END}))
    merges = path.with_name("merges.txt").read_text(encoding="utf-8")
    source = f"{path} with merges.txt"
    return HfJsonTokenizer(gpt2_spec(vocab, merges, settings, source), settings, source=source)
