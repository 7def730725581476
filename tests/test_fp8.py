"""Checkpoints with ``quant_method: fp8``, written here as Qwen, DeepSeek and AutoFP8 do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.model.building import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = ModelConfig("llama", 64, 64, 2, 4, 2, 16, 160, 128)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}


def codes_and_scales(weight: Tensor, block: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """``weight`` as 8-bit floats, the scale of each block, and what they give; last blocks may be smaller."""
    (n, k), (rows, columns) = weight.shape, block
    padded = F.pad(weight, (0, -k % columns, 0, -n % rows)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = padded.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * spread


def write(folder: Path, header: dict[str, Any], config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """A checkpoint of 8-bit floats, all but table and head; returns the weights that it stands for."""
    save_checkpoint(random_model(config, torch.bfloat16), folder)
    tensors, expected = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    block = header.get("weight_block_size")
    for name in [name for name in tensors if "proj" in name]:
        weight, stem = tensors[name].float(), name.removesuffix("weight")
        tensors[name], scale, expected[name] = codes_and_scales(weight, block or list(weight.shape))
        if block:
            tensors[stem + "weight_scale_inv"] = scale
        else:
            tensors |= {stem + "weight_scale": scale.view(()), stem + "input_scale": torch.tensor(0.5)}
    save_file(tensors, folder / "model.safetensors")
    set_header(folder, header)
    return expected


def set_header(folder: Path, header: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": header}))


@pytest.mark.parametrize("header", [BLOCKS, WHOLE])
def test_weights_are_codes_times_scales(header: dict[str, Any], tmp_path: Path) -> None:
    expected = write(tmp_path, header)
    opened = Checkpoint.open(tmp_path)
    assert opened.stored_dtype == torch.bfloat16
    for i, layer in enumerate(opened.build(torch.float32).layers):
        own = {n.removeprefix(f"model.layers.{i}."): t for n, t in expected.items() if f".{i}." in n}
        assert torch.equal(layer.wqkv.weight, torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
        assert torch.equal(layer.w13.weight, torch.cat([own[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        assert torch.equal(layer.w2.weight, own["mlp.down_proj.weight"])
    halves = [opened.build(torch.float32, shard=Shard(rank, 2)).layers[1].w2.weight for rank in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), expected["model.layers.1.mlp.down_proj.weight"])
    opened.build(torch.bfloat16, quantize="int8")


OUT = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("header", "change", "message"),
    [
        ({"weight_block_size": [32]}, {}, r"weight_block_size must be two sizes, not \[32\]"),
        ({"weight_block_size": [32, 0]}, {}, r"weight_block_size must be two sizes, not \[32, 0\]"),
        ({}, {OUT + "_scale_inv": torch.ones(2, 3)}, r"scale_inv is \[2, 3\] for a weight \[64, 64\]"),
        ({}, {OUT + "_scale_inv": None}, r"is stored as 8-bit floats, .*scale_inv"),
        ({}, {OUT: torch.ones(64, 64, dtype=torch.bfloat16)}, f"1 tensors unexpected: {OUT}_scale_inv"),
        ({}, {OUT: torch.ones(48, 64).to(torch.float8_e4m3fn)}, rf"{OUT} \[48, 64\], not \[64, 64\]"),
    ],
)
def test_what_does_not_fit_is_named(
    header: dict[str, Any], change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    write(tmp_path, BLOCKS)
    tensors = {**load_file(tmp_path / "model.safetensors"), **change}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    set_header(tmp_path, BLOCKS | header)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
