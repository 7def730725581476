"""The Triton kernels against their plain twins, and each row against itself in other company.

Triton decides when it is imported whether it compiles or interprets, so the checks run in a process of their own:
interpreted on a CPU, and compiled as well where there is a GPU. They are compiled for an H100 without one, too.
By hand:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels_gpu.py -o python_functions='check_*'
    python -m pytest tests/test_kernels_gpu.py -o python_functions='compile_*'
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized import dequantized
from torch import Tensor

from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.engine import parts, sampling
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.cpu.packing import from_nibbles
from gpt_fast.kernels.race import Draw, plain_race, race_key
from gpt_fast.kernels.reference import quantize_activations, quantize_heads
from gpt_fast.model import steps as engine_steps
from gpt_fast.model.attention import Scoring, paged_attention_eager, paged_attention_static
from gpt_fast.model.rope import rotate
from gpt_fast.model.transformer import Transformer, activate, rms_norm
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import Scheme, quant_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from gpu import reference as plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = os.environ.get("GPT_FAST_TEST_COMPILE") == "1"
if INTERPRETED or COMPILING or torch.cuda.is_available():
    attention = pytest.importorskip("gpt_fast.kernels.gpu.attention")
    experts = pytest.importorskip("gpt_fast.kernels.gpu.experts")
    fused = pytest.importorskip("gpt_fast.kernels.gpu.fused")
    graphs = pytest.importorskip("gpt_fast.kernels.gpu.graphs")
    launching = pytest.importorskip("gpt_fast.kernels.gpu.launching")
    least_kept = pytest.importorskip("gpt_fast.kernels.gpu.least_kept")
    linear = pytest.importorskip("gpt_fast.kernels.gpu.linear")
    race = pytest.importorskip("gpt_fast.kernels.gpu.race")
    gpu_model = pytest.importorskip("gpt_fast.model.gpu_model")
if INTERPRETED:
    attention.num_splits = lambda _: 2  # a program that finds nothing to do takes milliseconds here
DEVICE = "cpu" if INTERPRETED or COMPILING or not torch.cuda.is_available() else "cuda"
# The interpreter cuts bfloat16 results off where a GPU rounds them.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run_checks(what: str, **env: str) -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-o", f"python_functions={what}_*", "-p", "no:cacheprovider"]
    env = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_triton
@pytest.mark.slow
def test_the_checks_hold_interpreted() -> None:
    run_checks("check", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_checks_hold_on_this_gpu() -> None:
    run_checks("check")


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler comes for this machine only")
def test_everything_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    run_checks("compile", GPT_FAST_TEST_COMPILE="1", TRITON_CACHE_DIR=str(tmp_path))


@needs_triton
@pytest.mark.slow
def test_the_benchmark_runs_from_end_to_end() -> None:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["failed"] == []
    assert report["checks"] > 5
    assert {row["precision"] for row in report["decode"]} == {"bf16", "int8", "int4", "fp8"}
    assert all(row["tokens_per_second"] > 0 and row["gigabytes"] > 0 for row in report["decode"])
    assert [row["times_one_row"] for row in report["decode"] if row["each"] == 1] == [1.0] * 5
    assert {row["batch"] * row["each"] for row in report["decode"]} == {1, 20}
    assert [row["tokens"] for row in report["prompts"]] == [5, 20] * 5


def test_the_package_does_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import gpt_fast.llm, gpt_fast.kernels.gpu as g; g.available()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """By the norm of the difference, and so that no element is lost in it."""
    got, wanted = got.double(), wanted.double()
    assert torch.isfinite(got).all()
    assert ((got - wanted).norm() / wanted.norm()).item() < TOLERANCE[dtype]
    assert (got - wanted).abs().max() < 20 * TOLERANCE[dtype] * wanted.abs().max()


# --- products ------------------------------------------------------------------------------------------------------

WEIGHT_KINDS = ("dense", "int8", "fp8", "int4-32", "int4-64", "int4-128")


def weights(kind: str, n: int, k: int, dtype: torch.dtype, bias: bool = False, seed: int = 0) -> tuple[Any, Tensor]:
    """Random weights as the kernel takes them, and their values in float32."""
    w = noise(n, k, seed=seed) / k**0.5
    b = noise(n, seed=seed + 1).to(dtype) if bias else None
    if kind == "dense":
        return linear.prepare(w.to(dtype), bias=b), w.to(dtype).float()
    name, _, size = kind.partition("-")
    scheme = Scheme(name, int(size or 0))  # type: ignore[arg-type]
    module = QuantizedLinear(k, n, scheme, None if b is None else torch.nn.Parameter(b), DEVICE)
    module.store(0, quantize_rows(w.cpu(), scheme))
    values = dequantized(module)
    made = module.gpu_weights(dtype)
    if name == "int4":  # the layer keeps the kernels' copy of its codes alone, and computes the same from it
        assert module.weight is made.data
        assert torch.equal(module._columns(slice(1, n)), values[1:])
    return made, values


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(
    ("n", "k", "dtype"), [*((48, 1024, dtype) for dtype in DTYPES), (37, 416, torch.float32)], ids=str
)
def check_products(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    w, values = weights(kind, n, k, dtype)
    x = noise(70, k, seed=3).to(dtype)
    out = linear.linear(x, w)
    assert out.dtype == dtype
    assert_near(out, plain.linear(x, values), dtype)
    for begin, end in ((5, 6), (9, 16), (16, 33), (30, 70)):  # alone and in any company and place: the same bits
        assert torch.equal(linear.linear(x[begin:end].contiguous(), w), out[begin:end])


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def check_other_tilings_agree(kind: str) -> None:
    w, values = weights(kind, 64, 2048, torch.float32)
    x = noise(2, 2048, seed=3)
    used = linear.tiling(w)
    for division in (used._replace(tile=16, stages=2), used._replace(tile=64, warps=2), used._replace(splits=1)):
        assert_near(linear.linear(x, w, division=division), plain.linear(x, values), torch.float32)


def check_more_rows_than_there_is_room_for() -> None:
    w, _ = weights("dense", 64, 2048, torch.float32)
    assert linear.tiling(w).splits > 1
    x = noise(150, 2048, seed=3)
    memory = torch.full((4 * 64 * 64 * 8,), 7.0, device=DEVICE)
    room = linear.make_room([(w, 1)], 64, torch.device(DEVICE))
    small = room._replace(partial=memory[: room.partial.numel()])  # what is behind it belongs to others
    assert torch.equal(linear.linear(x, w, room=small), linear.linear(x, w))
    assert (memory == 7.0).all()
    assert torch.equal(linear.linear(x[:20], w, room=small), linear.linear(x[:20], w))
    assert not (memory[: room.partial.numel()] == 7.0).all()


@pytest.mark.parametrize("kind", ["dense", "int8", "int4-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (44, 200)])
def check_everything_around_a_product(kind: str, dtype: torch.dtype, n: int, k: int) -> None:
    x, residual = noise(18, k, seed=3).to(dtype), noise(18, n, seed=4).to(dtype)
    norm, after = (1 + 0.1 * noise(k, seed=5)).to(dtype), (1 + 0.1 * noise(n, seed=6)).to(dtype)
    w, values = weights(kind, n, k, dtype, bias=True)
    wanted = plain.linear(x, values, bias=w.bias, norm=norm, eps=1e-5, residual=residual)
    row = fused.prepare_norm(x, norm, 1e-5)
    out, waiting = linear.linear_residual(row, w, residual, after, 1e-6)
    assert_near(out, wanted, dtype)
    # What waits for its norm is, once divided, the norm of what was stored.
    ready = waiting.weighted.float() * torch.rsqrt(waiting.squares.sum(1, keepdim=True) / n + waiting.eps)
    assert_near(ready, out.float() * torch.rsqrt(out.float().pow(2).mean(1, keepdim=True) + 1e-6) * after, dtype)
    for i in (2, 16, 17):
        alone, alone_waiting = linear.linear_residual(
            fused.prepare_norm(x[i : i + 1], norm, 1e-5), w, residual[i : i + 1].contiguous(), after, 1e-6
        )
        assert torch.equal(alone, out[i : i + 1])
        assert torch.equal(alone_waiting.squares, waiting.squares[i : i + 1])
        assert torch.equal(alone_waiting.weighted, waiting.weighted[i : i + 1])


def rounded(x: Tensor) -> Tensor:
    """x [M, K] rounded to bytes in blocks of 128, in float32."""
    values, scales = quantize_activations(x.cpu(), 128, False)
    return (values * scales[..., None]).flatten(1)[:, : x.shape[1]].to(DEVICE)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k", "dtype"), [(64, 512, dtype) for dtype in DTYPES] + [(44, 416, torch.bfloat16)])
def check_products_of_prompts(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    """Each row has the same bits alone and in any company. Those of int8 weights are products of bytes."""
    w, values = weights(kind, n, k, dtype, bias=True)
    x, residual = noise(530, k, seed=3).to(dtype), noise(530, n, seed=4).to(dtype)
    if INTERPRETED:  # which takes its time
        x, residual = x[:40], residual[:40]
    out = linear.linear(x, w, residual=residual, many=True)
    taken = rounded(x) if kind == "int8" else x
    assert_near(out, plain.linear(taken, values, bias=w.bias, residual=residual), dtype)
    for begin, end in ((5, 6), (9, 16), (16, 39), (0, 40), (30, 150), (0, 300)):
        own = residual[begin:end].contiguous()
        assert torch.equal(linear.linear(x[begin:end].contiguous(), w, residual=own, many=True), out[begin:end])
    assert linear.linear(x[:0], w, many=True).shape == (0, n)
    norm = (1 + 0.1 * noise(k, seed=5)).to(dtype)
    row = fused.prepare_norm(x[:20], norm, 1e-5)
    got = linear.linear(row, w, gated=True, many=True)
    scale = torch.rsqrt(row.squares / k + 1e-5)
    taken = (rounded(row.weighted) if kind == "int8" else row.weighted.float()) * scale
    assert_near(got, plain.linear(taken, values, bias=w.bias, gated=True), dtype)
    assert torch.equal(linear.linear(row, w, gated=True, many=True)[3:4], got[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def check_rounding_to_bytes(dtype: torch.dtype) -> None:
    x = noise(7, 1500).to(dtype) * torch.logspace(-6, 4, 7, device=DEVICE)[:, None].to(dtype)
    x[2, 130:300] = 0.0
    values, scales = quantize_activations(x.cpu(), 128, False)  # a GPU's torch divides by multiplying
    got = linear.round_rows(x)
    assert torch.equal(got.scale.cpu(), scales.T)
    exact = x.cpu().double() / scales.double().repeat_interleave(128, dim=1)[:, :1500].clamp(min=1e-300)
    tie = (exact - exact.floor() - 0.5).abs() < 1e-4  # a GPU adds without rounding what it multiplied
    off = (got.values.cpu().int() - values.flatten(1)[:, :1500].int()).abs()
    assert off.max() <= 1
    assert not off[~tie].any()
    for bad in (float("nan"), float("inf")):
        x[1, 1400] = bad
        finite = linear.round_rows(x).scale.isfinite()
        assert not finite[10, 1]
        assert finite.sum() == finite.numel() - 1


@pytest.mark.parametrize("kind", ["dense", "fp8", "int4-64"])
@pytest.mark.parametrize("f", [32, 23])
def check_gated_products(kind: str, f: int) -> None:
    w, values = weights(kind, 2 * f, 256, torch.float16, bias=True)
    x = noise(18, 256, seed=3).half()
    out = linear.linear(x, w, gated=True)
    assert_near(out, plain.linear(x, values, bias=w.bias, gated=True), torch.float16)
    for i in (1, 17):
        assert torch.equal(linear.linear(x[i : i + 1].contiguous(), w, gated=True), out[i : i + 1])


def check_every_byte_is_read_right() -> None:
    """Products with unit vectors are the weights themselves."""
    stored = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64).to(DEVICE)
    eight = torch.where(stored & 0x7F == 0x7F, 0, stored)  # two bytes are not numbers
    wanted = {
        "fp8": eight.view(torch.float8_e4m3fn).float(),
        "int8": stored.view(torch.int8).float(),
        "int4": from_nibbles(stored).float() - 8,
    }
    one = torch.ones(4, 1, device=DEVICE)
    for dtype in DTYPES:
        made = {
            "fp8": linear.prepare(eight.view(torch.float8_e4m3fn), scale=one[:, 0]),
            "int8": linear.prepare(stored.view(torch.int8), scale=one[:, 0]),
            "int4": linear.prepare(stored, scale=one[:, 0], grid=(one.byte(), 64 * one.byte()), dtype=dtype),
        }
        for kind, w in made.items():
            eye = torch.eye(w.in_features, device=DEVICE, dtype=dtype)
            for begin in range(0, w.in_features, 16):
                x = eye[begin : begin + 16].contiguous()
                got = linear.linear(x, w, out=torch.empty(x.shape[0], 4, device=DEVICE))
                assert torch.equal(got, wanted[kind][:, begin : begin + 16].T), (kind, dtype)


@pytest.mark.parametrize(("kind", "gated"), [("gelu", False), ("gelu_tanh", True), ("relu", True), ("silu", False)])
def check_activations_and_caps(kind: str, gated: bool) -> None:
    w, values = weights("dense", 64, 96, torch.float32, bias=True)
    x = 5 * noise(3, 96, seed=3)
    made = plain.linear(x, values, bias=w.bias)
    for many in (False, True):
        got = linear.linear(x, w, gated=gated, activation=kind, many=many)
        assert_near(got, activate(made, kind, gated), torch.float32)
        assert_near(linear.linear(x, w, cap=0.8, many=many), 0.8 * torch.tanh(made / 0.8), torch.float32)


# --- experts -------------------------------------------------------------------------------------------------------


def layout_of(num_tokens: int, num_real: int) -> StepLayout:
    """Of ``num_tokens`` rows those of two sequences; the others only pad."""
    ends = torch.tensor([0, min(3, num_real), num_real], dtype=torch.int32, device=DEVICE)
    return StepLayout(ends, ends[1:], torch.zeros(2, 4, dtype=torch.int32, device=DEVICE), ends[:0].long())


@pytest.mark.parametrize(
    ("num_tokens", "num_real", "num_experts", "top_k"),
    [(1, 1, 8, 2), (19, 17, 5, 3), (150, 150, 60, 4), (70, 70, 2, 2)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def check_routes(num_tokens: int, num_real: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    scores = noise(num_tokens, num_experts).round(decimals=1)  # some are equal
    found = experts.route(scores, top_k, renormalize, layout_of(num_tokens, num_real))
    order = scores.sort(dim=1, descending=True, stable=True)
    chosen, top = order.indices[:, :top_k], order.values[:, :top_k]
    wanted = top.softmax(1) if renormalize else scores.softmax(1).gather(1, chosen)
    torch.testing.assert_close(found.weights, wanted, atol=1e-6, rtol=1e-5)
    chosen[num_real:] = num_experts
    flat = chosen.flatten()
    assert torch.equal(found.order.long(), flat.sort(stable=True).indices)
    assert found.starts.tolist() == [int((flat < e).sum()) for e in range(num_experts + 1)]


def check_scores_that_are_no_numbers() -> None:
    scores = noise(4, 6)
    scores[1, 3], scores[2, 0], scores[3] = torch.nan, -torch.inf, -torch.inf
    found = experts.route(scores, 2, True, layout_of(4, 4))
    assert found.weights.isnan().all(1).tolist() == [False, True, False, True]
    assert sorted(found.order.tolist()) == list(range(8))
    assert found.starts[-1] == 8


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("many", [False, True])
def check_products_of_experts(kind: str, many: bool) -> None:
    """Against each pair by itself. A row has the same bits alone and in any company, whatever others choose."""
    num_experts, top_k, k, f, count = 5, 2, 1024, 40, 27
    up, values = weights(kind, num_experts * 2 * f, k, torch.float16, bias=True)
    w = linear.stacked(up, num_experts)
    x, norm = noise(count, k, seed=3).half(), 1 + 0.1 * noise(k, seed=5)
    scores = noise(count, num_experts, seed=4)
    scores[:, 3] = -9.0  # which nobody chooses

    def made(begin: int, end: int) -> tuple[Tensor, Any]:
        routes = experts.route(scores[begin:end], top_k, True, layout_of(end - begin, end - begin))
        row = fused.prepare_norm(x[begin:end], norm, 1e-5)
        return linear.linear(row, w, gated=True, routes=routes, many=many).view(end - begin, top_k, f), row

    out, row = made(0, count)
    taken = rounded(row.weighted) if kind == "int8" and many else row.weighted.float()
    taken = taken * torch.rsqrt(row.squares / k + 1e-5)
    chosen = scores.topk(top_k, dim=1).indices
    for j in range(top_k):
        rows = [slice(e * 2 * f, (e + 1) * 2 * f) for e in chosen[:, j].tolist()]
        wanted = [
            plain.linear(t[None], values[r], bias=w.bias[r], gated=True) for t, r in zip(taken, rows, strict=True)
        ]
        assert_near(out[:, j], torch.cat(wanted), torch.float16)
    for begin, end in ((3, 4), (5, 20), (0, 9)):
        assert torch.equal(made(begin, end)[0], out[begin:end])


def check_experts_with_parts_that_meet() -> None:
    """The parts of products with few outputs meet in a room that was made for any step."""
    num_experts, top_k, count = 4, 2, 60
    stored, values = weights("dense", num_experts * 32, 2048, torch.float32)
    w = linear.stacked(stored, num_experts)
    assert linear.tiling(w, 16, top_k).splits > 1
    room = linear.make_room([(w, top_k)], 64, torch.device(DEVICE))
    room.partial.fill_(torch.nan)
    x, scores = noise(count, 2048, seed=3), noise(count, num_experts, seed=4)
    for n in (1, 9, count):
        routes = experts.route(scores[:n], top_k, True, layout_of(n, n))
        out = linear.linear(x[:n], w, routes=routes, room=room)
        assert torch.equal(linear.linear(x[:n], w, routes=routes), out)
        assert not room.arrivals.any()
    pairs = torch.einsum("mk,enk->men", x, values.view(num_experts, 32, 2048))
    chosen = scores.topk(top_k, dim=1).indices
    assert_near(out.view(count, top_k, 32), pairs.gather(1, chosen[..., None].expand(-1, -1, 32)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_what_experts_made_is_gathered(dtype: torch.dtype) -> None:
    layout, norm = layout_of(6, 5), 1 + 0.1 * noise(72, seed=2)
    routes = experts.route(noise(6, 4), 2, True, layout)
    y, add, shared = (noise(n, 72, seed=n).to(dtype) for n in (12, 6, 7))
    y[10:] = torch.nan  # of a row that only pads
    by = noise(6, 1, seed=3).to(dtype)
    out, row = experts.gather(y, routes, layout, add, (shared[:6], by), (norm, 1e-5))
    summed = (y.float().view(6, 2, 72) * routes.weights[..., None]).sum(1)
    summed[5] = 0.0
    assert_near(out, add.float() + summed + by.float().sigmoid() * shared[:6].float(), dtype)
    ready = row.weighted.float() * torch.rsqrt(row.squares / 72 + row.eps)
    assert_near(ready, rms_norm(out.float(), norm, 1e-5), dtype)
    alone, no_row = experts.gather(y, routes, layout)
    assert_near(alone, summed, dtype)
    assert no_row is None


def check_what_a_product_refuses() -> None:
    w, _ = weights("dense", 16, 64, torch.float32)
    with pytest.raises(ValueError, match="have 64 columns"):
        linear.linear(noise(1, 32), w)
    with pytest.raises(UnsupportedError, match="group_size 16, which is not one of"):
        linear.prepare(noise(4, 32).byte(), scale=noise(4), grid=(noise(4, 4).byte(), noise(4, 4).byte()))


# --- attention -----------------------------------------------------------------------------------------------------

SCALE = 0.125
FLOATS = (torch.float32, torch.float32)


class Case:
    """A cache with other sequences' leftovers in it, and one step's new tokens."""

    def __init__(
        self,
        counts: list[int],
        contexts: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        page: int = 4,
        pages: int = 24,
    ) -> None:
        slots, total = len(counts), sum(counts)
        g = torch.Generator().manual_seed(1)
        table = 1 + torch.randperm(slots * pages, generator=g).view(slots, pages).int()
        self.k_cache, self.v_cache = (noise(slots * pages + 1, page, kv_heads, dim, seed=s) for s in (1, 2))
        self.q, self.k, self.v = (noise(total, h, dim, seed=7 + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        start = torch.tensor([0, *counts]).cumsum(0).int()
        write = [
            int(table[s, p // page]) * page + p % page
            for s, (count, context) in enumerate(zip(counts, contexts, strict=True))
            for p in range(context - count, context)
        ]
        # What lies past a context may be anything.
        for s, context in enumerate(contexts):
            for p in range(context, pages * page):
                self.k_cache[table[s, p // page], p % page] = torch.inf
                self.v_cache[table[s, p // page], p % page] = torch.nan
        self.layout = StepLayout(
            *(t.to(DEVICE) for t in (start, torch.tensor(contexts).int(), table, torch.tensor(write)))
        )

    def run(self, attend: Callable[..., Tensor], window: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tensor:
        q, k, v = (t.to(dtype) for t in (self.q, self.k, self.v))
        cache = LayerCache(self.k_cache.to(cache_dtype), self.v_cache.to(cache_dtype))
        return attend(q, k, v, cache, self.layout, Scoring(window, 0.9 * q.shape[-1] ** -0.5))


def fast_attention(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> Tensor:
    cache.write(k, v, layout.write_slots)
    out: Tensor = attention.attend(q, cache, layout, scoring.window, scoring.scale)
    return out


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, torch.float32) for dim in (64, 80, 96, 128, 256)), (128, torch.float16), (80, torch.bfloat16)],
    ids=str,
)
def check_decoding_attention(dim: int, dtype: torch.dtype) -> None:
    case = Case([1, 1, 1], [90, 1, 33], 6, 2, dim)
    got = case.run(fast_attention, 0, dtype, dtype)
    assert got.dtype == dtype
    assert_near(got, case.run(paged_attention_eager, 0, torch.float32, dtype), dtype)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(
    ("counts", "heads", "kv_heads"),
    [
        ([1, 0, 1, 1], 8, 2),
        ([2, 1, 0, 3], 4, 2),
        ([0, 2, 0, 0], 5, 1),
        ([20, 0, 3, 1], 8, 2),
        ([0, 0, 60, 0], 2, 2),
        ([5, 40, 3, 1], 4, 2),
    ],
    ids=str,
)
def check_steps_of_any_mixture(counts: list[int], window: int, heads: int, kv_heads: int) -> None:
    contexts = [max(c, e) for c, e in zip(counts, (91, 0, 90, 8), strict=True)]
    case = Case(counts, [c if n else 0 for c, n in zip(contexts, counts, strict=True)], heads, kv_heads, 64)
    got = case.run(fast_attention, window, torch.float32, torch.float32)
    assert_near(got, case.run(paged_attention_eager, window, torch.float32, torch.float32), torch.float32)


@pytest.mark.parametrize("counts", [[1, 2, 1], [5, 60, 3]])
@pytest.mark.parametrize("extra", ["cap", "slopes", "sinks"])
def check_what_becomes_of_scores(extra: str, counts: list[int]) -> None:
    case = Case(counts, [91, 60, 8], 4, 2, 64)
    given = {"cap": 0.6, "slopes": 0.3 * noise(4, seed=3).abs(), "sinks": 2 * noise(4, seed=3)}[extra]
    cache = LayerCache(case.k_cache, case.v_cache)
    scoring = Scoring(20, SCALE, **{extra: given})
    wanted = case.run(lambda q, k, v, c, layout, _: paged_attention_eager(q, k, v, c, layout, scoring), 0, *FLOATS)
    for many in (False, True):
        if sum(counts) <= 64 or many:
            got = attention.attend(case.q, cache, case.layout, 20, SCALE, many=many, **{extra: given})
            assert_near(got, wanted, torch.float32)


def check_a_cache_of_another_dtype_is_written_and_read() -> None:
    case = Case([1, 2], [50, 20], 4, 2, 64)
    for dtype in (torch.bfloat16, torch.float16):
        wanted = case.run(paged_attention_static, 0, torch.float32, dtype)
        assert_near(case.run(fast_attention, 0, torch.float32, dtype), wanted, torch.float32)


@pytest.mark.parametrize("window", [0, 30])
def check_a_query_is_the_same_in_any_company(window: int) -> None:
    case = Case([1, 2, 1, 17], [91, 67, 3, 40], 2, 1, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    start, length, table, write = case.layout
    whole = attention.attend(case.q, cache, case.layout, window, SCALE)
    for s in range(4):
        for token in range(int(start[s]), int(start[s + 1])):
            alone = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
            position = length[s : s + 1] - (start[s + 1] - token) + 1
            layout = StepLayout(alone, position, table[s : s + 1], write[:0])
            got = attention.attend(case.q[token : token + 1], cache, layout, window, SCALE)
            assert torch.equal(got, whole[token : token + 1])


@pytest.mark.parametrize("window", [0, 70])
def check_a_prompt_is_the_same_in_any_pieces(window: int) -> None:
    case = Case([60, 9], [200, 30], 4, 2, 64, pages=50)
    cache = LayerCache(case.k_cache, case.v_cache)
    _, length, table, write = case.layout
    whole = attention.attend(case.q, cache, case.layout, window, SCALE, many=True)
    for begin, end in ((0, 23), (23, 60), (7, 8), (59, 60)):
        ends = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        layout = StepLayout(ends, length[:1] - (60 - end), table[:1], write[:0])
        got = attention.attend(case.q[begin:end], cache, layout, window, SCALE, many=True)
        assert torch.equal(got, whole[begin:end])


def check_scratch_is_ready_for_the_next_launch() -> None:
    case = Case([1, 2], [91, 40], 4, 2, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    room = attention.scratch(16, 4, 2, 64, torch.device(DEVICE))
    room.partial.fill_(torch.nan)
    first, again = (attention.attend(case.q, cache, case.layout, 0, SCALE, room) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, attention.attend(case.q, cache, case.layout, 0, SCALE))
    assert not room.arrivals.any()


@pytest.mark.parametrize("window", [0, 150, 1000])
def check_many_parts(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "num_splits", lambda _: 4)
    case = Case([1, 1], [250, 130], 4, 1, 64, page=16, pages=16)
    got = case.run(fast_attention, window, torch.float32, torch.float32)
    assert_near(got, case.run(paged_attention_eager, window, torch.float32, torch.float32), torch.float32)


def check_rows_that_only_pad_are_zero() -> None:
    case = Case([1, 1], [9, 5], 4, 2, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    q = torch.cat((case.q, noise(3, 4, 64)))
    out = attention.attend(q, cache, case.layout, 0, SCALE)
    assert not out[2:].any()
    assert torch.equal(out[:2], attention.attend(case.q, cache, case.layout, 0, SCALE))


def check_an_int8_cache() -> None:
    case = Case([1, 2], [80, 21], 4, 2, 64)
    keys, values = (torch.where(t.isfinite(), t, 0.0) for t in (case.k_cache, case.v_cache))
    (qk, ks), (qv, vs) = quantize_heads(keys), quantize_heads(values)
    got = attention.attend(case.q, LayerCache(qk, qv, ks, vs), case.layout, 0, SCALE)
    exact = LayerCache(qk * ks[..., None], qv * vs[..., None])
    assert_near(got, attention.attend(case.q, exact, case.layout, 0, SCALE), torch.float32)
    assert (got - attention.attend(case.q, LayerCache(keys, values), case.layout, 0, SCALE)).norm() < 0.02 * got.norm()


# --- what stands between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "normed", "dtype"),
    [
        (4, 2, 64, 64, True, torch.float32),
        (3, 1, 80, 80, False, torch.float32),
        (2, 2, 96, 96, True, torch.bfloat16),
        (4, 2, 64, 16, True, torch.float32),
        (3, 1, 80, 34, False, torch.float32),
        (2, 1, 24, 0, True, torch.float32),
    ],
    ids=str,
)
def check_rotation_and_cache_write(
    heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    qkv = noise(5, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = noise(5, rotary // 2, seed=1)
    slots = torch.tensor([7, 0, 3, 12, 4], device=DEVICE)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=-1))
    norms = [(1 + 0.1 * noise(dim, seed=i)).to(dtype) for i in range(2)]
    wq, wk = (rms_norm(t.float(), w.float(), 1e-6) if normed else t.float() for t, w in zip((q, k), norms, strict=True))
    wq, wk = (rotate(t, angles.cos(), angles.sin()) for t in (wq, wk))
    weights = norms if normed else (None, None)
    cache = LayerCache(*(torch.zeros(4, 4, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in range(2)))
    got = fused.rope_write(qkv, angles.cos(), angles.sin(), slots, cache, heads, *weights, eps=1e-6)
    assert_near(got, wq, dtype)
    written = [t.view(-1, kv_heads, dim)[slots] for t in cache[:2] if t is not None]
    assert_near(written[0], wk, dtype)
    assert torch.equal(written[1], v)
    untouched = torch.ones(16, dtype=torch.bool).index_fill_(0, slots.cpu(), False)
    assert not cache.k.view(16, -1)[untouched.to(DEVICE)].any()
    if dtype == torch.float32:
        small = LayerCache(
            *(torch.zeros(4, 4, kv_heads, dim, device=DEVICE, dtype=torch.int8) for _ in range(2)),
            *(torch.zeros(4, 4, kv_heads, device=DEVICE) for _ in range(2)),
        )
        fused.rope_write(qkv, angles.cos(), angles.sin(), slots, small, heads, *weights, eps=1e-6)
        for stored, scale, exact in ((small.k, small.k_scale, wk), (small.v, small.v_scale, v)):
            wanted, wanted_scale = quantize_heads(exact)  # the rotation may differ in the last bit, at a tie
            assert (stored.view(-1, kv_heads, dim)[slots].int() - wanted.int()).abs().max() <= 1
            assert_near(scale.view(-1, kv_heads)[slots], wanted_scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def check_norms_and_embedding(dtype: torch.dtype) -> None:
    x, norm = noise(3, 200).to(dtype), 1 + 0.1 * noise(200, seed=2)
    tokens = torch.tensor([2, 0, 2], device=DEVICE)
    for scale in (1.0, 14.1):
        wanted = x[tokens] * torch.tensor(scale, dtype=dtype)
        got, row = fused.embed(tokens, x, (norm, 1e-5), dtype, scale)
        assert_near(got, wanted, dtype) if scale != 1.0 else torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for waiting in (row, fused.prepare_norm(got, norm, 1e-5)):
            ready = waiting.weighted.float() * torch.rsqrt(waiting.squares / 200 + waiting.eps)
            assert_near(ready, rms_norm(wanted.float(), norm, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def check_norms_that_nobody_waits_for(dtype: torch.dtype) -> None:
    x, weight, bias, add = (
        noise(*size, seed=i).to(dtype) for i, size in enumerate(((3, 200), (200,), (200,), (3, 200)))
    )
    out, row = fused.norm(x, weight, None, 1e-5, add=add, following=(1 + bias, 1e-6))
    assert_near(out, rms_norm(x.float(), weight.float(), 1e-5) + add.float(), dtype)
    ready = row.weighted.float() * torch.rsqrt(row.squares / 200 + 1e-6)
    assert_near(ready, rms_norm(out.float(), 1 + bias.float(), 1e-6), dtype)
    layer, no_row = fused.norm(x + 7, weight, bias, 1e-5, centred=True)
    assert_near(layer, F.layer_norm((x + 7).float(), (200,), weight.float(), bias.float(), 1e-5), dtype)
    assert no_row is None
    columns = x.split((40, 160), dim=1)
    wanted = rms_norm(columns[1].float(), weight[:160].float(), 1e-5)
    first = columns[0].clone()
    fused.norm(columns[1], weight[:160], None, 1e-5, out=columns[1])
    assert_near(x[:, 40:], wanted, dtype)
    assert torch.equal(x[:, :40], first)


# --- whole steps ---------------------------------------------------------------------------------------------------


def check_draws_equal_the_plain_race() -> None:
    logits = 3 * noise(6, 5000)
    logits[logits < -4] = -torch.inf
    logits[3, 4999], logits[4] = torch.nan, -torch.inf
    keys = torch.tensor([race_key(7, p) for p in range(6)], dtype=torch.int32, device=DEVICE)
    drawn = race.race(logits, keys)
    assert drawn.tolist() == plain_race(logits, keys).tolist()
    assert drawn[3:5].tolist() == [-1, -1]


def check_the_cut_of_top_k_and_top_p_equals_the_sorted_one() -> None:
    logits = 3 * noise(7, 20000)
    logits[2] = logits[2].round()  # many that are equal
    logits[3, 5:] = -torch.inf
    logits[4], logits[5] = 1.5, -0.0
    for draws in (
        [Draw(1.0, top_p=p) for p in (0.9, 0.5, 0.95, 0.99, 0.3, 0.7, 1e-6)],
        [Draw(1.0, top_k=k) for k in (1, 50, 3, 7, 2, 20000, 19999)],
        [Draw(1.0, top_k=40, top_p=p) for p in (0.9, 0.5, 0.95, 0.99, 0.3, 0.7, 1.0)],
    ):
        top_k = torch.tensor([own.top_k or 20000 for own in draws], dtype=torch.int32, device=DEVICE)
        found = least_kept.least_kept(logits, top_k, torch.tensor([own.top_p for own in draws], device=DEVICE))
        wanted = sampling._least_kept(logits.cpu(), draws).to(DEVICE)
        assert torch.equal(logits >= found[:, None], logits >= wanted[:, None])
        alone = least_kept.least_kept(logits[1:2], top_k[1:2], torch.tensor([draws[1].top_p], device=DEVICE))
        assert torch.equal(alone, found[1:2])


def config(**more: Any) -> ModelConfig:
    keys: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 40,
        "dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "ffn_dim": 48,
        "max_seq_len": 64,
    }
    return ModelConfig(**(keys | more))


CONFIGS = {
    "plain": config(),
    "biases": config(qkv_bias=True, out_bias=True, mlp_bias=True, num_heads=4, num_kv_heads=2, head_dim=20),
    "norms": config(qk_norm="head", tie_embeddings=True, windows=(2, 0), num_layers=2),
    "constants": config(
        embedding_scale=5.5, residual_scale=0.3, logits_scale=0.25, attention_scale=0.4, norm_offset=1.0
    ),
    "rotations": config(
        num_layers=3,
        windows=(2, 0, 0),
        local_rope_theta=3.0,
        unrotated=(False, True, False),
        rotary_dim=6,
        qk_norm="head",
    ),
    "dynamic": config(rope_scaling=RopeScaling("dynamic", 2.0, 2)),
    "experts": config(family="mixtral", num_layers=2, experts=ExpertsConfig(5, 2, 24), residual_scale=0.3),
    "shared": config(
        family="qwen2_moe", num_layers=2, experts=ExpertsConfig(6, 3, 24, False, 32, (True, False)), qkv_bias=True
    ),
    "sinks": config(
        family="gpt_oss", sinks=True, experts=ExpertsConfig(4, 2, 32), activation="clamped_swiglu", router_bias=True,
        mlp_bias=True, windows=(3,),
    ),
    "caps": config(
        family="gemma2", norms="both", num_layers=2, attention_cap=0.7, logits_cap=1.5, activation="gelu_tanh",
        norm_offset=1.0,
    ),
    "layer norms": config(
        family="gpt2", norm="layer", gated=False, activation="gelu", learned_positions=2, rotary_dim=0, mlp_bias=True,
        head_bias=True, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
    ),
    "alibi": config(
        family="bloom", norm="layer", gated=False, activation="relu", alibi=True, rotary_dim=0, embedding_norm=True,
        parallel="one norm",
    ),
    "rows": config(family="olmo2", norms="after", qk_norm="row", num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2),
}  # fmt: skip
MODES = (None, "int8", "int4", "fp8")


def model_of(c: ModelConfig, mode: str | None, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(c).requires_grad_(False)
    for name, p in model.named_parameters():
        p.data = p + 0.1 * torch.randn(p.shape) if "norm" in name or "bias" in name else torch.randn(p.shape) / 8
    model.tie()
    model.to(DEVICE, dtype)
    if mode:
        quantize_model(model, quant_config(mode))
    return model


def empty_cache(c: ModelConfig, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    shape = (9, 4, c.num_kv_heads, c.head_dim)
    return [LayerCache.zeros(shape, dtype, torch.device(DEVICE)) for _ in range(c.num_layers)]


def step_of(table: list[list[int]], seen: list[int], counts: list[int]) -> dict[str, Any]:
    """``counts`` new tokens of each sequence, whose first ``seen`` tokens are in pages of 4."""
    where = [(s, seen[s] + i) for s in range(len(counts)) for i in range(counts[s])]
    numbers = {
        "tokens": [(5 * p + s) % 40 for s, p in where],
        "positions": [p for _, p in where],
        "lengths": [max(3, p + 1) for _, p in where],
    }
    layout = StepLayout(
        torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
        torch.tensor([n + count if count else 0 for n, count in zip(seen, counts, strict=True)]).int().to(DEVICE),
        torch.tensor(table).int().to(DEVICE),
        torch.tensor([table[s][p // 4] * 4 + p % 4 for s, p in where]).to(DEVICE),
    )
    return {name: torch.tensor(values).to(DEVICE) for name, values in numbers.items()} | {"layout": layout}


def steps() -> list[dict[str, Any]]:
    """Two sequences on pages 3 1 .. and 2 5 ..: a prompt of each, a decode of both, a verify of one."""
    table = [[3, 1, 7, 6], [2, 5, 4, 8]]
    return [step_of(table, *case) for case in (([0, 0], [3, 1]), ([3, 1], [1, 1]), ([4, 2], [0, 3]))]


def plain_step(model: Transformer, step: dict[str, Any], cache: Any) -> Tensor:
    rows = torch.arange(len(step["tokens"]), device=DEVICE)
    return model.step(step["tokens"], step["positions"], step["lengths"], cache, step["layout"], rows)


def fast_step(run: Any, step: dict[str, Any]) -> Tensor:
    out: Tensor = run.step(step["tokens"], step["positions"], step["lengths"], step["layout"])
    return out


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("plain", mode) for mode in MODES),
        *((name, None) for name in ("norms", "dynamic", "rotations")),
        *((name, "int8") for name in ("biases", "constants", "experts", "shared", "sinks", "caps", "layer norms")),
        *((name, None) for name in ("experts", "shared", "sinks", "caps", "layer norms", "alibi", "rows")),
        *(("experts", mode) for mode in ("int4", "fp8")),
    ],
)
@torch.inference_mode()
def check_programs_equal_the_model(name: str, mode: str | None) -> None:
    model = model_of(CONFIGS[name], mode)
    cache, twin_cache = empty_cache(model.config), empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    for step in steps()[: {None: 3, "int4": 2}.get(mode, 1)]:
        torch.testing.assert_close(fast_step(fast, step), plain_step(model, step, twin_cache), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(cache[-1][0][1:], twin_cache[-1][0][1:], atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def check_a_program_in_bfloat16() -> None:
    model = model_of(CONFIGS["plain"], "int4", torch.bfloat16)
    wide = model_of(CONFIGS["plain"], "int4", torch.bfloat16).float()  # the same weights in float32 arithmetic
    cache, twin_cache = empty_cache(model.config, torch.bfloat16), empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    for step in steps()[:2]:
        got, wanted = fast_step(fast, step), plain_step(wide, step, twin_cache)
        assert (got - wanted).norm() < 0.04 * wanted.norm()


@torch.inference_mode()
def check_decoding_alone_or_together_gives_the_same_bits() -> None:
    model = model_of(CONFIGS["norms"], "int8")
    cache = empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    first, second = steps()[:2]
    fast_step(fast, first)
    together = fast_step(fast, second)
    layout = second["layout"]
    for s in range(2):
        start = torch.tensor([0, 1, 1] if s == 0 else [0, 0, 1]).int().to(DEVICE)
        alone = fast.step(
            *(second[k][s : s + 1] for k in ("tokens", "positions", "lengths")),
            layout._replace(query_start=start, write_slots=layout.write_slots[s : s + 1]),
        )
        assert torch.equal(alone, together[s : s + 1])


def check_what_a_program_refuses() -> None:
    model = model_of(CONFIGS["plain"], "int4")
    cache = empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    many = torch.zeros(65, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="65 new tokens"):
        fast.step(many, many, many, steps()[0]["layout"])
    with pytest.raises(ValueError, match="shorter"):
        gpu_model.gpu_program(model, cache[:0])
    with pytest.raises(ValueError, match="no other, has scales"):
        gpu_model.gpu_program(model, [LayerCache(layer.k.to(torch.int8), layer.v.to(torch.int8)) for layer in cache])
    model.layers[0].wo.order = torch.arange(32)
    model.layers[0].wo._gpu_weights.clear()
    with pytest.raises(UnsupportedError, match="sorted columns"):
        gpu_model.gpu_program(model, cache)


# --- graphs --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def check_replays_equal_plain_calls() -> None:
    model = model_of(CONFIGS["plain"], "int8")
    plain_cache, cache = empty_cache(model.config), empty_cache(model.config)
    direct = gpu_model.gpu_program(model, plain_cache)
    recorded: list[Callable[[], Tensor]] = []

    def pretend(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded.append(run)
        return run

    table = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    held = graphs.CapturedProgram(
        gpu_model.gpu_program(model, cache),
        table,
        buckets=(4, 1),
        capture=pretend if DEVICE == "cpu" else None,
        prompt_buckets=(),
    )
    held.warm_up()
    assert DEVICE == "cuda" or len(recorded) == 2
    table.copy_(steps()[0]["layout"].page_table)  # after recording: a replay reads what is there then
    assert [held.bucket(n) for n in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert held.most == 4
    with pytest.raises(ValueError, match="the largest bucket holds 4"):
        held.bucket(5)
    kept = []
    for step in steps():
        count = len(step["tokens"])
        rows = torch.tensor([count - 1, 0], device=DEVICE)
        wanted = fast_step(direct, step)[rows]
        layout = step["layout"]._replace(page_table=table)
        got = held.step(step["tokens"], step["positions"], step["lengths"], layout, rows)
        assert torch.equal(got, wanted)
        kept.append((got, wanted))
    assert all(torch.equal(got, wanted) for got, wanted in kept)  # no later step writes into an earlier result
    for a, b in zip(cache, plain_cache, strict=True):
        assert torch.equal(a[0][1:], b[0][1:])  # padding went to page 0
        assert torch.equal(a[1][1:], b[1][1:])
    step = steps()[1]
    with pytest.raises(ValueError, match="recorded for"):
        held.step(step["tokens"], step["positions"], step["lengths"], step["layout"], rows)


@torch.inference_mode()
def check_verifying_equals_one_token_at_a_time() -> None:
    """Steps of 17 to 48 tokens, padded to a graph's: each row has the bits that it has alone."""
    model = model_of(config(qk_norm="head", windows=(9,)), "int4")
    cache = [LayerCache(*(noise(41, 4, 1, 16, seed=i) for i in range(2)))]
    table = [list(range(1 + 5 * s, 6 + 5 * s)) for s in range(8)]
    seen = [(5 * s) % 14 for s in range(8)]
    pages = torch.tensor(table).int().to(DEVICE)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    held = graphs.CapturedProgram(gpu_model.gpu_program(model, cache), pages, capture=capture, prompt_buckets=())
    held.warm_up()

    def logits(seen: list[int], counts: list[int]) -> Tensor:
        step = step_of(table, seen, counts)
        step["layout"] = step["layout"]._replace(page_table=pages)
        return held.step(*step.values(), torch.arange(sum(counts), device=DEVICE))

    alone = [[logits([n + i for n in seen], [int(s == t) for t in range(8)]) for i in range(6)] for s in range(8)]
    for counts in ([0, 6, 5, 0, 6, 0, 0, 0], [3] * 8, [5] * 8, [6] * 8):
        wanted = [row for rows, count in zip(alone, counts, strict=True) for row in rows[:count]]
        assert torch.equal(logits(seen, counts), torch.cat(wanted))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("norms", mode) for mode in MODES),
        *(("experts", mode) for mode in MODES),
        *((name, None) for name in ("shared", "sinks", "caps", "layer norms", "alibi", "rows")),
    ],
)
@torch.inference_mode()
def check_prompts(name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model computes them, and each with the same bits in a replay, launched, alone and beside others."""
    model = model_of(CONFIGS[name], mode)
    cache, twin_cache = empty_cache(model.config), empty_cache(model.config)
    pages = steps()[0]["layout"].page_table.clone()
    capture = (lambda run: run) if DEVICE == "cpu" else None
    program = gpu_model.gpu_program(model, cache)
    held = graphs.CapturedProgram(program, pages, (2,), capture, prompt_buckets=(6,))
    monkeypatch.setattr(engine_steps, "_capture", lambda *_: held)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    fast = engine_steps.TorchModel(model, kernels=True, compile=False).make_step(cache, pages)
    counts: list[int] = []
    fast.warm_up(counts.append, longest=100)
    assert counts == [1, 100]
    assert (fast.path, fast.reads_host(), fast.apart.most) == ("kernels", True, 2)
    model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    passes: list[int] = []

    def logits(seen: list[int], counts: list[int], rows: list[int]) -> Tensor:
        step = step_of(pages.tolist(), seen, counts)
        layout = StepLayout(*(t.cpu() for t in step["layout"]))._replace(page_table=pages)
        numbers = [step[name].cpu() for name in ("tokens", "positions", "lengths")]
        return fast(*numbers, layout, torch.tensor(rows, dtype=torch.int64))

    together = logits([0, 0], [7, 4], [2, 6, 7, 10])  # launched
    assert not passes
    keys = [layer.k.clone() for layer in cache]
    first = logits([0, 0], [5, 0], [2])  # replayed
    assert torch.equal(torch.cat([first, logits([5, 0], [2, 0], [1])]), together[:2])
    assert torch.equal(logits([0, 0], [0, 4], [0, 3]), together[2:])
    for layer, wanted in zip(cache, keys, strict=True):
        assert torch.equal(layer.k[1:], wanted[1:])
    assert logits([4, 0], [1, 0], []).shape == (0, model.config.vocab_size)
    wanted = plain_step(model, step_of(pages.tolist(), [0, 0], [7, 4]), twin_cache)[[2, 6, 7, 10]]
    if mode in ("int8", "int4"):  # rows are rounded to bytes, here for some weights, there for most
        assert (together - wanted).norm() < 0.04 * wanted.norm()
    else:
        torch.testing.assert_close(together, wanted, atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def check_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Plain torch runs the model then, and a line says why."""
    model = model_of(CONFIGS["plain"], None)
    step, cache = steps()[0], empty_cache(model.config)
    table = step["layout"].page_table

    def fails(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("out of registers\n and more")

    held = graphs.CapturedProgram(gpu_model.gpu_program(model, cache), table, (2,), fails)
    monkeypatch.setattr(engine_steps, "_capture", lambda *_: held)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    fast = engine_steps.TorchModel(model, kernels=True, compile=False).make_step(cache, table)
    assert (fast.path, fast.reads_host()) == ("kernels", True)
    counts: list[int] = []
    fast.warm_up(counts.append, longest=4)
    assert (fast.path, fast.reads_host(), fast.apart, counts[-2:]) == ("eager", False, None, [4, 3])
    assert caplog.messages[-1:] == ["the GPU kernels failed, and plain torch runs this model, slower: out of registers"]
    rows = torch.arange(4, device=DEVICE)
    wanted = plain_step(model, step, empty_cache(model.config))
    assert torch.equal(fast(*step.values(), rows), wanted)


@torch.inference_mode()
def check_a_chain_of_replays_equals_a_step_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences four, one and three tokens are drawn by Triton's race; each goes into the next replay."""
    model = model_of(CONFIGS["plain"], None)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    monkeypatch.setattr(
        engine_steps,
        "_capture",
        lambda m, cache, table, _: graphs.CapturedProgram(
            gpu_model.gpu_program(m, cache), table, (1, 2, 4), capture, (8,)
        ),
    )
    served = engine_steps.TorchModel(model, kernels=True, compile=False)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    monkeypatch.setattr(sampling, "available", lambda: False)
    monkeypatch.setattr(sampling, "race", race.race)
    monkeypatch.setattr(parts, "FEW", 2)
    sizes = {"max_batch": 4, "max_seq_len": 16, "num_pages": 13, "page_size": 4, "prefill_chunk": 8}
    runners = [Runner(served, **sizes) for _ in range(2)]
    for runner in runners:
        runner.warm_up()
        assert runner.path == "kernels"
    prompts = {0: (3, 9, 27), 1: (30,), 3: (7, 7)}  # three of them are a prompt
    pages = {slot: tuple(range(1 + 4 * i, 5 + 4 * i)) for i, slot in enumerate(prompts)}
    kinds = [(Draw(0.0), 4), (Draw(1.0, top_k=9, top_p=0.8), 1), (Draw(0.7, min_p=0.01), 3)]
    draws = [
        [kind._replace(low=low, high=high) for low, high in (race_key(j, i) for i in range(count))]
        for j, (kind, count) in enumerate(kinds)
    ]
    plan = [SequencePlan(slot, tokens, 0, 0, pages[slot], 1, 0) for slot, tokens in prompts.items()]
    got = runners[0].chain(StepPlan(tuple(plan)), draws)

    wanted: list[list[int]] = [[], [], []]
    for i in range(4):
        going = [j for j, own in enumerate(draws) if len(own) > i]
        logits = runners[1].execute(StepPlan(tuple(plan[j] for j in going)))
        for j, token in zip(going, sampling.draw_tokens(logits, [draws[j][i] for j in going]).tolist(), strict=True):
            wanted[j].append(token)
            plan[j] = plan[j]._replace(tokens=(token,), start=plan[j].end, new_pages=())
    assert got == wanted
    assert len({*got[0], *got[2]}) > 3
    for chained, single in zip(*(runner.cache for runner in runners), strict=True):
        assert torch.equal(chained.k[1:], single.k[1:])
        assert torch.equal(chained.v[1:], single.v[1:])


@pytest.mark.parametrize(
    ("name", "mode"), [("norms", None), ("norms", "int8"), ("experts", "int8"), ("shared", None), ("caps", None)]
)
@torch.inference_mode()
def check_what_is_beside_a_token_has_no_part_in_its_bits(
    name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of generated tokens, drafts and prompts in one plan, and of each alone; a prompt in pieces, and whole."""
    model = model_of(CONFIGS[name], mode)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    monkeypatch.setattr(
        engine_steps,
        "_capture",
        lambda m, cache, table, _: graphs.CapturedProgram(
            gpu_model.gpu_program(m, cache), table, (1, 16), capture, (8,)
        ),
    )
    served = engine_steps.TorchModel(model, kernels=True, compile=False)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    sizes = {"max_batch": 4, "max_seq_len": 16, "num_pages": 17, "page_size": 4, "prefill_chunk": 8}
    together, alone, whole = (Runner(served, **sizes) for _ in range(3))
    monkeypatch.setattr(parts, "FEW", 2)

    def part(slot: int, start: int, count: int, is_prompt: bool, num_logits: int = 1) -> SequencePlan:
        tokens = tuple((5 * p + slot) % 40 for p in range(start, start + count))
        pages = tuple(range(1 + 4 * slot, 5 + 4 * slot)) if start == 0 else ()
        return SequencePlan(slot, tokens, start, 0 if start == 0 else 4, pages, num_logits, 0, is_prompt)

    for runner in (together, alone, whole):
        runner.warm_up()
        assert runner.path == "kernels"
    plans = [
        [part(0, 0, 9, True, 2), part(2, 0, 5, True)],
        [part(0, 9, 1, False), part(1, 0, 6, True), part(2, 5, 2, False, 2), part(3, 0, 1, True)],
        [part(0, 10, 1, False), part(1, 6, 2, True), part(2, 7, 1, False), part(3, 1, 1, False)],
    ]
    for sequences in plans:
        got = together.execute(StepPlan(tuple(sequences)))
        wanted = torch.cat([alone.execute(StepPlan((own,))) for own in sequences])
        assert torch.equal(got, wanted)
    assert torch.equal(got[1:2], whole.execute(StepPlan((part(1, 0, 8, True),))))
    for ours, theirs in zip(together.cache, alone.cache, strict=True):
        assert torch.equal(ours.k[1:], theirs.k[1:])


def check_what_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_steps.gpu, "available", lambda: True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda: lambda run: run)

    def said(c: ModelConfig, max_batch: int) -> list[str]:
        caplog.clear()
        table = torch.zeros(max_batch, 4, dtype=torch.int32, device=DEVICE)
        found = engine_steps._capture(model_of(c, None), empty_cache(c), table)
        assert (found is None) == (c.head_dim > 256)
        return caplog.messages

    assert said(CONFIGS["plain"], 80) == []
    assert said(config(head_dim=300), 4) == [
        "the GPU kernels do not run Heads with head_dim 300: it must be even and at most 256: plain torch runs this "
        "model, and slower"
    ]


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
@torch.inference_mode()
def check_blocks_compile_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their products are the same as uncompiled, which plain torch's are not."""
    model = model_of(CONFIGS["biases"], mode, torch.bfloat16)
    table = torch.arange(1, 9, dtype=torch.int32, device=DEVICE)[None]

    def logits(count: int) -> Tensor:
        numbers = torch.arange(count, device=DEVICE)
        ends = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        step = {"tokens": numbers, "positions": numbers, "lengths": numbers + 1}
        step |= {"layout": StepLayout(ends, ends[1:], table, 4 + numbers)}
        return plain_step(model, step, empty_cache(model.config, torch.bfloat16))

    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: False)
    plain_logits = logits(30)
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: True)
    uncompiled, short = [logits(count) for count in (30, 17, 20)], logits(3)
    assert not torch.equal(uncompiled[0], plain_logits)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=True, backend="eager")
    assert all(torch.equal(logits(len(wanted)), wanted) for wanted in uncompiled)
    assert (logits(3) - short).norm() < 0.04 * short.norm()  # the kernel's products, and torch's


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def check_products_of_many_rows(kind: str) -> None:
    w, values = weights(kind, 20, 96, torch.bfloat16, bias=True)
    x = noise(2, 9, 96).bfloat16()
    got = linear.product(x, w)
    assert_near(got, plain.linear(x, values, bias=w.bias), torch.bfloat16)
    assert_near(linear.product(x[:, :8].contiguous(), w), got[:, :8], torch.bfloat16)


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
@torch.inference_mode()
def check_experts_of_plain_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are the kernels', each with an expert's rows, where they lie."""
    model = model_of(CONFIGS["experts"], mode)
    model.layers[0].experts_w13.bias = torch.nn.Parameter(noise(5 * 48), requires_grad=False)
    tokens = torch.arange(20, device=DEVICE)[None]
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: False)
    wanted = model(tokens)
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: True)
    torch.testing.assert_close(model(tokens), wanted, atol=1e-4, rtol=1e-3)


# --- compiled, not run ---------------------------------------------------------------------------------------------


class Compiled:
    """Stands for a kernel: compiles what it is launched with for a GPU that need not be here."""

    capability, kilobytes = 90, 227  # an H100's

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: list[Any] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
        types |= {torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8"}
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        signature, constants, aligned = {}, {}, {}
        for i, name in enumerate(names):
            value = given[name]
            number = not self.kernel.params[i].is_constexpr and isinstance(value, int | float)
            if isinstance(value, Tensor):
                signature[name] = types[value.dtype]
            elif number and value != 1:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
            else:
                signature[name], constants[name] = "constexpr", value
            if isinstance(value, Tensor) or (number and value != 1 and isinstance(value, int) and value % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, aligned)
        made = compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        assert made.metadata.shared <= self.kilobytes * 1024, "more shared memory than there is"
        self.made.append(made)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    kernels = {}
    for module in (linear, attention, fused, experts, least_kept):
        for name in [name for name in vars(module) if name.endswith("_kernel") and hasattr(vars(module)[name], "fn")]:
            kernels[name] = Compiled(getattr(module, name))
            monkeypatch.setattr(module, name, kernels[name])
    return kernels


def compile_products(compiled: dict[str, Compiled]) -> None:
    for kind in ("dense", "int8", "fp8", "int4-32", "int4-64"):
        w, _ = weights(kind, 64, 1024, torch.bfloat16, bias=True)
        for rows in (2, 30, 64):
            x = noise(rows, 1024).bfloat16()
            linear.linear_residual(linear.Row(x, noise(rows, 8), 1e-5), w, noise(rows, 64).bfloat16(), noise(64), 1e-5)
    linear.linear(x, w, gated=True)
    few_of_32 = compiled["linear_kernel"].made[9]  # int4-32 with two rows
    for made in compiled["linear_kernel"].made:
        code = made.asm["ptx"]
        assert "mma.sync" in code  # the matrix unit
        # Copies of 16 bytes; 8 for a tile of int4 that has no more for each thread.
        assert ("cp.async.ca.shared.global" if made is few_of_32 else "cp.async.cg.shared.global") in code
        # Nothing of the loop waits for a load: weights and constants all come through the pipeline.
        loops = [
            m[2] for m in re.finditer(r"\n(\$L__BB0_\d+):(.*?)bra\S*\s+\1;", code, re.DOTALL) if "mma.sync" in m[2]
        ]
        assert loops
        assert not any("ld.global" in loop for loop in loops)


@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (89, 99), (90, 227)])
def compile_products_of_prompts(
    capability: int, kilobytes: int, compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an A100, an L40S and an H100, with as much shared memory as they have."""
    monkeypatch.setattr(Compiled, "capability", capability)
    monkeypatch.setattr(Compiled, "kilobytes", kilobytes)
    monkeypatch.setattr(launching, "shared_memory", lambda _: kilobytes * 1024)
    for kind in ("dense", "int8", "fp8", "int4-32", "int4-64"):
        w, _ = weights(kind, 8192, 256, torch.bfloat16, bias=True)
        for rows in (40, 100, 1100):
            row = linear.Row(noise(rows, 256).bfloat16(), noise(rows, 1), 1e-5)
            linear.linear(row, w, residual=noise(rows, 8192).bfloat16(), many=True)
            linear.linear(row, w, gated=True, many=True)
    for made in compiled["linear_kernel"].made:
        code = made.asm["ptx"]
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in code
        assert "cp.async.cg.shared.global" in code
    assert sum(".s8.s8" in made.asm["ptx"] for made in compiled["linear_kernel"].made) == 6
    assert compiled["round_kernel"].made


@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (89, 99), (90, 227)])
def compile_experts(
    capability: int, kilobytes: int, compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "capability", capability)
    monkeypatch.setattr(Compiled, "kilobytes", kilobytes)
    monkeypatch.setattr(launching, "shared_memory", lambda _: kilobytes * 1024)
    for kind in ("dense", "int8", "fp8", "int4-32"):
        w, _ = weights(kind, 8 * 2048, 256, torch.bfloat16, bias=True)
        w = linear.stacked(w, 8)
        for rows in (1, 40, 1100):
            layout = layout_of(rows, rows)
            routes = experts.route(noise(rows, 8).bfloat16(), 2, True, layout)
            row = linear.Row(noise(rows, 256).bfloat16(), noise(rows, 1), 1e-5)
            linear.linear(row, w, gated=True, routes=routes, many=rows > 64)
            linear.linear(noise(2 * rows, 256).bfloat16(), w, routes=routes, many=rows > 64)
            x = noise(rows, 2048).bfloat16()
            experts.gather(noise(2 * rows, 2048).bfloat16(), routes, layout, x, (x, x[:, :1]), (noise(2048), 1e-5))
    assert len(compiled["linear_kernel"].made) == 24
    for name in ("route_kernel", "order_kernel", "gather_kernel"):
        assert compiled[name].made


def compile_activations_and_caps(compiled: dict[str, Compiled]) -> None:
    w, _ = weights("int8", 64, 256, torch.bfloat16, bias=True)
    x = noise(2, 256).bfloat16()
    for kind in ("gelu", "gelu_tanh", "relu", "clamped_swiglu"):
        linear.linear(x, w, gated=True, activation=kind)
    linear.linear(x, w, activation="gelu", many=True)
    linear.linear(x, w, cap=30.0)
    assert len(compiled["linear_kernel"].made) == 6


def compile_products_of_float32(compiled: dict[str, Compiled]) -> None:
    for kind in ("int4-128", "dense"):
        w, _ = weights(kind, 37, 416, torch.float32)
        linear.linear(noise(2, 416), w)
        linear.linear(noise(300, 416), w, many=True)


def compile_the_rest(compiled: dict[str, Compiled]) -> None:
    case = Case([1, 2], [90, 33], 8, 2, 128)
    cache = LayerCache(case.k_cache.bfloat16(), case.v_cache.bfloat16())
    attention.attend(case.q.bfloat16(), cache, case.layout, 7, SCALE)
    small = LayerCache(cache.k.to(torch.int8), cache.v.to(torch.int8), cache.k[..., 0], cache.v[..., 0])
    attention.attend(case.q.bfloat16(), small, case.layout, 0, SCALE)
    many = Case([60, 0], [90, 0], 8, 2, 80)
    attention.attend(many.q.half(), LayerCache(many.k_cache.half(), many.v_cache.half()), many.layout, 0, SCALE)
    qkv, angles, norm = noise(3, 12 * 128).bfloat16(), noise(3, 64), noise(128).bfloat16()
    for stored in (cache, small):
        fused.rope_write(qkv, angles, angles, case.layout.write_slots, stored, 8, norm, norm, 1e-5)
    x = noise(3, 200).bfloat16()
    fused.rope_write(qkv, angles[:, :9], angles[:, :9], case.layout.write_slots, cache, 8)
    for scale in (1.0, 3.0):
        fused.embed(torch.tensor([1, 2, 0]), x, (noise(200), 1e-5), torch.bfloat16, scale)
    fused.prepare_norm(x, noise(200), 1e-5)
    fused.norm(x, noise(200), noise(200), 1e-5, centred=True)
    fused.norm(x, noise(200), None, 1e-5, add=x, following=(noise(200), 1e-5))
    attention.attend(case.q.bfloat16(), cache, case.layout, 7, SCALE, cap=0.5, slopes=noise(8), sinks=noise(8))
    least_kept.least_kept(noise(2, 50000), torch.ones(2, dtype=torch.int32), noise(2))
    others = ("linear_kernel", "round_kernel", "route_kernel", "order_kernel", "gather_kernel")
    assert all(kernel.made for name, kernel in compiled.items() if name not in others)
