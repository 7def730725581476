"""Quantized models of every family: the C++ step against its twin in plain torch, and the ways to make one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import families_table
import pytest
import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.kernels.cpu.library import available
from gpt_fast.model.building import random_model
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.model.shapes import shape
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.calibrate import quantize_with_text
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.tensor(families_table.prompts()[-1]).view(25, 4)


def saved(name: str, directory: Path) -> Checkpoint:
    families_table.FAMILIES[name]().save_pretrained(directory)
    return Checkpoint.open(directory)


def logits(model: Transformer | CpuModel) -> torch.Tensor:
    with torch.no_grad():
        return model.forward(TOKENS).flatten(0, 1).float()


def share_alike(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Tokens whose logits are those expected."""
    alike = (actual - expected).abs().amax(-1) < 1e-4 * expected.std()
    return float(alike.float().mean())


@pytest.mark.skipif(not available(), reason="needs a C++ compiler and a CPU with AVX2")
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("name", families_table.FAMILIES)
def test_the_step_equals_its_twin(name: str, mode: str, tmp_path: Path) -> None:
    twin = saved(name, tmp_path).build(torch.float32, quantize=mode)
    layers = [module for module in twin.modules() if isinstance(module, QuantizedLinear)]
    assert layers
    exact = logits(twin)
    for layer in layers:
        layer.rounded = True
    expected = logits(twin)
    assert share_alike(exact, expected) == 0
    # The last bit of a number can decide how an activation is rounded to 8 bits: a token and those after it move.
    assert share_alike(logits(CpuModel(twin)), expected) > 0.7


@pytest.mark.skipif(not available(), reason="needs a C++ compiler and a CPU with AVX2")
def test_threads_that_come_late_change_nothing() -> None:
    """Which experts run is known in the middle of a step: a helper that joins later must not count by what it finds."""
    mixtral = shape("mixtral-8x7b")
    assert mixtral.experts is not None
    config = dataclasses.replace(
        mixtral, vocab_size=256, dim=128, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=32, ffn_dim=64,
        experts=dataclasses.replace(mixtral.experts, ffn_dim=256),
    )  # fmt: skip
    model, tokens = CpuModel(random_model(config, torch.float32)), torch.arange(4)[None]
    expected = model.forward(tokens)
    torch.set_num_threads(2)
    assert all(torch.equal(model.forward(tokens), expected) for _ in range(300))


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-windows", "gpt-oss", "olmo2", "gemma3"])
def test_rounded_while_loading_and_stored_rounded_are_equal(name: str, mode: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out", quant_config(mode))
    expected = source.build(torch.float32, quantize=mode).state_dict()
    actual = Checkpoint.open(tmp_path / "out").build(torch.float32).state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-windows", "gpt-oss"])
def test_experts_are_rounded_to_nearest_beside_calibrated_layers(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "source")
    quantize_with_text(source, tmp_path / "out", quant_config("int4"), TOKENS)
    nearest = source.build(torch.float32, quantize="int4").state_dict()
    fitted = Checkpoint.open(tmp_path / "out").build(torch.float32).state_dict()
    same = {key for key in nearest if torch.equal(nearest[key], fitted[key])}
    assert {key for key in nearest if "experts" in key or "router" in key} <= same
    assert "layers.0.wo.weight" not in same
