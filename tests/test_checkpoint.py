"""Checkpoints: damaged ones are refused by name, whole ones come in unchanged and within the memory they need."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quantized import dequantized

from gpt_fast.checkpoint.checkpoint import Checkpoint, most_common_dtype
from gpt_fast.checkpoint.families import parse_config, to_hf_config
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.checkpoint.weight_files import read_safetensors, write_safetensors
from gpt_fast.config import ExpertsConfig, ModelConfig, VocabShare
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.llm import LLM
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import describe, parts
from gpt_fast.model.shapes import SHAPES, shape
from gpt_fast.model.transformer import weight_bytes
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128)


def tiny(directory: Path, config: ModelConfig = TINY, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    save_checkpoint(random_model(config, dtype, seed=seed), directory)
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Apply ``change`` to the tensors of ``directory``."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    return directory


# Reading and writing safetensors


def header_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"{nonsense", b"", "header is damaged"),
    "not utf-8": (b'{"a\xff": 1}', b"", "header is damaged"),
    "nested past the stack": (b"[" * 100_000, b"", "header is damaged"),
    "a list": ([1], b"", "not an object"),
    "name twice": (b'{"a": 1, "a": 1}', b"", "occurs twice"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, b"", "'w' has no dtype, shape and data_offsets"),
    "entry is no object": ({"w": 3}, b"", "'w' has no"),
    "unknown dtype": ({"w": entry(0, 8, dtype="F4")}, b"x" * 8, "'w' has the unsupported dtype 'F4'"),
    "dtype is no string": ({"w": entry(0, 8, dtype=["F32"])}, b"x" * 8, "unsupported dtype"),
    "negative size": ({"w": entry(0, 8, shape=(-1, -2))}, b"x" * 8, "'w' has the shape"),
    "size is no integer": ({"w": entry(0, 8, shape=(2.0,))}, b"x" * 8, "'w' has the shape"),
    "size is true": ({"w": entry(0, 4, shape=(True,))}, b"x" * 4, "'w' has the shape"),
    "three offsets": ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, b"x" * 8, "'w' has the shape"),
    "past the end": ({"w": entry(0, 8)}, b"x" * 7, "cut short"),
    "backwards": ({"w": entry(8, 0)}, b"x" * 8, "cut short or damaged"),
    "shape and bytes differ": ({"w": entry(0, 12)}, b"x" * 12, "has 12 bytes"),
    "huge shape": ({"w": entry(0, 8, shape=(2**62, 2**62))}, b"x" * 8, "has 8 bytes"),
    "huge, of no bytes": ({"w": entry(0, 0, shape=(0, 2**70))}, b"", "'w' has the shape"),
    "product too large": ({"w": entry(0, 0, shape=(2**40, 0, 2**40))}, b"", "'w' has the shape"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "'b' overlaps"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, "belong to none"),
    "rest": ({"a": entry(0, 8)}, b"x" * 9, "1 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors_are_refused(case: str, tmp_path: Path) -> None:
    header, data, words = DAMAGED[case]
    path = header_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("filler", range(4))
def test_a_tensor_without_values_may_lie_anywhere(filler: int, tmp_path: Path) -> None:
    text = json.dumps({"w": entry(0, 0, shape=(0, 4))}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) + filler) + text + b" " * filler)
    found = read_safetensors(path)["w"]
    assert (found.shape, found.dtype, found.rows(0, 0).numel()) == ((0, 4), torch.float32, 0)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_short_files_and_absurd_headers(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file, or cut short"):
        read_safetensors(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """Whatever byte a download stopped at, no tensor of zeros comes out of it."""
    path = tmp_path / "whole.safetensors"
    safetensors.torch.save_file({"a": torch.randn(3, 5), "b": torch.randn(7)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(cut)


@pytest.mark.parametrize("padding", range(8))
def test_misaligned_data(padding: int, tmp_path: Path) -> None:
    """Writers before 2022 did not pad the header, so that float32 may begin at any byte."""
    values = torch.randn(3, 4)
    text = json.dumps({"w": entry(0, 48, shape=(3, 4))}).encode() + b" " * padding
    path = header_file(tmp_path / "model.safetensors", text, values.numpy().tobytes())
    target = torch.empty(3, 4)
    read_safetensors(path)["w"].copy_to(target)
    assert torch.equal(target, values)


def test_the_reference_implementation_reads_what_is_written(tmp_path: Path) -> None:
    values = {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.int8),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {name: StoredTensor(t) for name, t in values.items()})
    theirs, ours = safetensors.torch.load_file(path), read_safetensors(path)
    for name, value in values.items():
        assert torch.equal(theirs[name], value)
        assert theirs[name].dtype == value.dtype
        target = torch.empty_like(value)
        ours[name].copy_to(target)
        assert torch.equal(target, value)
        assert ours[name].data.dtype == value.dtype, "one that is not aligned would be read as bytes, and copied"
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    class Broken(StoredTensor):
        def rows(self, begin: int, end: int) -> torch.Tensor:
            raise OSError(28, "No space left on device")

    bad = Broken(torch.zeros(2))
    with pytest.raises(OSError, match="No space"):
        write_safetensors(tmp_path / "x.safetensors", {"a": bad})
    assert list(tmp_path.iterdir()) == []


# Pieces, and views of stored tensors


ORDER = torch.arange(32).view(4, 4, 2).transpose(1, 2).flatten()  # rotary pairs of four heads, as two halves
VIEWS: dict[str, tuple[Callable[[StoredTensor], StoredTensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": (lambda s: s, lambda t: t),
    "part": (lambda s: s.part(8, 16), lambda t: t[8:24]),
    "no rows": (lambda s: s.part(5, 0), lambda t: t[5:5]),
    "columns": (lambda s: s.columns(3, 5), lambda t: t[:, 3:8]),
    "picked": (lambda s: s.picked(ORDER), lambda t: t[ORDER]),
    "picked, a part and columns of it": (
        lambda s: s.picked(ORDER).part(4, 20).columns(1, 7),
        lambda t: t[ORDER][4:24, 1:8],
    ),
    "picked twice": (lambda s: s.picked(ORDER).picked(ORDER), lambda t: t[ORDER][ORDER]),
    "columns, then picked": (lambda s: s.columns(2, 9).picked(ORDER), lambda t: t[ORDER, 2:11]),
    "transposed": (lambda s: s.transposed(), lambda t: t.t()),
    "transposed, then a part and columns": (
        lambda s: s.transposed().part(2, 7).columns(4, 11),
        lambda t: t.t()[2:9, 4:15],
    ),
    "transposed and picked": (lambda s: s.transposed().picked(ORDER[ORDER < 12]), lambda t: t.t()[ORDER[ORDER < 12]]),
}


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("view", VIEWS)
def test_copy_in_pieces_gives_the_view(
    view: str, padding: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pieces of a few rows give what one copy of the whole would, converted to the target's dtype; aligned or not."""
    monkeypatch.setattr("gpt_fast.checkpoint.stored._CHUNK", 3 * 12 * 4)
    values = torch.randn(32, 12)
    text = json.dumps({"w": entry(0, 32 * 12 * 4, shape=(32, 12))}).encode()
    text += b" " * (-len(text) % 8 + padding)
    whole = read_safetensors(header_file(tmp_path / "x", text, values.numpy().tobytes()))["w"]
    stored, expected = VIEWS[view][0](whole), VIEWS[view][1](values)
    assert (stored.shape, stored.dtype) == (tuple(expected.shape), torch.float32)
    target = torch.empty(expected.shape, dtype=torch.bfloat16)
    read: list[int] = []
    stored.copy_to(target, read.append)
    assert torch.equal(target, expected.bfloat16())
    assert sum(read) == expected.numel() * 4
    assert len(read) > 2 or not expected.numel()
    stored.copy_to(target)  # pages that were let go come back from the file
    assert torch.equal(target, expected.bfloat16())


# Ranks


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of everything that is read from files from here on."""
    read: list[int] = []
    rows = StoredTensor.rows

    def counted(self: StoredTensor, begin: int, end: int) -> torch.Tensor:
        out = rows(self, begin, end)
        read.append(out.numel() * out.element_size())
        return out

    monkeypatch.setattr(StoredTensor, "rows", counted)
    return read


SPLIT = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 64, 128, qkv_bias=True, out_bias=True, mlp_bias=True)
ROW_RUNS = {"wqkv": (32, 16, 16), "w13": (64, 64), "tokens": (64,), "output": (64,)}


def joined(name: str, ranks: list[torch.Tensor]) -> torch.Tensor:
    """What ranks hold of a parameter or buffer, as one model would hold it."""
    *_, module, _ = name.split(".")
    if module in ("wo", "w2") and ranks[0].dim() == 2:
        return torch.cat(ranks, dim=1)
    if module not in ROW_RUNS:
        assert all(torch.equal(ranks[0], rank) for rank in ranks), name
        return ranks[0]
    runs = [rank.split([size // len(ranks) for size in ROW_RUNS[module]]) for rank in ranks]
    return torch.cat([rank[i] for i in range(len(runs[0])) for rank in runs])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int8 while loading", "int8"])
def test_ranks_read_their_own_bytes_and_together_hold_the_whole(
    kind: str, tied: bool, bytes_read: list[int], tmp_path: Path
) -> None:
    model = random_model(dataclasses.replace(SPLIT, tie_embeddings=tied), torch.float32, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    save_checkpoint(model, tmp_path / "plain")
    checkpoint = Checkpoint.open(tmp_path / "plain")
    if kind == "int8":
        quantize_checkpoint(checkpoint, tmp_path / "int8", quant_config("int8"))
        checkpoint = Checkpoint.open(tmp_path / "int8")
    quantize = "int8" if kind == "int8 while loading" else None
    whole = checkpoint.build(torch.float32, quantize=quantize).state_dict()
    held = []
    for rank in range(2):
        bytes_read.clear()
        model = checkpoint.build(torch.float32, quantize=quantize, shard=Shard(rank, 2))
        assert model.config.num_kv_heads == 1
        held.append(model.state_dict())
        least = weight_bytes(model)
        if quantize:  # read in float32; the scale of a row that is divided needs all of the row
            parts_read = [Shard(rank, 2).cut(part) for part in parts(checkpoint.config)]
            least = sum(4 * math.prod(part.shape) * cut.num_columns for cut, part in parts_read)
        assert sum(bytes_read) == least
        assert least < 0.75 * sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    for name, tensor in whole.items():
        assert torch.equal(joined(name, [rank[name] for rank in held]), tensor), name


def test_int4_is_divided_in_whole_groups(tmp_path: Path) -> None:
    """Keys and values are int8 beside queries in int4; a rank's half of 64 inputs is a group, its half of 96 is not."""
    shape = ModelConfig("llama", 64, 128, 1, 4, 2, 32, 96, 128)
    save_checkpoint(random_model(dataclasses.replace(shape, ffn_dim=128), torch.float32), tmp_path / "a")
    whole = Checkpoint.open(tmp_path / "a").build(torch.float32, quantize="int4").layers[0]
    ranks = [
        Checkpoint.open(tmp_path / "a").build(torch.float32, quantize="int4", shard=Shard(rank, 2)).layers[0]
        for rank in range(2)
    ]
    for name, dim in (("wqkv.queries", 0), ("wqkv.keys_values", None), ("wo", 1)):
        found = [dequantized(rank.get_submodule(name)) for rank in ranks]
        expected = dequantized(whole.get_submodule(name))
        if dim is None:
            keys, values = zip(*(half.chunk(2) for half in found), strict=True)
            assert torch.equal(torch.cat([*keys, *values]), expected)
        else:
            assert torch.equal(torch.cat(found, dim), expected)
    save_checkpoint(random_model(shape, torch.float32), tmp_path / "b")
    with pytest.raises(ConfigError, match=r"w2.weight has 48 inputs a rank, no whole groups of int4-g32"):
        Checkpoint.open(tmp_path / "b").build(torch.float32, quantize="int4", shard=Shard(0, 2))


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (Shard(0, 3), r"num_heads \(4\) is not a multiple of the 3 ranks"),
        (Shard(2, 2), "rank 2 is not one of 2"),
    ],
)
def test_shapes_that_ranks_do_not_divide_are_refused(shard: Shard, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpoint.open(tiny(tmp_path)).build(torch.float32, shard=shard)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 12, "num_kv_heads": 3}, r"num_kv_heads \(3\) is not a multiple of the 2 ranks"),
        ({"ffn_dim": 65}, r"ffn_dim \(65\)"),
        ({"vocab_size": 1}, "a vocabulary of 1 tokens is too small for 2 ranks"),
        ({"experts": ExpertsConfig(4, 2, 33)}, r"experts' ffn_dim \(33\)"),
        ({"experts": ExpertsConfig(4, 2, 32, shared_ffn_dim=5)}, r"experts' shared_ffn_dim \(5\)"),
    ],
)
def test_what_is_not_divided_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shard(0, 2).config(dataclasses.replace(SPLIT, **changes))


@pytest.mark.parametrize(("vocab_size", "starts"), [(64, [0, 16, 32, 48]), (63, [0, 16, 32, 47]), (5, [0, 2, 3, 3])])
def test_every_token_is_one_rank_s_and_all_have_as_many_rows(vocab_size: int, starts: list[int]) -> None:
    config = dataclasses.replace(SPLIT, vocab_size=vocab_size)
    table = next(part for part in parts(config) if part.source.endswith("embed_tokens.weight"))
    shares = [VocabShare.of(vocab_size, rank, 4) for rank in range(4)]
    owned = [token for share in shares for token in range(share.own, share.first + share.num_rows)]
    assert owned == list(range(vocab_size))
    assert [share.first for share in shares] == starts
    for rank, share in enumerate(shares):
        cut, part = Shard(rank, 4).cut(table)
        assert cut.rows == ((share.first, share.num_rows),)
        assert part.shape == (share.num_rows, 32)
        assert Shard(rank, 4).config(config).vocab_rows == share.num_rows


def test_fewer_heads_of_keys_than_ranks_are_repeated() -> None:
    """Each rank's key is the one that its queries look at."""
    config = dataclasses.replace(SPLIT, num_heads=8, num_kv_heads=2, head_dim=4)
    keys = next(part for part in parts(config) if part.source.endswith("layers.0.self_attn.k_proj.weight"))
    assert [Shard(rank, 4).config(config).num_kv_heads for rank in range(4)] == [1] * 4
    cuts = [Shard(rank, 4).cut(keys) for rank in range(4)]
    assert [cut.rows for cut, _ in cuts] == [((0, 4),), ((0, 4),), ((4, 4),), ((4, 4),)]
    assert [(part.start, part.shape) for _, part in cuts] == [(8, (4, 32))] * 4


# Whole models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loaded_model_is_plain_and_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Checkpoint.open(tiny(tmp_path)).build(dtype)
    saved = random_model(TINY, torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(dtype)), name
        assert (ours.dtype, ours.device.type, ours.requires_grad) == (dtype, "cpu", False)
        assert ours.is_contiguous()
    assert model.ropes[0].inv_freq.dtype == torch.float32
    assert model.ropes[0].inv_freq.device.type == "cpu"
    assert not model.training
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_save_and_load_every_kind_of_weight(name: str, tmp_path: Path) -> None:
    features: dict[str, Any] = {
        "llama": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": "head"},
        "mistral": {"windows": (16, 16)},
    }[name]
    config = dataclasses.replace(TINY, family=name, **features)
    model = random_model(config, torch.bfloat16, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # biases and norms too, so that none can be swapped or left out
    save_checkpoint(model, tmp_path, extra={"eos_token_id": [5, 6]})
    again = Checkpoint.open(tmp_path).build(torch.bfloat16)
    assert again.config == config
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [5, 6]
    assert Checkpoint.open(tmp_path).stored_dtype == torch.bfloat16
    for (key, ours), theirs in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs[1]), key


def test_missing_unexpected_and_misshaped_are_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(7):
            tensors[f"extra.{i}"] = torch.zeros(1)
        del tensors["model.norm.weight"]
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)

    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(rewrite(tiny(tmp_path), spoil)).build(torch.float32)
    text = str(caught.value)
    assert "1 tensors missing: model.norm.weight" in text
    assert "7 tensors unexpected: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more" in text
    assert "model.layers.1.mlp.down_proj.weight [3, 3], not [32, 48]" in text


def test_integer_weights_are_not_taken_for_plain_ones(tmp_path: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int8)

    with pytest.raises(CheckpointError, match=r"not floating-point: model.embed_tokens.weight \(int8\)"):
        Checkpoint.open(rewrite(tiny(tmp_path), quantize)).build(torch.float32)


def test_tied_embeddings_in_every_spelling(tmp_path: Path) -> None:
    """One storage where the file has one table under either name or twice; two where the tables differ."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    raw = to_hf_config(tied, "float32")

    def load(case: str, tie: bool, change: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
        directory = rewrite(tiny(tmp_path / case, tied), change)
        (directory / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": tie}))
        return Checkpoint.open(directory).build(torch.float32)

    for case, tie, change in (
        ("head missing", True, lambda t: None),
        ("head missing, said untied", False, lambda t: None),
        ("both", True, lambda t: t.update({head: t[embed].clone()})),
        ("table missing", True, lambda t: t.update({head: t.pop(embed)})),
    ):
        model = load(case, tie, change)
        assert model.config.tie_embeddings, case
        assert model.head.output.weight.data_ptr() == model.embed.tokens.weight.data_ptr(), case
        assert model.head.output.weight.abs().sum() > 0
    model = load("differ", True, lambda t: t.update({head: t[embed] + 1}))
    assert not model.config.tie_embeddings
    assert torch.equal(model.head.output.weight, model.embed.tokens.weight + 1)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        Checkpoint.open(tmp_path / "nowhere").build(torch.float32)
    tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint.open(tmp_path).build(torch.float32)
    index = tmp_path / "model.safetensors.index.json"
    names = dict.fromkeys(read_safetensors(tmp_path / "a.safetensors"), "a.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    Checkpoint.open(tmp_path).build(torch.float32)
    for weight_map, words in (
        (names | {"model.norm.weight": "b.safetensors"}, r"b.safetensors is missing"),
        (names | {"model.norm.weight": "b" * 1000}, r"b{100} is missing"),
        (names | {"model.norm.weight": "../b.safetensors"}, "outside its own directory"),
        (["a.safetensors"], "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(tmp_path).build(torch.float32)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    tiny(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b.safetensors: tensor .* is in another file"):
        Checkpoint.open(tmp_path)


class Payload:
    """What a hostile pickle would hold: an object whose unpickling calls something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code in a checkpoint ran",))


def test_pickles_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": Payload()}, path)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read .*it holds print, ") as caught:
        Checkpoint.open(tmp_path).build(torch.float32)
    assert "ran" not in capsys.readouterr().out
    # torch's message says how to switch the protection off.
    assert not re.search("weights_only|trust|allowlist|safe_globals|torch.load", str(caught.value))
    torch.save([torch.zeros(1)], path)
    with pytest.raises(CheckpointError, match="holds list"):
        Checkpoint.open(tmp_path).build(torch.float32)
    torch.save({"a": 3}, path)
    with pytest.raises(CheckpointError, match="'a' is int, not a tensor"):
        Checkpoint.open(tmp_path).build(torch.float32)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(tmp_path).build(torch.float32)
    torch.save({0: torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="0 is Tensor, not a tensor with a name"):
        Checkpoint.open(tmp_path).build(torch.float32)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is no checkpoint known here"):
        Checkpoint.open(tmp_path).build(torch.float32)


def test_the_dtype_of_a_checkpoint_is_that_of_its_plain_weights() -> None:
    sizes = {"a.weight": (torch.bfloat16, 9), "b.weight": (torch.float32, 4), "c.weight": (torch.float8_e4m3fn, 99)}
    sizes |= {f"d.{name}": (torch.float32, 99) for name in ("scale", "scales", "row_scale")}
    tensors = {name: StoredTensor(torch.zeros(n).to(dtype)) for name, (dtype, n) in sizes.items()}
    assert most_common_dtype(tensors, "x") == torch.bfloat16
    with pytest.raises(CheckpointError, match="x holds no floating-point weights"):
        most_common_dtype({name: tensors[name] for name in ("c.weight", "d.scale")}, "x")


def test_a_tensor_that_repeats_one_number_without_end_is_refused(tmp_path: Path) -> None:
    """Four bytes in the file would become 4 TB in memory."""
    tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    nothing, size = (torch.empty(2, 0, dtype=torch.int64), torch.empty(0)), (10**6, 10**6)
    sparse = torch.sparse_coo_tensor(*nothing, size, check_invariants=True)
    for endless in (torch.zeros(1).expand(size), sparse):
        torch.save({"lm_head.weight": endless}, tmp_path / "pytorch_model.bin")
        said = r"'lm_head.weight' of shape \[1000000, 1000000\] is not stored whole"
        with pytest.raises(CheckpointError, match=said):
            Checkpoint.open(tmp_path).build(torch.float32)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(
    value: float, quantize: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig("llama", 64, 64, 2, 4, 4, 16, 96, 128)
    model = random_model(config, torch.float32)
    save_checkpoint(model, tmp_path / "good")
    Checkpoint.open(tmp_path / "good").build(torch.float32, quantize=quantize)
    assert "finite" not in caplog.text
    with torch.no_grad():
        model.embed.tokens.weight[33, 5] = value
        model.layers[1].w2.weight[3, 7] = value
    save_checkpoint(model, tmp_path / "bad")
    Checkpoint.open(tmp_path / "bad").build(torch.float32, quantize=quantize)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 weights are not finite" in line
    assert "embed.tokens.weight" in line
    assert "layers.1.w2." in line


def test_a_value_too_large_for_the_dtype_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny(tmp_path)
    model = Checkpoint.open(tmp_path).build(torch.float32)
    with torch.no_grad():
        model.head.norm.weight[0] = 1e6
    save_checkpoint(model, tmp_path)
    Checkpoint.open(tmp_path).build(torch.float32, column_major=True)
    assert not caplog.records
    Checkpoint.open(tmp_path).build(torch.float16)
    assert "1 weights are not finite (NaN or infinity): head.norm.weight." in caplog.text


def test_random_models_are_seeded(tmp_path: Path) -> None:
    one, same, other = (random_model(TINY, torch.float32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.head.output.weight, same.head.output.weight)
    assert not torch.equal(one.head.output.weight, other.head.output.weight)
    assert one.head.output.weight.std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(one.head.norm.weight, torch.ones(32))
    assert len(one.head.output.weight.unique(dim=0)) == 64


def test_named_shapes() -> None:
    """Parameter counts as published."""
    counts = {
        "tinyllama-1.1b": 1_100_048_384,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "llama-2-7b": 6_738_415_616,
        "llama-3.1-8b": 8_030_261_248,
        "qwen2.5-7b": 7_615_616_512,
        "mistral-7b": 7_248_023_552,
    }
    assert {name: describe(SHAPES[name]).num_parameters for name in counts} == counts
    for config in SHAPES.values():
        assert to_hf_config(config, "bfloat16")  # every shape can be written and read back
    with pytest.raises(ConfigError, match=r"llama-9t.*tinyllama-1.1b"):
        shape("llama-9t")


# Memory

MEASURE = """
import sys, torch
from gpt_fast.checkpoint.checkpoint import Checkpoint

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

warm = torch.zeros(1 << 20).to(torch.bfloat16).float()  # what the first conversion allocates for good
before = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
model = Checkpoint.open(sys.argv[1]).build(getattr(torch, sys.argv[2]))
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(held, status("VmHWM:") - before, float(model.head.output.weight[-1, -1]))
"""
LARGE = ModelConfig("llama", 8192, 1024, 5, 16, 16, 64, 2816, 2048)  # 81 million weights


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in float32 and bfloat16 as safetensors, and in float32 as pytorch_model.bin."""
    root = tmp_path_factory.mktemp("large")
    model = random_model(LARGE, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        save_checkpoint(model, root / str(dtype).removeprefix("torch."), dtype)
    directory = root / "bin"
    directory.mkdir()
    (directory / "config.json").write_bytes((root / "float32" / "config.json").read_bytes())
    torch.save(safetensors.torch.load_file(root / "float32" / "model.safetensors"), directory / "pytorch_model.bin")
    return root


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs madvise")
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("bin", "float32"),
        ("bin", "bfloat16"),
    ],
)
def test_a_load_peaks_at_the_weights_it_leaves(source: str, dtype: str, large: Path) -> None:
    """At most 1.1 times the weights, plus what the allocator and the page tables take of any size."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", MEASURE, str(large / source), dtype]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    held, peak, last = (float(n) for n in done.stdout.split())
    assert held == describe(LARGE).num_parameters * (4 if dtype == "float32" else 2)
    assert last != 0
    assert held * 0.95 < peak < held * 1.1 + (4 << 20), f"{peak / held:.3f} times the weights"


def test_config_and_weights_disagree_on_layers(tmp_path: Path) -> None:
    tiny(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert parse_config(read_json(tmp_path / "config.json")).num_layers == 3
    with pytest.raises(CheckpointError, match=r"9 tensors missing: model.layers.2.input_layernorm.weight"):
        Checkpoint.open(tmp_path).build(torch.float32)


def test_the_layout_changes_nothing_but_the_strides(tmp_path: Path) -> None:
    config = ModelConfig("llama", 300, 64, 2, 4, 2, 16, 144, 64)
    rows, columns = (random_model(config, torch.float32, column_major=turned) for turned in (False, True))
    assert not columns.layers[0].w2.weight.is_contiguous()  # type: ignore[union-attr,operator]
    for (name, a), (_, b) in zip(rows.named_parameters(), columns.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    save_checkpoint(rows, tmp_path)
    tokens = torch.arange(20)[None]
    loaded = [Checkpoint.open(tmp_path).build(torch.float32, column_major=turned) for turned in (False, True)]
    torch.testing.assert_close(loaded[0](tokens), loaded[1](tokens), atol=1e-5, rtol=1e-5)


# Files


OPENED: list[str] = []  # every file that is opened while WATCHED is set: audit hooks cannot be taken away again
WATCHED = threading.Event()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHED.is_set() and event == "open":
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def _hook() -> None:
    sys.addaudithook(_note)


@pytest.fixture
def opened(_hook: None) -> Iterator[list[str]]:
    """The paths that are opened from here on."""
    OPENED.clear()
    WATCHED.set()
    yield OPENED
    WATCHED.clear()


@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "tokenizer.json", "both"])
@pytest.mark.parametrize("quantized", [False, True])
def test_llm_opens_each_file_once(
    tokenizer: str, quantized: bool, data_dir: Path, tmp_path: Path, opened: list[str]
) -> None:
    folder = tiny(tmp_path / "a", dataclasses.replace(TINY, vocab_size=512))
    if quantized:
        quantize_checkpoint(Checkpoint.open(folder), tmp_path / "b", quant_config("int8"))
        folder = tmp_path / "b"
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(2):
        half = {name: tensor for j, (name, tensor) in enumerate(tensors.items()) if j % 2 == i}
        safetensors.torch.save_file(half, folder / f"{i}.safetensors")
    weight_map = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    if tokenizer != "tokenizer.json":
        model = data_dir / "models" / "stories260K_hf" / "tokenizer.model"
        (folder / "tokenizer.model").write_bytes(model.read_bytes())
    if tokenizer != "tokenizer.model":
        spec = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    files = sorted(path.name for path in folder.iterdir())
    opened.clear()
    with LLM(folder, compile=False, max_seq_len=32) as llm:
        assert llm.tokenizer is not None
    assert sorted(Path(path).name for path in opened if Path(path).parent == folder) == files
