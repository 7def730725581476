"""GGUF files: every encoding, architecture and vocabulary gives what the model had that the file was made of."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf_files import (
    Type,
    add_sentencepiece,
    close,
    dequantized,
    write_byte_pairs,
    write_dequantized,
    write_model,
)
from quantized import dequantized as layer_values
from test_tokenizer import PIECES
from vocabularies import CHAT_TOKENS, gpt2_vocab, library_for_ranks, write_all

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.families import parse_config
from gpt_fast.checkpoint.files import choose_files
from gpt_fast.checkpoint.fingerprint import fingerprint
from gpt_fast.checkpoint.gguf_tensors import GgufTensor
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.cli import main
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError, TokenizerError, TokenizerMissing
from gpt_fast.gguf import ENCODINGS, read_metadata
from gpt_fast.llm import LLM
from gpt_fast.model.building import random_model
from gpt_fast.params import SamplingParams
from gpt_fast.quantize import gguf as formats
from gpt_fast.quantize.scheme import Scheme, Split, quant_config
from gpt_fast.quantize.writer import quantize_checkpoint
from gpt_fast.serve.routes import openai_context
from gpt_fast.serve.settings import find_checkpoint
from gpt_fast.tokenizer import load_tokenizer
from gpt_fast.tokenizer.chat import DEFAULT, load_templates
from gpt_fast.tokenizer.gguf_vocabulary import end_ids, tokenizer_files

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "model_store" / "demo" / "target"
QUANTIZED = (
    "Q2_K",
    "Q3_K",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)
WIDE = ModelConfig("llama", 64, 256, 2, 4, 2, 64, 512, 128)  # whole blocks of 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of whole blocks, with an untied head."""
    path = tmp_path_factory.mktemp("wide")
    save_checkpoint(random_model(WIDE, torch.float32), path, extra={"bos_token_id": None, "eos_token_id": 2})
    return path


def values_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor.whole().float() for name, tensor in checkpoint.tensors.items()}


def assert_same_values(one: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = values_of(one), values_of(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def logits(checkpoint: Checkpoint, **how: Any) -> torch.Tensor:
    model = checkpoint.build(torch.float32, **how)
    tokens = torch.arange(24)[None] * 7 % checkpoint.config.vocab_size
    with torch.no_grad():
        return model(tokens)[0]


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_are_read_as_the_library_reads_them(name: str) -> None:
    encoding = next(e for e in ENCODINGS.values() if e.name == name)
    raw = np.random.default_rng(0).integers(0, 256, (40, 3 * encoding.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes are also NaN, infinity and huge numbers
        expected = gguf.quants.dequantize(raw, Type[name])
    ours = GgufTensor(torch.from_numpy(raw), encoding, 3 * encoding.values)
    np.testing.assert_array_equal(ours.rows(0, 40).numpy(), expected)
    np.testing.assert_array_equal(ours.picked(torch.tensor([7, 3])).rows(0, 2).numpy(), expected[[7, 3]])
    part = ours.columns(encoding.values, encoding.values)
    np.testing.assert_array_equal(part.rows(5, 9).numpy(), expected[5:9, encoding.values : 2 * encoding.values])
    with pytest.raises(ConfigError, match=f"no whole blocks of {name}"):
        ours.columns(0, 16)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_weights_are_those_of_the_file(kind: str, folder: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(write_model(folder, tmp_path / "m.gguf", kind))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert opened.format.method is None
    assert opened.stored_dtype == dtype
    expected = values_of(Checkpoint.open(folder))
    for name, values in values_of(opened).items():
        wanted = expected[name] if "norm" in name else expected[name].to(dtype).float()
        assert torch.equal(values, wanted), name


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_give_the_logits_of_the_librarys_values(kind: str, folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", kind)
    ours = Checkpoint.open(path)
    theirs = Checkpoint.open(write_dequantized(folder, path, tmp_path / "plain.gguf"))
    assert_same_values(ours, theirs)
    assert ours.format.method == "GGUF"
    assert ours.stored_dtype == torch.bfloat16
    expected = logits(theirs)
    error = (logits(ours) - expected).norm() / expected.norm()
    assert error < 0.04, f"{error:.4f}"  # four bits themselves are off by 0.1 to 0.2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_codes_of_four_bits_stay(kind: str, folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", kind)
    opened = Checkpoint.open(path)
    layer = opened.build(torch.float32).get_submodule("layers.0.w2")
    assert layer.scheme == Scheme("int4", 32)
    stored = opened.tensors["model.layers.0.mlp.down_proj.weight"]
    wanted = dequantized(path)["blk.0.ffn_down.weight"]
    groups = stored.groups(0, stored.num_rows)
    # A scale is the nearest of 255 parts of the row's greatest, a zero the nearest eighth of a code.
    greatest = groups.step.abs().amax(1, keepdim=True)
    allowed = (greatest / 255 / 2 * 8 + groups.step.abs() / 16)[..., None] * 1.01
    assert ((layer_values(layer) - wanted).unflatten(1, (-1, 32)).abs() <= allowed).all()
    assert not torch.equal(layer_values(layer), wanted)


def test_a_group_that_cannot_be_stored_is_rounded_anew(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    model = random_model(WIDE, torch.float32)
    model.get_parameter("layers.0.w2.weight").data[3, :32] = torch.linspace(5, 6, 32)  # far from 0
    save_checkpoint(model, source)
    path = write_model(source, tmp_path / "m.gguf", "Q4_1")
    layer = Checkpoint.open(path).build(torch.float32).get_submodule("layers.0.w2")
    wanted = dequantized(path)["blk.0.ffn_down.weight"]
    assert (layer_values(layer)[3, :32] - wanted[3, :32]).abs().max() < 6 / 15


def test_files_mix_encodings(folder: Path, tmp_path: Path) -> None:
    kinds = {"attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K", "token_embd": "Q6_K", "blk.1.ffn_up": "F16"}
    kinds |= {"attn_output": "Q4_K", "output": "Q8_0"}
    path = write_model(folder, tmp_path / "m.gguf", "Q4_K", kinds=kinds)
    opened = Checkpoint.open(path)
    int4, int8 = Scheme("int4", 32), Scheme("int8")
    assert opened.format.quant is not None
    assert opened.format.quant.named == {
        "layers.0.wqkv": Split(int4, int8, WIDE.q_dim), "layers.1.wqkv": Split(int4, int8, WIDE.q_dim),
        "layers.0.wo": int4, "layers.1.wo": int4, "layers.0.w13": int4, "layers.0.w2": int4, "layers.1.w2": int8,
        "head.output": int8,
    }  # fmt: skip
    plain = logits(Checkpoint.open(write_dequantized(folder, path, tmp_path / "plain.gguf")))
    assert (logits(opened) - plain).norm() / plain.norm() < 0.04


def test_one_matrix_of_two_encodings_is_held_in_the_wider(folder: Path, tmp_path: Path) -> None:
    """Only queries can be held apart from the rest."""
    path = write_model(folder, tmp_path / "m.gguf", "Q4_K", kinds={"blk.0.ffn_up": "Q8_0", "blk.1.ffn_gate": "Q6_K"})
    form = Checkpoint.open(path).format
    assert form.quant is not None
    assert [form.quant.named[f"layers.{i}.w13"] for i in (0, 1)] == [Scheme("int8")] * 2


# ---------------------------------------------------------------- architectures

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama-bias": ("llama", "LlamaForCausalLM", {"attention_bias": True}),
    "mixtral": ("llama", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", "Qwen3MoeForCausalLM", {"head_dim": 16, **QWEN_MOE}),
    "phi3": ("phi3", "Phi3ForCausalLM", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
    "gemma": ("gemma", "GemmaForCausalLM", {"head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3": (
        "gemma3", "Gemma3ForCausalLM",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_hidden_layers": 6, "rope_theta": 1e6},
    ),
    "gpt2": (
        "gpt2", "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128, "vocab_size": 96},
    ),
}  # fmt: skip


def made(name: str, path: Path) -> Path:
    """A folder with a random model of ``ARCHITECTURES[name]``, norms and biases random too."""
    _, architecture, changes = ARCHITECTURES[name]
    raw = {"architectures": [architecture]} | ({} if name == "gpt2" else SHAPE) | changes
    model = random_model(parse_config(raw), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).bfloat16().float() / 8)
    save_checkpoint(model, path)
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_the_models_that_they_were_made_of(name: str, tmp_path: Path) -> None:
    source = made(name, tmp_path / "source")
    arch, wanted = ARCHITECTURES[name][0], Checkpoint.open(source)
    opened = Checkpoint.open(write_model(source, tmp_path / "m.gguf", arch=arch))
    assert opened.config == wanted.config
    assert_same_values(opened, wanted)
    assert torch.equal(logits(opened), logits(wanted))
    convert(tmp_path / "m.gguf", tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").config == wanted.config
    assert_same_values(Checkpoint.open(tmp_path / "out"), wanted)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "mixtral"])
def test_other_layouts_are_quantized_too(name: str, tmp_path: Path) -> None:
    source = made(name, tmp_path / "source")
    path = write_model(source, tmp_path / "m.gguf", "Q8_0", ARCHITECTURES[name][0])
    opened, plain = Checkpoint.open(path), Checkpoint.open(source)
    assert opened.format.method == "GGUF"
    assert (logits(opened) - logits(plain)).norm() / logits(plain).norm() < 0.03
    convert(path, tmp_path / "out")
    converted = Checkpoint.open(tmp_path / "out")
    for ours, theirs in zip(
        opened.build(torch.bfloat16).state_dict().items(),
        converted.build(torch.bfloat16).state_dict().items(),
        strict=True,
    ):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1]), ours[0]


def test_both_ranks_together_hold_what_one_does(folder: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(write_model(folder, tmp_path / "m.gguf", "Q4_0"))
    halves = [opened.build(torch.float32, shard=Shard(rank, 2)) for rank in (0, 1)]
    whole = opened.build(torch.float32)
    for name, dim in (("layers.0.wo", 1), ("layers.1.w2", 1)):
        parts = [layer_values(half.get_submodule(name)) for half in halves]
        assert torch.equal(torch.cat(parts, dim), layer_values(whole.get_submodule(name)))


def llama3_divisors(head_dim: int, theta: float, factor: float) -> list[float]:
    """As llama.cpp's converter writes them."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        blended = 1 / ((1 - smooth) / factor + smooth) if smooth else factor
        out.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else blended)
    return out


def test_llama3s_rotation_is_found_in_its_divisors(tmp_path: Path) -> None:
    source = made("llama", tmp_path / "source")
    divisors = llama3_divisors(16, 5000.0, 32.0)
    path = write_model(source, tmp_path / "m.gguf", vectors={"rope_freqs.weight": divisors})
    scaling = Checkpoint.open(path).config.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.original_max_seq_len) == ("llama3", 32.0, 8192)
    own = [1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0]
    path = write_model(source, tmp_path / "n.gguf", vectors={"rope_freqs.weight": own})
    scaling = Checkpoint.open(path).config.rope_scaling
    assert scaling is not None
    assert (scaling.type, list(scaling.short), list(scaling.long)) == ("longrope", own, own)
    assert scaling.original_max_seq_len == 128
    assert scaling.attention_factor == 1


def test_gemma3s_layers_with_a_window(tmp_path: Path) -> None:
    source = made("gemma3", tmp_path / "source")
    wanted = Checkpoint.open(source).config

    def config(**keys: Any) -> ModelConfig:
        return Checkpoint.open(write_model(source, tmp_path / "m.gguf", arch="gemma3", metadata=keys)).config

    assert config() == wanted
    assert (wanted.windows, wanted.local_rope_theta) == ((8, 8, 8, 8, 8, 0), 1e4)
    assert config(**{"rope.freq_base_swa": 5000.0}).local_rope_theta == 5000
    assert config(**{"attention.sliding_window_pattern": 2}).windows == (8, 0, 8, 0, 8, 0)
    assert config(**{"attention.sliding_window_pattern": [1, 1, 0, 0, 1, 1]}).windows == (8, 8, 0, 0, 8, 8)
    every = [True] * 6  # which is no period of 1
    assert config(**{"attention.sliding_window_pattern": every}).windows == (8,) * 6
    raw = {"architectures": ["Gemma3ForCausalLM"], **SHAPE, **ARCHITECTURES["gemma3"][2], "sliding_window": None}
    save_checkpoint(random_model(parse_config(raw), torch.float32), tmp_path / "all")
    path = write_model(tmp_path / "all", tmp_path / "all.gguf", arch="gemma3")
    assert Checkpoint.open(path).config.windows == ()
    assert torch.equal(logits(Checkpoint.open(path)), logits(Checkpoint.open(tmp_path / "all")))


def test_keys_that_an_architecture_has_no_use_for(folder: Path, tmp_path: Path) -> None:
    keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope.freq_base_swa": 5000.0}
    path = write_model(folder, tmp_path / "m.gguf", metadata=keys)
    assert Checkpoint.open(path).config == Checkpoint.open(folder).config


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_a_window_of_0_is_none(name: str, tmp_path: Path) -> None:
    arch, architecture, changes = ARCHITECTURES[name]
    raw = {"architectures": [architecture], **SHAPE, **changes, "sliding_window": None}
    save_checkpoint(random_model(parse_config(raw), torch.float32), tmp_path / "source")
    path = write_model(tmp_path / "source", tmp_path / "m.gguf", arch=arch, metadata={"attention.sliding_window": 0})
    assert Checkpoint.open(path).config.windows == ()


def test_other_scalings_of_the_rotation(tmp_path: Path) -> None:
    source = made("phi3", tmp_path / "source")
    vectors = {"rope_factors_short.weight": [1.0, 1.5, 2.0, 2.5], "rope_factors_long.weight": [2.0, 3.0, 4.0, 5.0]}
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    opened = Checkpoint.open(write_model(source, tmp_path / "m.gguf", arch="phi3", vectors=vectors, metadata=keys))
    scaling = opened.config.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.original_max_seq_len, scaling.attention_factor) == ("longrope", 32, 1.25)
    assert (scaling.short, scaling.long) == ((1.0, 1.5, 2.0, 2.5), (2.0, 3.0, 4.0, 5.0))
    source = made("llama", tmp_path / "other")
    for kind in ("linear", "yarn"):
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
        found = Checkpoint.open(write_model(source, tmp_path / f"{kind}.gguf", metadata=keys)).config.rope_scaling
        assert found is not None
        assert (found.type, found.factor) == (kind, 4.0)
    for keys in ({"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):  # in older files without the type
        found = Checkpoint.open(write_model(source, tmp_path / "older.gguf", metadata=keys)).config.rope_scaling
        assert found is not None
        assert (found.type, found.factor) == ("linear", 4.0)
    keys = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert Checkpoint.open(write_model(source, tmp_path / "none.gguf", metadata=keys)).config.rope_scaling is None
    path = write_model(source, tmp_path / "bad.gguf", metadata={"rope.scaling.type": "su"})
    with pytest.raises(CheckpointError, match=r"bad\.gguf: llama\.rope\.scaling\.type 'su' is not supported"):
        Checkpoint.open(path)


def test_where_yarn_interpolates(folder: Path, tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 1.0}
    ends = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    for given, wanted in (({}, (32.0, 1.0)), (ends, (16.0, 2.0))):
        path = write_model(folder, tmp_path / "m.gguf", metadata=keys | given)
        scaling = Checkpoint.open(path).config.rope_scaling
        assert scaling is not None
        assert (scaling.type, scaling.beta_fast, scaling.beta_slow) == ("yarn", *wanted)
    with pytest.raises(CheckpointError, match=r"llama\.rope\.scaling\.yarn_attn_factor 0\.5 is not supported"):
        Checkpoint.open(write_model(folder, path, metadata=keys | {"rope.scaling.yarn_attn_factor": 0.5}))


# ---------------------------------------------------------------- vocabularies

TEXTS = [*PIECES, "Once upon a time, in 1999, there were 12345 cats.", "  two  spaces\n\n\ttab", "don't I'LL we've", ""]


@pytest.fixture(scope="module")
def vocabularies(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabularies of tests/data as other files hold them."""
    path = tmp_path_factory.mktemp("vocabularies")
    write_all(data_dir, path)
    return path


def write_sentencepiece(model: Path, out: Path, **ids: bool) -> Path:
    writer = gguf.GGUFWriter(out, "llama")
    add_sentencepiece(writer, model)
    if "add_space_prefix" in ids:
        writer.add_add_space_prefix(ids["add_space_prefix"])
    if "add_bos_token" in ids:
        writer.add_add_bos_token(ids["add_bos_token"])
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    close(writer)
    return out


def test_sentencepiece_gives_the_ids_of_its_model(vocabularies: Path, data_dir: Path, tmp_path: Path) -> None:
    model = data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1"
    ours = load_tokenizer(write_sentencepiece(model, tmp_path / "m.gguf"))
    theirs = load_tokenizer(vocabularies / "mistral-sentencepiece")
    stories = (data_dir / "text" / "tinystories.txt").read_text(encoding="utf-8")
    for text in [*TEXTS, stories[:20_000]]:
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs.encode(text, allow_special=True), text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, (2,), 32_000)
    assert ours.leading_spaces_dropped == theirs.leading_spaces_dropped == 1


def test_sentencepiece_by_its_keys(data_dir: Path, tmp_path: Path) -> None:
    model = data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1"
    flags = {"add_space_prefix": False, "add_bos_token": False}
    bare = load_tokenizer(write_sentencepiece(model, tmp_path / "m.gguf", **flags))
    assert bare.decode(bare.encode("hello")) == "hello"
    assert bare.leading_spaces_dropped == 0
    assert bare.encode("hello")[0] != 1
    template = load_templates(tmp_path / "m.gguf").get(DEFAULT)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>[user] hi"


def test_templates_by_name(data_dir: Path, tmp_path: Path) -> None:
    """As in files of Hermes 2 Pro and Command R, whose template for tools is another one."""
    templates = {name: "{{ messages[0].content }} by " + name for name in ("default", "tool_use", "rag")}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_sentencepiece(writer, data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1")
    writer.add_chat_template([{"name": name, "template": template} for name, template in templates.items()])
    close(writer)
    found = load_templates(tmp_path / "m.gguf")
    assert {name: template.source for name, template in found.items()} == {
        name: templates[name] for name in ("default", "tool_use")
    }


def test_sentencepiece_s_special_tokens_by_any_name(tmp_path: Path) -> None:
    """In the order of Gemma's. The model itself knows them as well, for whoever takes it without the files beside."""
    tokens = ["<pad>", "<eos>", "<bos>", "<none>", "▁", "a", "▁a"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 4 + [-3.0, -2.0, -1.0])
    writer.add_token_types([2, 3, 3, 2, 1, 1, 1])  # of two that are unknown one is named as such
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    close(writer)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.encode("a")) == (2, (1,), [2, 5])
    made = tokenizer_files(tmp_path / "m.gguf")["tokenizer.model"]
    model = sentencepiece.SentencePieceProcessor(model_proto=made)
    assert (model.bos_id(), model.eos_id(), model.unk_id()) == (2, 1, 3)
    assert [model.id_to_piece(id) for id in range(len(tokens))] == tokens


def test_user_defined_tokens_are_written_with_spaces(data_dir: Path, tmp_path: Path) -> None:
    """Gemma's runs of spaces: llama.cpp's converter spells those of user-defined tokens as spaces, and no others."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    add_sentencepiece(writer, data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1", user_defined=["  ", " " * 17])
    close(writer)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.leading_spaces_dropped == 0  # Gemma's texts begin with no space, and its first files do not say so
    text = "a" + " " * 17 + "b  c"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.decode(ids) == text  # the model has a piece of two spaces as well


def test_user_defined_markup_is_cut_out_of_a_text(data_dir: Path, tmp_path: Path) -> None:
    """As in files of models whose turns were added to Mistral's vocabulary; text behind them begins like any text."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    markup = ["<|im_end|>", "<|im_start|>"]
    add_sentencepiece(writer, data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1", user_defined=markup)
    close(writer)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    said, answer = (tokenizer.encode(text, bos=False) for text in ("user\nhi", "\n"))
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.encode(text, allow_special=True) == [1, 32_001, *said, 32_000, *answer]
    assert tokenizer.encode(text)[:5] == [1, 32_001, *said[:3]]
    assert said[0] == tokenizer.encode("user", bos=False)[0]
    assert not tokenizer.is_special(32_001)


def test_the_demo_model_keeps_its_ids(tmp_path: Path, data_dir: Path) -> None:
    path = write_model(DEMO, tmp_path / "m.gguf", "Q8_0")
    ours, theirs = load_tokenizer(path), load_tokenizer(DEMO)
    stories = (data_dir / "text" / "tinystories.txt").read_text(encoding="utf-8")
    for text in [*TEXTS, stories]:
        assert ours.encode(text) == theirs.encode(text)


def test_phi3s_markup_swallows_white_space(vocabularies: Path, data_dir: Path, tmp_path: Path) -> None:
    writer, model = (
        gguf.GGUFWriter(tmp_path / "m.gguf", "phi3"),
        data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1",
    )
    add_sentencepiece(writer, model, CHAT_TOKENS, user_defined=["</s>"])
    writer.add_eos_token_id(32_000)  # <|endoftext|>, the first of the tokens behind the model's
    close(writer)
    ours, theirs = load_tokenizer(tmp_path / "m.gguf"), load_tokenizer(vocabularies / "chat-json")
    texts = [
        "<|user|>\n  hi<|end|>\n<|assistant|>\n",
        "<|endoftext|>  x",
        "<s> a",
        "<|user|>\x1f \u2029<|end|>\u3000\x1cx",
        "plain <|user|> text",
        "</s>a</s> b",
    ]
    for text in texts:
        for allowed in (True, False):
            assert ours.encode(text, bos=False, allow_special=allowed) == theirs.encode(
                text, bos=False, allow_special=allowed
            )


def golden(data_dir: Path) -> list[tuple[str, list[int]]]:
    path = data_dir / "tokenizers" / "golden_encodings" / "ggml-vocab-gpt-2.gguf"
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=False)]


def byte_pairs(data_dir: Path, out: Path, pre: str, special: tuple[str, ...] = ("<|endoftext|>",), **ids: int) -> Path:
    """GPT-2's vocabulary with the splitting ``pre``."""
    merges = (data_dir / "tokenizers" / "gpt2" / "merges.txt").read_text(encoding="utf-8")
    tokens = [token for token in gpt2_vocab(merges) if token != "<|endoftext|>"]
    pairs = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    types = [1] * len(tokens) + [3] * len(special)
    return write_byte_pairs(out, [*tokens, *special], pairs, pre, types, **ids)


def test_byte_pairs_give_the_published_ids(data_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_pairs(data_dir, tmp_path / "m.gguf", "gpt-2", bos=50256, eos=50256))
    for text, ids in golden(data_dir):
        assert tokenizer.encode(text) == ids, text
    assert tokenizer.encode("<|endoftext|>") != [50256]
    assert tokenizer.encode("<|endoftext|>", allow_special=True) == [50256]
    assert (tokenizer.eos_token_ids, tokenizer.decode([50256])) == ((50256,), "")


@pytest.mark.parametrize(("pre", "name"), [("llama-bpe", "llama3-tiktoken"), ("qwen2", "qwen-tiktoken")])
def test_splits_are_those_of_the_models(
    pre: str, name: str, vocabularies: Path, data_dir: Path, tmp_path: Path
) -> None:
    special = ("<|begin_of_text|>", "<|eot_id|>", "<|im_end|>")
    path = byte_pairs(data_dir, tmp_path / "m.gguf", pre, special, bos=50256, eos=50257)
    ours, theirs = load_tokenizer(path), library_for_ranks(name, vocabularies / "gpt2-vocab-merges")
    texts = [*TEXTS, *(text for text, _ in golden(data_dir))]
    for text in texts:
        text = text.encode("utf-8", "replace").decode()  # the library takes no half of a UTF-16 pair
        assert ours.encode(text, bos=False) == theirs.encode(text).ids, text
    assert ours.encode("a")[0] == (50256 if pre == "llama-bpe" else ours.encode("a", bos=False)[0])


def test_the_older_default_split(data_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_pairs(data_dir, tmp_path / "m.gguf", "default"))
    words = [tokenizer.decode([id]) for id in tokenizer.encode("It's 12345 $x")]
    assert words == ["It", "'", "s", " ", "123", "45", " ", "$", "x"]


def test_vocabularies_that_are_not_read(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"m\.gguf: tokenizer\.ggml\.pre 'falcon' is not supported, only default, "
    ):
        load_tokenizer(byte_pairs(data_dir, tmp_path / "m.gguf", "falcon"))
    writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "llama")
    writer.add_tokenizer_model("t5")
    close(writer)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model 't5' is not supported"):
        load_tokenizer(tmp_path / "t5.gguf")
    close(gguf.GGUFWriter(tmp_path / "none.gguf", "llama"))
    with pytest.raises(TokenizerMissing, match=r"none\.gguf has no tokenizer"):
        load_tokenizer(tmp_path / "none.gguf")
    assert load_templates(tmp_path / "none.gguf").get(DEFAULT) is None


@pytest.mark.parametrize(
    ("model", "key", "value", "said"),
    [
        ("gpt2", "token_list", None, "tokens, the list of tokens, is missing"),
        ("gpt2", "token_merges", None, "merges, the list of merges, is missing"),
        ("gpt2", "token_types", [1, 1], "token_type must have a number for each of 3 tokens"),
        ("llama", "token_scores", None, "scores must have a number for each of 3 tokens"),
    ],
)
def test_what_a_vocabulary_lacks_is_told(model: str, key: str, value: Any, said: str, tmp_path: Path) -> None:
    whole = {"token_list": ["a", "b", "ab"], "token_merges": ["a b"], "token_types": [1] * 3, "token_scores": [0.0] * 3}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_bos_token_id(0)
    for name, given in (whole | {key: value}).items():
        if given is not None:
            getattr(writer, f"add_{name}")(given)
    close(writer)
    with pytest.raises(TokenizerError, match=rf"m\.gguf: tokenizer\.ggml\.{said}"):
        load_tokenizer(tmp_path / "m.gguf")
    assert load_templates(tmp_path / "m.gguf") == {}


# ---------------------------------------------------------------- wherever a checkpoint is taken


def greedy(checkpoint: str | Path, **options: Any) -> list[int]:
    with LLM(checkpoint, kernels=False, compile=False, **options) as llm:
        return llm.generate("Once upon a time", SamplingParams(max_tokens=12)).token_ids


def test_generating(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = write_model(DEMO, tmp_path / "one" / "demo.gguf", "F32")
    expected = greedy(DEMO, dtype="float32")
    assert greedy(path) == expected
    assert greedy(tmp_path / "one") == expected, "a folder with one file stands for it"
    small = write_model(DEMO, tmp_path / "small.gguf", "Q8_0")
    assert greedy(path, draft=str(small)) == expected
    assert greedy(small, quantize="int4")[:4] == expected[:4]
    shutil.copy(small, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds several checkpoints, name one: other\.gguf, small\.gguf"):
        Checkpoint.open(tmp_path)


def test_serving(tmp_path: Path) -> None:
    write_model(DEMO, tmp_path / "demo.gguf", "Q8_0", template="{{ messages[0].content }}!")
    assert find_checkpoint(Path("auto"), tmp_path) == tmp_path
    with LLM(tmp_path, kernels=False, compile=False) as llm:
        template = openai_context(llm, ("demo",)).template
        assert template is not None
        assert template.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_model_in_several_files(folder: Path, tmp_path: Path) -> None:
    whole = Checkpoint.open(write_model(folder, tmp_path / "whole.gguf", "Q4_0"))
    (tmp_path / "parts").mkdir()
    write_model(folder, tmp_path / "parts" / "m.gguf", "Q4_0", tensors_a_file=8)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (tmp_path / "parts", parts[0], parts[2]):
        opened = Checkpoint.open(path)
        assert opened.files == parts
        assert_same_values(opened, whole)
    files, left_out = choose_files(tmp_path / "parts", parts[1].name)
    assert (list(files), left_out) == (parts, [])
    before = fingerprint(Checkpoint.open(parts[0]))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf is missing; the model is in 3 files"):
        Checkpoint.open(parts[0])
    assert fingerprint(whole) != before


def test_nothing_beside_the_file_is_read(folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf")
    alone = fingerprint(Checkpoint.open(path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "do_sample": true}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "keys.json").write_text("{}")
    opened = Checkpoint.open(path)
    assert opened.defaults.eos_token_ids == ()
    assert opened.companions() == {}
    assert fingerprint(opened) == alone
    files, left_out = choose_files(tmp_path)
    assert ([file.name for file in files], len(left_out)) == (["m.gguf"], 3)


def test_every_end_of_an_answer_is_known(folder: Path, data_dir: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["<unk>", "<|im_end|>", "</s>", "x", "<|eot_id|>"])
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.add_eos_token_id(2)
    writer.add_key_value("tokenizer.ggml.eot_token_id", False, gguf.GGUFValueType.BOOL)  # no id
    close(writer)
    assert end_ids(read_metadata(tmp_path / "m.gguf")) == [2, 1]


def test_a_turns_end_that_is_declared_to_be_text(data_dir: Path, tmp_path: Path) -> None:
    """As converters did until 2024 with all that was added to a vocabulary."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    markup = ["<|im_end|>", "<|im_start|>"]
    add_sentencepiece(writer, data_dir / "tokenizers" / "mistral" / "tokenizer.model.v1", user_defined=markup)
    close(writer)
    assert end_ids(read_metadata(tmp_path / "m.gguf")) == [2, 32_000]
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer.is_special(32_000)
    assert 32_000 not in tokenizer.encode("a<|im_end|>")
    assert 32_000 in tokenizer.encode("a<|im_end|>", allow_special=True)


def test_a_tokenizer_beside_a_vocabulary_that_is_not_read(folder: Path, vocabularies: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", "Q8_0")
    given = vocabularies / "mistral-json" / "tokenizer.json"
    convert(path, tmp_path / "out", given)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert Checkpoint.open(tmp_path / "out").tokenizer.vocab_size == 32_000
    with pytest.raises(CheckpointError, match=r"nowhere\.json does not exist"):
        convert(path, tmp_path / "other", tmp_path / "nowhere.json")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_a_converted_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    path = write_model(DEMO, tmp_path / "demo.gguf", kind, kinds={"attn_v": "Q6_K"} if kind == "Q4_K" else {})
    assert main(["convert", str(path), "--out", str(tmp_path / "out")]) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"}
    ours, converted = Checkpoint.open(path), Checkpoint.open(tmp_path / "out")
    assert converted.config == ours.config
    assert converted.stored_dtype == ours.stored_dtype
    with torch.no_grad():
        tokens = torch.arange(40)[None]
        models = [opened.build(torch.bfloat16) for opened in (ours, converted)]
        assert torch.equal(*(model(tokens) for model in models))
    assert converted.tokenizer.encode("Once upon a time") == ours.tokenizer.encode("Once upon a time")
    if kind == "Q4_K":
        modules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules"]
        assert modules["layers.0.wqkv"] == "int4-g32, int8"
        convert(path, tmp_path / "plain", dtype=torch.float32)
        plain = Checkpoint.open(tmp_path / "plain")
        assert plain.format.method is None
        assert_same_values(plain, ours)


def test_nothing_is_left_of_a_conversion_that_failed(folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", "Q4_K")
    for dtype, writer in ((None, "quantize.writer"), (torch.float32, "checkpoint.weight_files")):
        full = mock.patch(f"gpt_fast.{writer}.write_rows", side_effect=OSError(28, "No space left"))
        with full, pytest.raises(CheckpointError, match="out cannot be written: No space left"):
            convert(path, tmp_path / "out", dtype=dtype)
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_quantized_anew(folder: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(write_model(folder, tmp_path / "m.gguf", "Q5_K"))
    quantize_checkpoint(opened, tmp_path / "out", quant_config("int4"))
    written = Checkpoint.open(tmp_path / "out").build(torch.float32).get_submodule("layers.1.wo")
    loaded = opened.build(torch.float32, quantize="int4").get_submodule("layers.1.wo")
    assert written.scheme == loaded.scheme == Scheme("int4", 32)
    assert torch.equal(layer_values(written), layer_values(loaded))


def test_never_a_whole_matrix_in_full_precision(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    groups = GgufTensor.groups
    monkeypatch.setattr(GgufTensor, "groups", lambda t, b, e: (sizes.append((e - b) * t.shape[1]), groups(t, b, e))[1])
    monkeypatch.setattr(formats, "_CHUNK", 4096)
    monkeypatch.setattr("gpt_fast.quantize.rtn._CHUNK", 4096)
    monkeypatch.setattr("gpt_fast.checkpoint.stored._CHUNK", 4096 * 4)
    kinds = {"ffn": "Q6_K"}
    Checkpoint.open(write_model(folder, tmp_path / "m.gguf", "Q4_K", kinds=kinds)).build(torch.bfloat16)
    assert max(sizes) == 4096


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(DEMO, tmp_path / "demo.gguf", "Q4_0")
    assert main(["info", "--checkpoint", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["quantization"], facts["dtype"], facts["eos_token_ids"]) == ("GGUF", "bfloat16", [2])
    assert facts["weight_bytes"] < 3e6
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:5000])
    assert main(["info", "--checkpoint", str(tmp_path / "cut.gguf")]) != 0
    assert "cut.gguf: it is cut short or damaged" in capsys.readouterr().err


# ---------------------------------------------------------------- files that lie


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")
LIES = {
    "empty": (b"", "begins with b''"),
    "no header": (b"GGUF\3\0", "cut short"),
    "another kind": (b"PK\3\4" + bytes(60), "begins with b'PK"),
    "old": (header(version=1), "has version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "tensors without end": (header(tensors=2**60), f"speaks of {2**60} entries"),
    "keys without end": (header(keys=2**60), f"speaks of {2**60} entries"),
    "keys that are not there": (header(keys=2**20), "cut short"),
    "a key without end": (header(keys=1, body=text("a", 2**60)), "cut short"),
    "a string without end": (header(keys=1, body=text("a") + struct.pack("<I", 8) + text("x", 2**63)), "cut short"),
    "an array without end": (header(keys=1, body=text("a") + struct.pack("<IIQ", 9, 0, 2**60)), "entries"),
    "a long array": (header(keys=1, body=text("a") + struct.pack("<IIQ", 9, 4, 2**24)), "cut short"),
    "strings that are not there": (header(keys=1, body=text("a") + struct.pack("<IIQ", 9, 8, 2**24)), "cut short"),
    "arrays in an array": (header(keys=1, body=text("a") + struct.pack("<IIQ", 9, 9, 2)), "unknown kind"),
    "an unknown kind": (header(keys=1, body=text("a") + struct.pack("<I", 77)), "unknown kind"),
    "a key twice": (header(keys=2, body=ARCH * 2), "occurs twice"),
    "no alignment": (
        header(keys=1, body=text("general.alignment") + struct.pack("<II", 4, 3)), "must be a power of two, not 3",
    ),
    "a tensor twice": (header(tensors=2, body=tensor("a", (4,)) * 2) + bytes(200), "'a' occurs twice"),
    "overlapping": (header(tensors=2, body=tensor("a", (64,)) + tensor("b", (8,), 0, 32)) + bytes(900), "overlap"),
    "beyond the end": (header(tensors=1, body=tensor("a", (4,), 0, 2**40)) + bytes(99), "ends at byte"),
    "far beyond the end": (header(tensors=1, body=tensor("a", (4,), 0, 2**64 - 32)) + bytes(99), "ends at byte"),
    "not aligned": (header(tensors=1, body=tensor("a", (4,), 0, 7)) + bytes(99), "no multiple of 32"),
    "huge": (header(tensors=1, body=tensor("a", (2**40, 2**40))) + bytes(99), "ends at byte"),
    "experts without end": (
        header(tensors=1, body=tensor("a_exps.weight", (1, 1, 2**19))) + bytes(2**21 + 99), "more than 262144 matrices",
    ),
    "no size": (header(tensors=1, body=tensor("a", (0, 4))) + bytes(99), "the shape [4, 0]"),
    "a size that wraps": (header(tensors=1, body=tensor("a", (2**63, 2))) + bytes(99), "the shape"),
    "no dimension": (header(tensors=1, body=tensor("a", ())) + bytes(99), "0 dimensions"),
    "dimensions": (header(tensors=1, body=tensor("a", (2,) * 9)) + bytes(99), "9 dimensions"),
    "parts of a block": (header(tensors=1, body=tensor("a", (33, 2), 8)) + bytes(99), "in Q8_0 has the shape [2, 33]"),
    "an encoding that is not read": (
        header(tensors=1, body=tensor("blk.0.x", (256,), 17)), "'blk.0.x' is in IQ2_XS, which is not supported",
    ),
    "no such encoding": (header(tensors=1, body=tensor("a", (4,), 999)) + bytes(99), "is in encoding 999"),
    "no architecture": (header(), "lack general.architecture"),
    "no table": (header(keys=1, body=ARCH), "has no token_embd.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content, said = LIES[name]
    path = tmp_path / "liar.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(path)
    assert said in str(refused.value)
    assert "liar.gguf" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", None, "lack llama.block_count"),
        ("block_count", 2**31, "num_hidden_layers must be between 1 and"),
        ("attention.head_count", "four", "llama.attention.head_count must be a number, not 'four'"),
        ("attention.head_count", 0, "num_attention_heads must be between 1"),
        ("attention.key_length", 2**31, "head_dim must be between 1"),
        ("attention.layer_norm_rms_epsilon", None, "lack llama.attention.layer_norm_rms_epsilon"),
        ("rope.freq_base", float("nan"), "rope_theta must be a number"),
        ("feed_forward_length", 64, "does not fit its configuration"),
        ("block_count", 1, "unexpected"),
        ("attention.causal", False, "is_causal False is not supported"),
    ],
)
def test_metadata_that_make_no_sense(key: str, value: Any, said: str, folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", metadata={})
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "changed.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama.") and name != f"llama.{key}":
            writer.add_key_value(name, field.contents(), field.types[0])
    of = gguf.GGUFValueType
    kinds = {int: of.UINT32, str: of.STRING, float: of.FLOAT32, bool: of.BOOL}
    if value is not None:
        writer.add_key_value(f"llama.{key}", value, kinds[type(value)])
    for found in reader.tensors:
        writer.add_tensor(found.name, np.array(found.data), raw_dtype=found.tensor_type)
    close(writer)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path / "changed.gguf")
    assert said in str(refused.value)
    assert "changed.gguf" in str(refused.value)


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6"))
    with pytest.raises(CheckpointError, match=r"m\.gguf: general\.architecture 'rwkv6' is not supported, only llama, "):
        Checkpoint.open(tmp_path / "m.gguf")


def test_damage_anywhere_is_an_error_or_changes_numbers(tmp_path: Path) -> None:
    whole = write_model(DEMO, tmp_path / "whole.gguf", "Q4_0").read_bytes()
    begin = whole.index(b"token_embd.weight")
    path, random = tmp_path / "damaged.gguf", np.random.default_rng(0)
    for i in range(150):
        data = bytearray(whole)
        if i % 3 == 0:
            del data[int(random.integers(0, len(data))) :]
        else:
            at = int(random.integers(0, begin + 2000)) if i % 3 == 1 else int(random.integers(0, 400))
            data[at : at + 8] = random.bytes(int(random.integers(1, 9))).ljust(8, b"\xff")
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError, TokenizerError):
            _ = Checkpoint.open(path).tokenizer
