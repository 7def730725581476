"""Memory is looked at before it is taken: the KV cache, the weights, and the sizes that a config.json claims.

So are cores, before threads are started."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import check_idle
from test_hub_quantized import make as make_hub

from gpt_fast import LLM, SamplingParams, memory
from gpt_fast.cgroups import cpu_quota
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.family import KEYS
from gpt_fast.checkpoint.json_values import LIMITS
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.commands import bench, info
from gpt_fast.commands import eval as evaluate
from gpt_fast.config import DEFAULT_MAX_BATCH, EngineConfig, ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.memory import HostMemory, host_memory, plan_cache
from gpt_fast.model.building import random_model
from gpt_fast.model.shapes import SHAPES
from gpt_fast.placement import usable_threads
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TINY = ModelConfig("llama", 64, 64, 2, 4, 2, 16, 96, 128)
TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of a token of TINY in a float32 cache
CPU = torch.device("cpu")
GB = 10**9

pytestmark = pytest.mark.usefixtures("one_thread")


def write(directory: Path, **changes: Any) -> Path:
    """A tiny checkpoint whose config.json says ``changes``."""
    save_checkpoint(random_model(TINY, torch.float32), directory, extra=changes)
    return directory


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this machine one with so many bytes free."""

    def have(num_bytes: int) -> None:
        monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(num_bytes, num_bytes, 0))

    return have


# ---- what is free ---------------------------------------------------------------------------------------------------

MEMINFO = "MemTotal: 16000 kB\nMemFree: 1000 kB\nMemAvailable: 8000 kB\nSwapFree: 500 kB\nHugePages_Total: 0\n"
UNLIMITED = str(2**63 - 4096)  # how version 1 spells it


def machine(root: Path, cgroup: str, files: dict[str, str]) -> HostMemory:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(root)


def v2(folder: str, limit: str, used: int, cached: int = 0, high: str = "max") -> dict[str, str]:
    at = f"sys/fs/cgroup{folder}/memory"
    stat = f"anon 5\nfile 7\ninactive_file {cached}\nactive_file 0\n"
    return {f"{at}.max": limit, f"{at}.high": high, f"{at}.current": str(used), f"{at}.stat": stat}


def v1(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{folder}/memory"
    stat = f"cache 9\ntotal_inactive_file {cached}\ntotal_active_file 0\n"
    return {f"{at}.limit_in_bytes": limit, f"{at}.usage_in_bytes": str(used), f"{at}.stat": stat}


@pytest.mark.parametrize(
    ("cgroup", "files", "free", "total"),
    [
        ("", {}, 8_192_000, 16_384_000),
        ("0::/a/b\n", v2("/a/b", "max", 3), 8_192_000, 16_384_000),
        ("0::/a/b\n", v2("/a/b", "5000000", 1_000_000), 4_000_000, 5_000_000),
        ("0::/a/b\n", v2("/a/b", "5000000", 4_000_000, cached=3_000_000), 4_000_000, 5_000_000),
        ("0::/a/b\n", v2("/a/b", "5000000", 1_000_000, high="3000000"), 2_000_000, 3_000_000),
        ("0::/a/b\n", v2("/a/b", "max", 1) | v2("/a", "2000000", 500_000), 1_500_000, 2_000_000),
        ("0::/a\n", v2("/a", "2000000", 3_000_000), 0, 2_000_000),
        ("0::/../..\n", v2("", "2000000", 500_000), 1_500_000, 2_000_000),
        ("0::/elsewhere\n", v2("", "2000000", 500_000), 1_500_000, 2_000_000),
        ("5:cpu:/x\n4:memory:/a\n0::/\n", v1("/a", "2000000", 900_000, 400_000), 1_500_000, 2_000_000),
        ("4:cpu,memory:/a/b\n", v1("/a/b", UNLIMITED, 9) | v1("", "3000000", 0), 3_000_000, 3_000_000),
        ("4:memory:/a\n", v1("/a", UNLIMITED, 9), 8_192_000, 16_384_000),
    ],
    ids=[
        "none",
        "v2 max",
        "v2",
        "v2 cache",
        "v2 high",
        "parent",
        "over",
        "namespace",
        "unseen",
        "v1",
        "v1 top",
        "v1 no",
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], free: int, total: int) -> None:
    assert machine(tmp_path, cgroup, files) == HostMemory(free, total, 512_000)


def test_systems_that_do_not_say_are_guessed(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.free == found.total // 2
    assert found.free + found.spare == found.total


def test_this_machine_says_something_sensible() -> None:
    found = host_memory()
    assert 0 < found.free <= found.total
    assert memory.free_bytes(CPU) <= found.total


def test_a_gpu_is_asked_after_torch_let_go_of_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(str(device)), (7, 9))[1])
    assert memory.free_bytes(torch.device("cuda:1")) == 7
    assert asked == ["empty", "cuda:1"]


# ---- how large the cache is -----------------------------------------------------------------------------------------


def plan(free: int, positions: int = 1024, device_type: str = "cpu", **options: Any) -> memory.CachePlan:
    config = dataclasses.replace(TINY, max_seq_len=positions)
    return plan_cache(config, EngineConfig(**options), dtype=torch.float32, free=free, device_type=device_type)


ROOMY = 8 * 1024 * TOKEN  # eight sequences of 1024 tokens


def test_with_room_it_is_what_the_batch_can_fill() -> None:
    found = plan(GB)
    assert (found.max_batch, found.max_seq_len, found.num_tokens) == (DEFAULT_MAX_BATCH, 1024, 8 * 1024)
    assert found.num_bytes == ROOMY + 16 * TOKEN, "and a page of nobody"
    assert plan(GB, max_batch=3).num_tokens == 3 * 1024
    assert plan(GB, max_seq_len=100).num_tokens == 8 * 112, "whole pages"
    assert plan(GB, num_pages=5).num_tokens == 80
    assert plan(GB, num_pages=5).max_seq_len == 80
    assert plan(GB, num_pages=5, max_seq_len=80).max_seq_len == 80
    with pytest.raises(ConfigError, match=r"num_pages: 5 .* hold 80, and max_seq_len: 81"):
        plan(GB, num_pages=5, max_seq_len=81)


@pytest.mark.parametrize(("device_type", "share"), [("cpu", 0.5), ("cuda", 0.9)])
def test_it_takes_its_share_and_no_more(device_type: str, share: float) -> None:
    for free in (20_000_000, 50_000_000, 10**10):
        found = plan(free, 10**7, device_type)
        assert 0.8 * share * (free - 2_000_000) < found.num_bytes <= share * free
        assert found.max_seq_len == min(10**7, found.num_tokens), "one sequence may have all of it"
        assert plan(free, 10**7, device_type, memory_share=0.25).num_bytes <= 0.25 * free
    assert plan(2 * ROOMY).num_bytes <= ROOMY
    assert plan(2 * ROOMY).max_seq_len == 1024, "full length still fits, seven times"


def test_steps_of_prompts_are_long_where_memory_is_not_scarce() -> None:
    llama, where = SHAPES["llama-3.1-8b"], {"dtype": torch.bfloat16, "device_type": "cuda"}

    def chunk(free: int, **options: Any) -> int:
        return plan_cache(llama, EngineConfig(**options), free=free, **where).prefill_chunk  # type: ignore[arg-type]

    assert [chunk(free * GB) for free in (8, 60)] == [512, 2048]
    assert [chunk(free * GB, prefill_chunk=1000) for free in (8, 60)] == [1000, 1000]
    assert plan(GB).prefill_chunk == plan(20 * GB).prefill_chunk == 256


def test_a_draft_model_takes_pages_and_a_step_of_its_own() -> None:
    tiny = dataclasses.replace(TINY, max_seq_len=10**6)
    wide = dataclasses.replace(tiny, ffn_dim=1500)
    where: dict[str, Any] = {"dtype": torch.float32, "free": 2 * ROOMY, "device_type": "cpu"}
    alone, narrow, broad = (plan_cache(tiny, EngineConfig(), draft=d, **where) for d in (None, tiny, wide))
    assert narrow.num_bytes <= ROOMY
    assert 0.4 * alone.num_pages < narrow.num_pages <= 0.5 * alone.num_pages
    assert 0.3 * narrow.num_pages < broad.num_pages < 0.9 * narrow.num_pages, "256 rows of its feed-forward"


def test_the_large_models_of_today_start_on_small_machines() -> None:
    llama = SHAPES["llama-3.1-8b"]
    free = 24 * GB - 16 * GB
    found = plan_cache(llama, EngineConfig(), dtype=torch.bfloat16, free=free, device_type="cuda")
    assert 4 * GB < found.num_bytes < 0.9 * free
    assert 40_000 < found.max_seq_len < llama.max_seq_len
    assert "131072" in found.shortened
    with pytest.raises(ConfigError, match=r"137 GB \(max_seq_len: 131072, max_batch: 8\)"):
        plan_cache(
            llama,
            EngineConfig(max_seq_len=131072, max_batch=8),
            dtype=torch.bfloat16,
            free=80 * GB,
            device_type="cuda",
        )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_seq_len": 32768}, "lower max_seq_len,"),
        ({"max_seq_len": 4096, "max_batch": 8}, "lower max_seq_len or max_batch,"),
        ({"max_batch": 128}, "128, of 256 tokens at least.*lower max_batch,"),
        ({"num_pages": 2048}, "lower num_pages,"),
    ],
)
def test_what_was_asked_for_and_does_not_fit_is_refused(options: dict[str, int], names: str) -> None:
    free = 2 * 8192 * TOKEN + 2_000_000  # about 8,192 tokens are allowed
    with pytest.raises(ConfigError, match=names) as caught:
        plan(free, 10**6, **options)
    for name, value in options.items():
        assert f"{name}: {value}" in str(caught.value)
    numbers = (f"{memory.gigabytes(free)} that are free", "0.0168 GB (", "memory_share (0.5)")
    assert all(number in str(caught.value) for number in numbers), caught.value
    halves = {name: value // 8 for name, value in options.items()}
    assert plan(free, 10**6, **halves).num_bytes <= free / 2


def test_an_open_length_shrinks_where_a_batch_was_asked_for() -> None:
    free = 2 * 8192 * TOKEN + 2_000_000
    found = plan(free, 10**6, max_batch=16)
    assert found.max_batch == 16
    assert 16 * 256 < found.num_tokens == found.max_seq_len < 10**6
    short = plan(free, 64, max_batch=100)
    assert short.max_seq_len == 64, "a model of 64 positions needs no 256"


def test_nothing_at_all_is_refused() -> None:
    for nothing in (0, -GB, 500_000):
        with pytest.raises(ConfigError, match="one sequence, of 256 tokens at least"):
            plan(nothing)


def test_a_step_needs_memory_too() -> None:
    """A vocabulary of 16 million makes one step's logits larger than all of the cache."""
    wide = dataclasses.replace(TINY, vocab_size=2**24)
    with pytest.raises(ConfigError, match="less what a step needs"):
        plan_cache(wide, EngineConfig(), dtype=torch.float32, free=20 * GB, device_type="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_plan_is_what_is_allocated(dtype: str) -> None:
    model = random_model(TINY, torch.float32)
    with LLM.from_model(model, kv_cache_dtype=dtype, compile=False, max_batch=3, page_size=8) as llm:
        planned = llm._loaded.plan
        assert planned.num_bytes == llm.engine.runner.cache_bytes
        assert planned.num_pages + 1 == llm.engine.scheduler.pages.num_pages
        assert llm.engine.runner.max_batch == llm.engine.scheduler.max_batch == 3


# ---- from a checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [131_072, 10**7])
def test_any_number_of_positions_starts_by_default(
    positions: int, tmp_path: Path, free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Of TINY's cache eight times 131,072 positions would be 0.5 GB; here 6 MB are free."""
    free(6_000_000)
    with caplog.at_level(logging.INFO), LLM(write(tmp_path, max_position_embeddings=positions)) as llm:
        assert 1_000_000 < llm.engine.runner.cache_bytes <= 3_000_000
        assert 1024 < llm.max_seq_len < 6000
        done = llm.generate([3, 1, 4], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(done.token_ids) == 5
        whole = llm.generate([5] * (llm.max_seq_len - 2), SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(whole.token_ids) == 2, "the length that is promised can be used"
        check_idle(llm)
        length = llm.max_seq_len
    assert f"max_seq_len is {length} and not {positions}" in caplog.text
    assert "0.006 GB free" in caplog.text
    assert f"room for 1.0 sequences of {length} tokens" in caplog.text


def test_with_room_the_log_says_so_and_warns_of_nothing(
    tmp_path: Path, free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    free(GB)
    with caplog.at_level(logging.INFO), LLM(write(tmp_path)) as llm:
        assert llm.max_seq_len == 128
    assert "KV cache: 0.000532 GB of 1 GB free, 1024 tokens: room for 8.0 sequences of 128 tokens" in caplog.text
    assert "max_seq_len is" not in caplog.text
    assert "threads" not in caplog.text
    assert "finite" not in caplog.text


@pytest.mark.parametrize("options", [{"max_seq_len": 100_000}, {"max_batch": 1000}, {"num_pages": 10**6}])
def test_llm_refuses_before_anything_is_read(
    options: dict[str, int], tmp_path: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(20_000_000)
    monkeypatch.setattr("gpt_fast.loading.Checkpoint.build", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}.*GB"):
        LLM(write(tmp_path), **options)


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    tmp_path: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    size = sum(p.numel() for p in random_model(TINY, torch.float32).parameters())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.num_bytes(torch.float32) == 4 * size
    free(3 * size)
    assert checkpoint.num_bytes(torch.bfloat16) == 2 * size
    memory.check_weights(2 * size, CPU, ())
    assert checkpoint.num_bytes(torch.float32, "int8") < 3 * size
    monkeypatch.setattr("gpt_fast.loading.Checkpoint.build", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(ConfigError, match=r"weights need .* GB, and .* GB are free on cpu; set quantize: int8 or int4"):
        LLM(tmp_path, dtype="float32")
    free(size // 2)  # what is set already is not proposed
    with pytest.raises(ConfigError, match=r"free on cpu; set quantize: int4, or take a machine"):
        LLM(tmp_path, dtype="float32", quantize="int8")
    with pytest.raises(ConfigError, match=r"free on cpu; take a machine with more memory"):
        LLM(tmp_path, dtype="float32", quantize="int4")
    free(3 * size)
    # Swap space is memory of a kind: what fits with it is not refused.
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(3 * size, 3 * size, 2 * size))
    memory.check_weights(4 * size, CPU, ())


def test_info_says_what_fits(
    tmp_path: Path, free: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gpt_fast.checkpoint.checkpoint.load_tokenizer", lambda _: argparse.Namespace(vocab_size=1, eos_token_ids=())
    )
    write(tmp_path, max_position_embeddings=131_072)

    def said(*more: str) -> str:
        parser = argparse.ArgumentParser()
        info.add_parser(parser.add_subparsers())
        arguments = parser.parse_args(["info", "--checkpoint", str(tmp_path), "--dtype", "float32", *more])
        assert info.run(arguments) == 0
        return capsys.readouterr().out

    free(20_000_000)
    facts = json.loads(said("--json"))
    assert facts["free_bytes"] == 20_000_000
    assert facts["kv_bytes_per_token"] == TOKEN
    assert facts["weight_bytes"] == Checkpoint.open(tmp_path).num_bytes(torch.float32)
    assert facts["cache_bytes"] == (facts["cache_tokens"] + 16) * TOKEN <= 10_000_000
    assert facts["cache_holds"] == f"1.0 sequences of {facts['cache_tokens']} tokens"
    assert json.loads(said("--json", "--quantize", "int8"))["weight_bytes"] < facts["weight_bytes"]
    lines = said()
    assert "free_bytes" in lines
    assert "0.02 GB" in lines
    free(100_000)
    assert "the KV cache would need" in json.loads(said("--json"))["does_not_fit"]


# ---- what config.json claims ----------------------------------------------------------------------------------------

KINDS = ("plain", "int4", "gptq", "awq")


def write_kind(directory: Path, kind: str) -> Path:
    """TINY as ``kind`` of checkpoint."""
    if kind in ("gptq", "awq"):
        make_hub(directory, kind, symmetric=True)
    elif kind == "plain":
        write(directory)
    else:
        write(directory.with_name("source"))
        quantize_checkpoint(Checkpoint.open(directory.with_name("source")), directory, quant_config(kind))
    return directory


def claim(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


LIMIT_OF_KEY = {KEYS.get(name, name): limit for name, limit in LIMITS.items()}
HUGE = {
    "hidden_size": 10**9,
    "num_hidden_layers": 10**9,
    "vocab_size": 10**12,
    "intermediate_size": 10**10,
    "num_attention_heads": 10**9,
    "num_key_value_heads": 10**9,
    "head_dim": 10**12,
    "max_position_embeddings": 10**15,
    "sliding_window": 10**15,
}
ASK = """
import resource, sys, torch
from gpt_fast import LLM, cli
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.errors import CheckpointError
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint
import gpt_fast.evaluate, torch._inductor.config
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, now + 2**29))
for folder in sys.argv[1:]:
    quant = quant_config("int8")
    doors = [lambda: LLM(folder), lambda: quantize_checkpoint(Checkpoint.open(folder), folder + "-out", quant)]
    for door in doors:
        try:
            door()
            print(folder, "was taken", flush=True)
        except CheckpointError as error:
            print(error, flush=True)
    for command in (["info"], ["eval", "--perplexity", "x"]):
        print("status", cli.main([*command, "--checkpoint", folder]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory by what /proc says")
def test_huge_sizes_are_refused_through_every_door(tmp_path: Path) -> None:
    """With half a gigabyte of memory to go: a list of 10^9 parts or one of these tensors would not fit into it."""
    folders = []
    for key, value in HUGE.items():
        changes = {"architectures": ["MistralForCausalLM"]} if key == "sliding_window" else {}
        folders.append(claim(write(tmp_path / key), **{key: value}, **changes))
    done = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * len(HUGE), done.stdout
    for i, key in enumerate(HUGE):
        by_llm, by_quantize, *statuses = lines[4 * i : 4 * i + 4]
        assert f"{key} must be between 1 and {LIMIT_OF_KEY[key]}, not {HUGE[key]}" in by_llm
        assert by_llm == by_quantize
        assert statuses == ["status 1", "status 1"]


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_the_file_does_not_have_are_refused_before_anything_is_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limits, and still terabytes: only the tensors' own shapes tell."""
    original = write_kind(tmp_path / "a", kind)
    text = (original / "config.json").read_text()
    monkeypatch.setattr("gpt_fast.checkpoint.checkpoint.empty_model", lambda *_, **__: pytest.fail("a model was built"))
    doors: list[Callable[[], object]] = [
        lambda: Checkpoint.open(original).build(torch.float32),
        lambda: Checkpoint.open(original).meta_model(torch.float32),
        lambda: LLM(original),
        lambda: quantize_checkpoint(Checkpoint.open(original), tmp_path / "out", quant_config("int8")),
    ]
    for key, limit in LIMIT_OF_KEY.items():
        if key in ("max_position_embeddings", "sliding_window") or "experts" in key:
            continue  # of the first two no tensor tells, and this family has no experts
        (original / "config.json").write_text(text)
        claim(original, **{key: 4 if key == "num_key_value_heads" else limit})  # it divides the 4 heads
        for door in doors:
            with pytest.raises(CheckpointError):
                door()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 128, "head_dim": None, "num_key_value_heads": None}, "more than hidden_size"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a number below"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 10.0**9}}, "times factor must be between"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number below"),
        ({"hidden_size": int("9" * 3000)}, r"hidden_size must be between 1 and 262144, not 9{60}\.\.\.$"),
        ({"hidden_size": list(range(10**5))}, r"hidden_size must be int, not .{60}\.\.\.$"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        LLM(claim(write(tmp_path), **changes))


def test_deep_nesting_is_damage(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 10**6 + "]" * 10**6 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        LLM(tmp_path)


# ---- threads --------------------------------------------------------------------------------------------------------


def test_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert [usable_threads(n) for n in (1, 3)] == [1, 3]
    assert not caplog.records
    assert usable_threads(100_000) == 3
    assert (
        "threads: 100000 (the option threads, OMP_NUM_THREADS or torch's own choice) are more than the 3 cores"
        in caplog.text
    )
    assert "OMP_PROC_BIND" not in caplog.text
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert usable_threads(4) == 3
    assert "OMP_PROC_BIND binds this process" in caplog.text
    for wrong in (0, -1, 10**9):
        with pytest.raises(ConfigError, match=f"threads must be a whole number from 1 to 1048576, not {wrong}"):
            usable_threads(wrong)


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("", {}, None),
        ("0::/a/b\n", {"/a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"/a/b/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"/a/b/cpu.max": "250000 100000\n", "/a/cpu.max": "50000 50000\n"}, 1.0),
        ("0::/../..\n", {"/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/a\n", {"/a/cpu.max": "what is this\n"}, None),
        ("4:cpu,cpuacct:/a\n0::/\n", {"/cpu/a/cpu.cfs_quota_us": "150000", "/cpu/a/cpu.cfs_period_us": "100000"}, 1.5),
        ("4:cpu,cpuacct:/a\n", {"/cpu/a/cpu.cfs_quota_us": "-1", "/cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:cpuset:/a\n", {"/cpu/a/cpu.cfs_quota_us": "100000", "/cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
    ids=["none", "max", "v2", "parent", "namespace", "damaged", "v1", "v1 no", "another"],
)
def test_a_containers_share_of_the_cpus(
    tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None
) -> None:
    at = {f"sys/fs/cgroup{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": cgroup, **at}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "threads"), [(None, 3), (0.5, 1), (1.9, 1), (2.0, 2), (64.0, 3)])
def test_threads_keep_within_the_share(quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    monkeypatch.setattr("gpt_fast.cgroups.cpu_quota", lambda: quota)
    assert usable_threads(3) == threads


@pytest.mark.parametrize("by", ["the option", "the environment"])
def test_the_engine_keeps_to_it(by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr("gpt_fast.loading.SMALL_MODEL_BYTES", 0)
    given = {"threads": 100_000} if by == "the option" else {}
    if not given:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 100_000)
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    with LLM.from_model(random_model(TINY, torch.float32), compile=False, kernels=False, **given):
        assert seen == [1]
    assert "threads: 100000" in caplog.text


@pytest.mark.parametrize("command", ["bench", "eval"])
def test_the_commands_keep_to_it(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopHereError(Exception):
        pass

    def stop(threads: int) -> None:
        raise StopHereError(threads)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", stop)
    checkpoint = write(tmp_path)
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    {"bench": bench, "eval": evaluate}[command].add_parser(subparsers)
    more = ["--perplexity", "x"] if command == "eval" else []
    arguments = parser.parse_args([command, "--checkpoint", str(checkpoint), "--threads", "100000", *more])
    with pytest.raises(StopHereError) as caught:
        arguments.run(arguments)
    assert caught.value.args == (2,)
