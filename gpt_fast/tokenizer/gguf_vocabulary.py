"""Vocabularies in the metadata of GGUF files, as the files that a Hugging Face folder would have instead.

``tokenizer.ggml.model`` names the kind. ``llama``: pieces with scores, a SentencePiece model (tokenizer.model).
``gpt2``: byte pairs with merges (tokenizer.json); ``tokenizer.ggml.pre`` says how text is split before, one row of
``SPLITS`` each. The chat template and the special tokens go into tokenizer_config.json.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.errors import TokenizerError, TokenizerMissing
from gpt_fast.gguf import read_metadata
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.hf_json import BYTE_LEVEL, HfJsonTokenizer, bpe_spec, split
from gpt_fast.tokenizer.sentencepiece_model import SPACE, SentencePieceTokenizer
from gpt_fast.tokenizer.settings import settings_of
from gpt_fast.tokenizer.tiktoken_ranks import LLAMA3_PATTERN, QWEN_PATTERN

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # of tokens; as SentencePiece numbers them
_BPE = 2  # the kind of a SentencePiece model that merges by score

# Tokens that end an answer; files name one of them as the end, and models were tuned to write another.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # tokenizer_config.json's names, and GGUF's
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's


class Split(NamedTuple):
    """How text is cut into words before pairs are merged. ``steps``: pre-tokenizers, one after the other.
    ``whole``: a word that is a token is not merged. ``add_bos``: where the file does not say."""

    steps: tuple[Mapping[str, Any], ...]
    nfc: bool = False
    whole: bool = False
    add_bos: bool = False


_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BYTES = BYTE_LEVEL | {"use_regex": False}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_SHORTENED}|{_CASED}{_UPPER}+{_LOWER}*{_SHORTENED}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = Split((split(LLAMA3_PATTERN), _BYTES), whole=True, add_bos=True)
_GPT2 = Split((BYTE_LEVEL,))
_DIGITS = Split(({"type": "Digits", "individual_digits": True}, BYTE_LEVEL))
_QWEN = Split((split(QWEN_PATTERN), _BYTES), nfc=True)
SPLITS = {
    "default": Split(
        (split(r"[\p{P}\$\+<=>\^~\|]+"), split(_WORDS), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), _BYTES)
    ),
    "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3._replace(whole=False, add_bos=False), "smaug-bpe": _LLAMA3._replace(whole=False, add_bos=False),
    "qwen2": _QWEN, "deepseek-r1-qwen": _QWEN._replace(nfc=False),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS,
    "gpt-4o": Split((split(_GPT4O), _BYTES)),
    "tekken": Split((split(_TEKKEN), _BYTES), whole=True, add_bos=True),
}  # fmt: skip


_TODO = "put the model's own tokenizer.json beside the weights: gpt-fast convert FILE --tokenizer FILE --out DIR"


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end an answer: those that the keys name, and control tokens known to do so."""
    named = [id for name in ("eos", "eot", "eom") if (id := token_id(metadata, name)) is not None]
    controls = {token: id for id, token in reversed(_of_kind(metadata, _CONTROL).items())}
    return list(dict.fromkeys([*named, *(controls[end] for end in _ENDS if end in controls)]))


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of the token ``name``, such as bos; None where the metadata have none."""
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id if isinstance(id, int) and not isinstance(id, bool) else None


def _of_kind(metadata: Mapping[str, Any], wanted: int) -> dict[int, str]:
    """Tokens of the kind ``wanted`` by id; none where the metadata do not say."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, array):
        return {}
    pairs = enumerate(zip(tokens, types, strict=False))
    return {i: token for i, (token, kind) in pairs if _meant(token, kind) == wanted}


def _meant(token: str, kind: int) -> int:
    """The kind of ``token``. Until 2024 llama.cpp's converter declared all added tokens to be user-defined."""
    if kind == _USER_DEFINED and token in _ENDS:
        return _CONTROL
    return kind if kind in range(_NORMAL, _BYTE + 1) else _NORMAL


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer in the file ``path``. Raises as ``load_tokenizer`` does, and CheckpointError for damaged files."""
    files, source = tokenizer_files(path), f"the vocabulary in {path}"
    settings = settings_of(json.loads(files["tokenizer_config.json"]), {}, {}, source)
    if "tokenizer.model" in files:
        return SentencePieceTokenizer(files["tokenizer.model"], settings, {}, source=source)
    return HfJsonTokenizer(json.loads(files["tokenizer.json"]), settings, source=source)


def tokenizer_config(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json would say for the file ``path``: special tokens, chat template. Raises
    CheckpointError."""
    return _config(read_metadata(path))


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    split = SPLITS.get(str(metadata.get("tokenizer.ggml.pre")), _GPT2)
    given = metadata.get("tokenizer.ggml.add_bos_token")
    usual = metadata.get("tokenizer.ggml.model") == "llama" or split.add_bos
    out: dict[str, Any] = {"add_bos_token": given if isinstance(given, bool) else usual}
    for ours, name in _NAMED.items():
        if (token := _named(metadata, name)) is not None:
            out[f"{ours}_token"] = token
    if metadata.get("tokenizer.ggml.model") == "llama":
        out["added_tokens_decoder"] = _markup(metadata)
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    named = [
        {"name": name, "template": metadata[key]} for name, key in keys.items() if isinstance(metadata.get(key), str)
    ]
    if len(named) == 1 and named[0]["name"] == "default":
        return out | {"chat_template": named[0]["template"]}
    return out | ({"chat_template": named} if named else {})


def _markup(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens that are cut out of a text before a SentencePiece model sees the rest: user-defined ones, such as
    ``<|im_start|>`` where a converter did not know it for a control token. The text behind them gets the space that a
    text gets at its start. Where none does, the model finds them as well, unless it has the spelling of one twice.

    In Phi-3's vocabularies all markup of chats swallows the white space behind it: no key says so, and llama.cpp knows
    it too. Of it ``</s>`` is declared to be text."""
    controls, texts = (_of_kind(metadata, kind) for kind in (_CONTROL, _USER_DEFINED))
    if metadata.get("general.architecture") == "phi3":
        return {
            str(id): {"content": token, "special": id in controls, "rstrip": True}
            for id, token in (controls | texts).items()
            if token not in _WITHOUT_RSTRIP
        }
    spelled = {_spelled(token) for token in texts.values() if " " in token}
    twice = spelled and spelled & {*metadata["tokenizer.ggml.tokens"]}
    if not _has_prefix(metadata) and not twice:
        return {}
    return {str(id): {"content": token, "special": False} for id, token in texts.items()}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer in the GGUF file ``path`` as files by name. Raises TokenizerMissing where it has none,
    TokenizerError for one that is not supported or makes no sense."""
    metadata = read_metadata(path)
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind in (None, "none", "no_vocab"):
        raise TokenizerMissing(f"{path} has no tokenizer (tokenizer.ggml.model is {kind!r})")
    if kind not in ("llama", "gpt2"):
        raise TokenizerError(f"{path}: tokenizer.ggml.model {kind!r:.40} is not supported, only llama, gpt2; {_TODO}")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{path}: tokenizer.ggml.tokens, the list of tokens, is missing")
    given = metadata.get("tokenizer.ggml.token_type", array("i", [_NORMAL]) * len(tokens))
    if not isinstance(given, array) or len(given) != len(tokens):
        raise TokenizerError(f"{path}: tokenizer.ggml.token_type must have a number for each of {len(tokens)} tokens")
    types = [int(_meant(token, kind)) for token, kind in zip(tokens, given, strict=True)]
    config = json.dumps(_config(metadata), ensure_ascii=False, indent=2).encode()
    if kind == "llama":
        made = {"tokenizer.model": _sentencepiece(path, metadata, tokens, types)}
    else:
        made = {"tokenizer.json": _byte_pairs(path, metadata, tokens, types)}
    return made | {"tokenizer_config.json": config}


def _named(metadata: Mapping[str, Any], name: str) -> str | None:
    """The token ``name``, such as bos; None where there is none."""
    id, tokens = token_id(metadata, name), metadata.get("tokenizer.ggml.tokens")
    return tokens[id] if isinstance(tokens, list) and id is not None and 0 <= id < len(tokens) else None


def _byte_pairs(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> bytes:
    """tokenizer.json."""
    name, merges = str(metadata.get("tokenizer.ggml.pre", "default")), metadata.get("tokenizer.ggml.merges")
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        raise TokenizerError(f"{path}: tokenizer.ggml.pre {name!r:.40} is not supported, only {known}; {_TODO}")
    if not isinstance(merges, list):
        raise TokenizerError(f"{path}: tokenizer.ggml.merges, the list of merges, is missing")
    row, kinds = SPLITS[name], list(zip(tokens, types, strict=True))
    vocab = {token: id for id, (token, kind) in enumerate(kinds) if kind != _UNUSED}
    spec = bpe_spec(vocab, merges, {"type": "Sequence", "pretokenizers": list(row.steps)})
    spec["normalizer"] = {"type": "NFC"} if row.nfc else None
    spec["model"]["ignore_merges"] = row.whole
    spec["added_tokens"] = [
        {"id": id, "content": token, "special": kind == _CONTROL, **dict.fromkeys(_FLAGS, False)}
        for id, (token, kind) in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED) and vocab[token] == id
    ]
    return json.dumps(spec, ensure_ascii=False).encode()


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> bytes:
    """tokenizer.model."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, array) or len(scores) != len(tokens):
        raise TokenizerError(f"{path}: tokenizer.ggml.scores must have a number for each of {len(tokens)} tokens")
    named = {name: _named(metadata, name) for name in ("unknown", "bos", "eos")}
    kinds = list(types)
    if (unknown := named["unknown"]) is not None:  # a model has one
        kinds = [_CONTROL if kind == _UNKNOWN else kind for kind in kinds]
        kinds[tokens.index(unknown)] = _UNKNOWN
    known, spelled = set(tokens), [_spelled(token) for token in tokens]
    pieces = (
        _field(1, (token if ours in known else ours).encode()) + _field(2, float(score)) + _field(3, kind)
        for token, ours, score, kind in zip(tokens, spelled, scores, kinds, strict=True)
    )
    trainer = _field(3, _BPE) + _field(35, int(_BYTE in kinds))
    for number, token in zip((45, 46, 47), named.values(), strict=True):
        trainer += _field(number, token.encode()) if token is not None else b""
    squeeze = metadata.get("tokenizer.ggml.remove_extra_whitespaces")
    normalizer = _field(1, b"identity") + _field(3, int(_has_prefix(metadata))) + _field(4, int(squeeze is True))
    return b"".join(_field(1, piece) for piece in pieces) + _field(2, trainer) + _field(3, normalizer)


def _has_prefix(metadata: Mapping[str, Any]) -> bool:
    """Whether a text begins behind a space; Gemma's do not, whose first files lack the key."""
    given = metadata.get("tokenizer.ggml.add_space_prefix")
    usual = not str(metadata.get("general.architecture")).startswith("gemma")
    return given if isinstance(given, bool) else usual


def _spelled(token: str) -> str:
    """``token`` as a model finds it: llama.cpp's converter writes spaces of user-defined tokens, such as Gemma's."""
    return token.replace(" ", SPACE)


def _field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protocol buffer: SentencePiece's models are such (its sentencepiece_model.proto has the numbers)."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """``value``, at least 0."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
