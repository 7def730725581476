"""Tokenizer files in every format, made of the two free vocabularies in tests/data: Mistral's and GPT-2's.

Llama 3 and Qwen are known by their number of ranks. Their own ranks may not be copied, so GPT-2's stand for them,
filled up with tokens that no text has.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

DIGITS_OF_A_TOKEN = {"llama3-tiktoken": "{1,3}", "qwen-tiktoken": ""}
# The chat markup and its flags are those of Phi-3's tokenizer.json.
CHAT_TOKENS = ["<|endoftext|>", "<|assistant|>", *(f"<|placeholder{i}|>" for i in range(1, 5)), "<|system|>", "<|end|>"]
CHAT_TOKENS += ["<|placeholder5|>", "<|placeholder6|>", "<|user|>"]


def write_all(data_dir: Path, out: Path) -> None:
    """A folder in ``out`` for each back-end."""
    given = data_dir / "tokenizers"
    model = given / "mistral" / "tokenizer.model.v1"
    merges = (given / "gpt2" / "merges.txt").read_text(encoding="utf-8")
    names = ("mistral-sentencepiece", "mistral-json", "chat-json", "llama3-tiktoken", "qwen-tiktoken")
    for name in (*names, "gpt2-vocab-merges"):
        (out / name).mkdir()
    shutil.copy(model, out / "mistral-sentencepiece" / "tokenizer.model")
    spec = mistral_json(model)
    _write_json(out / "mistral-json" / "tokenizer.json", spec)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(out / "mistral-json" / "tokenizer_config.json", named | {"add_bos_token": True})
    _write_json(out / "chat-json" / "tokenizer.json", with_chat_tokens(spec))
    named = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<|endoftext|>"}
    _write_json(out / "chat-json" / "tokenizer_config.json", named | {"add_bos_token": False})
    (out / "llama3-tiktoken" / "tokenizer.model").write_bytes(rank_file(merges, 128_000))
    (out / "qwen-tiktoken" / "qwen.tiktoken").write_bytes(rank_file(merges, 151_643))
    _write_json(out / "gpt2-vocab-merges" / "vocab.json", gpt2_vocab(merges))
    shutil.copy(given / "gpt2" / "merges.txt", out / "gpt2-vocab-merges")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


# Mistral


def mistral_json(model: Path) -> dict[str, Any]:
    """The SentencePiece model as a tokenizer.json, in the form of the published conversions of such models."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocab = {piece: id for id, piece in enumerate(sp.id_to_piece(list(range(sp.vocab_size()))))}
    texts = {p: id for p, id in vocab.items() if not (sp.is_control(id) or sp.is_unknown(id) or sp.is_byte(id))}
    merges = [
        (-sp.get_score(id), cut, f"{piece[:cut]} {piece[cut:]}")
        for piece, id in texts.items()
        for cut in range(1, len(piece))
        if piece[:cut] in texts and piece[cut:] in texts
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": name, "normalized": True, "special": True} | flags
            for id, name in enumerate(("<unk>", "<s>", "</s>"))
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [merge for _, _, merge in sorted(merges)],
        },
    }


def with_chat_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same with chat markup behind the vocabulary, no BOS, and an end of sequence that is declared to be text."""
    flags: dict[str, Any] = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    added = [token | {"normalized": False} for token in spec["added_tokens"][:2]]
    added.append(flags | {"id": 2, "content": "</s>", "rstrip": True, "special": False})
    added += [
        flags | {"id": 32_000 + i, "content": name, "rstrip": name != "<|endoftext|>"}
        for i, name in enumerate(CHAT_TOKENS)
    ]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": {}}
    return spec | {"added_tokens": added, "post_processor": processor}


# GPT-2


def gpt2_vocab(merges: str) -> dict[str, int]:
    """vocab.json: the bytes in the order of their characters, what each merge makes, the end of text."""
    pieces = [*_byte_characters().values(), *(line.replace(" ", "") for line in merges.split("\n") if line)]
    return {piece: id for id, piece in enumerate([*pieces, "<|endoftext|>"])}


def _byte_characters() -> dict[int, str]:
    """GPT-2's character of each byte: printable Latin-1 first, then the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(0x100 + i) for i, value in enumerate(others)}


def rank_file(merges: str, size: int) -> bytes:
    """GPT-2's pieces as a tiktoken file of ``size`` ranks."""
    byte_of = {char: value for value, char in _byte_characters().items()}
    pieces = [bytes(byte_of[char] for char in piece) for piece in list(gpt2_vocab(merges))[:-1]]
    pieces += [b"\xf5" + i.to_bytes(3, "big") for i in range(size - len(pieces))]  # UTF-8 has no byte 0xF5
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces))


def library_for_ranks(name: str, folder: Path) -> tokenizers.Tokenizer:
    """The tokenizers library with GPT-2's merges and the published split of Llama 3 or Qwen; ids are the ranks."""
    merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + DIGITS_OF_A_TOKEN[name] + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    pairs = [tuple(line.split(" ")) for line in merges if line]
    model = tokenizers.models.BPE(vocab=json.loads((folder / "vocab.json").read_text()), merges=pairs)
    library = tokenizers.Tokenizer(model)
    if name == "qwen-tiktoken":
        library.normalizer = tokenizers.normalizers.NFC()
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library
