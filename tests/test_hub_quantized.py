"""Checkpoints that other tools quantized: every layout, built here bit by bit, gives the values it stands for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from quantized import check_ranks, dequantized
from torch import Tensor

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import parts
from gpt_fast.model.description import Layout
from gpt_fast.quantize.hub import parse_header
from gpt_fast.quantize.linear import QuantizedLinear

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = ModelConfig("llama", 64, 64, 2, 4, 2, 16, 96, 128)
GROUP = 32


def pack(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int [R, 8 C] -> int32 [R, C]; nibble i holds value ``order[i]`` of its eight."""
    out = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for nibble, which in enumerate(order):
        out |= values[:, which::8].long() << (4 * nibble)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def make(
    directory: Path,
    method: str,
    *,
    symmetric: bool,
    desc_act: bool = False,
    whole: bool = False,
    config: ModelConfig = CONFIG,
    **more: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint of random codes; returns the weights [N, K] it stands for, by Hugging Face's names."""
    save_checkpoint(random_model(config, torch.float16), directory)
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    generator = torch.Generator().manual_seed(0)
    expected = {}
    offset = 1 if method == "gptq" and more.get("checkpoint_format", "gptq") == "gptq" else 0
    for name in [name for name in tensors if "proj" in name]:
        n, k = tensors.pop(name).shape
        size = k if whole else GROUP
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if desc_act else torch.arange(k)
        group_of = torch.empty(k, dtype=torch.int64)
        group_of[order] = torch.arange(k) // size
        codes = torch.randint(0, 16, (k, n), generator=generator)
        zeros = torch.randint(0, 16, (k // size, n), generator=generator)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros
        scales = (torch.rand(k // size, n, generator=generator) * 0.02 + 0.001).half()
        expected[name] = ((codes - zeros[group_of]).float() * scales[group_of].float()).t()
        prefix = name.removesuffix("weight")
        if method == "awq":
            tensors[prefix + "qweight"] = pack(codes, (0, 2, 4, 6, 1, 3, 5, 7))
            tensors[prefix + "qzeros"] = pack(zeros, (0, 2, 4, 6, 1, 3, 5, 7))
        else:
            tensors[prefix + "qweight"] = pack(codes.t()).t().contiguous()
            tensors[prefix + "qzeros"] = pack(zeros) - offset * 0x11111111  # which borrows from a zero's neighbours
            tensors[prefix + "g_idx"] = group_of.to(torch.int32)
            tensors[prefix + "bias"] = torch.zeros(n, dtype=torch.float16)  # as AutoGPTQ does
        tensors[prefix + "scales"] = scales
    safetensors.torch.save_file(tensors, path)
    raw = json.loads((directory / "config.json").read_text())
    group_size = -1 if whole else GROUP
    raw["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": group_size, **more}
    (directory / "config.json").write_text(json.dumps(raw))
    return expected


CASES: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq", "symmetric": True},
    "gptq, asymmetric": {"method": "gptq", "symmetric": False},
    "gptq v2": {"method": "gptq", "symmetric": True, "checkpoint_format": "gptq_v2"},
    "gptq, act-order": {"method": "gptq", "symmetric": True, "desc_act": True},
    "gptq, one group": {"method": "gptq", "symmetric": True, "whole": True},
    "awq": {"method": "awq", "symmetric": False, "version": "gemm", "zero_point": True},
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_were_stored(tmp_path: Path, case: str) -> None:
    expected = make(tmp_path, **CASES[case])
    model = Checkpoint.open(tmp_path).build(torch.float32)
    fused = {
        "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "wo": ("self_attn.o_proj",),
        "w13": ("mlp.gate_proj", "mlp.up_proj"),
        "w2": ("mlp.down_proj",),
    }
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    for i, block in enumerate(model.layers):
        for name, sources in fused.items():
            layer = block.get_submodule(name)
            assert isinstance(layer, QuantizedLinear)
            weight = torch.cat([expected[f"model.layers.{i}.{source}.weight"] for source in sources])
            # The scale, at most 0.021, moves by at most half of 255 parts; codes and zeros, 15 apart at most, do not.
            most = 1e-6 if CASES[case].get("whole") else 15 * 0.021 / 255 / 2
            assert (dequantized(layer) - weight).abs().max() <= most
            inputs = x[:, : weight.shape[1]]
            assert torch.allclose(layer(inputs), inputs @ dequantized(layer).t(), atol=2e-3)
    assert torch.isfinite(model(torch.arange(9)[None])).all()


@pytest.mark.parametrize("kind", ["heads", "pairs"])
@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_rows_in_another_order_are_refused(
    tmp_path: Path, case: str, kind: Literal["heads", "pairs"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Falcon, or GLM."""
    make(tmp_path, **CASES[case])
    checkpoint = Checkpoint.open(tmp_path)
    layout = Layout(kind, groups=2, head_dim=16, pairs=16)
    ordered = [p._replace(layout=layout) if "q_proj" in p.source else p for p in parts(checkpoint.config)]
    monkeypatch.setattr("gpt_fast.checkpoint.checkpoint.parts", lambda config: ordered)
    with pytest.raises(CheckpointError, match=f"q_proj.*an order that is not read from {case}"):
        checkpoint.build(torch.float32)


@pytest.mark.parametrize("case", ["gptq, asymmetric", "gptq v2", "awq"])
def test_ranks_together_hold_the_whole(tmp_path: Path, case: str) -> None:
    """Four outputs a rank of the keys begin in the middle of a stored number, of which each holds eight."""
    make(tmp_path, config=dataclasses.replace(CONFIG, num_heads=16, head_dim=4, ffn_dim=128), **CASES[case])
    check_ranks(Checkpoint.open(tmp_path))


def test_scattered_groups_are_not_divided(tmp_path: Path) -> None:
    make(tmp_path, config=dataclasses.replace(CONFIG, ffn_dim=128), **CASES["gptq, act-order"])
    with pytest.raises(ConfigError, match=r"o_proj\.g_idx scatters each group over the inputs of all ranks"):
        Checkpoint.open(tmp_path).build(torch.float32, shard=Shard(0, 2))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1024}, "group_size 1024"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point False"),
    ],
)
def test_other_layouts_are_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_header(raw, "config.json")


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, **CASES["gptq"])
    path = tmp_path / "model.safetensors"
    tensors = dict(safetensors.torch.load_file(path))
    whole = dict(tensors)
    name = "model.layers.1.mlp.up_proj."

    def refused(message: str) -> None:
        safetensors.torch.save_file(tensors, path)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path).build(torch.float32)

    del tensors[name + "scales"]
    refused(f"missing: {name}scales")
    tensors = {**whole, name + "qzeros": torch.zeros(1, 8, dtype=torch.int32)}
    refused(rf"{name}qzeros \[1, 8\], not \[2, 12\]")
    tensors = {**whole, name + "bias": torch.ones(96)}
    refused(f"unexpected: {name}bias")
    tensors = {**whole, name + "g_idx": torch.arange(63, -1, -1, dtype=torch.int32) // 32}
    refused(f"{name}g_idx differs")
    tensors = {**whole, name + "g_idx": (torch.arange(64) > 40).to(torch.int32)}
    refused(f"{name}g_idx has groups of other sizes")
    tensors = {**whole, name + "scales": -whole[name + "scales"]}
    refused(f"{name}scales has negative values")
    tensors = {n: t for n, t in whole.items() if not n.startswith(name)}
    tensors[name + "weight"] = torch.zeros(96, 64)
    refused(r"only a part of layers\.1\.w13")
