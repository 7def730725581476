"""Hugging Face's tokenizer.json, and GPT-2's vocab.json with merges.txt, by the tokenizers library
(https://github.com/huggingface/tokenizers): the file's normalizer, pre-tokenizer and model encode. Decoding is ours:
the decoder's steps are turned into one table of bytes, so that text can be streamed byte by byte."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError, TokenizerError
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.settings import MAX_IDS, AddedToken, Settings, merge_added_tokens, read_added_tokens
from gpt_fast.tokenizer.tiktoken_ranks import QWEN_PATTERN

# GPT-2's alphabet for bytes: printable Latin-1 stands for itself, the other bytes are the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = [*_PRINTABLE, *(value for value in range(256) if value not in _PRINTABLE)]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_OF_CHAR = dict(zip(map(chr, [*_PRINTABLE, *range(0x100, 0x200)]), _BYTES, strict=False))

MALFORMED = (AttributeError, KeyError, TypeError)  # what steps of other types and without their fields raise below


class HfJsonTokenizer(Tokenizer):
    """A tokenizer.json, given as its parsed object (which is changed), plus the settings beside it.

    BOS follows the file's post-processor, unless ``add_bos_token`` says otherwise. Truncation and padding that a file
    may carry are switched off: a prompt must not be cut in silence. Added tokens that the checkpoint itself declares
    to be text (``special: false``) are matched in any text, as the library does."""

    def __init__(self, spec: dict[str, Any], settings: Settings, *, source: str) -> None:
        """Raises TokenizerError, naming ``source``, if the library cannot read it or its ids contradict each other."""
        try:
            vocab = spec["model"]["vocab"]
        except (KeyError, TypeError) as error:
            why = "is JSON, but not a tokenizer.json of the tokenizers library"
            raise TokenizerError(f"{source} {why}: {error!r}") from error
        vocab = vocab if isinstance(vocab, dict) else {}  # Unigram has a list; its special tokens are all added ones
        named = {name: vocab[name] for name in settings.special_names if isinstance(vocab.get(name), int)}
        listed = read_added_tokens(spec, source)
        added = merge_added_tokens(listed, settings.beside(listed), vocab=named, special_names=settings.special_names)
        self._library = _load(spec, added, source)
        self._lock = threading.Lock()  # over the library's switch for special tokens, which is not a call's own
        for token in added.values():
            if (found := self._library.token_to_id(token.content)) != token.id:
                why = f"the added token {token.content!r} has id {token.id}, but loads as {found}"
                raise TokenizerError(f"{source}: {why}")
        try:
            decoder = bytes_decoder(spec.get("decoder"))
        except MALFORMED as error:
            raise TokenizerError(f"{source}: its decoder is malformed: {error!r}") from error
        self.bytewise = decoder is not None
        piece_to_bytes, dropped = decoder or (lambda piece, is_added: piece.encode(), 0)
        vocab = self._library.get_vocab(with_added_tokens=False)
        pieces = {id: piece_to_bytes(piece, False) for piece, id in vocab.items()}
        if (largest := max(pieces, default=0)) >= MAX_IDS:
            raise TokenizerError(f"{source}: a token has the id {largest}; fetch the file again")
        # As the library knows them: what it finds in normalized text has what the normalizer puts in front.
        names = {id: self._library.id_to_token(id) for id in added}
        pieces |= {id: piece_to_bytes(name, name == added[id].content) for id, name in names.items()}
        bos, prefix = _bos(self._library, settings)
        eos = self._library.token_to_id(settings.eos_token) if settings.eos_token else None
        super().__init__(
            pieces,
            {id: token.content for id, token in added.items() if token.special},
            bos_token_id=bos,
            eos_token_ids=() if eos is None else (eos,),
            prefix_ids=prefix,
            leading_spaces_dropped=dropped,
        )

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        with self._lock:
            self._library.encode_special_tokens = not allow_special
            try:
                return list(self._library.encode(text, add_special_tokens=False).ids)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # no token for what the vocabulary does not know; or the library panics
                raise RequestError(f"the model's vocabulary has no tokens for all of this text: {error}") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.bytewise:
            return super().decode(ids, skip_special)
        kept = [int(id) for id in ids if not (self.is_special(id) and skip_special)]
        return str(self._library.decode(kept, skip_special_tokens=False))


def gpt2_spec(vocab: Mapping[str, int], merges: str, settings: Settings, source: str) -> dict[str, Any]:
    """vocab.json and the text of merges.txt as a tokenizer.json object; ``tokenizer_class`` decides the splitting.
    Raises TokenizerError for a class whose splitting rules are not known."""
    name = (settings.tokenizer_class or "GPT2Tokenizer").removesuffix("Fast")
    bytes_step = BYTE_LEVEL | {"add_prefix_space": bool(settings.add_prefix_space)}
    qwen_steps = {"type": "Sequence", "pretokenizers": [split(QWEN_PATTERN), bytes_step | {"use_regex": False}]}
    splitting: dict[str, tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = {
        "GPT2Tokenizer": (None, bytes_step),
        "Qwen2Tokenizer": ({"type": "NFC"}, qwen_steps),
    }
    if name not in splitting:
        todo = "save its tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        raise TokenizerError(f"{source}: how {name} splits text is not known from vocab.json and merges.txt; {todo}")
    lines = [line for line in merges.split("\n") if line.strip(" \r") and not line.startswith("#version")]
    normalizer, pre_tokenizer = splitting[name]
    return bpe_spec(vocab, [line.rstrip("\r") for line in lines], pre_tokenizer) | {"normalizer": normalizer}


def split(pattern: str) -> dict[str, Any]:
    """The step that cuts what the regular expression ``pattern`` matches from what is around it."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def bpe_spec(vocab: Mapping[str, int], merges: Sequence[str], pre_tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json object of byte pairs in GPT-2's alphabet, without added tokens."""
    model = {"type": "BPE", "vocab": dict(vocab), "merges": list(merges)}
    steps = {"normalizer": None, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": BYTE_LEVEL}
    return {"version": "1.0", "added_tokens": [], "model": model} | steps


def bytes_decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str, bool], bytes], int] | None:
    """A decoder's steps as a function of a piece, and of whether that is the text of an added token, to bytes; and the
    number of leading spaces that it drops from a text. None if decoding is more than a concatenation (WordPiece, CTC
    ...), where text is decoded by the library."""
    replacements: list[tuple[str, str]] = []
    kinds: set[str] = set()
    dropped = 0
    for step in _flatten(decoder):
        kind, joined = step["type"], bool(kinds & {"ByteLevel", "Fuse"})  # joined: there is one text, no more pieces
        if kind == "Replace" and "String" in step["pattern"] and not joined:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not joined:
            replacements.append((step["replacement"], " "))
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            dropped = 0 if scheme == "never" else 1
        elif kind == "Strip" and joined and step["content"] == " " and not step["stop"]:
            dropped = step["start"]
        elif kind not in ("ByteFallback", "Fuse") and not (kind == "ByteLevel" and not replacements):
            return None
        kinds.add(kind)
    if not kinds - {"Fuse", "Strip"}:
        return None  # no decoder: the library puts spaces between the tokens

    def piece_to_bytes(piece: str, is_added: bool) -> bytes:
        # Any other piece is plain text. So are added tokens; but Gemma's have the marks for spaces that are replaced.
        if "ByteLevel" in kinds and not is_added and set(piece) <= BYTE_OF_CHAR.keys():
            return bytes([BYTE_OF_CHAR[char] for char in piece])
        for old, new in replacements:
            piece = piece.replace(old, new)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else piece.encode()

    return piece_to_bytes, dropped


def prefixes_every_segment(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json's pipeline puts the dummy prefix behind added tokens too, not only at the start."""
    steps = [*_flatten(spec.get("normalizer")), *_flatten(spec.get("pre_tokenizer"))]
    return any(step["type"] == "Prepend" or step.get("prepend_scheme") == "always" for step in steps)


def _flatten(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    parts = next((step[name] for name in ("decoders", "normalizers", "pretokenizers") if name in step), None)
    return [step] if parts is None else [inner for part in parts for inner in _flatten(part)]


def _load(spec: dict[str, Any], added: Mapping[int, AddedToken], source: str) -> Any:
    """The library's tokenizer with the tokens ``added``. Special ones are matched before normalization: Llama 2's file
    asks for the opposite, and so its dummy prefix hides every ``<s>`` that does not follow a space."""
    import tokenizers

    spec["truncation"] = spec["padding"] = None
    names = [token.content for token in added.values() if token.special]
    # The library numbers tokens that are not in the vocabulary by their order.
    in_order = [added[id] for id in sorted(added)]
    spec["added_tokens"] = [vars(token) | {"normalized": token.normalized and not token.special} for token in in_order]
    try:
        if _makes_any(spec["model"], names):
            steps = [spec.get("pre_tokenizer"), _cut_names(names)]
            spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step for step in steps if step is not None]}
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
        library.encode("a")  # its post-processor may name tokens that are not there
        return library
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and where it panics not even that
        why = f"is refused by the tokenizers library ({error}); fetch the file again"
        raise TokenizerError(f"{source} {why}") from error


def _makes_any(model: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether the model may find one of ``names`` in a text: byte pairs make what they merge, other models and those
    that do not merge a whole word find all pieces of their vocabulary."""
    if model.get("type") != "BPE":
        return True
    own = set(names) & model["vocab"].keys()
    merges = model.get("merges") or () if own else ()
    made = (merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge) for merge in merges)
    return bool(own and model.get("ignore_merges")) or any(name in own for name in made)


def _cut_names(names: Sequence[str]) -> dict[str, Any] | None:
    """The step that cuts a text behind the first character of each of ``names``: what is on both sides spells the name
    without being it."""
    cuts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names if len(name) > 1]
    return split("|".join(cuts)) | {"behavior": "MergedWithPrevious"} if cuts else None


def _bos(library: Any, settings: Settings) -> tuple[int | None, tuple[int, ...]]:
    """The BOS token and what ``encode(bos=True)`` prepends: what the file's post-processor puts in front of a text."""
    plain, processed = (library.encode("a", add_special_tokens=add).ids for add in (False, True))
    starts = (start for start in range(len(processed)) if processed[start : start + len(plain)] == plain)
    prefix = tuple(processed[: next(starts, 0)])
    bos = library.token_to_id(settings.bos_token) if settings.bos_token else None
    if bos is None and prefix:
        bos = prefix[0]
    return bos, settings.prefix(bos, prefix)
