"""gpt-fast's own files, served as they are: the plain model, int8, Mixtral, int4 in every order of packing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpt_fast_files import (
    State,
    int4_rows,
    int4_state,
    int8_rows,
    int8_state,
    meta_state,
    pack_cpu,
    pack_cpu_bytes,
    pack_gpu,
)
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.families import to_hf_config
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ExpertsConfig, ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.building import random_model
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.tinygemm import PackedCodes, dequantized, find_order, unpacked

pytestmark = pytest.mark.usefixtures("one_thread")

# Inputs of 128 fill tiles of 8 times 16, those of 192 are padded to 1024.
LLAMA = ModelConfig("llama", 96, 128, 2, 4, 2, 32, 192, 128)
MIXTRAL = dataclasses.replace(LLAMA, family="mixtral", experts=ExpertsConfig(4, 2, 192), rope_theta=1e6)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def model_of(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    made = random_model(config, torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.normal_(0, 0.1).bfloat16())  # gpt-fast's files hold bfloat16
    return made


def write(folder: Path, config: ModelConfig, state: State, name: str = "model.pth") -> Path:
    """A checkpoint as gpt-fast's users have it: ``state`` beside Hugging Face's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config, "bfloat16")))
    torch.save(state, folder / name)
    return folder / name


def logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS]))[0]


def linears(model: Transformer) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def values(layer: QuantizedLinear) -> Tensor:
    return layer._columns(slice(None))


# ---- plain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_model_pth_is_the_model(config: ModelConfig, tmp_path: Path) -> None:
    model = model_of(config)
    path = write(tmp_path / "pth", config, {name: t.bfloat16() for name, t in meta_state(model).items()})
    save_checkpoint(model, tmp_path / "hub", torch.bfloat16)
    opened = Checkpoint.open(path)
    assert (opened.path, opened.directory, opened.files) == (path, path.parent, [path])
    assert opened.stored_dtype == torch.bfloat16
    assert all(tensor.mapped for tensor in opened.tensors.values())
    assert torch.equal(logits(opened.build(torch.float32)), logits(model))
    assert torch.equal(
        logits(opened.build(torch.float32)), logits(Checkpoint.open(tmp_path / "hub").build(torch.float32))
    )


def test_a_path_stands_for_one_checkpoint(tmp_path: Path) -> None:
    state = meta_state(model_of(LLAMA))
    path = write(tmp_path, LLAMA, state)
    assert Checkpoint.open(tmp_path).path == path, "the only .pth of a folder"
    write(tmp_path, LLAMA, int8_state(state), "model_int8.pth")
    with pytest.raises(CheckpointError, match=r"several checkpoints, name one: model.pth, model_int8.pth"):
        Checkpoint.open(tmp_path)
    save_checkpoint(model_of(LLAMA), tmp_path)
    for hub in (tmp_path, tmp_path / "model.safetensors", tmp_path / "config.json"):
        assert Checkpoint.open(hub).path == tmp_path, "Hugging Face's files come first"
    assert Checkpoint.open(path).path == path, "unless another one is named"
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "nowhere.pth")


def test_what_lies_beside_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, meta_state(model_of(LLAMA)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not say how many heads .* put the config.json .* beside it"):
        Checkpoint.open(path)
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 4, "max_seq_len": 128}))
    assert Checkpoint.open(path).config == LLAMA
    path = write(tmp_path, MIXTRAL, meta_state(model_of(MIXTRAL)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"a mixture of experts needs Hugging Face's config.json"):
        Checkpoint.open(path)


# ---- int8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_int8_keeps_every_value(config: ModelConfig, tmp_path: Path) -> None:
    model = model_of(config)
    path = write(tmp_path, config, int8_state(meta_state(model)), "model_int8.pth")
    opened = Checkpoint.open(path)
    served = opened.build(torch.float32)
    expected = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {name: module for name, module in expected.items() if "router" not in name}
    assert linears(served).keys() == expected.keys()
    for name, layer in linears(served).items():
        codes, scales = int8_rows(expected[name].weight)
        scales = scales if "experts" in name else scales.bfloat16().float()
        assert torch.equal(layer.weight, codes), name
        assert torch.equal(layer.scale, scales), name
        expected[name].weight.data = codes * scales[:, None]
    torch.testing.assert_close(logits(served), logits(model), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="is quantized already"):
        opened.format_for("int8")


def test_int8_is_served_by_the_kernels_and_divided_between_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, int8_state(meta_state(model_of(LLAMA))), "model_int8.pth")
    opened = Checkpoint.open(path)
    with (
        LLM(opened, dtype="float32", compile=False) as llm,
        LLM(path, dtype="float32", kernels=False, compile=False) as plain,
    ):
        params = SamplingParams(max_tokens=5, temperature=0)
        assert len(llm.generate(TOKENS, params).token_ids) == len(plain.generate(TOKENS, params).token_ids) == 5
    whole = linears(opened.build(torch.float32))
    ranks = [linears(opened.build(torch.float32, shard=Shard(i, 2))) for i in range(2)]
    assert torch.equal(torch.cat([values(rank["layers.0.w2"]) for rank in ranks], 1), values(whole["layers.0.w2"]))
    assert torch.equal(torch.cat([values(rank["head.output"]) for rank in ranks]), values(whole["head.output"]))


# ---- int4 -----------------------------------------------------------------------------------------------------------

PACKS: dict[str, Callable[[Tensor, int], Tensor]] = {"gpu": pack_gpu, "cpu": pack_cpu, "cpu bytes": pack_cpu_bytes}


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("inner_tiles", [2, 4, 8])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_values_are_read_exactly(pack: str, inner_tiles: int, group_size: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(80, 512)
    codes, grids = int4_rows(weight, group_size)
    state = {"X.weight": PACKS[pack](codes, inner_tiles), "X.scales_and_zeros": grids}
    found, size = unpacked({name: StoredTensor(t) for name, t in state.items()}, "x.pth")
    assert size == group_size
    read, grid = found["X.weight"], found["X.scales_and_zeros"]
    assert torch.equal(read.rows(0, 80), codes.to(torch.uint8))
    rows = torch.tensor([70, 3, 4, 79, 64, 63])
    assert torch.equal(read.picked(rows).rows(1, 6), codes[rows[1:]].to(torch.uint8))
    scale, zero = grids.transpose(0, 1).float().repeat_interleave(group_size, 1).unbind(-1)
    exact = (codes.float() - 8) * scale + zero
    assert torch.equal(dequantized(read.rows(0, 80), grid.rows(0, 80)), exact)
    assert (exact - weight).abs().max() < 0.6 * scale.max() + 0.02, "the file means the weights it was made of"


def test_torch_means_the_same_by_packed_values() -> None:
    torch.manual_seed(1)
    codes, grids = int4_rows(torch.randn(64, 128), 32)
    rows = torch.eye(128, dtype=torch.bfloat16)
    products = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, pack_cpu_bytes(codes, 8), 32, grids)
    found = dequantized(codes.to(torch.uint8), grids.transpose(0, 1))
    torch.testing.assert_close(found.bfloat16(), products.t(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_cpu_order_is_known(capability: str, tmp_path: Path) -> None:
    """What torch packs when it takes this machine for a smaller one. One that is larger than it is stays what it is."""
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gpt_fast_files import int4_rows, pack_cpu
torch.manual_seed(1)
codes, grids = int4_rows(torch.randn(208, 256), 32)
torch.save({{"codes": codes, "grids": grids, "packed": pack_cpu(codes, 8),
             "capability": torch.backends.cpu.get_cpu_capability()}}, {str(tmp_path / "packed.pt")!r})
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    made = torch.load(tmp_path / "packed.pt")
    weight = StoredTensor(made["packed"])
    order = find_order([(weight, StoredTensor(made["grids"].transpose(0, 1)))], "x.pth")
    names = {"DEFAULT": "a CPU without vectors", "AVX2": "a CPU with AVX2", "AVX512": "a CPU with AVX-512"}
    assert order.name == names.get(made["capability"], order.name)
    assert torch.equal(PackedCodes(weight, order).rows(0, 208), made["codes"].to(torch.uint8))


def test_an_order_that_is_not_known_is_refused() -> None:
    weight = StoredTensor(torch.randint(-(2**31), 2**31 - 1, (16, 4, 32, 4), dtype=torch.int32))
    grid = StoredTensor(int4_rows(torch.randn(128, 512), 32)[1].transpose(0, 1))
    with pytest.raises(CheckpointError, match=r"not known here.*gpt-fast quantize --checkpoint DIR --mode int4"):
        find_order([(weight, grid)], "x.pth")


@pytest.mark.parametrize("pack", ["gpu", "cpu"])
def test_int4_keeps_codes_and_serves_them(pack: str, tmp_path: Path) -> None:
    """Rows of all layers, padded ones and those of a head included, end where the model has them."""
    model = model_of(LLAMA)
    path = write(tmp_path, LLAMA, int4_state(meta_state(model), PACKS[pack]), "model_int4.g32.pth")
    opened = Checkpoint.open(path)
    served = opened.build(torch.float32)
    for name, layer in linears(served).items():
        weight = model.get_submodule(name).weight.detach()
        assert layer.scheme.group_size == 32
        codes, grids = int4_rows(weight, 32)
        scale, zero = grids.transpose(0, 1).float().repeat_interleave(32, 1).unbind(-1)
        exact = (codes.float() - 8) * scale + zero
        error = (values(layer) - exact).abs() / scale
        assert error.max() < 0.25, "of one step: an eighth of a code for the zero, and what the scale lost at the ends"
        assert error.square().mean().sqrt() < 0.06
    again = Checkpoint.open(path).build(torch.float32)
    assert torch.equal(logits(again), logits(served))
    plain = model_of(LLAMA)
    for name in linears(served):
        plain.get_submodule(name).weight.data = values(linears(served)[name])
    torch.testing.assert_close(logits(served), logits(plain), rtol=1e-4, atol=1e-5)
    with LLM(opened, dtype="float32", compile=False) as llm:
        assert len(llm.generate(TOKENS, SamplingParams(max_tokens=5, temperature=0)).token_ids) == 5
    ranks = [linears(opened.build(torch.float32, shard=Shard(i, 2))) for i in range(2)]
    for name, dim in (("layers.1.w2", 1), ("layers.1.wo", 1), ("head.output", 0)):
        assert torch.equal(torch.cat([values(rank[name]) for rank in ranks], dim), values(linears(served)[name])), name


def test_groups_that_do_not_fit_the_scheme_are_rounded_anew() -> None:
    """A zero below all values, one value in a whole group, and scales too small beside the largest of the row."""
    from gpt_fast.quantize.scheme import Scheme
    from gpt_fast.quantize.tinygemm import regrid

    torch.manual_seed(2)
    weight = torch.randn(4, 128) * 0.1
    weight[0, :32] += 3  # all positive: code 0 stands for more than 0
    weight[1, 32:64] = 0.25
    weight[2, 64:96] *= 1e-4
    codes, grids = int4_rows(weight, 32)
    grid = grids.transpose(0, 1)
    found = regrid(codes.to(torch.uint8), grid, Scheme("int4", 32))
    anew = quantize_rows(dequantized(codes.to(torch.uint8), grid), Scheme("int4", 32))
    for name, tensor in found.items():
        assert torch.equal(tensor[:3].to(anew[name].dtype), anew[name][:3]), name
    assert torch.isfinite(found["row_scale"]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers.0.attention.wo.scales_and_zeros": torch.zeros(3, 128, 2)}, "wo is not packed as gpt-fast does it"),
        ({"layers.0.attention.wo.weight": torch.zeros(128, 128)}, "wo is not packed as gpt-fast does it"),
        ({"layers.0.attention.wo.scales_and_zeros": torch.zeros(2, 128, 2)}, "groups of .32, 64. inputs"),
        ({"layers.0.attention.wo.weight": None}, "wo is not packed .* missing"),
        ({"output.scales_and_zeros": None}, "lm_head.scales_and_zeros"),
    ],
)
def test_damaged_int4_is_refused(change: dict[str, Tensor | None], says: str, tmp_path: Path) -> None:
    state = int4_state(meta_state(model_of(LLAMA)), pack_gpu) | change
    path = write(tmp_path, LLAMA, {name: t for name, t in state.items() if t is not None})
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(path)


# ---- damaged files of every kind ------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda t: t.flatten()[0].clone(),
    "flat": lambda t: t.flatten().clone(),
    "one row less": lambda t: t[1:].clone(),
    "empty": lambda t: t[:0].clone(),
    "one dimension more": lambda t: t[None].clone(),
    "float64": lambda t: t.double(),
    "bool": lambda t: t.bool(),
}


@pytest.mark.parametrize("kind", ["plain", "int8", "int4", "experts", "experts int8"])
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name_or_served(kind: str, tmp_path: Path) -> None:
    config = MIXTRAL if "experts" in kind else LLAMA
    state = meta_state(model_of(config))
    if "int8" in kind:
        state = int8_state(state)
    elif kind == "int4":
        state = int4_state(state, pack_gpu)
    refused = 0
    for name in [name for name in state if "layers.1." not in name]:
        for damage in DAMAGES.values():
            path = write(tmp_path, config, state | {name: damage(state[name])})
            try:
                Checkpoint.open(path)
            except CheckpointError as error:
                assert str(path) in str(error), name  # noqa: PT017
                refused += 1
        path = write(tmp_path, config, {other: tensor for other, tensor in state.items() if other != name})
        if name == "output.weight" and kind in ("plain", "experts"):
            assert Checkpoint.open(path).config.tie_embeddings, "as in Hugging Face's files"
        else:
            with pytest.raises(CheckpointError):
                Checkpoint.open(path)
    assert refused > 4 * len(state) // 2
