"""Tokenizers against published ids, each other and their libraries; streaming against decoding at once."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vocabularies import library_for_ranks, write_all

from gpt_fast.errors import RequestError, TokenizerError
from gpt_fast.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from gpt_fast.tokenizer.chat import ChatTemplate
from gpt_fast.tokenizer.chat_prompt import encode_chat
from gpt_fast.tokenizer.hf_json import HfJsonTokenizer, gpt2_spec
from gpt_fast.tokenizer.sentencepiece_model import SentencePieceTokenizer
from gpt_fast.tokenizer.settings import AddedToken, AddedTokenSplitter, Settings, read_settings
from gpt_fast.tokenizer.tiktoken_ranks import TiktokenTokenizer, _cut_runs

Load = Callable[[str], Tokenizer]

fuzz = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

# ---------------------------------------------------------------- the tokenizers under test

BACKENDS = (
    "mistral-sentencepiece",
    "mistral-json",
    "chat-json",
    "llama3-tiktoken",
    "qwen-tiktoken",
    "gpt2-vocab-merges",
)
LIKE_SENTENCEPIECE = BACKENDS[:3]  # one character stands for a space and for itself, and a first space is dropped


@pytest.fixture(scope="session")
def vocabularies(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each back-end."""
    directory = tmp_path_factory.mktemp("vocabularies")
    write_all(data_dir, directory)
    return directory


@pytest.fixture(scope="session")
def load(vocabularies: Path) -> Load:
    return cache(lambda name: load_tokenizer(vocabularies / name))


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """The pieces of the pushes, the flush last."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or ())
    return [*map(detokenizer.push, ids), detokenizer.flush()]


class ByteTokenizer(Tokenizer):
    """One token a byte, then <bos> and <eos>: the smallest tokenizer with every awkward split of a character."""

    def __init__(self, leading_spaces_dropped: int = 0) -> None:
        super().__init__(
            {value: bytes([value]) for value in range(256)},
            {256: "<bos>", 257: "<eos>"},
            bos_token_id=256,
            eos_token_ids=(257,),
            prefix_ids=(256,),
            leading_spaces_dropped=leading_spaces_dropped,
        )

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        return list(text.encode())


# ---------------------------------------------------------------- texts

PIECES = [
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|user|>",
        "[INST]",
        "<0x41>",
    ),
    *(
        "  ",
        "   ",
        " ",
        "\t",
        "\n\n",
        "\r\n",
        "\x00",
        "\x7f",
        "\u00a0",
        "\u00a0\u00a0",
        "\u200b",
        "\u3000",
        "\ufeff",
        "▁",
        "▁▁",
    ),
    *(
        "👩‍👩‍👧‍👦",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "🇨🇭",
        "🇺🇦",
        "👍🏽",
        "❤️",
        "e\u0301",
        "ñ",
        "한국어",
        "日本語",
        "漢字",
        "नमस्ते",
        "ไทย",
        "שלום",
        "مرحبا",
    ),
    *(
        "𝔘𝔫𝔦",
        "ﬁ",
        "\u0300",
        "Z͑ͫ̓",
        "don't",
        "I'LL",
        "12345",
        "3.14",
        "x=1;",
        "Hello",
        " world",
        "\ufffd",
        "\ud83d",
        "¿",
        "ß",
    ),
]
texts = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join),
    st.text(max_size=40),
    st.text(alphabet=" ▁<s>/\u00a0\na", max_size=20),
)
HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family 👨🏿‍🚒, flags 🇨🇭🇺🇦 and 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "中文字符，日本語の文章、한국어 문장 𠜎𠜱",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢ e\u0301 n\u0303",
    "  two spaces, trailing  ",
    "नमस्ते दुनिया ไทย שָׁלוֹם مرحبا",
    "\x00\x01 control \x7f\u200b\u2028",
]


def valid(text: str) -> str:
    """The text with halves of surrogate pairs replaced, as every tokenizer reads it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_decoded(name: str, text: str) -> str:
    """What decode(encode(text)) must be."""
    text = valid(text)
    if name == "qwen-tiktoken":
        return unicodedata.normalize("NFC", text)  # as its authors' code does before encoding
    if name in LIKE_SENTENCEPIECE:
        return text.replace("▁", " ")
    return text


# ---------------------------------------------------------------- published ids


def golden_cases(folder: Path, golden: str) -> Iterator[tuple[str, list[int]]]:
    inputs = (folder / f"ggml-vocab-{golden}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = (folder / f"ggml-vocab-{golden}.gguf.out").read_text().split("\n")
    assert len(inputs) == len(outputs) == 47
    yield from ((text, [int(id) for id in line.split()]) for text, line in zip(inputs, outputs, strict=True))


def check_golden(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text, bos=False) == ids, text
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text


def test_golden_encodings(load: Load, data_dir: Path) -> None:
    for text, ids in golden_cases(data_dir / "tokenizers" / "golden_encodings", "gpt-2"):
        check_golden(load("gpt2-vocab-merges"), text, ids)


def test_golden_encodings_of_vocabularies_that_may_not_be_copied(extra_data_dir: Path, tmp_path: Path) -> None:
    given = extra_data_dir / "tokenizers"
    repair_llama2_json(given / "llama2", tmp_path)
    for path, golden in {
        given / "llama2": "llama-spm",
        tmp_path: "llama-spm",
        given / "phi3_llama_spm_json": "phi-3",
        given / "llama3": "llama-bpe",
        given / "qwen": "qwen2",
    }.items():
        tokenizer = load_tokenizer(path)
        for text, ids in golden_cases(given / "golden_encodings", golden):
            check_golden(tokenizer, text, ids)
    for version, size in (("240216.model.v2", 32_768), ("241114.model.v7", 32_768)):
        assert load_tokenizer(given / "mistral" / f"mistral_instruct_tokenizer_{version}").vocab_size == size


def repair_llama2_json(source: Path, out: Path) -> None:
    """Llama 2's tokenizer.json as it was published.

    In the copy that is read here every no-break space (U+00A0) has become a space: four vocabulary entries and three
    merges. The ids in tokenizer.model show what the entries were.
    """
    spec = json.loads((source / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    for broken in [piece for piece in vocab if " " in piece]:
        vocab[broken.replace(" ", "\u00a0")] = vocab.pop(broken)
    merges = spec["model"]["merges"]
    for i, merge in enumerate(merges):
        if merge.count(" ") != 1:
            half = len(merge) // 2
            merges[i] = merge[:half].replace(" ", "\u00a0") + " " + merge[half + 1 :].replace(" ", "\u00a0")
    (out / "tokenizer.json").write_text(json.dumps(spec))
    shutil.copy(source / "tokenizer_config.json", out)


# ---------------------------------------------------------------- back-ends agree with each other and their libraries


@fuzz
@given(text=texts, bos=st.booleans(), allow_special=st.booleans())
@example(text="<s>a</s> b<s>", bos=False, allow_special=True)
@example(text="</s>", bos=True, allow_special=True)
@example(text=" <s> <unk>", bos=False, allow_special=False)
def test_mistral_backends_agree(load: Load, text: str, bos: bool, allow_special: bool) -> None:
    from_model, from_json = load("mistral-sentencepiece"), load("mistral-json")
    ids = from_model.encode(text, bos, allow_special)
    assert from_json.encode(text, bos, allow_special) == ids
    for skip_special in (True, False):
        assert from_json.decode(ids, skip_special) == from_model.decode(ids, skip_special)


@fuzz
@given(ids=st.lists(st.integers(0, 31_999), max_size=12))
@example(ids=[35, 264])  # at the start, the byte token of a space, which encoding never makes
@example(ids=[28705, 28705, 264])
def test_mistral_backends_decode_any_ids_alike(load: Load, ids: list[int]) -> None:
    from_model, from_json = load("mistral-sentencepiece"), load("mistral-json")
    assert from_json.decode(ids) == from_model.decode(ids)
    assert [from_json.token_bytes(id) for id in ids] == [from_model.token_bytes(id) for id in ids]


@fuzz
@given(text=texts)
@example(text="1234567 don't I'LL\r\n\n  x=1;\u00a0 e\u0301")
def test_encode_and_decode_are_the_libraries(load: Load, vocabularies: Path, text: str) -> None:
    # Only for what encode makes: for invalid byte sequences SentencePiece writes one U+FFFD a byte, Python and we one
    # for each broken character.
    text = valid(text)
    sentencepiece, tokenizers, gpt2, *of_ranks = libraries(vocabularies)
    ids = load("mistral-sentencepiece").encode(text, bos=False)
    assert ids == sentencepiece.encode(text)
    assert load("mistral-sentencepiece").decode(ids) == sentencepiece.decode(ids)
    ids = load("chat-json").encode(text, bos=False)
    assert load("chat-json").decode(ids) == tokenizers.decode(ids, skip_special_tokens=True)
    ids = load("gpt2-vocab-merges").encode(text, bos=False)
    assert ids == gpt2.encode(text).ids
    assert load("gpt2-vocab-merges").decode(ids) == gpt2.decode(ids)
    for name, library in zip(("llama3-tiktoken", "qwen-tiktoken"), of_ranks, strict=True):
        assert load(name).encode(text, bos=False) == library.encode(text).ids


@cache
def libraries(vocabularies: Path):  # type: ignore[no-untyped-def]
    import sentencepiece
    import tokenizers

    gpt2 = vocabularies / "gpt2-vocab-merges"
    return (
        sentencepiece.SentencePieceProcessor(model_file=str(vocabularies / "mistral-sentencepiece/tokenizer.model")),
        tokenizers.Tokenizer.from_file(str(vocabularies / "chat-json" / "tokenizer.json")),
        tokenizers.ByteLevelBPETokenizer(*(str(gpt2 / name) for name in ("vocab.json", "merges.txt"))),
        library_for_ranks("llama3-tiktoken", gpt2),
        library_for_ranks("qwen-tiktoken", gpt2),
    )


def test_texts_of_the_published_encodings_in_every_vocabulary(load: Load, data_dir: Path) -> None:
    for text, _ in golden_cases(data_dir / "tokenizers" / "golden_encodings", "gpt-2"):
        for name in BACKENDS:
            ids = load(name).encode(text, bos=False)
            assert load(name).decode(ids) == text
            assert "".join(stream(load(name), ids)) == text


@pytest.mark.parametrize("version", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral(data_dir: Path, version: str) -> None:
    tokenizer = load_tokenizer(data_dir / "tokenizers" / "mistral" / version)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.vocab_size == (32_000 if version.endswith("v1") else 32_768)
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == text
        assert "".join(stream(tokenizer, ids)) == text
    inst, end = (tokenizer.encode(name, bos=False, allow_special=True) for name in ("[INST]", "[/INST]"))
    assert (len(inst) > 1) == version.endswith("v1")
    if len(inst) == 1:
        # mistral-common encodes "Hi" by itself, so the word has its dummy prefix behind the control token too.
        assert tokenizer.encode("[INST]Hi[/INST]", bos=False, allow_special=True) == [
            *inst, *tokenizer.encode("Hi", bos=False), *end
        ]  # fmt: skip
        assert inst[0] not in tokenizer.encode("[INST]Hi[/INST]")


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize("name", BACKENDS)
@fuzz
@given(text=texts)
def test_roundtrip_and_stream(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    expected = as_decoded(name, text)
    if name == "chat-json" and "</s>" in text:
        # Its file declares "</s>" to be text that swallows the white space behind it, and so it does.
        expected = tokenizer.decode(ids)
    assert tokenizer.decode(ids) == expected
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == expected
    assert "".join(pieces).count("\ufffd") == expected.count("\ufffd")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_streams_without_replacement_characters(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    for prompt in ("", "A prompt:"):
        prompt_ids = tokenizer.encode(prompt)
        ids = tokenizer.encode(prompt + text)
        ids = ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else tokenizer.encode(text, bos=False)
        pieces = stream(tokenizer, ids, prompt_ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]
        assert pieces[-1] == ""  # nothing was held back for longer than a character


@pytest.mark.parametrize("name", BACKENDS)
@fuzz
@given(data=st.data())
def test_any_ids_stream_as_they_decode(load: Load, name: str, data: st.DataObject) -> None:
    # Models sample anything: halves of characters, byte tokens, control tokens in the middle.
    tokenizer = load(name)
    some_id = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1),
        st.integers(0, 260),  # where the byte tokens and the control tokens of most vocabularies are
        st.sampled_from([tokenizer.bos_token_id or 0, *tokenizer.eos_token_ids]),
    )
    check_stream(tokenizer, data.draw(st.lists(some_id, max_size=6)), data.draw(st.lists(some_id, max_size=12)))


@fuzz
@given(
    dropped=st.sampled_from([0, 1, 2, sys.maxsize]),
    prompt=st.lists(st.one_of(st.sampled_from([32, 256, 257, 0xF0, 0x9F]), st.integers(0, 257)), max_size=6),
    ids=st.lists(st.one_of(st.sampled_from([32, 256, 0xF0, 0x9F, 0x98, 0x80, 0xE4]), st.integers(0, 257)), max_size=12),
)
def test_any_bytes_stream_as_they_decode(dropped: int, prompt: list[int], ids: list[int]) -> None:
    check_stream(ByteTokenizer(dropped), prompt, ids)


def check_stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    before = tokenizer.decode(prompt)
    if not before.endswith("\ufffd"):
        assert "".join(stream(tokenizer, ids, prompt)) == tokenizer.decode(prompt + ids)[len(before) :]


def test_first_space_is_the_texts_only_after_a_prompt(load: Load) -> None:
    for name in LIKE_SENTENCEPIECE:
        tokenizer = load(name)
        prompt, word = tokenizer.encode("Once upon a"), tokenizer.encode("time", bos=False)
        assert len(word) == 1
        assert stream(tokenizer, word, prompt) == [" time", ""]
        assert stream(tokenizer, word) == ["time", ""]
        assert stream(tokenizer, word, [1]) == ["time", ""]  # BOS alone: still the start


def test_character_across_prompt_and_answer() -> None:
    face = list("😀".encode())
    for cut in (1, 2, 3):
        assert "".join(stream(ByteTokenizer(), face[cut:], [65, *face[:cut]])) == "😀"


def test_unfinished_character_is_held_back_then_replaced() -> None:
    assert stream(ByteTokenizer(), [72, *"😀".encode()[:3]]) == ["H", "", "", "", "\ufffd"]
    assert stream(ByteTokenizer(), [*"😀".encode()[:3], 72]) == ["", "", "", "\ufffdH", ""]


def test_cost_of_a_push_does_not_grow() -> None:
    class Counting(ByteTokenizer):
        calls = 0

        def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
            self.calls += 1
            return super().token_bytes(id, skip_special)

        def decode(self, ids, skip_special=True):  # type: ignore[no-untyped-def]
            raise AssertionError("a byte-wise stream decodes no text a second time")

    tokenizer = Counting()
    detokenizer = IncrementalDetokenizer(tokenizer, [65] * 10_000)
    after_prompt = tokenizer.calls
    assert after_prompt < 10
    for _ in range(1_000):
        detokenizer.push(65)
    assert tokenizer.calls == after_prompt + 1_000


@fuzz
@given(words=st.lists(st.sampled_from(["hello", "helloing", "world", ",", "日", "[SEP]", "zzz"]), max_size=20))
def test_decoders_that_join_words_stream_by_a_window(words: list[str]) -> None:
    tokenizer = wordpiece()
    assert not tokenizer.bytewise
    ids = tokenizer.encode(" ".join(words), bos=False, allow_special=True)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    prompt = tokenizer.encode("hello world", bos=False)
    prompt += tokenizer.encode("[SEP]" * 10, bos=False, allow_special=True)  # no context for what follows
    assert "".join(stream(tokenizer, ids, prompt)) == tokenizer.decode(prompt + ids)[len("hello world") :]


@pytest.mark.parametrize("pattern", [{"Regex": "_{2,}"}, {"String": "_" * 9}])
def test_window_holds_back_half_characters(vocabularies: Path, pattern: dict[str, str]) -> None:
    vocab = json.loads((vocabularies / "gpt2-vocab-merges" / "vocab.json").read_text())
    spec = gpt2_spec(vocab, (vocabularies / "gpt2-vocab-merges" / "merges.txt").read_text(), Settings(), "gpt2")
    rewrite = {"type": "Replace", "pattern": pattern, "content": "_"}  # of the whole text, so not a table of bytes
    spec["decoder"] = {"type": "Sequence", "decoders": [spec["decoder"], rewrite]}
    tokenizer = HfJsonTokenizer(spec, Settings(), source="gpt2")
    assert not tokenizer.bytewise
    assert tokenizer.decode(tokenizer.encode("a" + "_" * 9)) == "a_"
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert all(pieces[i] == "" for i in range(len(ids)) if tokenizer.decode(ids[: i + 1]).endswith("\ufffd"))
        assert "".join(stream(tokenizer, ids[:-1])) == tokenizer.decode(ids[:-1]), "and gives them up at the end"
    if "Regex" in pattern:
        one, answer = tokenizer.encode("_"), tokenizer.encode("_b")
        for count in range(7):  # what is joined to the answer is the prompt's end, and not its beginning
            prompt = [*tokenizer.encode("x" + " y" * count), *one]
            assert "".join(stream(tokenizer, answer, prompt)) == "b"


@cache
def wordpiece() -> Tokenizer:
    vocab = ["[UNK]", "[SEP]", "hello", "world", "##ing", ",", "日"]
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": {piece: id for id, piece in enumerate(vocab)}}  # fmt: skip
    spec = {
        "version": "1.0", "normalizer": None, "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None,
        "added_tokens": [{"id": 1, "content": "[SEP]", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False}, "model": model,
    }  # fmt: skip
    return HfJsonTokenizer(spec, Settings(), source="wordpiece")


# ---------------------------------------------------------------- special tokens

SPECIAL = {
    "mistral-sentencepiece": {"<s>": 1, "</s>": 2, "<unk>": 0},
    "mistral-json": {"<s>": 1, "</s>": 2, "<unk>": 0},
    "chat-json": {"<s>": 1, "<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007, "<|user|>": 32010},
    "llama3-tiktoken": {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|finetune_right_pad_id|>": 128004,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
    },
    "qwen-tiktoken": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    "gpt2-vocab-merges": {"<|endoftext|>": 50256},
}


@pytest.mark.parametrize("name", BACKENDS)
def test_special_tokens_in_text_are_text(load: Load, name: str) -> None:
    tokenizer = load(name)
    for token, id in SPECIAL[name].items():
        assert tokenizer.encode(token, bos=False, allow_special=True) == [id]
        assert tokenizer.is_special(id)
        assert tokenizer.token_bytes(id) == b""
        assert tokenizer.token_bytes(id, skip_special=False) == token.encode()
        text = f"{token}a {token} b{token}{token}"
        ids = tokenizer.encode(text, bos=False)
        assert not any(map(tokenizer.is_special, ids)), token
        assert tokenizer.decode(ids) == text
        allowed = tokenizer.encode(text, bos=False, allow_special=True)
        assert allowed.count(id) == 4
        assert token not in tokenizer.decode(allowed)
        assert tokenizer.decode(allowed, skip_special=False).startswith(token)


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_special_pieces_of_a_vocabulary_are_not_found_in_text(kind: str, tmp_path: Path) -> None:
    """Such models take every piece for text, also those that the file calls special."""
    import tokenizers

    pieces = ["<unk>", "<s>", "</s>", "<", "/", "s", ">", "/s>", "a", "\u2581", "\u2581a", "\u2581<"]
    if kind == "Unigram":
        model: Any = tokenizers.models.Unigram([(piece, -1.0 * (i > 2)) for i, piece in enumerate(pieces)], 0, False)
    else:
        model = tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>")
    library = tokenizers.Tokenizer(model)
    metaspace = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never" if kind == "WordLevel" else "always")
    library.pre_tokenizer, library.decoder = metaspace, tokenizers.decoders.Metaspace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("</s>", "</s></s>", "a</s> a", "<s>"):
        assert not {1, 2} & set(tokenizer.encode(text)), text
        assert tokenizer.encode(text, allow_special=True) == library.encode(text).ids
    assert tokenizer.encode("a a/s") == library.encode("a a/s").ids
    if kind == "Unigram":
        assert tokenizer.decode(tokenizer.encode("a</s> a</s>")) == "a</s> a</s>"


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_special_pieces_that_byte_pairs_make_are_not_found_in_text(ignore_merges: bool, tmp_path: Path) -> None:
    """They merge to a piece that the file calls special, or take a whole word without merging."""
    import tokenizers

    pieces = ["[", "x", "]", "a", "\u2581", "[x", "[x]"]
    merges = [("[", "x")] if ignore_merges else [("[", "x"), ("[x", "]")]
    model = tokenizers.models.BPE(
        {piece: id for id, piece in enumerate(pieces)}, merges, ignore_merges=ignore_merges, unk_token="a"
    )
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    library.add_special_tokens(["[x]"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("[x]", "a[x][x] [x]a", "[x"):
        ids = tokenizer.encode(text)
        assert 6 not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, allow_special=True) == library.encode(text).ids
    assert tokenizer.encode("[xa x") == library.encode("[xa x").ids


def test_a_panic_of_the_library_is_the_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, so nothing behind would stop it: it would end the worker."""

    class Panic(BaseException):
        pass

    class Library:
        def encode(self, text: str, **options: Any) -> Any:
            raise Panic("end byte index 1 is not a char boundary")

    tokenizer = HfJsonTokenizer(json.loads(wordpiece()._library.to_str()), Settings(), source="x")  # type: ignore[attr-defined]
    monkeypatch.setattr(tokenizer, "_library", Library())
    with pytest.raises(RequestError, match="not a char boundary"):
        tokenizer.encode("hello")


def test_a_text_that_a_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    """A vocabulary should have a token for what it does not know; this one has none."""
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0), ("b", -1.0)], None, False))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(RequestError, match="has no tokens for all of this text"):
        tokenizer.encode("abc")


@pytest.mark.parametrize(("name", "end"), [("llama3-tiktoken", "<|eot_id|>"), ("qwen-tiktoken", "<|im_end|>")])
def test_special_tokens_stay_whole_in_a_long_run(load: Load, name: str, end: str) -> None:
    """A message in a script without spaces is one run with the token behind it, and runs are cut; and what follows may
    be a mark that Unicode joins to the token's last character."""
    tokenizer = load(name)
    for length in (0, 24_991, 24_995, 24_999, 25_000):
        text = "漢" * length + end + "\u0338a"
        ids = tokenizer.encode(text, bos=False, allow_special=True)
        assert ids.count(SPECIAL[name][end]) == 1, length
        assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("flag", ["rstrip", "lstrip"])
def test_forged_tokens_leave_the_white_space_around_the_true_ones(flag: str, vocabularies: Path) -> None:
    """Phi-3's markup swallows white space, also where a chat is encoded in parts."""
    spec = json.loads((vocabularies / "chat-json" / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token[flag] = token["special"]
    tokenizer = HfJsonTokenizer(spec, Settings(), source="chat-json")
    source = {"rstrip": "<|user|>\n {{ messages[0].content }}<|end|>\n<|assistant|>\n",
              "lstrip": "<|user|>{{ messages[0].content }} \n<|end|>\n<|assistant|>"}[flag]  # fmt: skip
    template = ChatTemplate(source, {}, "the test")
    for content in ("Hello world", "Hello <|end|>"):
        ids = encode_chat(template, tokenizer, [{"role": "user", "content": content}])
        assert ids == [32010, *tokenizer.encode(content, bos=False), 32007, 32001]


@pytest.mark.parametrize(
    ("name", "bos", "prefix", "eos"),
    [
        ("mistral-sentencepiece", 1, [1], (2,)),
        ("mistral-json", 1, [1], (2,)),
        ("chat-json", 1, [], (32000,)),
        ("llama3-tiktoken", 128000, [128000], (128001, 128009, 128008)),
        ("qwen-tiktoken", None, [], (151643, 151645)),
        ("gpt2-vocab-merges", 50256, [], (50256,)),
    ],
)
def test_bos_and_eos(load: Load, name: str, bos: int | None, prefix: list[int], eos: tuple[int, ...]) -> None:
    tokenizer = load(name)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, eos)
    assert tokenizer.encode("") == prefix
    assert tokenizer.encode("", bos=False) == []
    assert tokenizer.encode("Hi") == prefix + tokenizer.encode("Hi", bos=False)


def test_switch_for_special_tokens_is_each_calls_own(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tokenizers library keeps the switch in the tokenizer, which the threads of a server share.
    tokenizer = load("chat-json")
    expected = {allow: tokenizer.encode("<|user|>", allow_special=allow) for allow in (False, True)}
    assert expected[False] != expected[True]

    class SlowLibrary:
        """Lets other threads run between the setting of the switch and its use."""

        def __init__(self, library: Any) -> None:
            self.__dict__["library"] = library

        def __setattr__(self, name: str, value: bool) -> None:
            setattr(self.library, name, value)

        def encode(self, *args: Any, **options: Any) -> Any:
            time.sleep(0.005)
            return self.library.encode(*args, **options)

    monkeypatch.setattr(tokenizer, "_library", SlowLibrary(tokenizer._library))  # type: ignore[attr-defined]
    with ThreadPoolExecutor(4) as pool:
        for allow, ids in pool.map(lambda i: (i % 2 == 0, tokenizer.encode("<|user|>", True, i % 2 == 0)), range(20)):
            assert ids == expected[allow]


def train_sentencepiece(**options: object) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    text = ["hello world", "the quick brown fox jumps over the lazy dog", "turn turns <turn> in turn"] * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity", **options,
    )  # fmt: skip
    return model.getvalue()


def test_a_piece_that_is_named_as_a_special_token_is_one() -> None:
    """Also where tokenizer.json does not list it among the added tokens."""
    model = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "[SEP]": 1, "hello": 2}}
    spec = {"version": "1.0", "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
            "added_tokens": [], "decoder": None, "model": model}  # fmt: skip
    named = Settings(special_names=frozenset({"[SEP]", "[PAD]"}), eos_token="[SEP]")
    tokenizer = HfJsonTokenizer(spec, named, source="words")
    assert [tokenizer.is_special(id) for id in range(3)] == [False, True, False]
    assert tokenizer.eos_token_ids == (1,)
    assert 1 not in tokenizer.encode("hello [SEP]")
    assert tokenizer.encode("hello [SEP]", allow_special=True) == [2, 1]


def test_sentencepiece_s_special_tokens_may_be_0(tmp_path: Path) -> None:
    for ids in ((0, 1), (1, 0)):
        bos, eos = ids
        (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(bos_id=bos, eos_id=eos, unk_id=2))
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, (eos,))
        assert tokenizer.encode("hello")[0] == bos


def test_sentencepiece_added_tokens_of_the_json_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(user_defined_symbols=["<turn>"]))
    bare = load_tokenizer(tmp_path)
    size, turn = bare.vocab_size, bare.encode("<turn>", bos=False)[-1]
    assert not bare.is_special(turn)  # as far as the model knows, it is text
    config = {
        "added_tokens_decoder": {
            str(turn): {"content": "<turn>", "special": True},
            str(size + 2): {"content": "<|end|>", "special": True, "rstrip": True},
        },
        "eos_token": "<|end|>",
        "add_bos_token": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (size + 3, (2, size + 2))
    assert tokenizer.is_special(turn)
    assert tokenizer.is_special(size + 1)  # in no file
    for text in ("<turn>", "in<turn> turn<turn><turn>", "<|end|><pad>"):
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == text
    hello = bare.encode("hello", bos=False)
    assert tokenizer.encode("<turn>hello<|end|>\n<pad>", allow_special=True) == [turn, *hello, size + 2, size]
    assert tokenizer.decode([turn, *hello, size + 2], skip_special=False) == "<turn> hello<|end|>"

    # transformers' `legacy: false`: no dummy prefix behind an added token.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": False}))
    ids = load_tokenizer(tmp_path).encode("hello<turn>hello", allow_special=True)
    assert ids[: len(hello)] == hello
    assert load_tokenizer(tmp_path).decode(ids, skip_special=False) == "hello<turn>hello"

    (tmp_path / "added_tokens.json").write_text(json.dumps({"hello": size}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {str(size): {"content": "<s>"}}})
    )
    with pytest.raises(TokenizerError, match="do not belong together"):
        load_tokenizer(tmp_path)


def test_special_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    def written(name: str) -> dict[str, Any]:
        return {"content": name, "lstrip": False, "normalized": False, "__type": "AddedToken"}

    named = {"bos_token": written("<s>"), "eos_token": written("</s>"), "pad_token": None}
    several = {"additional_special_tokens": [written("<turn>"), "<end>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({**named, **several}))
    found = read_settings(tmp_path)
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    assert found.special_names == {"<s>", "</s>", "<turn>", "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": written("<end>")}))
    assert read_settings(tmp_path).eos_token == "<end>", "which is the newer file"


def test_added_tokens_of_spaces_are_spaces(tmp_path: Path, vocabularies: Path) -> None:
    """Gemma's files list runs of spaces among the added tokens, in SentencePiece's spelling."""
    model = train_sentencepiece(user_defined_symbols=["▁▁"], remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    bare = load_tokenizer(tmp_path)
    two = next(id for id in range(bare.vocab_size) if bare.token_bytes(id) == b"  ")
    config = {"added_tokens_decoder": {str(two): {"content": "▁▁", "special": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert two in tokenizer.encode("hello  hello")
    assert tokenizer.decode(tokenizer.encode("hello  hello")) == "hello  hello"

    spec = json.loads((vocabularies / "mistral-json" / "tokenizer.json").read_text())
    two = spec["model"]["vocab"]["▁▁"]
    spec["added_tokens"].append({"id": two, "content": "▁▁", "special": False, "normalized": False,
                                 **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)})  # fmt: skip
    tokenizer = HfJsonTokenizer(spec, Settings(), source="mistral-json")
    assert tokenizer.decode([*tokenizer.encode("hello"), two]) == "hello  "


@pytest.mark.parametrize("name", ["mistral-json", "mistral-sentencepiece"])
def test_added_tokens_without_flags_have_those_of_tokenizer_json(name: str, tmp_path: Path, vocabularies: Path) -> None:
    """CodeGen's added_tokens.json lists runs of spaces, which are text."""
    shutil.copytree(vocabularies / name, tmp_path, dirs_exist_ok=True)
    spec = json.loads((vocabularies / "mistral-json" / "tokenizer.json").read_text())
    flags = {"normalized": False, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
    spec["added_tokens"] += [
        flags | {"id": 32_000, "content": "\t\t\t", "special": False},
        flags | {"id": 32_001, "content": "<turn>", "special": True},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"\t\t\t": 32_000, "<turn>": 32_001, "<pad>": 32_002}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a\t\t\tb<turn>")
    assert 32_000 in ids
    assert tokenizer.decode(ids).replace("\t ", "\t") == "a\t\t\tb<turn>"
    assert [tokenizer.is_special(32_000 + i) for i in range(3)] == [False, True, True]


@pytest.mark.parametrize("name", ["mistral-json", "gpt2-vocab-merges"])
def test_added_tokens_of_normalized_text_decode_as_in_the_library(name: str, vocabularies: Path) -> None:
    """Where a normalizer marks spaces, they are found with the space before them."""
    import tokenizers

    if name == "mistral-json":
        spec = json.loads((vocabularies / name / "tokenizer.json").read_text())
    else:
        vocab = json.loads((vocabularies / name / "vocab.json").read_text())
        spec = gpt2_spec(vocab, (vocabularies / name / "merges.txt").read_text(), Settings(), name)
        spec["normalizer"], spec["pre_tokenizer"] = {"type": "ByteLevel"}, None
    flags = {"special": False, "normalized": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] += [flags | {"id": size, "content": "<tool>"}, flags | {"id": size + 1, "content": "\n\n"}]
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = HfJsonTokenizer(spec, Settings(), source=name)
    ids = tokenizer.encode("hello <tool> hello\n\n", bos=False)
    assert size in ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(("options", "dropped"), [
    ({"add_dummy_prefix": False, "remove_extra_whitespaces": False}, 0),
    ({"add_dummy_prefix": True, "remove_extra_whitespaces": False}, 1),
    ({"add_dummy_prefix": True, "remove_extra_whitespaces": True}, sys.maxsize),
])  # fmt: skip
def test_sentencepiece_white_space_rules(tmp_path: Path, options: dict[str, bool], dropped: int) -> None:
    import sentencepiece

    model = train_sentencepiece(**options)
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer, library = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.leading_spaces_dropped == dropped
    space = library.piece_to_id("▁")
    for ids in ([space] * 3, [1, space, space], library.encode("  hello   world ")):
        assert tokenizer.decode(ids) == library.decode(ids)
        check_stream(tokenizer, ids[:1], ids[1:])


# ---------------------------------------------------------------- files


def test_order_of_preference(tmp_path: Path, vocabularies: Path) -> None:
    shutil.copy(vocabularies / "llama3-tiktoken" / "tokenizer.model", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), TiktokenTokenizer)
    shutil.copy(vocabularies / "mistral-json" / "tokenizer.json", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), HfJsonTokenizer)
    shutil.copy(vocabularies / "mistral-sentencepiece" / "tokenizer.model", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)


@pytest.mark.parametrize(
    ("source", "name", "size"),
    [
        ("mistral-sentencepiece/tokenizer.model", "tokenizer.json", 32_000),
        ("mistral-sentencepiece/tokenizer.model", "a.tiktoken", 32_000),
        ("llama3-tiktoken/tokenizer.model", "tokenizer.json", 128_256),
        ("chat-json/tokenizer.json", "tokenizer.model", 32_011),
    ],
)
def test_format_is_read_from_the_content(tmp_path: Path, vocabularies: Path, source: str, name: str, size: int) -> None:
    shutil.copyfile(vocabularies / source, tmp_path / name)
    assert load_tokenizer(tmp_path).vocab_size == size


def test_missing_back_end_leaves_the_others(
    tmp_path: Path, vocabularies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    shutil.copy(vocabularies / "mistral-sentencepiece" / "tokenizer.model", tmp_path)
    with pytest.raises(TokenizerError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path)
    shutil.copy(vocabularies / "mistral-json" / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 32_000


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.model", b"", "is empty"),
        ("tokenizer.model", b"\nnot a model", "not a readable SentencePiece model"),
        ("tokenizer.model", pickle.dumps({"a": 1}), "pickle"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("tokenizer.model", b"<html>Not found</html>", "neither a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg==\n", "line 2: b'Ig=='"),
        ("tokenizer.model", b"IQ== 0\nI!== 1\n", "line 2"),
        ("tokenizer.model", b"IQ== 0\nIg== 2\n", "not 0 to 1"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "single byte"),
        ("tokenizer.json", b'{"model": ', "not valid JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "not a tokenizer.json"),
        ("tokenizer.json", b'{"model": {"type": "Other", "vocab": {}}}', "refused by the tokenizers library"),
        ("tokenizer_config.json", b"[1]", "a JSON list where an object is expected"),
        (
            "tokenizer_config.json",
            b'{"additional_special_tokens": 5}',
            "additional_special_tokens must be a list, not 5",
        ),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', "malformed"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"4000000000": {"content": "x"}}}',
            "malformed: .*4000000000",
        ),
        ("tokenizer.json", b'{"model": {"vocab": {}}, "added_tokens": [{"id": 1e999, "content": "x"}]}', "malformed"),
    ],
)
def test_corrupt_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=message) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_truncated_files(tmp_path: Path, vocabularies: Path) -> None:
    for source in (
        "mistral-sentencepiece/tokenizer.model",
        "llama3-tiktoken/tokenizer.model",
        "chat-json/tokenizer.json",
    ):
        data = (vocabularies / source).read_bytes()
        path = tmp_path / Path(source).name
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(TokenizerError, match=path.name):
            load_tokenizer(path)
    spec = json.loads((vocabularies / "mistral-json" / "tokenizer.json").read_text())
    spec["model"]["merges"][7] += " x"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match="Merges text file invalid"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_values_that_make_no_sense(tmp_path: Path, vocabularies: Path) -> None:
    given, damaged = vocabularies / "mistral-json" / "tokenizer.json", tmp_path / "tokenizer.json"
    spec = json.loads(given.read_text())
    start = [{"SpecialToken": {"id": "<lost>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": start, "pair": start, "special_tokens": {}}
    damaged.write_text(json.dumps(spec | {"post_processor": processor}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is refused by the tokenizers library"):
        load_tokenizer(damaged)
    piece = max(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    spec["model"]["vocab"][piece] = 2**31  # a table with a row for each would take tens of gigabytes
    damaged.write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: a token has the id 2147483648"):
        load_tokenizer(damaged)


@pytest.mark.parametrize(
    ("folder", "change", "message"),
    [
        ("mistral-json", {"decoder": ["Fuse"]}, r"tokenizer\.json: its decoder is malformed"),
        ("mistral-json", {"model": {"type": "BPE", "vocab": {"<s>": []}}}, "is refused by the tokenizers library"),
        ("mistral-json", {"model": {"type": "BPE", "vocab": {"<s>": 1}, "merges": 5}}, "is refused by the tokenizers"),
        ("mistral-sentencepiece", {"normalizer": True}, r"the tokenizer\.json beside .*: its steps are malformed"),
        ("mistral-sentencepiece", {"normalizer": {}}, r"the tokenizer\.json beside .*: its steps are malformed"),
    ],
)
def test_json_of_other_types(
    folder: str, change: dict[str, Any], message: str, tmp_path: Path, vocabularies: Path
) -> None:
    shutil.copytree(vocabularies / folder, tmp_path, dirs_exist_ok=True)
    spec = json.loads((vocabularies / "mistral-json" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | change))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_sentencepiece_with_a_piece_that_is_no_text(tmp_path: Path, vocabularies: Path) -> None:
    data = (vocabularies / "mistral-sentencepiece" / "tokenizer.model").read_bytes()
    for piece, broken in (
        (b"\x0a\x03the\x15", b"\x0a\x03t\xff\xff\x15"),
        (b"\x0a\x03<s>\x15", b"\x0a\x03\xff\xff>\x15"),
    ):
        assert piece in data
        (tmp_path / "tokenizer.model").write_bytes(data.replace(piece, broken, 1))
        with pytest.raises(TokenizerError, match=r"tokenizer\.model (holds a piece that is no text|is not a readable)"):
            load_tokenizer(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_unknown_splitting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeGenTokenizer"}')
    with pytest.raises(TokenizerError, match="CodeGenTokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_sentencepiece_without_the_space_in_front(prefix: bool | None, tmp_path: Path, vocabularies: Path) -> None:
    shutil.copy(vocabularies / "mistral-sentencepiece" / "tokenizer.model", tmp_path)
    facts = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": prefix}
    facts |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    theirs = pytest.importorskip("transformers").LlamaTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("Hello world", "a\nb", "</s>hello", "世界"):
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ours.encode(" Hello")) == " Hello"


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_in_front_is_as_in_transformers(name: str, prefix: bool, tmp_path: Path, vocabularies: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(vocabularies / "gpt2-vocab-merges" / file, tmp_path)
    facts = {"tokenizer_class": name, "add_prefix_space": prefix}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    theirs = getattr(pytest.importorskip("transformers"), name).from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("Hello world", " Hello", "", "a\nb"):
        assert ours.encode(text, bos=False) == theirs.encode(text)
    if name == "GPT2Tokenizer":
        assert ours.encode("Hello world", bos=False) == ([18435, 995] if prefix else [15496, 995])


def test_truncation_in_a_file_does_not_cut_prompts(tmp_path: Path, vocabularies: Path) -> None:
    spec = json.loads((vocabularies / "chat-json" / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "<unk>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one two three four five six")) == "one two three four five six"
    assert len(tokenizer.encode("one")) == 1


def test_bos_of_a_json_file_follows_its_post_processor(tmp_path: Path, vocabularies: Path) -> None:
    spec = json.loads((vocabularies / "mistral-json" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path).encode("Hi")[0] == load_tokenizer(tmp_path).bos_token_id == 1
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    assert load_tokenizer(tmp_path).encode("") == []
    spec["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    assert load_tokenizer(tmp_path).encode("") == [1]


@pytest.mark.parametrize("id", [-1, 10**9])
def test_ids_outside_the_vocabulary(id: int) -> None:
    tokenizer = ByteTokenizer()
    for use in (
        lambda: tokenizer.decode([65, id]),
        lambda: tokenizer.token_bytes(id),
        lambda: tokenizer.is_special(id),
        lambda: wordpiece().decode([id]),
    ):
        with pytest.raises(TokenizerError, match=f"token id {id} is outside the vocabulary"):
            use()


def test_ids_that_pad_a_models_vocabulary_have_no_text() -> None:
    assert stream(ByteTokenizer(), [65, 258, 66], [67, 300]) == ["A", "", "B", ""]
    assert stream(wordpiece(), [2, 7, 3], [2, 100]) == [" hello", "", " world", ""]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("run", "times"), [(" ", 1_000_000), ("a", 100_000), ("é", 100_000), ("\n", 100_000), ("! ", 50_000)]
)
def test_very_long_runs(load: Load, name: str, run: str, times: int) -> None:
    tokenizer = load(name)
    text = run * times
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_runs_are_cut_where_the_engine_of_llama_3_cuts_them() -> None:
    assert [*_cut_runs("")] == []
    n = 25_000
    for text, lengths in [
        ("a" * n, [n]),
        ("a" * (n - 1) + " " + "b" * n + "c", [2 * n, 1]),
        (" " * (2 * n + 3) + "é", [n, n, 4]),
        (("a" * (n - 1) + " ") * 40, [40 * n]),
    ]:
        assert [len(part) for part in _cut_runs(text)] == lengths
        assert "".join(_cut_runs(text)) == text


def test_white_space_before_a_token_that_swallows_it() -> None:
    mask, other = AddedToken(5, "<mask>", False, lstrip=True), AddedToken(6, "\n\n", False)
    split = AddedTokenSplitter([mask, other]).split
    assert [*split("a \t<mask> b<mask>")] == ["a", 5, " b", 5, ""]
    assert [*split("a\n\n<mask>")] == ["a", 6, "", 5, ""]
    assert [*split(" " * 200_000)] == [" " * 200_000]


@pytest.mark.parametrize(
    ("step", "every"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}, False),
        ({"normalizer": None, "pre_tokenizer": None}, False),
    ],
)
def test_dummy_prefix_behind_added_tokens_is_the_json_files(
    tmp_path: Path, vocabularies: Path, step: dict[str, Any], every: bool
) -> None:
    shutil.copy(vocabularies / "mistral-sentencepiece" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(step | {"added_tokens": [{"id": 32_000, "content": "<turn>"}]}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Hi<turn>Hi", bos=False, allow_special=True)
    assert tokenizer.decode(ids) == ("Hi<turn> Hi" if every else "Hi<turn>Hi")
    assert 32_000 in tokenizer.encode("Hi<turn>Hi")  # declared to be text, so it is found in any


def test_needs_no_torch() -> None:
    import subprocess

    heavy = {"torch", "sentencepiece", "tiktoken", "tokenizers"}
    code = f"import sys, gpt_fast.tokenizer; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "[]\n"
