"""Ranks that share a model compute what one process computes, whatever the family and the weights: in plain torch up to
rounding, by the C++ kernels to the last bit."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import families_table
import pytest
import test_hub_quantized
import torch
from test_ranks import ROOT, TARGET, assert_ranks_agree
from torch import Tensor
from torch_rank import ASKED, load, logits
from waiting import free_port

from gpt_fast import LLM
from gpt_fast.model.cpu_model import CpuModel

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {"vocab_size": 263, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
make = partial(families_table.make, **SHAPE)
# Each with the number of its sums: one for the embedding, and those of two layers.
FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (partial(make, "Llama"), 1 + 2 * 2),
    "llama, one key": (partial(make, "Llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True), 1 + 2 * 2),
    "qwen3": (partial(make, "Qwen3", head_dim=32), 1 + 2 * 2),
    "gemma2": (partial(make, "Gemma2", head_dim=32, sliding_window=8, query_pre_attn_scalar=20), 1 + 2 * 2),
    "gpt2": (partial(make, "GPT2", max_position_embeddings=256), 1 + 2 * 2),
    "mixtral": (partial(make, "Mixtral", num_local_experts=5, num_experts_per_tok=2), 1 + 2 * 2),
    "qwen2-moe": (  # an expert that every token goes through
        partial(make, "Qwen2Moe", **families_table.QWEN_EXPERTS, shared_expert_intermediate_size=40), 1 + 2 * 3,
    ),
    "gpt-oss": (  # sinks, and biases of experts; heads that are whole blocks of int8
        partial(make, "GptOss", **families_table.GPT_OSS | {"head_dim": 32}), 1 + 2 * 2,
    ),
    "olmo2": (partial(make, "Olmo2"), 1 + 2 * 4),  # norms of all queries and of all keys
    "bloom": (partial(make, "Bloom"), 1 + 2 * 2),  # slopes for each head
}  # fmt: skip
QUANTIZED = [("llama", "int8"), ("llama", "int4"), ("gpt2", "int8"), ("mixtral", "int4"), ("gpt-oss", "int8")]
HUB = ("gptq, asymmetric", "awq")
NAMES = [*FAMILIES, *HUB, *(f"{name} in {mode}" for name, mode in QUANTIZED)]
OF_FOUR = ["llama", "llama, one key", "mixtral", "olmo2", "gptq, asymmetric", "llama in int4"]
BY_KERNELS_OF_FOUR = [name for name in NAMES if not name.startswith("qwen2-moe")]
LEFT_OUT = [("llama", 1), ("llama", 2), ("llama", 3), ("mixtral", 3), ("qwen2-moe", 3), ("qwen2-moe", 4), ("olmo2", 2)]
GENERATED: dict[str, dict[str, Any]] = {
    "plain torch": {"kernels": False, "compile": False},
    "a draft beside the C++ kernels": {"draft": str(TARGET.parent / "draft"), "speculate": "always"},
}
OPTIONS = {"device": "cpu", "dtype": "float32", "max_seq_len": 64, "max_batch": 1, "threads": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (family, _) in FAMILIES.items():
        family().save_pretrained(folder / name)
    larger = dataclasses.replace(test_hub_quantized.CONFIG, dim=128, head_dim=32, ffn_dim=256)
    for name in HUB:
        test_hub_quantized.make(folder / name, config=larger, **test_hub_quantized.CASES[name])
    return {name: folder / name for name in (*FAMILIES, *HUB)}


def jobs(checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Whose logits are wanted, by a name."""
    found = {name: {"checkpoint": str(path)} for name, path in checkpoints.items()}
    for name, mode in QUANTIZED:
        found[f"{name} in {mode}"] = found[name] | {"quantize": mode}
    for name in NAMES:
        found[f"{name} by C++"] = found[name] | {"kernels": True}
    return found


def more_jobs(checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What else two ranks are to do."""
    found: dict[str, dict[str, Any]] = {}
    for name, which in LEFT_OUT:
        found[f"{name} without sum {which}"] = {"checkpoint": str(checkpoints[name]), "left_out": which}
    for name, options in GENERATED.items():
        found[name] = {"checkpoint": str(TARGET), "options": OPTIONS | options, "port": free_port()}
    return found


def start(asked: list[dict[str, Any]], count: int, out: Path, **more: str) -> list[list[Any]]:
    """What each of ``count`` ranks finds. ``more``: of their environment."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, str(ROOT / "tests" / "torch_rank.py"), json.dumps(asked), str(out)]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(count)]
    try:
        assert [process.wait(120) for process in ranks] == [0] * count
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(f"{out}.{rank}") for rank in range(count)]


Found = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of so many ranks found of a job. All jobs in one start of the ranks: imports cost more."""

    @cache
    def of_all(count: int) -> dict[str, list[Any]]:
        every = jobs(checkpoints)
        of_four = [*OF_FOUR, *(f"{name} by C++" for name in BY_KERNELS_OF_FOUR)]
        named = every | more_jobs(checkpoints) if count == 2 else {name: every[name] for name in of_four}
        each = start(list(named.values()), count, tmp_path_factory.mktemp("found") / "of")
        return {name: [rank[i] for rank in each] for i, name in enumerate(named)}

    return lambda count, name: of_all(count)[name]


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> Callable[[str], Tensor]:
    """The logits that one process computes, by the name of the job."""

    def compute(name: str) -> Tensor:
        whole, stepped = logits(load(jobs(checkpoints)[name]))
        torch.testing.assert_close(stepped, whole, atol=1e-4, rtol=1e-4)
        return whole

    return compute


CASES = [(2, name) for name in NAMES] + [(4, name) for name in OF_FOUR]


@pytest.mark.parametrize(("count", "name"), CASES)
def test_ranks_compute_the_logits_of_one_process(
    count: int, name: str, found: Found, alone: Callable[[str], Tensor]
) -> None:
    expected = alone(name)
    # Logits that are all alike would agree whatever the weights.
    assert expected.std() > (0.2 if name.startswith(HUB) else 0.5)
    first, *others = found(count, name)
    for other in others:
        assert torch.equal(other["whole"], first["whole"])
        assert torch.equal(other["stepped"], first["stepped"])
    torch.testing.assert_close(first["whole"], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(first["stepped"], expected, atol=1e-3, rtol=1e-3)
    if name in FAMILIES:
        assert first["num_sums"] == 4 * FAMILIES[name][1]  # one run as a whole, three steps


KERNEL_CASES = [(2, name) for name in NAMES] + [(4, name) for name in BY_KERNELS_OF_FOUR]


@pytest.mark.parametrize(("count", "name"), KERNEL_CASES)
def test_ranks_compute_the_same_bits_by_the_kernels(
    count: int, name: str, found: Found, checkpoints: dict[str, Path]
) -> None:
    job = jobs(checkpoints)[f"{name} by C++"]
    model = load(job)
    whole, stepped = logits(model)
    for rank in found(count, f"{name} by C++"):
        assert isinstance(model, CpuModel)
        assert rank["kernels"] == (name != "olmo2")  # whose norms take whole rows: by plain torch
        if rank["kernels"]:
            assert_ranks_agree(rank["whole"], whole, name not in FAMILIES)
            assert_ranks_agree(rank["stepped"], stepped, name not in FAMILIES)
        else:
            torch.testing.assert_close(rank["whole"], whole, atol=1e-3, rtol=1e-3)


BY_TRITON = ("gemma2", "gpt2", "qwen2-moe", "bloom", "mixtral in int4")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_ranks_compute_the_logits_of_one_process_by_triton(
    checkpoints: dict[str, Path], alone: Callable[[str], Tensor], tmp_path: Path
) -> None:
    """Interpreted, and without the graphs that hold their steps on GPUs. Norms of whole rows go back to plain torch."""
    asked = [jobs(checkpoints)[name] | {"triton": True} for name in (*BY_TRITON, "olmo2")]
    leader, follower = start(asked, 2, tmp_path / "of", TRITON_INTERPRET="1")
    for name, first, other in zip((*BY_TRITON, "olmo2"), leader, follower, strict=True):
        assert first["path"] == ("eager" if name == "olmo2" else "kernels"), name
        assert torch.equal(first["stepped"], other["stepped"]), name
        wanted = alone(name)[:12]
        if name in FAMILIES:
            torch.testing.assert_close(first["stepped"], wanted, atol=1e-3, rtol=1e-3)
        else:  # prompts are rounded to bytes for some of the weights
            assert (first["stepped"] - wanted).norm() < 0.04 * wanted.norm(), name


@pytest.mark.parametrize(("name", "which"), LEFT_OUT)
def test_every_kind_of_sum_is_seen(name: str, which: int, found: Found, alone: Callable[[str], Tensor]) -> None:
    wrong = found(2, f"{name} without sum {which}")[0]["whole"]
    assert (wrong - alone(name)).abs().max() > 0.1


@pytest.mark.parametrize("name", GENERATED)
def test_a_whole_engine_answers_as_one_process_does(name: str, found: Found) -> None:
    options = {key: value for key, value in GENERATED[name].items() if key not in ("draft", "speculate")}
    with LLM(TARGET, **(OPTIONS | options)) as llm:
        expected, path = llm.generate(*ASKED).token_ids, llm.status()["path"]
    leader, follower = found(2, name)
    assert leader["tokens"] == expected
    assert leader["path"] == path
    assert (leader["num_accepted"] > 0) == ("draft" in GENERATED[name])
    assert follower is None
