"""The Triton step honours or refuses every field of every operation of a model's description.

Each field of each operation is changed to another value: the program must refuse the model by the operation's name, or
compute what plain torch computes of the changed description. As in test_kernels_gpu.py the checks run interpreted, in
their own process. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/test_gpu_program.py -o python_functions='check_*'
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import families_table
import pytest
import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import ExpertsConfig, ModelConfig
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.model import description as d
from gpt_fast.model.attention import alibi_slopes
from gpt_fast.model.rope import Rope
from gpt_fast.model.transformer import Block, Transformer
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.scheme import quant_config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    attention = pytest.importorskip("gpt_fast.kernels.gpu.attention")
    program = pytest.importorskip("gpt_fast.kernels.gpu.program")
    gpu_model = pytest.importorskip("gpt_fast.model.gpu_model")
    attention.num_splits = lambda _: 2  # a program that finds nothing to do takes milliseconds here


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_every_field_is_honoured_or_refused() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-o", "python_functions=check_*", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# Widths meet, so that operations can read and write each other's buffers: attended, hidden and x have 32 columns, qkv
# and inner 64.
CONFIG = ModelConfig("llama", 40, 32, 1, 4, 2, 8, 32, 64, qk_norm="head", qkv_bias=True, mlp_bias=True)
EXPERTS = dataclasses.replace(
    CONFIG, family="qwen2_moe", mlp_bias=False, logits_cap=2.0, experts=ExpertsConfig(4, 2, 16, False, 16)
)
ROPES = (d.RopeTable(8, 10000.0), d.RopeTable(8, 3.0), d.RopeTable(4, 10000.0))
LAYER = "layers.0."


def model_of(mode: str | None, config: ModelConfig = CONFIG) -> Transformer:
    """Of ``config``, with more tables than it needs. The one with experts has learned positions, too."""
    torch.manual_seed(0)
    model = Transformer(config).requires_grad_(False)
    for name, p in model.named_parameters():
        p.data = p + 0.1 * torch.randn(p.shape) if "norm" in name or "bias" in name else torch.randn(p.shape) / 4
    if mode:
        quantize_model(model, quant_config(mode))
    embed = model.description.embed
    others = d.Table("others", CONFIG.vocab_size, CONFIG.dim, "others")
    ops = embed.ops if config.experts is None else (*embed.ops, d.AddPositions("x", "others", 0))
    model.embed.add_module("others", nn.Embedding(others.num_rows, others.dim, _freeze=True))
    model.description = model.description._replace(
        embed=embed._replace(tables=(*embed.tables, others), ops=ops), ropes=ROPES
    )
    model.embed.block, model.ropes = model.description.embed, nn.ModuleList(map(Rope, ROPES))
    return model


def module_of(model: Transformer, prefix: str) -> Block:
    modules = (model.embed, *model.layers, model.head)
    return next(module for module in modules if module.block.prefix == prefix)


def replace_ops(model: Transformer, prefix: str, ops: tuple[d.Op, ...]) -> None:
    module = module_of(model, prefix)
    module.block = module.block._replace(ops=ops)
    alibi = any(isinstance(op, d.Attention) and op.alibi for op in ops)
    module.slopes = alibi_slopes(CONFIG.num_heads) if alibi else None
    embed, *layers, head = (m.block for m in (model.embed, *model.layers, model.head))
    model.description = model.description._replace(embed=embed, layers=tuple(layers), head=head)


def change_op(model: Transformer, prefix: str, index: int, fields: dict[str, Any]) -> None:
    ops = module_of(model, prefix).block.ops
    replace_ops(model, prefix, (*ops[:index], dataclasses.replace(ops[index], **fields), *ops[index + 1 :]))


def step() -> tuple[Tensor, Tensor, Tensor, StepLayout]:
    """Five new tokens of one sequence."""
    numbers = torch.arange(5)
    layout = StepLayout(
        torch.tensor([0, 5]).int(),
        torch.tensor([5]).int(),
        torch.tensor([[2, 1]]).int(),
        8 - 4 * (numbers // 4) + numbers % 4,
    )
    return 7 * numbers % 40, numbers, numbers + 1, layout


def empty_cache(model: Transformer) -> list[LayerCache]:
    heads = next(op for op in model.description.layers[0].ops if isinstance(op, d.Heads))
    return [LayerCache.zeros((3, 4, heads.num_kv_heads, heads.head_dim), torch.float32, torch.device("cpu"))]


@torch.inference_mode()
def plain(model: Transformer) -> tuple[Tensor, LayerCache]:
    tokens, positions, lengths, layout = step()
    cache = empty_cache(model)
    return model.step(tokens, positions, lengths, cache, layout, torch.arange(5)), cache[0]


@torch.inference_mode()
def fast(model: Transformer) -> tuple[Tensor, LayerCache]:
    tokens, positions, lengths, layout = step()
    cache = empty_cache(model)
    return gpu_model.gpu_program(model, cache).step(tokens, positions, lengths, layout), cache[0]


def assert_equal_to_plain(model: Transformer) -> Tensor:
    (got, cache), (wanted, wanted_cache) = fast(model), plain(model)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(cache.k[1:], wanted_cache.k[1:], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(cache.v[1:], wanted_cache.v[1:], atol=2e-5, rtol=1e-4)
    return wanted


NORMS = ((LAYER, 0), (LAYER, 5), ("head.", 0))
PRODUCTS = ((LAYER, 1), (LAYER, 4), (LAYER, 6), (LAYER, 8), ("head.", 1))
# Which operation gets which values, and whether it is honoured.
CHANGES: list[tuple[str, int, dict[str, Any], bool]] = [
    ("embed.", 0, {"out": "y"}, False),
    ("embed.", 0, {"table": "others"}, True),
    ("embed.", 0, {"scale": 3.0}, True),
    *((*norm, {"eps": 0.5}, True) for norm in NORMS),
    *((*norm, {"offset": 0.7}, True) for norm in NORMS),
    *((*norm, {"kind": "layer"}, True) for norm in NORMS),
    *((*norm, {"add": "x"}, True) for norm in NORMS),
    (LAYER, 5, {"add": "normed"}, False),
    (LAYER, 5, {"x": "attended"}, True),
    (LAYER, 5, {"out": "other"}, True),
    (LAYER, 5, {"weight": "attention_norm"}, True),
    *((*product, {"scale": 0.6}, True) for product in PRODUCTS),
    (LAYER, 4, {"x": "normed"}, True),
    (LAYER, 8, {"x": "attended"}, True),
    (LAYER, 4, {"out": "normed"}, True),
    (LAYER, 4, {"matrix": "w2"}, True),
    (LAYER, 4, {"add": ""}, True),
    (LAYER, 8, {"add": "attended"}, True),
    (LAYER, 8, {"add": "normed"}, False),
    (LAYER, 6, {"add": "qkv"}, False),
    (LAYER, 2, {"k": "v", "v": "k"}, False),
    (LAYER, 2, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "norm": "no"}, True),
    (LAYER, 2, {"head_dim": 300}, False),
    (LAYER, 2, {"head_dim": 7}, False),
    (LAYER, 2, {"rotary": 0}, True),
    (LAYER, 2, {"rotary": 4}, False),
    (LAYER, 2, {"rotary": 4, "rope": 2}, True),
    (LAYER, 2, {"rope": 1}, True),
    (LAYER, 2, {"rope": 3}, False),
    (LAYER, 2, {"norm": "no"}, True),
    (LAYER, 2, {"norm": "row"}, False),
    (LAYER, 2, {"norm_eps": 0.5}, True),
    (LAYER, 2, {"norm_offset": 0.7}, True),
    (LAYER, 3, {"q": "k"}, False),
    (LAYER, 3, {"k": "v"}, False),
    (LAYER, 3, {"v": "k"}, False),
    (LAYER, 3, {"scale": 0.2}, True),
    (LAYER, 3, {"window": 2}, True),
    (LAYER, 3, {"cap": 3.0}, True),
    (LAYER, 3, {"alibi": True}, True),
    (LAYER, 3, {"sinks": "q_norm"}, False),
    (LAYER, 7, {"x": "qkv"}, False),
    (LAYER, 7, {"kind": "gelu"}, True),
    (LAYER, 7, {"kind": "clamped_swiglu"}, True),
    (LAYER, 7, {"kind": "clamped_swiglu", "gated": False}, False),
]
CHANGES_OF_EXPERTS: list[tuple[str, int, dict[str, Any], bool]] = [
    ("embed.", 1, {"x": "y"}, False),
    ("embed.", 1, {"table": "tokens"}, True),
    ("embed.", 1, {"offset": 3}, True),
    (LAYER, 6, {"matrix": "experts_w2"}, False),
    (LAYER, 7, {"x": "normed"}, False),
    (LAYER, 7, {"top_k": 1}, True),
    (LAYER, 7, {"renormalize": True}, True),
    (LAYER, 12, {"x": "x"}, True),
    (LAYER, 12, {"routes": "scores"}, False),
    (LAYER, 12, {"up": "shared_w13"}, False),
    (LAYER, 12, {"down": "shared_w2"}, False),
    (LAYER, 12, {"kind": "gelu"}, True),
    (LAYER, 12, {"kind": "clamped_swiglu", "gated": False}, False),
    (LAYER, 12, {"add": ""}, True),
    (LAYER, 12, {"add": "attended"}, True),
    (LAYER, 12, {"add": "normed"}, False),
    (LAYER, 12, {"out": "y"}, False),
    (LAYER, 12, {"scale": 0.6}, True),
    (LAYER, 13, {"x": "attended"}, True),
    (LAYER, 13, {"x": "x"}, False),
    (LAYER, 13, {"by": "x"}, False),
    (LAYER, 13, {"add": "attended"}, False),
    (LAYER, 13, {"out": "y"}, False),
    ("head.", 2, {"x": "normed"}, False),
    ("head.", 2, {"out": "y"}, False),
    ("head.", 2, {"limit": 0.5}, True),
]
LAUNCHES = ("embed", "prepare_norm", "norm", "linear", "linear_residual", "rope_write", "attend", "route", "gather")
RENAMED = ("qkv", "q", "k", "v", "attended", "normed", "inner", "hidden")
RENAMED_OF_EXPERTS = ("scores", "routes", "shared", "shared_weight")


@pytest.mark.parametrize(
    ("config", "change"),
    [*((CONFIG, change) for change in CHANGES), *((EXPERTS, change) for change in CHANGES_OF_EXPERTS)],
    ids=lambda given: str(given) if isinstance(given, tuple) else "",
)
def check_a_changed_field(config: ModelConfig, change: tuple[str, int, dict[str, Any], bool]) -> None:
    prefix, index, fields, honoured = change
    model = model_of(None, config)
    before = plain(model)[0]
    change_op(model, prefix, index, fields)
    if honoured:
        assert (assert_equal_to_plain(model) - before).abs().max() > 1e-3, "a change that changes nothing shows nothing"
    else:
        with pytest.raises(UnsupportedError, match=r"^(a model|[A-Z]\w+) with \w+ "):
            fast(model)


@pytest.mark.parametrize(("prefix", "index"), PRODUCTS, ids=str)
def check_the_scale_of_a_quantized_product(prefix: str, index: int) -> None:
    model = model_of("int8")
    change_op(model, prefix, index, {"scale": 0.6})
    assert_equal_to_plain(model)


@pytest.mark.parametrize(
    ("name", "config"), [*((n, CONFIG) for n in RENAMED), *((n, EXPERTS) for n in RENAMED_OF_EXPERTS)], ids=str
)
def check_names_of_buffers_mean_nothing(name: str, config: ModelConfig) -> None:
    model = model_of(None, config)
    ops = tuple(
        dataclasses.replace(op, **{f: "another" for f, value in dataclasses.asdict(op).items() if value == name})
        for op in module_of(model, LAYER).block.ops
    )
    assert ops != module_of(model, LAYER).block.ops
    replace_ops(model, LAYER, ops)
    assert_equal_to_plain(model)


def check_every_field_is_walked() -> None:
    walked: dict[type[d.Op], set[str]] = {}
    for config, changes in ((CONFIG, CHANGES), (EXPERTS, CHANGES_OF_EXPERTS)):
        model = model_of(None, config)
        for prefix, index, fields, _ in changes:
            walked.setdefault(type(module_of(model, prefix).block.ops[index]), set()).update(fields)
        for op in module_of(model, LAYER).block.ops:
            names = {f for f, value in dataclasses.asdict(op).items() if value in (*RENAMED, *RENAMED_OF_EXPERTS)}
            walked.setdefault(type(op), set()).update(names)
    assert {kind: {f.name for f in dataclasses.fields(kind)} for kind in walked} == walked
    assert set(walked) == set(program._RULES) == set(get_args(d.Op))


UNLIKE_LLAMA = (
    "mixtral-windows", "qwen2-moe", "qwen3-moe", "gemma2", "gemma3", "olmo2", "glm4", "gpt-oss", "gpt2", "gpt-neox",
    "opt", "bloom", "phi", "starcoder2", "stablelm-parallel", "falcon", "falcon-40b", "gpt-bigcode",
)  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE_LLAMA)
@torch.inference_mode()
def check_a_family_equals_its_model(name: str, tmp_path: Path) -> None:
    families_table.FAMILIES[name]().save_pretrained(tmp_path)
    model = Checkpoint.open(tmp_path).build(torch.float32)
    c, (tokens, positions, lengths, layout) = model.config, step()
    size = (3, 4, c.num_kv_heads, c.head_dim)
    cache, twin = ([LayerCache.zeros(size, torch.float32, tokens.device)] * c.num_layers for _ in range(2))
    wanted = model.step(tokens, positions, lengths, twin, layout, torch.arange(5))
    got = gpu_model.gpu_program(model, cache).step(tokens, positions, lengths, layout)
    torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("parallel", ["no", "one norm", "two norms"])
def check_a_layer_is_six_launches(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for every Llama, Mistral and Qwen; with a second norm beside the first one, its preparation is a seventh."""
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(CONFIG, num_layers=2, parallel=parallel)).requires_grad_(False)  # type: ignore[arg-type]
    launched: list[str] = []
    for name in LAUNCHES:
        monkeypatch.setattr(program, name, noted(getattr(program, name), launched))
    tokens, positions, lengths, layout = step()
    cache = [*empty_cache(model), *empty_cache(model)]
    got = gpu_model.gpu_program(model, cache).step(tokens, positions, lengths, layout)
    layer = {
        "no": ["linear", "rope_write", "attend", "linear_residual", "linear", "linear_residual"],
        "one norm": ["linear", "rope_write", "attend", "linear", "linear", "linear_residual"],
        "two norms": ["prepare_norm", "linear", "rope_write", "attend", "linear", "linear", "linear_residual"],
    }[parallel]
    assert launched == ["embed", *layer, *layer, "linear"]
    wanted = model.step(tokens, positions, lengths, [*empty_cache(model), *empty_cache(model)], layout, torch.arange(5))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def check_a_layer_with_experts_is_ten_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, family="mixtral", mlp_bias=False, experts=ExpertsConfig(4, 2, 16))
    model = Transformer(config).requires_grad_(False)
    launched: list[str] = []
    for name in LAUNCHES:
        monkeypatch.setattr(program, name, noted(getattr(program, name), launched))
    assert_equal_to_plain(model)
    assert launched == [
        *("embed", "linear", "rope_write", "attend", "linear_residual"),
        *("linear", "route", "linear", "linear", "gather", "linear"),
    ]  # a route is two


def noted(function: Any, names: list[str]) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        names.append(function.__name__)
        return function(*args, **options)

    return run
