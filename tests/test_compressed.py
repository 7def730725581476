"""Checkpoints in the format compressed-tensors: layers of the library itself, and files written here bit by bit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import check_ranks, dequantized
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.building import random_model
from gpt_fast.quantize.linear import QuantizedLinear

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(__file__).parent / "data" / "compressed"
HEADERS: dict[str, Any] = json.loads((DATA / "headers.json").read_text())
CONFIG = ModelConfig("llama", 64, 64, 2, 4, 2, 16, 128, 128)

Change = Callable[[str, Tensor], dict[str, Tensor]]  # (name of a weight, weight) -> the tensors that are stored for it


def weight_of(layer: torch.nn.Module) -> Tensor:
    return dequantized(layer) if isinstance(layer, QuantizedLinear) else layer.get_parameter("weight").detach()


def write(folder: Path, change: Change, header: dict[str, Any], config: ModelConfig = CONFIG) -> Path:
    """A checkpoint of ``config`` whose linear layers, the head too, are what ``change`` makes of them."""
    save_checkpoint(random_model(config, torch.float16), folder)
    plain = load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        linear = tensor.dim() == 2 and "embed" not in name
        tensors |= change(name, tensor) if linear else {name: tensor}
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": header}))
    return folder


def only(part: str, stored: dict[str, Tensor]) -> Change:
    """``stored``, tensors by the ends of their names, for layers with ``part`` in their names."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        stem = name.removesuffix("weight")
        return {stem + end: t for end, t in stored.items()} if part in name else {name: tensor}

    return change


@pytest.mark.parametrize("case", HEADERS)
def test_layers_of_the_library_itself(case: str, tmp_path: Path) -> None:
    own = {n.removeprefix(case + "."): t for n, t in load_file(DATA / "layers.safetensors").items()}
    own = {n: t for n, t in own.items() if "." not in n}
    values = own.pop("values").float()
    n, k = values.shape
    one_head = ModelConfig("llama", 64, k, 1, 1, 1, n, 64, 64)
    checkpoint = Checkpoint.open(write(tmp_path, attention_only(own), HEADERS[case], one_head))
    found = weight_of(checkpoint.build(torch.float32).get_submodule("layers.0.wqkv"))
    # Values are stored in 16 bits by the library. A scale of int4 moves by at most half of 255 parts of the greatest.
    most = 1e-3 * values.abs().max()
    if case.startswith("w4"):
        most += 15 * own["weight_scale"].float().max() / 255 / 2
    for rows in found.split(n):
        assert (rows - values).abs().max() <= most
    assert values.std() > 5 * most


def attention_only(stored: dict[str, Tensor]) -> Change:
    """``stored`` for queries, keys and values."""
    return lambda name, t: only(name if any(f".{x}_proj." in name for x in "qkv") else "no name", stored)(name, t)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [N, K] -> int32 [N, ceil(K * bits / 32)], the first code in the lowest bits."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each))
    words = sum(codes[:, i::each] << (bits * i) for i in range(each))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
HEADER: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": [],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip


def four_bits(expected: dict[str, Tensor], *, size: int = 32, zeros: bool = True, scattered: bool = False) -> Change:
    """Random codes in groups of ``size`` inputs, ``scattered`` over a layer's inputs; ``expected`` gets the values."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        n, k = tensor.shape
        generator = torch.Generator().manual_seed(len(expected))
        codes = torch.randint(0, 16, (n, k), generator=generator)
        zero = torch.randint(2, 14, (n, k // size), generator=generator) if zeros else torch.full((n, k // size), 8)
        scale = (torch.rand(n, k // size, generator=generator) * 0.01 + 0.01).half()
        group_of = torch.arange(k) // size
        if scattered:
            group_of = group_of[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        expected[name] = (codes - zero[:, group_of]).float() * scale[:, group_of].float()
        stem = name.removesuffix("weight")
        out = {"weight_packed": packed(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
        if zeros:
            out["weight_zero_point"] = packed(zero.t(), 4).t()
        if scattered:
            out["weight_g_idx"] = group_of.to(torch.int32)
        return {stem + end: t for end, t in out.items()}

    return change


FUSED = {
    "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "wo": ("self_attn.o_proj",),
    "w13": ("mlp.gate_proj", "mlp.up_proj"), "w2": ("mlp.down_proj",),
}  # fmt: skip


def assert_values(model: torch.nn.Module, expected: dict[str, Tensor], most: float) -> None:
    for name, sources in FUSED.items():
        weight = torch.cat([expected[f"model.layers.1.{source}.weight"] for source in sources])
        assert (weight_of(model.get_submodule(f"layers.1.{name}")) - weight).abs().max() <= most
    assert (weight_of(model.get_submodule("head.output")) - expected["lm_head.weight"]).abs().max() <= most


@pytest.mark.parametrize("how", [{}, {"zeros": False}, {"scattered": True}, {"size": 64}])
def test_four_bits_are_those_that_were_stored(how: dict[str, Any], tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    checkpoint = Checkpoint.open(write(tmp_path, four_bits(expected, **how), HEADER))
    assert checkpoint.stored_dtype == torch.float16
    model = checkpoint.build(torch.float32)
    assert_values(model, expected, 15 * 0.02 / 255 / 2)
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    layer = model.get_submodule("layers.1.wqkv")
    assert torch.allclose(layer(inputs), inputs @ weight_of(layer).t(), atol=1e-4)


def test_codes_do_not_move(tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    folder = write(tmp_path, four_bits(expected), HEADER)
    layer = Checkpoint.open(folder).build(torch.float32).get_submodule("layers.0.wo")
    stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.o_proj.weight_packed"].view(torch.uint8)
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
    halves = layer.get_buffer("weight").unflatten(1, (-1, 16))  # 32 codes: byte j has those of j and j + 16
    assert torch.equal(torch.cat((halves & 15, halves >> 4), dim=2).flatten(1), codes)


@pytest.mark.parametrize("zeros", [True, False])
def test_ranks_together_hold_the_whole(zeros: bool, tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    config = dataclasses.replace(CONFIG, num_heads=16, head_dim=4)
    check_ranks(Checkpoint.open(write(tmp_path, four_bits(expected, zeros=zeros), HEADER, config)))


def test_scattered_groups_are_not_divided(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, four_bits({}, scattered=True), HEADER))
    with pytest.raises(ConfigError, match="weight_g_idx scatters each group over the inputs of all ranks"):
        checkpoint.build(torch.float32, shard=Shard(0, 2))


def eight_bits(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As stored, with the scales of static activations."""
    scale = tensor.float().abs().amax(1, keepdim=True) / 127
    stem, codes = name.removesuffix("weight"), (tensor.float() / scale).round().to(torch.int8)
    static = {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    return {name: codes, stem + "weight_scale": scale, **{stem + end: t for end, t in static.items()}}


def eight_bit_floats(name: str, tensor: Tensor) -> dict[str, Tensor]:
    scale = (tensor.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (tensor.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, name + "_scale": scale}


def eight(form: str, kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": kind, "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return HEADER | {"format": form, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("family", ["llama", "glm", "falcon"])
def test_eight_bits_in_every_order_of_rows(family: str, tmp_path: Path) -> None:
    """GLM's rows stand in pairs, Falcon's in groups of heads."""
    config = CONFIG
    if family == "glm":
        config = dataclasses.replace(CONFIG, family="glm", rotary_dim=8)
    if family == "falcon":
        import families_table

        families_table.FAMILIES["falcon-40b"]().save_pretrained(tmp_path / "theirs")
        config = Checkpoint.open(tmp_path / "theirs").config
    expected: dict[str, Tensor] = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        out = eight_bits(name, tensor)
        expected[name] = out[name].float() * out[name + "_scale"]
        return out

    folder = write(tmp_path / "int8", change, eight("int-quantized", "int"), config)
    model = Checkpoint.open(folder).build(torch.float32)
    plain = load_file(folder / "model.safetensors")
    by_hand = write(tmp_path / "plain", lambda name, tensor: {name: expected[name]}, {}, config)
    others = load_file(by_hand / "model.safetensors")
    others |= {name: tensor for name, tensor in plain.items() if name in others and name not in expected}
    save_file(others, by_hand / "model.safetensors")
    wanted = Checkpoint.open(by_hand).build(torch.float32)
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), wanted(tokens), atol=1e-4, rtol=1e-3)
    assert isinstance(model.get_submodule("layers.0.wqkv"), QuantizedLinear)


def test_eight_bit_floats_are_plain_weights(tmp_path: Path) -> None:
    """So they can be rounded, divided and adapted like others."""
    folder = write(tmp_path / "fp8", eight_bit_floats, eight("float-quantized", "float"))
    stored = load_file(folder / "model.safetensors")
    expected = {n: t.float() * stored[n + "_scale"].float() for n, t in stored.items() if n + "_scale" in stored}
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.format.method is None
    assert_values(checkpoint.build(torch.float32), expected, 15 * 0.02 / 255 / 2)
    rounded = checkpoint.build(torch.bfloat16, quantize="fp8").get_submodule("layers.1.w2")
    codes = stored["model.layers.1.mlp.down_proj.weight"]  # every output has one at the end of the range
    assert torch.equal(rounded.get_buffer("weight").view(torch.uint8), codes.view(torch.uint8))
    by_hand = write(tmp_path / "plain", lambda name, tensor: {name: expected[name]}, {})
    others = load_file(by_hand / "model.safetensors") | {n: t for n, t in stored.items() if t.dtype == torch.float16}
    save_file(others, by_hand / "model.safetensors")
    plain = Checkpoint.open(by_hand)
    convert(folder, tmp_path / "converted")
    ours, wanted = (c.build(torch.bfloat16) for c in (Checkpoint.open(tmp_path / "converted"), plain))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), wanted.parameters(), strict=True))
    for how in (
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"shard": Shard(1, 2)},
        {"quantize": "int8", "shard": Shard(0, 2)},
    ):
        ours, wanted = (c.build(torch.bfloat16, **how).state_dict() for c in (checkpoint, plain))
        for name, tensor in wanted.items():
            assert torch.equal(ours[name], tensor), (how, name)


def test_the_engine_serves_them(tmp_path: Path) -> None:
    for i, (change, header) in enumerate(((four_bits({}), HEADER), (eight_bits, eight("int-quantized", "int")))):
        folder = write(tmp_path / str(i), change, header)
        answers = []
        for kernels in (True, False):
            with LLM(folder, threads=1, max_batch=1, kernels=kernels, compile=False) as llm:
                answers.append(llm.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).token_ids)
        assert len(answers[0]) == len(answers[1]) == 8
        with pytest.raises(ConfigError, match=r"quantized already \(compressed-tensors\)"):
            LLM(folder, quantize="int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        ({"quantization_status": "initialized"}, "quantization_status 'initialized' is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({"transform_config": {"config_groups": {}}}, "transform_config is not supported"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups must give a scheme by name"),
        ({"config_groups": {"a": {"weights": WEIGHTS | {"num_bits": 3}}}}, "config_groups.a.weights: int of 3 bits"),
        ({"config_groups": {"a": {"weights": WEIGHTS | {"type": "float"}}}}, "float of 4 bits is not supported"),
        ({"config_groups": {"a": {"weights": WEIGHTS | {"strategy": "block"}}}}, "strategy 'block' is not supported"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}},
            "block_structure None is not two sizes",
        ),
    ],
)
def test_other_formats_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, four_bits({}), HEADER | change)
    with pytest.raises(CheckpointError, match=f"config.json: quantization_config.{message}|{message}"):
        Checkpoint.open(folder)


def test_an_older_word_for_compressed_is_read(tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    write(tmp_path, four_bits(expected), HEADER | {"quantization_status": "frozen"})
    assert_values(Checkpoint.open(tmp_path).build(torch.float32), expected, 15 * 0.02 / 255 / 2)


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path, four_bits({}), HEADER)
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj."
    whole = load_file(path)

    def refused(message: str, **changes: Tensor | None) -> None:
        tensors = whole | {name + end: t for end, t in changes.items() if t is not None}
        tensors = {n: t for n, t in tensors.items() if changes.get(n.removeprefix(name), t) is not None}
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(folder).build(torch.float32)

    refused(f"{name}weight_scale is missing", weight_scale=None)
    refused(
        rf"{name}weight_zero_point \[16, 4\], not \[16, 2\]", weight_zero_point=torch.zeros(16, 4, dtype=torch.int32)
    )
    refused(rf"{name}weight_shape is not that of the model, \[128, 64\]", weight_shape=torch.tensor([128, 63]))
    refused(f"{name}weight_scale is 4 groups of 64 inputs", weight_scale=torch.ones(128, 4))
    refused(f"{name}weight_g_idx has groups of other sizes", weight_g_idx=(torch.arange(64) > 40).to(torch.int32))
    refused(f"{name}weight_g_idx differs", weight_g_idx=torch.arange(63, -1, -1, dtype=torch.int32) // 32)
    unquantized: dict[str, Any] = dict.fromkeys(("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"))
    refused(r"parts of layers\.1\.w13.* differ: int4-g32, not quantized", weight=torch.zeros(128, 64), **unquantized)
    eights = {"weight": torch.zeros(128, 64, dtype=torch.int8), "weight_scale": torch.ones(128, 1)}
    refused(f"{name}weight_zero_point: int8 with zeros", **(eights | {"weight_packed": None, "weight_shape": None}))
    for shape in ((128, 3), (64, 4), (128, 2, 1), (128, 0)):
        wrong = unquantized | eights | {"weight_scale": torch.ones(shape)}
        refused(rf"{name}weight_scale is {re.escape(str(list(shape)))} for weights of 8 bits \[128, 64\]", **wrong)
