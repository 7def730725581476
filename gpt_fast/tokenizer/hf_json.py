"""Hugging Face's tokenizer.json, and GPT-2's vocab.json with merges.txt, by the tokenizers library.

https://github.com/huggingface/tokenizers; the file's pipeline (normalizer, pre-tokenizer, model) encodes. Decoding is
ours: the file's decoder steps are turned into one table of bytes, so that text can be streamed byte by byte.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt_fast.errors import TokenizerError
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.settings import AddedToken, Settings, read_added_tokens
from gpt_fast.tokenizer.tiktoken_ranks import QWEN_PATTERN

PieceToBytes = Callable[[str], bytes]


def _byte_level_alphabet() -> dict[int, int]:
    """Character to byte of GPT-2's alphabet: printable Latin-1 stands for itself, the others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {value: value for value in printable} | {0x100 + i: value for i, value in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


class HfJsonTokenizer(Tokenizer):
    """A tokenizer.json, given as its parsed object (which is changed), plus the settings beside it.

    BOS follows the file's post-processor, unless ``add_bos_token`` says otherwise. Truncation and padding that a file
    may carry are switched off: a prompt must not be cut in silence. Added tokens that the checkpoint itself declares
    to be text (``special: false``) are matched in any text, as the library does."""

    def __init__(self, spec: dict[str, Any], settings: Settings, *, source: str) -> None:
        """Raises TokenizerError, naming ``source``, if the library cannot read it or its ids contradict each other."""
        added = _merge_added_tokens(spec, settings, source)
        self._library = _load(spec, source)
        self._library.encode_special_tokens = True  # special tokens in a text are text
        self._lock = threading.Lock()  # over the switch above: it belongs to the tokenizer, not to a call
        for token in added.values():
            if (found := self._library.token_to_id(token.content)) != token.id:
                why = f"the added token {token.content!r} has id {token.id}, but loads as {found}"
                raise TokenizerError(f"{source}: {why}")
        decoder = bytes_decoder(spec.get("decoder"))
        pieces, unnamed = _pieces(
            self._library.get_vocab(with_added_tokens=False), added, decoder[0] if decoder else str.encode
        )
        bos, prefix = _bos(self._library, settings)
        eos = self._library.token_to_id(settings.eos_token) if settings.eos_token else None
        super().__init__(
            pieces,
            {id: token.content for id, token in added.items() if token.special} | unnamed,
            bos_token_id=bos,
            eos_token_ids=() if eos is None else (eos,),
            prefix_ids=prefix,
            leading_spaces_dropped=decoder[1] if decoder else 0,
        )
        self.bytewise = decoder is not None

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        with self._lock:
            self._library.encode_special_tokens = not allow_special
            return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.bytewise:
            return super().decode(ids, skip_special)
        kept = [int(id) for id in ids if not (self.is_special(id) and skip_special)]
        return str(self._library.decode(kept, skip_special_tokens=False))


def gpt2_spec(vocab: Mapping[str, int], merges: str, settings: Settings, source: str) -> dict[str, Any]:
    """vocab.json and the text of merges.txt as a tokenizer.json object; ``tokenizer_class`` decides the splitting.
    Raises TokenizerError for a class whose splitting rules are not known."""
    name = (settings.tokenizer_class or "GPT2Tokenizer").removesuffix("Fast")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    normalizer = None  # what is missing or None is off
    if name == "Qwen2Tokenizer":
        normalizer = {"type": "NFC"}
        split = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    elif name != "GPT2Tokenizer":
        todo = "save its tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        raise TokenizerError(f"{source}: how {name} splits text is not known from vocab.json and merges.txt; {todo}")
    lines = [line for line in merges.split("\n") if line.strip(" \r") and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": dict(vocab), "merges": [line.rstrip("\r") for line in lines]}
    spec = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": byte_level, "model": model}
    return {"version": "1.0", "added_tokens": [], "post_processor": None} | spec


def bytes_decoder(decoder: Mapping[str, Any] | None) -> tuple[PieceToBytes, int] | None:
    """A decoder's steps as a function from piece to bytes, and the number of leading spaces that it drops from a text.
    None if decoding is more than a concatenation (WordPiece, CTC ...), where text is decoded by the library."""
    replacements: list[tuple[str, str]] = []
    byte_level = byte_fallback = fused = False
    dropped = 0
    for step in _flatten(decoder):
        kind = step["type"]
        if kind == "ByteLevel" and not replacements:
            byte_level = True
        elif kind == "Replace" and "String" in step["pattern"] and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not fused:
            replacements.append((step["replacement"], " "))
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            dropped = 0 if scheme == "never" else 1
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
            dropped = step["start"]
        else:
            return None
    if not (byte_level or replacements or byte_fallback):
        return None  # no decoder: the library puts spaces between the tokens

    def piece_to_bytes(piece: str) -> bytes:
        if byte_level:
            return _byte_level_bytes(piece)
        for old, new in replacements:
            piece = piece.replace(old, new)
        return (_fallback_byte(piece) if byte_fallback else None) or piece.encode()

    return piece_to_bytes, dropped


def prefixes_every_segment(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json's pipeline puts the dummy prefix behind added tokens too, not only at the start."""
    steps = [*_flatten(spec.get("normalizer")), *_flatten(spec.get("pre_tokenizer"))]
    return any(step["type"] == "Prepend" or step.get("prepend_scheme") == "always" for step in steps)


def _flatten(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    for name in ("decoders", "normalizers", "pretokenizers"):
        if name in step:
            return [inner for part in step[name] for inner in _flatten(part)]
    return [step]


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[ord(char)] for char in piece])
    except KeyError:
        return piece.encode()  # outside the alphabet, so the piece is plain text; the library does the same


def _fallback_byte(piece: str) -> bytes | None:
    found = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(found[1]) if found else None


def _merge_added_tokens(spec: dict[str, Any], settings: Settings, source: str) -> dict[int, AddedToken]:
    """The added tokens of the file and of the settings by id; ``spec`` then holds them all. Special ones are matched
    before normalization: Llama 2's file asks for the opposite, and so its dummy prefix hides every ``<s>`` that does
    not follow a space."""
    tokens = read_added_tokens(spec, source)
    try:
        vocab = spec["model"]["vocab"]
    except (KeyError, TypeError) as error:
        why = "is JSON, but not a tokenizer.json of the tokenizers library"
        raise TokenizerError(f"{source} {why}: {error!r}") from error
    for token in settings.added:
        tokens.setdefault(token.id, token)
        if token.special:
            tokens[token.id] = replace(tokens[token.id], special=True)
    known = {token.content for token in tokens.values()}
    if isinstance(vocab, dict):  # Unigram has a list, whose special tokens are always added ones
        for name in sorted((settings.special_names & vocab.keys()) - known):
            tokens[vocab[name]] = AddedToken(vocab[name], name, special=True)
    for id, token in tokens.items():
        if token.special or token.content in settings.special_names:
            tokens[id] = replace(token, special=True, normalized=False)
    # The library numbers tokens that are not in the vocabulary by their order.
    spec["added_tokens"] = [vars(tokens[id]) for id in sorted(tokens)]
    return tokens


def _load(spec: dict[str, Any], source: str) -> Any:
    import tokenizers

    spec["truncation"] = spec["padding"] = None
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        why = f"is refused by the tokenizers library ({error}); fetch the file again"
        raise TokenizerError(f"{source} {why}") from error


def _pieces(
    vocab: Mapping[str, int], added: Mapping[int, AddedToken], piece_to_bytes: PieceToBytes
) -> tuple[list[bytes], dict[int, str]]:
    """Each id's bytes, and the ids below the largest that no token has."""
    size = 1 + max([*vocab.values(), *added])
    known = {id: piece_to_bytes(piece) for piece, id in vocab.items()}
    known |= {id: token.content.encode() for id, token in added.items()}
    return [known.get(id, b"") for id in range(size)], {id: "" for id in range(size) if id not in known}


def _bos(library: Any, settings: Settings) -> tuple[int | None, tuple[int, ...]]:
    """The BOS token and what ``encode(bos=True)`` prepends: what the file's post-processor puts in front of a text."""
    plain = library.encode("a", add_special_tokens=False).ids
    processed = library.encode("a", add_special_tokens=True).ids
    starts = (start for start in range(len(processed)) if processed[start : start + len(plain)] == plain)
    prefix = tuple(processed[: next(starts, 0)])
    bos = library.token_to_id(settings.bos_token) if settings.bos_token else None
    if bos is None and prefix:
        bos = prefix[0]
    if settings.add_bos_token is False:
        prefix = ()
    elif settings.add_bos_token and not prefix and bos is not None:
        prefix = (bos,)
    return bos, prefix
