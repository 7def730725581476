"""Quantized weights: formats to the byte, layers, and every way to load gives the same model."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from programs import needs_cpp
from quantized import dequantized, noisy_rows
from torch import Tensor, nn
from torch._dynamo.utils import counters

from gpt_fast import cli
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ExpertsConfig, ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.kernels.cpu import library, quantizing
from gpt_fast.kernels.cpu.packing import from_nibbles, nibbles
from gpt_fast.kernels.reference import dequantize_int4
from gpt_fast.llm import LLM
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import describe, parts
from gpt_fast.model.transformer import weight_bytes
from gpt_fast.params import SamplingParams
from gpt_fast.quantize.apply import bytes_of, quantize_model, random_quantized, swap_layers
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear
from gpt_fast.quantize.rtn import encode, find_grid, pad_groups, plain_int4, plain_int8, quantize_rows
from gpt_fast.quantize.scheme import Kind, Scheme, Split, parse_quant_config, quant_config
from gpt_fast.quantize.writer import CheckpointWriter, quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128)  # 48 inputs are a group and a half
SHAPES = {
    "untied": TINY,
    "tied": replace(TINY, tie_embeddings=True),
    "biases": replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen3": replace(TINY, family="qwen3", qk_norm="head"),
}
SCHEMES = [Scheme("int8"), Scheme("fp8"), Scheme("int4", 32), Scheme("int4", 64), Scheme("int4", 128)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write(directory: Path, config: ModelConfig = TINY, dtype: torch.dtype = torch.float32) -> Path:
    save_checkpoint(random_model(config, dtype), directory)
    return directory


def layer(scheme: Scheme, weight: Tensor, bias: Tensor | None = None) -> QuantizedLinear:
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    made = QuantizedLinear(weight.shape[1], weight.shape[0], scheme, parameter, "cpu")
    made.store(0, quantize_rows(weight, scheme))
    return made


# Formats


def test_packed_bytes_hold_what_the_format_says() -> None:
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = nibbles(codes)
    assert packed.shape == (3, 48)
    for block in range(3):
        for j in range(16):
            low, high = codes[:, 32 * block + j], codes[:, 32 * block + j + 16]
            assert torch.equal(packed[:, 16 * block + j], low | (high << 4))
    assert torch.equal(from_nibbles(packed), codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("k", [172, 128, 20])
def test_tensors_have_the_shapes_that_are_declared(scheme: Scheme, k: int) -> None:
    made = quantize_rows(noise(5, k), scheme)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in made.items()} == scheme.tensors(5, k)


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
def test_config_round_trip(mode: str) -> None:
    config = quant_config(mode, 64)
    raw = json.loads(json.dumps(config.to_json()))
    assert raw["quant_method"] == "gpt_fast"
    assert raw["bits"] == (4 if mode == "int4" else 8)
    assert parse_quant_config(raw, "x") == config


@pytest.mark.parametrize(
    "modules", [None, {}, {"layers": "int5"}, {"nothing": "int8"}, {"layers": "int4-g7"}, {"layers": ["int8"]}]
)
def test_unknown_schemes_are_refused(modules: Any) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config\.modules"):
        parse_quant_config({"modules": modules}, "x")


# Rounding


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = noise(7, 50) * torch.logspace(-6, 3, 7)[:, None]
    made = quantize_rows(weight, Scheme("int8"))
    error = (made["weight"].float() * made["scale"][:, None] - weight).abs()
    assert (error <= 0.5001 * weight.abs().amax(1, keepdim=True) / 127).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_search_beats_the_plain_range(group_size: int) -> None:
    weight = noise(64, 512) * 0.02
    grid = find_grid(weight, group_size)
    found = dequantize_int4(nibbles(encode(weight, grid)), *grid)
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low).flatten(1)
    assert (found - weight).square().mean() < 0.9 * (plain - weight).square().mean()


def test_groups_on_one_side_of_zero_are_not_cut_off() -> None:
    weight = 5 + torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    for w in (weight, -weight):
        found = dequantized(layer(Scheme("int4", 32), w))
        assert (found - w).abs().max() < 0.6 * 6 / 15  # 0 needs a code: the steps are those of 0 to 6


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 3e-7, 2e4])
def test_constant_rows_survive(scheme: Scheme, value: float) -> None:
    weight = torch.full((3, 40), value)
    made = dequantized(layer(scheme, weight))
    assert torch.allclose(made, weight, rtol=1e-3 if scheme.kind != "fp8" else 0.07, atol=1e-7)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_rows_can_be_quantized_alone(scheme: Scheme) -> None:
    weight = noise(10, 172)
    whole, pieces = layer(scheme, weight), layer(scheme, torch.zeros(10, 172))
    for begin in (0, 3, 7):
        pieces.store(begin, quantize_rows(weight[begin : begin + 4], scheme))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), pieces.state_dict()[name].view(torch.uint8)), name


def test_padding_does_not_change_a_range() -> None:
    weight = noise(4, 40)
    assert torch.equal(pad_groups(weight, 32)[:, :40], weight)
    assert torch.equal(pad_groups(weight, 32)[:, 40:], weight[:, 39:].expand(4, 24))


def assert_same(made: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, but for what kind of NaN a row's scale is."""
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, equal_nan=True, msg=lambda m, n=name: n + m)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_cpp_searches_as_plain_torch_does(group_size: int, dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (8, 20), (24, 172), (9, 8 * group_size), (8, 9 * group_size + 5), (64, 1024)):
        rows = noisy_rows(n, k, seed=k).to(dtype)
        expected = plain_int4(rows.float(), group_size)
        assert_same(quantizing.quantize_int4(rows, group_size), expected)
        assert_same(quantizing.quantize_int4(rows.t().contiguous().t(), group_size), expected)
        torch.set_num_threads(3)
        assert_same(quantizing.quantize_int4(rows, group_size), expected)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpp_rounds_to_int8_as_plain_torch_does(dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (8, 20), (9, 32), (24, 172), (64, 1024)):
        rows = noisy_rows(n, k, seed=k).to(dtype)
        rows[0, 0] = 1e-44  # of float32 alone: a scale that is 0
        expected = plain_int8(rows.float())
        assert_same(quantizing.quantize_int8(rows), expected)
        assert_same(quantizing.quantize_int8(rows.t().contiguous().t()), expected)
        torch.set_num_threads(3)
        assert_same(quantizing.quantize_int8(rows), expected)


@needs_cpp
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_int8_scale_of_its_row_alone(value: float) -> None:
    weight = noise(3, 70)
    weight[1, 68] = value
    for make in (quantizing.quantize_int8, plain_int8):
        made = make(weight)
        assert made["scale"].isfinite().tolist() == [True, False, True]
        assert_same({name: tensor[::2] for name, tensor in made.items()}, plain_int8(weight[::2]))


@needs_cpp
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_the_scale_of_its_row_alone(value: float) -> None:
    weight = noise(4, 600)
    weight[1, 70] = weight[3, 0] = weight[3, 599] = value
    weight[3, 1] = -value
    for make in (quantizing.quantize_int4, plain_int4):
        made = make(weight, 32)
        assert made["row_scale"].isfinite().tolist() == [True, False, True, False]
        assert_same(made, plain_int4(weight, 32))
        assert_same({n: t[::2] for n, t in made.items()}, plain_int4(weight[::2], 32))


@needs_cpp
@pytest.mark.parametrize(
    ("kind", "in_cpp", "plain"),
    [("int4", quantizing.quantize_int4, plain_int4), ("int8", quantizing.quantize_int8, plain_int8)],
)
def test_cpp_rounds_where_it_can(
    kind: Kind,
    in_cpp: Callable[..., dict[str, Tensor]],
    plain: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, used = dict[str, Tensor](), list[str]()

    def noted(name: str, function: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        return lambda *arguments: used.append(name) or function(*arguments)

    monkeypatch.setattr(f"gpt_fast.kernels.cpu.quantizing.quantize_{kind}", noted("C++", in_cpp))
    monkeypatch.setattr(f"gpt_fast.quantize.rtn.plain_{kind}", noted("plain", plain))
    scheme = Scheme(kind, 32) if kind == "int4" else Scheme(kind)
    made = quantize_rows(noise(3, 64), scheme)
    monkeypatch.setattr(library, "available", lambda: False)
    assert_same(quantize_rows(noise(3, 64), scheme), made)
    assert used == ["C++", "plain"]


def test_group_sizes_that_cpp_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group_size \(48\) is not one of 32, 64, 128"):
        quantizing.quantize_int4(noise(3, 96), 48)


# Layers


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("k", [172, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dequantized_weight(scheme: Scheme, k: int, dtype: torch.dtype) -> None:
    made = layer(scheme, noise(24, k), noise(24, seed=1).to(dtype))
    x = noise(2, 3, k, seed=2).to(dtype)
    out = made(x)
    assert out.dtype == dtype
    assert made.bias is not None
    expected = F.linear(x.float(), dequantized(made)) + made.bias.float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    assert torch.allclose(out.float(), expected, rtol=tolerance, atol=tolerance)


def test_sorted_columns_meet_their_own_inputs() -> None:
    weight = noise(8, 48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    made = layer(Scheme("int4", 32), weight[:, order])
    made.order = order
    x = noise(5, 48, seed=1)
    assert torch.allclose(made(x), F.linear(x, dequantized(made)), atol=1e-5)
    assert (dequantized(made) - weight).abs().max() < 0.3


# Models: what is quantized, and every way to get there


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_loading_writing_and_changing_a_model_agree(tmp_path: Path, shape: str, mode: str) -> None:
    source = write(tmp_path / "a", SHAPES[shape])
    at_load = Checkpoint.open(source).build(torch.float32, quantize=mode, column_major=True)
    in_memory = Checkpoint.open(source).build(torch.float32)
    quantize_model(in_memory, quant_config(mode))
    quantize_checkpoint(Checkpoint.open(source), tmp_path / "b", quant_config(mode))
    from_disk = Checkpoint.open(tmp_path / "b").build(torch.float32)
    tokens = torch.arange(20)[None]
    for model in (in_memory, from_disk):
        assert model.state_dict().keys() == at_load.state_dict().keys()
        for name, tensor in model.state_dict().items():
            other = at_load.state_dict()[name]
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.float(), other.float()), name
        assert torch.allclose(model(tokens), at_load(tokens), atol=1e-5)


def kinds(model: nn.Module) -> dict[str, Scheme]:
    return {name: module.scheme for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def blocks(layer: dict[str, Scheme]) -> dict[str, Scheme]:
    return {f"layers.{i}.{name}": scheme for i in range(2) for name, scheme in layer.items()}


def test_queries_beside_keys_and_values_in_another_format_are_one_layer() -> None:
    weight, bias, x = noise(24, 64), noise(24), noise(3, 64)
    split = SplitLinear(64, 24, Split(Scheme("int4", 32), Scheme("int8"), 16), nn.Parameter(bias), "cpu")
    split.queries.store(0, quantize_rows(weight[:16], Scheme("int4", 32)))
    split.keys_values.store(0, quantize_rows(weight[16:], Scheme("int8")))
    apart = [layer(Scheme("int4", 32), weight[:16], bias[:16]), layer(Scheme("int8"), weight[16:], bias[16:])]
    assert torch.equal(split(x), torch.cat([part(x) for part in apart], dim=-1))
    assert torch.equal(dequantized(split), torch.cat([dequantized(part) for part in apart]))


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
@pytest.mark.parametrize(
    "more", [{}, {"tie_embeddings": True}, {"family": "mixtral", "experts": ExpertsConfig(3, 2, 40)}]
)
def test_random_weights_that_are_quantized_at_once(mode: str | None, more: dict[str, Any]) -> None:
    config, quant = replace(TINY, **more), None if mode is None else quant_config(mode)
    made = random_model(config, torch.float32)
    if quant is not None:
        quantize_model(made, quant)
        got = random_quantized(config, torch.float32, torch.device("cpu"), quant)
        assert {n: (t.shape, t.dtype) for n, t in got.state_dict().items()} == {
            n: (t.shape, t.dtype) for n, t in made.state_dict().items()
        }
        logits = got(torch.arange(20)[None])
        assert logits.isfinite().all()
        assert logits.std() > 0
    assert bytes_of(config, torch.float32, quant) == weight_bytes(made)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(TINY, torch.float32)
    quantize_model(model, quant_config("int4", 32))
    int4, int8 = Scheme("int4", 32), Scheme("int8")
    whole = {"wo": int4, "w13": int4, "w2": int8}  # 48 inputs are no whole groups
    apart = {"wqkv.queries": int4, "wqkv.keys_values": int8}
    assert kinds(model) == blocks(whole | apart) | {"head.output": int8}
    unshared = random_model(replace(TINY, num_kv_heads=4), torch.float32)  # keys and values as many as queries
    quantize_model(unshared, quant_config("int4", 32))
    assert kinds(unshared) == blocks(whole | {"wqkv": int4}) | {"head.output": int8}
    llama = FAMILIES["llama"]
    stacked = replace(llama, names={**llama.names, "wqkv": "one_tensor"})
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "llama", stacked)
        patch.setattr("gpt_fast.quantize.scheme.describe", describe.__wrapped__)  # what is cached is of the real row
        assert quant_config("int4", 32).scheme("layers.0.wqkv", TINY) == int4
    no_exceptions = random_model(TINY, torch.float32)
    quantize_model(no_exceptions, replace(quant_config("int4", 32), exceptions=None))
    assert kinds(no_exceptions) == blocks(dict.fromkeys(whole, int4) | {"wqkv": int4}) | {"head.output": int8}
    tied = random_model(SHAPES["tied"], torch.float32)
    quantize_model(tied, quant_config("int8"))
    assert tied.head.output.weight is tied.embed.tokens.weight
    kept = random_model(TINY, torch.float32)
    quantize_model(kept, quant_config("int4", quantize_head=False))
    assert isinstance(kept.head.output, nn.Linear)


def test_weights_are_let_go_of_one_by_one() -> None:
    model = random_model(TINY, torch.float32)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    weights = {name: weakref.ref(model.get_parameter(f"{name}.weight")) for name in names}

    def scheme_of(name: str) -> Scheme:
        before = names[: max(0, names.index(name) - 1)]  # the one before may still be held by a variable
        assert all(weights[other]() is None for other in before)
        return Scheme("int8")

    swap_layers(model, scheme_of, "cpu", rounded=True)
    assert all(weight() is None for weight in weights.values())


def test_bytes_per_token_count_the_quantized_weights() -> None:
    model = random_model(TINY, torch.float32)
    quantize_model(model, quant_config("int8"))
    matrices = [p.shape for p in parts(TINY) if len(p.shape) == 2 and p.target != "embed.tokens.weight"]
    norms = 4 * 32 * 5
    expected = sum(n * k + 4 * n for n, k in matrices) + norms + 4 * 32  # and one row of the embedding
    assert model.bytes_per_token(0, 4) == expected


def test_a_checkpoint_in_bfloat16_keeps_the_rest_so(tmp_path: Path) -> None:
    quantize_checkpoint(
        Checkpoint.open(write(tmp_path / "a", dtype=torch.bfloat16)), tmp_path / "b", quant_config("int4")
    )
    stored = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.self_attn.q_proj.weight"].shape == (32, 16)
    assert stored["model.layers.0.self_attn.q_proj.zero"].dtype == torch.uint8
    assert stored["model.layers.0.self_attn.k_proj.weight"].dtype == torch.int8
    assert stored["lm_head.weight"].dtype == torch.int8
    assert read_json(tmp_path / "b" / "config.json")["quantization_config"]["group_size"] == 32
    assert not (tmp_path / "b.partial").exists()


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path)


Q_SCALE = "model.layers.0.self_attn.q_proj.scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_SCALE), f"missing: {Q_SCALE}"),
        (lambda t: t.update({Q_SCALE: t[Q_SCALE].double()}), f"{Q_SCALE} is stored as torch.float64"),
        (lambda t: t.update({Q_SCALE: t[Q_SCALE][:5].clone()}), rf"{Q_SCALE} \[5\], not \[32\]"),
        (lambda t: t.update({"more": torch.zeros(1)}), "unexpected: more"),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    quantize_checkpoint(Checkpoint.open(write(tmp_path / "a")), tmp_path / "b", quant_config("int8"))
    rewrite(tmp_path / "b", change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "b").build(torch.float32)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    quantize_checkpoint(Checkpoint.open(source), tmp_path / "b", quant_config("int8"))
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(Checkpoint.open(tmp_path / "b"), tmp_path / "c", quant_config("int8"))
    with pytest.raises(ConfigError, match="quantized already"):
        Checkpoint.open(tmp_path / "b").build(torch.float32, quantize="int8")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_checkpoint(Checkpoint.open(source), tmp_path / "b", quant_config("int8"))
    (tmp_path / "d.partial").mkdir()
    with pytest.raises(CheckpointError, match="left from an interrupted run"):
        quantize_checkpoint(Checkpoint.open(source), tmp_path / "d", quant_config("int8"))
    with pytest.raises(ConfigError, match="int3"):
        quant_config("int3")
    with pytest.raises(ConfigError, match="group_size: 48"):
        quant_config("int4", 48)


# The engine


def test_llm_generates_alike_from_a_checkpoint_and_by_an_option(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    quantize_checkpoint(Checkpoint.open(source), tmp_path / "b", quant_config("int4"))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "compile": False, "max_seq_len": 64}
    with LLM(source, quantize="int4", **options) as llm:
        by_option = llm.generate([3, 1, 4], params).token_ids
        read = llm.model.bytes_per_token(0, 4)
    with LLM(tmp_path / "b", **options) as llm:
        assert llm.generate([3, 1, 4], params).token_ids == by_option
        assert llm.model.bytes_per_token(0, 4) == read
    options.pop("dtype")
    with LLM.from_model(random_model(TINY, torch.float32), quantize="int4", **options) as llm:
        assert llm.generate([3, 1, 4], params).token_ids == by_option


def test_llm_refuses_modes_and_devices(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"quantize in LLM\(\) must be one of int8, int4, fp8, not 'int3'"):
        LLM(source, quantize="int3")
    with pytest.raises(ConfigError, match="fp8 is not supported on cpu"):
        LLM(source, quantize="fp8", device="cpu")
    quantize_checkpoint(Checkpoint.open(source), tmp_path / "b", quant_config("fp8"))
    with pytest.raises(ConfigError, match=r"fp8 is not supported on cpu.* stored in fp8 the unquantized one"):
        LLM(tmp_path / "b", device="cpu")
    with pytest.raises(ConfigError, match="draft: fp8 is not supported on cpu"):
        LLM(source, draft=tmp_path / "b", device="cpu")
    quantized = Checkpoint.open(source).build(torch.float32, quantize="int8")
    with pytest.raises(ConfigError, match="quantize: the weights of this model are quantized already"):
        LLM.from_model(quantized, quantize="int4")


def test_compiled_equals_eager_and_nothing_compiles_in_service(tmp_path: Path) -> None:
    mode = "int4"  # which has keys, values and the head in int8
    source = write(tmp_path / "a")
    prompts = [[3] * n for n in (1, 5, 40, 17)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 64, "max_batch": 3, "prefill_chunk": 16}
    options["kernels"] = False
    with LLM(source, quantize=mode, compile=False, **options) as llm:
        eager = [c.token_ids for c in llm.generate(prompts, params)]
    with LLM(source, quantize=mode, **options) as llm:
        assert llm.engine.runner.path != "eager"
        compiled = counters["stats"]["unique_graphs"]
        assert [c.token_ids for c in llm.generate(prompts, params)] == eager
        assert counters["stats"]["unique_graphs"] == compiled


# The command


def test_the_command_writes_a_checkpoint_that_others_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')

    def run(*arguments: str) -> tuple[int, str]:
        status = cli.main(["quantize", "--checkpoint", str(source), *arguments])
        return status, capsys.readouterr().err

    status, said = run("--mode", "int4", "--group-size", "32", "--out", str(tmp_path / "b"))
    assert status == 0, said
    assert (tmp_path / "b" / "generation_config.json").exists()
    model = Checkpoint.open(tmp_path / "b").build(torch.float32)
    assert model.layers[0].wo.scheme == Scheme("int4", 32)
    assert Checkpoint.open(tmp_path / "b").meta_model(torch.float32).bytes_per_token(9, 4) == model.bytes_per_token(
        9, 4
    )
    assert Checkpoint.open(source).meta_model(torch.float32).bytes_per_token(9, 4) == Checkpoint.open(source).build(
        torch.float32
    ).bytes_per_token(9, 4)
    assert "weights in int4-g32" in said
    assert "weights in int8" in said
    status, said = run("--mode", "int4", "--group-size", "128", "--out", str(tmp_path / "c"))
    assert status == 1
    assert "group_size: 128 fits no layer" in said
    status, said = run("--mode", "int8", "--group-size", "64", "--out", str(tmp_path / "c"))
    assert status == 1
    assert "--group-size means nothing" in said


def test_a_run_that_a_full_disk_stopped_at_once_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, quant = Checkpoint.open(write(tmp_path / "a")), quant_config("int8")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_note", full)
        with pytest.raises(OSError, match="No space"):
            quantize_checkpoint(source, tmp_path / "b", quant)
    assert (tmp_path / "b.partial" / "model.safetensors").exists()
    (tmp_path / "b.partial" / "model.safetensors").write_bytes(b"")  # or a moment earlier
    quantize_checkpoint(source, tmp_path / "b", quant, resume=True)
    quantize_checkpoint(source, tmp_path / "whole", quant)
    whole, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "b"))
    assert whole == other


def leave(source: Checkpoint, out: Path) -> None:
    """What a run that is interrupted at once leaves of ``out``."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        CheckpointWriter(source, quant_config("int8"), out, {"method": "rtn"}, resume=False),
    ):
        raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["time", "size", "name", "config.json"])
def test_what_is_left_of_another_checkpoint_is_not_gone_on_with(change: str, tmp_path: Path) -> None:
    folder, times = write(tmp_path / "a"), (1_700_000_000, 1_700_000_000)
    weights, config = folder / "model.safetensors", folder / "config.json"
    os.utime(weights, times)
    leave(Checkpoint.open(folder), tmp_path / "b")
    if change == "config.json":
        config.write_text(json.dumps(read_json(config) | {"rms_norm_eps": 0.5}))
    elif change == "name":
        weights = weights.rename(folder / "weights.safetensors")
        named = dict.fromkeys(Checkpoint.open(write(tmp_path / "c")).tensors, weights.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    elif change == "size":
        tensors = safetensors.torch.load_file(weights)
        safetensors.torch.save_file(tensors, weights, {"a": "longer header"})
    os.utime(weights, (0, 0) if change == "time" else times)
    with pytest.raises(CheckpointError, match="was begun with other settings or another checkpoint"):
        quantize_checkpoint(Checkpoint.open(folder), tmp_path / "b", quant_config("int8"), resume=True)


def test_two_runs_do_not_write_the_same_folder(tmp_path: Path) -> None:
    source, quant = Checkpoint.open(write(tmp_path / "a")), quant_config("int8")
    with CheckpointWriter(source, quant, tmp_path / "b", {"method": "rtn"}, resume=False) as writer:
        for resume in (False, True):  # whoever would delete what is left, or go on with it, would spoil it
            with pytest.raises(CheckpointError, match=r"another run writes \S+/b.partial: wait for it"):
                quantize_checkpoint(source, tmp_path / "b", quant, resume=resume)
        for block in writer.blocks:
            writer.round_block(block, None)
    assert Checkpoint.open(tmp_path / "b").format.method == "gpt_fast"


def test_a_full_disk_is_told_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, quant = Checkpoint.open(write(tmp_path / "a")), quant_config("int8")
    with monkeypatch.context() as patch:
        patch.setattr("gpt_fast.quantize.writer.write_rows", mock.Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(OSError, match=r"No space left: .*b\.partial"):
            quantize_checkpoint(source, tmp_path / "b", quant)
    quantize_checkpoint(source, tmp_path / "b", quant, resume=True)
    assert (tmp_path / "b" / "config.json").is_file()


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    source, quant = Checkpoint.open(write(tmp_path / "a")), quant_config("int8")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == tmp_path / "empty")
        with pytest.raises(CheckpointError, match="link is a mount point, which cannot be replaced; name a new folder"):
            quantize_checkpoint(source, tmp_path / "link", quant)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "empty")
        with pytest.raises(CheckpointError, match="empty is the current folder"):
            quantize_checkpoint(source, tmp_path / "empty", quant)
    assert not list((tmp_path / "empty").iterdir())
    quantize_checkpoint(source, tmp_path / "link", quant)  # where the link leads
    assert (tmp_path / "empty" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_an_interrupted_rounding_goes_on_with_the_next_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, quant = Checkpoint.open(write(tmp_path / "a")), quant_config("int8")
    quantize_checkpoint(source, tmp_path / "whole", quant)
    written: list[str] = []
    real = CheckpointWriter.write_part

    def interrupted(*arguments: Any) -> None:
        written.append(arguments[1].target)
        if len(written) == 12:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(CheckpointWriter, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "b", quant)
    before = {name.rpartition(".")[0].rpartition(".")[0] for name in written[:11]}
    assert before == {"embed", "layers.0", "layers.1"}  # the second layer is not whole
    quantize_checkpoint(source, tmp_path / "b", quant, resume=True)
    again = written[12:]
    assert not any(name.startswith(("embed.", "layers.0.")) for name in again)
    assert any(name.startswith("layers.1.") for name in again)
    whole, other = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("whole", "b"))
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in whole)
