"""The Triton kernels compile for GPUs that need not be here: an A100, an L40S and an H100.

The checks run in their own process (triton_checks.py). By hand:

    GPT_FAST_TEST_COMPILE=1 python -m pytest tests/test_gpu_compiled.py -o python_functions='compile_*'
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_checks import RUNNING, SCALE, Case, layout_of, needs_triton, noise, run_checks, weights

from gpt_fast.kernels.cache import LayerCache

if RUNNING:
    attention = pytest.importorskip("gpt_fast.kernels.gpu.attention")
    experts = pytest.importorskip("gpt_fast.kernels.gpu.experts")
    fused = pytest.importorskip("gpt_fast.kernels.gpu.fused")
    launching = pytest.importorskip("gpt_fast.kernels.gpu.launching")
    least_kept = pytest.importorskip("gpt_fast.kernels.gpu.least_kept")
    linear = pytest.importorskip("gpt_fast.kernels.gpu.linear")


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler comes for this machine only")
def test_everything_compiles(tmp_path: Path) -> None:
    run_checks(__file__, "compile", GPT_FAST_TEST_COMPILE="1", TRITON_CACHE_DIR=str(tmp_path))


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


@pytest.fixture(params=[(80, 163), (89, 99), (90, 227)], ids=["A100", "L40S", "H100"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a GPU that is compiled for, with as much shared memory as it has."""
    number, kilobytes = request.param
    monkeypatch.setattr(Compiled, "capability", number)
    monkeypatch.setattr(Compiled, "kilobytes", kilobytes)
    monkeypatch.setattr(launching, "shared_memory", lambda _: kilobytes * 1024)
    return number


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


def compile_products_of_prompts(capability: int, compiled: dict[str, Compiled]) -> None:
    for kind in ("dense", "int8", "fp8", "int4-32", "int4-64"):
        w, _ = weights(kind, 8192, 256, torch.bfloat16, bias=True)
        for rows in (40, 100, 1100) if capability == 90 else (40, 1100):
            row = linear.Row(noise(rows, 256).bfloat16(), noise(rows, 1), 1e-5)
            linear.linear(row, w, residual=noise(rows, 8192).bfloat16(), many=True)
            linear.linear(row, w, gated=True, many=True)
    for made in compiled["linear_kernel"].made:
        code = made.asm["ptx"]
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in code
        assert "cp.async.cg.shared.global" in code
    assert sum(".s8.s8" in made.asm["ptx"] for made in compiled["linear_kernel"].made) == (6 if capability == 90 else 4)
    assert compiled["round_kernel"].made


def compile_experts(capability: int, compiled: dict[str, Compiled]) -> None:
    for kind in ("dense", "int8", "int4-32"):
        w, _ = weights(kind, 8 * 2048, 256, torch.bfloat16, bias=True)
        w = linear.stacked(w, 8)
        for rows in (1, 40, 1100) if capability == 90 else (1100,):
            layout = layout_of(rows, rows)
            routes = experts.route(noise(rows, 8).bfloat16(), 2, True, layout)
            row = linear.Row(noise(rows, 256).bfloat16(), noise(rows, 1), 1e-5)
            linear.linear(row, w, gated=True, routes=routes, many=rows > 64)
            linear.linear(noise(2 * rows, 256).bfloat16(), w, routes=routes, many=rows > 64)
    x = noise(rows, 2048).bfloat16()
    experts.gather(noise(2 * rows, 2048).bfloat16(), routes, layout, x, (x, x[:, :1]), (noise(2048), 1e-5))
    assert len(compiled["linear_kernel"].made) == (18 if capability == 90 else 6)
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


def compile_attention_of_any_heads(capability: int, compiled: dict[str, Compiled]) -> None:
    """Many heads to a key, large ones, and float32: each fits."""
    for heads, kv_heads, dim, dtype in (
        (71, 1, 64, torch.bfloat16),
        (8, 1, 256, torch.bfloat16),
        (4, 1, 128, torch.float32),
    ):
        case = Case([60, 9], [90, 9], heads, kv_heads, dim)
        cache = LayerCache(case.k_cache.to(dtype), case.v_cache.to(dtype))
        for many in (False, True):
            attention.attend(case.q.to(dtype), cache, case.layout, 0, SCALE, many=many)
    assert len(compiled["attend_kernel"].made) == 6


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
    for made in compiled["rope_write_kernel"].made:  # a token's place in qkv may be more than 2 ** 31
        assert "%0 = tt.get_program_id x" in made.asm["ttir"]
        assert not re.search(r"arith\.muli %0, .* : i32", made.asm["ttir"])
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
