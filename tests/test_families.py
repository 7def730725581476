"""Every family against transformers: the same logits from the same directory, and config.json read as it reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.families import parse_config, to_hf_config
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.generation import GenerationDefaults, read_generation_defaults
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.describing import describe, parts
from gpt_fast.model.shapes import shape
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def save(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def assert_same_logits(ours: torch.nn.Module, theirs: transformers.PreTrainedModel) -> None:
    for prompt in families_table.prompts():
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            expected = theirs(tokens, use_cache=False).logits
            actual = ours(tokens)
        assert expected.std() > 0.5  # logits that are all alike would agree whatever the weights
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", families_table.FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = families_table.FAMILIES[name]()
    ours = Checkpoint.open(save(theirs, tmp_path)).build(torch.float32)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts_in_mxfp4(quantize: str | None, tmp_path: Path) -> None:
    """The published form of gpt-oss holds the same model as the weights that transformers makes of it."""
    theirs = families_table.make("GptOss", **families_table.GPT_OSS | {"intermediate_size": 96})
    generator, packed = torch.Generator().manual_seed(0), {}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 3:
                experts, inputs, outputs = parameter.shape
                shape = (experts, outputs, inputs // 32)
                blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
                scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
                packed |= {name + "_blocks": blocks, name + "_scales": scales}
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    plain, short = Checkpoint.open(save(theirs, tmp_path / "plain")), save(theirs, tmp_path / "short")
    tensors = load_file(short / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if name + "_blocks" not in packed}
    save_file(kept | packed, short / "model.safetensors")
    raw = read_json(short / "config.json") | {"quantization_config": {"quant_method": "mxfp4"}}
    (short / "config.json").write_text(json.dumps(raw))
    expected = plain.build(torch.float32, quantize=quantize).state_dict()
    actual = Checkpoint.open(short).build(torch.float32, quantize=quantize).state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    if quantize is None:
        assert_same_logits(plain.build(torch.float32), theirs)
        convert(short, tmp_path / "converted", dtype=torch.float32)
        converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
        assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in converted.named_parameters())
    packed.popitem()
    save_file(kept | packed, short / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*down_proj\.0\.weight.*unexpected: .*down_proj_blocks"):
        Checkpoint.open(short)


@pytest.mark.parametrize("name", ["llama3", "qwen2-tied", "qwen3"])
def test_sharded_safetensors(name: str, tmp_path: Path) -> None:
    theirs = families_table.FAMILIES[name]()
    save(theirs, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(Checkpoint.open(tmp_path).build(torch.float32), theirs)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pytorch_model_bin(name: str, shards: int, zipped: bool, tmp_path: Path) -> None:
    theirs = families_table.FAMILIES[name]()
    save(theirs, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = dict(theirs.state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # as transformers before 4.32 saved it
    names = list(state)
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i}.bin" for i in range(shards)]
    for i, file in enumerate(files):
        part = {n: state[n] for n in names[i::shards]}
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        weight_map = {n: files[i % shards] for i, n in enumerate(names)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_logits(Checkpoint.open(tmp_path).build(torch.float32), theirs)


@pytest.mark.parametrize("name", ["llama-theta", "llama-linear", "llama-dynamic", "llama3", "qwen2-windows", "mistral"])
def test_old_spelling_of_config(name: str, tmp_path: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling (with "type" before 4.43), torch_dtype, no layer_types."""
    theirs = families_table.FAMILIES[name]()
    save(theirs, tmp_path)
    new = Checkpoint.open(tmp_path).config
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    raw["rope_scaling"] = None if rope["type"] == "default" else rope
    raw["torch_dtype"] = raw.pop("dtype")
    raw.pop("layer_types", None)
    path.write_text(json.dumps(raw))
    assert Checkpoint.open(tmp_path).config == new
    assert_same_logits(Checkpoint.open(tmp_path).build(torch.float32), theirs)


@pytest.mark.parametrize(("positions", "expected"), [(512, 2048), (2048, 2048), (640, 2048), (4096, 4096)])
def test_yarn_lengthens_the_context(positions: int, expected: int, tmp_path: Path) -> None:
    """As Qwen's cards say, the scaling is added and the number of positions left as it is; others write the product."""
    save(families_table.FAMILIES["llama"](), tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    path.write_text(json.dumps(raw | {"max_position_embeddings": positions, "rope_scaling": scaling}))
    config = Checkpoint.open(tmp_path).config
    assert config.max_seq_len == expected
    path.write_text(json.dumps(to_hf_config(config, "float32")))
    assert Checkpoint.open(tmp_path).config == config


@pytest.mark.parametrize(("name", "local"), [("gemma3-linear", "rope_local_base_freq"), ("olmo3-yarn", "unread")])
def test_old_spelling_of_rotation_by_layer(name: str, local: str, tmp_path: Path) -> None:
    """Before transformers 5 layers with a window had keys beside rope_theta, or what rope_theta says unscaled."""
    save(families_table.FAMILIES[name](), tmp_path)
    new, path = Checkpoint.open(tmp_path).config, tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    full = rope["full_attention"]
    raw |= {"rope_theta": full.pop("rope_theta"), local: rope["sliding_attention"]["rope_theta"], "rope_scaling": full}
    assert parse_config(raw) == new


@pytest.mark.parametrize(
    ("name", "prefix", "changes", "buffer"),
    [
        ("gpt2", "transformer.", {}, "h.0.attn.bias"),
        ("bloom", "transformer.", {"hidden_size": "n_embed", "n_head": "num_attention_heads"}, None),
        ("opt", "model.", {}, None),
        ("gpt-neox-serial", "", {}, "gpt_neox.layers.0.attention.masked_bias"),
    ],
)
def test_checkpoints_as_the_hub_has_them(
    name: str, prefix: str, changes: dict[str, str], buffer: str | None, tmp_path: Path
) -> None:
    """From before transformers 5: names without their beginning, other keys, causal masks among the weights."""
    theirs = families_table.FAMILIES[name]()
    save(theirs, tmp_path)
    weights = {key.removeprefix(prefix): tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    if buffer is not None:
        weights[buffer] = torch.zeros(1, 1, 4, 4)
    save_file(weights, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {changes.get(key, key): value for key, value in raw.items()}
    rope = raw.pop("rope_parameters", None)
    if rope:
        raw |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same_logits(Checkpoint.open(tmp_path).build(torch.float32), theirs)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt-neox",
        "opt",
        "bloom",
        "phi",
        "phi3-longrope",
        "falcon-40b",
        "glm4",
        "qwen2-moe",
        "mixtral",
        "gpt-oss",
    ],
)
def test_what_is_written_has_the_tensors_that_transformers_saves(name: str, tmp_path: Path) -> None:
    save(families_table.FAMILIES[name](), tmp_path / "theirs")
    save_checkpoint(Checkpoint.open(tmp_path / "theirs").build(torch.float32), tmp_path / "saved")
    convert(tmp_path / "theirs", tmp_path / "converted")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    for folder in ("saved", "converted"):
        ours = load_file(tmp_path / folder / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "falcon-40b"])
def test_layouts_are_undone_before_rounding(name: str, mode: str, tmp_path: Path) -> None:
    """Scales belong to the rows of the parameter: a quantized checkpoint is what quantizing while loading makes."""
    source = Checkpoint.open(save(families_table.FAMILIES[name](), tmp_path / "plain"))
    quantize_checkpoint(source, tmp_path / "quantized", quant_config(mode))
    stored = Checkpoint.open(tmp_path / "quantized").build(torch.float32).state_dict()
    rounded = source.build(torch.float32, quantize=mode).state_dict()
    assert stored.keys() == rounded.keys()
    assert any(tensor.dtype in (torch.int8, torch.uint8) for tensor in stored.values())
    assert all(torch.equal(stored[key], rounded[key]) for key in stored)


@pytest.mark.parametrize("mode", [None, "int8"])
@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX", "Phi3"])
def test_ranks_divide_rows_in_the_order_of_the_parameter(name: str, mode: str | None, tmp_path: Path) -> None:
    """Each rank has its share of the queries, of the keys and of the values, however the tensor mixes them."""
    checkpoint = Checkpoint.open(save(families_table.make(name, vocab_size=264, pad_token_id=0), tmp_path))
    whole, *ranks = (
        checkpoint.build(torch.float32, quantize=mode, shard=shard).state_dict()
        for shard in (None, Shard(0, 2), Shard(1, 2))
    )
    parameters = {part.target: part for part in parts(dataclasses.replace(checkpoint.config, tie_embeddings=False))}
    for name, tensor in whole.items():
        module, _, kind = name.rpartition(".")
        part = parameters[f"{module}.bias" if kind == "bias" else f"{module}.weight"]
        held = [rank[name] for rank in ranks]
        if part.split == "rows":
            pieces = [t.split([size // 2 for size in part.runs]) for t in held]
            joined = torch.cat([piece[i] for i in range(len(part.runs)) for piece in pieces])
        else:
            joined = torch.cat(held, dim=1) if part.split == "columns" and tensor.dim() == 2 else held[0]
        assert torch.equal(joined, tensor), name


def test_positions_that_were_not_learned_are_refused(tmp_path: Path) -> None:
    save(families_table.FAMILIES["gpt2"](), tmp_path)
    with pytest.raises(ConfigError, match="max_seq_len: 257 is more than the model's 256 learned positions"):
        LLM(tmp_path, max_seq_len=257)


@pytest.mark.parametrize("options", [{"kernels": False}, {"device_map": {"cpu": 1, "cpu:1": 2}}, {}], ids=str)
def test_a_last_page_may_have_more_room_than_there_are_learned_positions(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing may be computed behind the last of 50 positions, the steps of the warm-up included."""
    save(families_table.make("GPT2", max_position_embeddings=50), tmp_path)
    with LLM(tmp_path, dtype="float32", compile=False, page_size=64, **options) as llm:
        done = llm.generate([5] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(done.token_ids) == 10


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda row: row.name)
def test_defaults_are_those_of_transformers(family: Any) -> None:
    """A config.json that names its architecture alone means what transformers' own defaults say."""
    meant = {key: values[0] for key, values in family.when.items()}
    theirs = transformers.AutoConfig.for_model(family.model_type, **meant)
    dim, heads = theirs.hidden_size, theirs.num_attention_heads
    derived = {
        "head_dim": dim // heads,
        "num_key_value_heads": heads,
        "num_kv_heads": heads,
        "ffn_hidden_size": 4 * dim,
        "word_embed_proj_dim": dim,
    }
    for key, value in (family.defaults | meant).items():
        if key in ("rope_theta", "partial_rotary_factor"):
            assert theirs.rope_parameters.get("full_attention", theirs.rope_parameters)[key] == value
        elif key == "rope_parameters":
            assert theirs.rope_parameters == value | {"rope_theta": family.defaults["rope_theta"]}
        elif key == "rope_local_base_freq":
            assert theirs.rope_parameters["sliding_attention"]["rope_theta"] == value
        elif key in derived and value is None:
            assert (getattr(theirs, key, None) or derived[key]) == derived[key]
        elif key == "sliding_window" and "use_sliding_window" in family.defaults:
            assert type(theirs)(use_sliding_window=True).sliding_window == value
        elif key == "sliding_window_pattern":
            on = type(theirs)(use_sliding_window=True) if "use_sliding_window" in family.defaults else theirs
            kinds = ["sliding_attention" if (i + 1) % value else "full_attention" for i in range(on.num_hidden_layers)]
            assert on.layer_types == kinds
        elif key in ("attention_bias", "mlp_bias", "seq_length") and not hasattr(theirs, key):
            assert not value or key == "seq_length"  # transformers has no such key
        else:
            assert getattr(theirs, key) == value, key
    config = parse_config({"architectures": list(family.architectures)} | meant)
    assert (config.dim, config.num_layers, config.num_heads) == (dim, theirs.num_hidden_layers, heads)
    assert config.vocab_size == theirs.vocab_size
    assert parse_config(to_hf_config(config, "float32")) == config


@pytest.mark.parametrize("name", families_table.FAMILIES)
def test_to_hf_config_round_trips_and_transformers_reads_it(name: str, tmp_path: Path) -> None:
    theirs = families_table.FAMILIES[name]()
    config = Checkpoint.open(save(theirs, tmp_path)).config
    raw = to_hf_config(config, "float32")
    assert parse_config(raw) == config
    padding = {"pad_token_id": theirs.config.pad_token_id}  # transformers' default may lie outside a tiny vocabulary
    (tmp_path / "config.json").write_text(json.dumps(raw | padding))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([families_table.prompts()[-1]])
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_to_hf_config_refuses_what_the_family_cannot_say() -> None:
    config = dataclasses.replace(parse_config(LLAMA), qk_norm=True)
    with pytest.raises(CheckpointError, match="llama cannot express"):
        to_hf_config(config, "float32")


MIXTRAL = ["MixtralForCausalLM"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["BambooForCausalLM"]},
        r"BambooForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM",
    ),
    "no list": ({"architectures": 5}, "architecture 5 is not supported"),
    "model_type": ({"architectures": None, "model_type": "bamboo"}, "bamboo"),
    "activation": ({"hidden_act": "softplus"}, "hidden_act 'softplus'"),
    "rope type": ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_scaling.rope_type 'ntk'"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_scaling.factor"),
    "yarn's scale": ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}}, "mscale must be a number"),
    "yarn's rotations": ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}}, "beta_fast must be above"),
    "yarn's base": ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta must be above 1"),
    "rope's base": ({"rope_theta": 0}, "rope_theta must be above 0, not 0"),
    "rope's local base": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": -1e4}},
        },
        "sliding_attention.rope_theta must be above 0",
    ),
    "rope's older local base": (
        {"architectures": ["Gemma3ForCausalLM"], "rope_local_base_freq": 0},
        "rope_local_base_freq must be above 0",
    ),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor"),
    "rope by layer": ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "chunked_attention"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    "partial rope": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    "quantized": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "string size": ({"hidden_size": "64"}, "hidden_size must be int, not '64'"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 4096, not 0"),
    "heads": ({"num_attention_heads": 32, "num_key_value_heads": 5}, "num_key_value_heads"),
    "flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool"),
    "epsilon": ({"rms_norm_eps": None}, "rms_norm_eps must be a number"),
    "experts": ({"architectures": MIXTRAL, "num_local_experts": "8"}, "num_local_experts must be int, not '8'"),
    "too few experts": ({"architectures": MIXTRAL, "num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more"),
    "too many experts": (
        {"architectures": MIXTRAL, "num_local_experts": 4096, "num_hidden_layers": 64},
        "4096 experts in 64 layers",
    ),
    "sparse step": ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step"),
    "swiglu": ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0}, "swiglu_limit 5.0"),
    "query scale": ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "both ways": ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional"),
    "later tokens": ({"is_causal": False}, "is_causal False is not supported, only None, True"),
    "no rotation": ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "unrotated has 2 entries"),
    "logits": ({"architectures": ["GraniteForCausalLM"], "logits_scaling": "2"}, "logits_scaling must be a number"),
    "longrope's lengths": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
        },
        "short_factor has 1 numbers for 48 rotary pairs",
    ),
    "longrope's one position": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "original_max_position_embeddings": 1,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        },
        "attention_factor is missing",
    ),
    "gpt2 scales": ({"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by"),
    "gpt2 width": ({"architectures": ["GPT2LMHeadModel"], "n_embd": 2**30}, "n_embd must be between 1 and 262144"),
    "opt norms": ({"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}, "do_layer_norm_before False"),
    "opt width": ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 512}, r"word_embed_proj_dim 512.*768"),
    "bloom": (
        {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm True",
    ),
    "falcon alibi": ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi True is not supported"),
    "falcon norms": ({"architectures": ["FalconForCausalLM"], "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
    "falcon flag": ({"architectures": ["FalconForCausalLM"], "multi_query": 1}, "multi_query 1 is not supported"),
    "phi": ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, "qk_layernorm True"),
    "stablelm": ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(CheckpointError, match=words):
        parse_config(LLAMA | changes)


def test_no_rope_parameters_are_those_of_the_family() -> None:
    raw = {"architectures": ["GptOssForCausalLM"]}
    scaling = parse_config(raw).rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor) == ("yarn", 32.0)
    assert parse_config(raw | {"rope_parameters": None, "rope_scaling": None}).rope_scaling == scaling
    assert parse_config(raw | {"rope_parameters": {"rope_type": "default"}}).rope_scaling is None
    assert (parse_config(raw).rope_theta, parse_config(raw | {"rope_theta": 1e6}).rope_theta) == (150000.0, 1e6)


def test_layer_types_are_checked() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "use_sliding_window": True}
    kinds = ["full_attention", "sliding_attention"]
    assert parse_config(qwen | {"layer_types": kinds, "sliding_window": 16}).windows == (0, 16)
    for wrong in (["full_attention"], ["full_attention", "chunked_attention"], "full_attention"):
        with pytest.raises(CheckpointError, match="layer_types"):
            parse_config(qwen | {"layer_types": wrong})
    with pytest.raises(CheckpointError, match="no sliding_window is in use"):
        parse_config(qwen | {"layer_types": kinds, "use_sliding_window": False})
    mistral = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "sliding_window": 16}
    for listed in ({}, {"layer_types": None}):
        assert parse_config(mistral | listed).windows == (16, 16)
    assert parse_config(mistral | {"layer_types": kinds}).windows == (0, 16)
    assert parse_config(mistral | {"layer_types": kinds[:1] * 2}).windows == ()


def test_dynamic_rope_stretches_the_context() -> None:
    raw = LLAMA | {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    config = parse_config(raw)
    assert config.max_seq_len == 4096
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_seq_len == 2048


def published(**keys: Any) -> ModelConfig:
    return parse_config(LLAMA | keys)


def test_published_parameter_counts() -> None:
    """Configurations as their authors publish them count what the model cards say."""
    llama32 = published(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    assert describe(llama32).num_parameters == 1_235_814_400
    assert describe(published()).num_parameters == 6_738_415_616  # Llama 2 7B is what transformers defaults to
    mixtral = describe(shape("mixtral-8x7b"))
    assert mixtral.num_parameters == 46_702_792_704
    assert mixtral.active_parameters == 12_748_587_008  # the embedding table is not multiplied with


def write_generation(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def read_defaults(directory: Path) -> GenerationDefaults:
    raw = read_json(directory / "config.json")
    return read_generation_defaults(directory, raw, FAMILIES[parse_config(raw).family].defaults)


@pytest.mark.parametrize(
    ("config", "generation", "eos", "bos"),
    [
        ({}, None, (2,), 1),  # the family's defaults
        ({"eos_token_id": 7, "bos_token_id": 6}, None, (7,), 6),
        ({"eos_token_id": [7, 8]}, None, (7, 8), 1),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 8]}, (9, 8), 1),
        ({"eos_token_id": 7}, {"bos_token_id": 5}, (7,), 5),
        ({"eos_token_id": None, "bos_token_id": None}, None, (), None),
        ({"architectures": ["Qwen2ForCausalLM"]}, None, (), None),
    ],
)
def test_special_tokens(
    config: dict[str, Any], generation: dict[str, Any] | None, eos: tuple[int, ...], bos: int | None, tmp_path: Path
) -> None:
    defaults = read_defaults(write_generation(tmp_path, config, generation))
    assert defaults.eos_token_ids == eos
    assert defaults.bos_token_id == bos


def test_sampling_defaults(tmp_path: Path) -> None:
    """Only with do_sample; a missing temperature is 1.0 then, and top_k counts only where it is written."""

    def sampling(generation: dict[str, Any] | None, **config: Any) -> tuple[Any, ...]:
        p = read_defaults(write_generation(tmp_path, config, generation)).sampling
        assert p.repetition_penalty == (generation or {}).get("repetition_penalty")
        return p.temperature, p.top_k, p.top_p, p.min_p

    off = (None, None, None, None)
    assert sampling(None) == off
    assert sampling({"temperature": 0.6, "top_p": 0.9}) == off
    assert sampling({"do_sample": True}) == (1.0, None, None, None)
    assert sampling({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}) == (0.6, 20, 0.9, None)
    assert sampling({"do_sample": True, "min_p": 0.05, "top_k": None}) == (1.0, None, None, 0.05)
    assert sampling({"do_sample": True, "repetition_penalty": 1.05}) == (1.0, None, None, None)
    assert sampling({"repetition_penalty": 1.05}) == off, "it counts without do_sample, as in transformers"
    theirs = SamplingParams(repetition_penalty=1.05)
    assert SamplingParams().resolved(theirs).repetition_penalty == 1.05
    assert SamplingParams(repetition_penalty=1.0).resolved(theirs).repetition_penalty == 1.0
    assert not SamplingParams(repetition_penalty=1.0).resolved(theirs).penalised
    assert SamplingParams().resolved().repetition_penalty == 1.0
    (tmp_path / "generation_config.json").unlink()
    assert sampling(None, do_sample=True, temperature=0.7) == (0.7, None, None, None)  # as before transformers 4.26
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p"):
        sampling({"do_sample": True, "top_p": 7})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        sampling({"eos_token_id": "</s>"})
