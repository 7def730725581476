"""The C++ kernels for other CPUs than this one: the same sources for NEON under an emulator, VNNI's by its formula.

Each call's arguments go to the native kernels and, in a file, to a program made of the same sources for the other CPU
(kernel_calls.cpp). Their results must agree to the bit.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpt_fast import kernels
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.reference import quantize_heads

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler and a CPU with AVX2")

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# What the instruction computes where no pair of products overflows 16 bits, which neither int8 nor nibbles can.
DPBUSD = """
#include <immintrin.h>
inline __m256i dpbusd(__m256i sum, __m256i u, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)));
}
#define GPT_FAST_DPBUSD dpbusd
"""


class Call(NamedTuple):
    """One call of kernels.cpp, and which buffer is the result."""

    function: int
    integers: Sequence[int]
    buffers: Sequence[Tensor | None]
    result: int
    real: float = 0.0


FUNCTIONS = ("gpt_fast_linear", "gpt_fast_paged_attention", "gpt_fast_rms_norm", "gpt_fast_silu_mul")


def linear_call(kind: str, rows: int, n: int, k: int, group: int = 32) -> Call:
    g = torch.Generator().manual_seed(n + k)
    scale = None
    if kind in ("float32", "bfloat16"):
        data = packing.pack_dense(torch.randn(n, k, generator=g).to(getattr(torch, kind)))
    elif kind == "int8":
        data = packing.pack_int8(torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8))
        scale = torch.rand(n, generator=g)
    else:
        codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        grid = torch.randint(0, 256, (2, n, k // group), generator=g, dtype=torch.uint8)
        data, scale = packing.pack_int4(codes, *grid), torch.rand(n, generator=g)
    x = torch.randn(rows, k, generator=g)
    integers = (cpu.FORMATS[kind], rows, k, n, group)
    return Call(0, integers, (x, data, scale, torch.randn(n, generator=g), torch.zeros(rows, n)), 4)


def attention_call(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int) -> Call:
    """A prompt's chunk of 9 tokens after 5 others, and one token of a sequence of 70."""
    g = torch.Generator().manual_seed(dim)
    page, pages = 16, 5
    cache = [torch.randn(2 * pages + 1, page, kv_heads, dim, generator=g) for _ in range(2)]
    scales: list[Tensor | None] = [None, None]
    if dtype == torch.int8:
        for i in range(2):
            cache[i], scales[i] = quantize_heads(cache[i])
    table = torch.randperm(2 * pages, generator=g).view(2, pages).int() + 1
    start, length = torch.tensor([0, 9, 10], dtype=torch.int32), torch.tensor([14, 70], dtype=torch.int32)
    places = [(0, i) for i in range(5, 14)] + [(1, 69)]
    slots = torch.tensor([int(table[s, i // page]) * page + i % page for s, i in places])
    q = torch.randn(10, heads, dim, generator=g)
    k, v = (torch.randn(10, kv_heads, dim, generator=g) for _ in range(2))
    buffers = (q, k, v, *(c.to(dtype) for c in cache), *scales, start, length, table, slots, torch.zeros_like(q))
    integers = (10, 2, pages, page, heads, kv_heads, dim, window, cpu.CACHE_FORMATS[dtype])
    return Call(1, integers, buffers, 11)


CALLS = {
    **{
        f"{kind} {rows}x{n}x{k}": (linear_call, (kind, rows, n, k))
        for kind in ("float32", "bfloat16", "int8", "int4")
        for rows, n, k in ((1, 40, 96), (5, 37, 640), (19, 64, 128))
    },
    "int4 groups of 128": (linear_call, ("int4", 3, 24, 256, 128)),
    "attention float32": (attention_call, (torch.float32, 4, 4, 16, 0)),
    "attention bfloat16": (attention_call, (torch.bfloat16, 8, 2, 64, 24)),
    "attention int8": (attention_call, (torch.int8, 6, 2, 32, 0)),
}


def norm_calls() -> list[Call]:
    x = torch.cat((torch.randn(2, 200), torch.full((1, 200), -200.0), torch.full((1, 200), 200.0)))
    x[1, 3] = torch.nan
    return [
        Call(2, (4, 200), (x, torch.randn(200), torch.zeros(4, 200)), 2, 1e-5),
        Call(3, (4, 100), (x, torch.zeros(4, 100)), 1),
    ]


def native(call: Call) -> Tensor:
    buffers = [None if t is None else t.clone() for t in call.buffers]
    at = [None if t is None else t.data_ptr() for t in buffers]
    i = list(call.integers)
    arguments: list[object]
    if call.function == 0:
        arguments = [i[0], at[0], *i[1:], *at[1:]]
    elif call.function == 1:
        arguments = [*at, *i]
    elif call.function == 2:
        arguments = [at[0], at[1], *i, call.real, at[2]]
    else:
        arguments = [at[0], *i, at[1]]
    getattr(cpu.library(), FUNCTIONS[call.function])(*arguments, 2)
    result = buffers[call.result]
    assert result is not None
    return result


def elsewhere(command: Sequence[str], call: Call, folder: Path) -> Tensor:
    buffers = [b"" if t is None else bytes(t.contiguous().view(torch.uint8).flatten().numpy()) for t in call.buffers]
    integers = [*call.integers, 2]
    data = struct.pack(f"<qq{len(integers)}qdq", call.function, len(integers), *integers, call.real, len(buffers))
    (folder / "in").write_bytes(data + b"".join(struct.pack("<q", len(b)) + b for b in buffers))
    subprocess.run([*command, str(folder / "in"), str(folder / "out")], check=True, timeout=600)
    begin = sum(map(len, buffers[: call.result]))
    result = call.buffers[call.result]
    assert result is not None
    out = (folder / "out").read_bytes()[begin : begin + len(buffers[call.result])]
    return torch.frombuffer(bytearray(out), dtype=result.dtype).view(result.shape)


@pytest.fixture(params=["neon", "neon_dot", "vnni"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command that runs kernel_calls.cpp as built for another CPU."""
    folder = tmp_path
    target = str(folder / "kernel_calls")
    flags = [flag for flag in cpu.FLAGS if flag not in ("-fPIC", "-shared")]
    flags += [f"-I{cpu.SOURCES}", str(HERE / "kernel_calls.cpp"), "-o", target]
    if request.param == "vnni":
        (folder / "dpbusd.h").write_text(DPBUSD)
        subprocess.run(
            [cpu.compiler(), *cpu.VARIANTS["avx2"], "-include", str(folder / "dpbusd.h"), *flags],
            check=True,
            timeout=600,
        )
        return [target]
    for tool in (ARM_COMPILER, ARM_EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    subprocess.run([ARM_COMPILER, *cpu.VARIANTS[request.param], "-static", *flags], check=True, timeout=600)
    return [ARM_EMULATOR, target]


def test_results_equal_the_native_kernels(program: list[str], tmp_path: Path) -> None:
    """All calls in one test, which is skipped where there is no emulator."""
    for name, (make, arguments) in CALLS.items():
        call = make(*arguments)  # type: ignore[operator]
        got, wanted = elsewhere(program, call, tmp_path), native(call)
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    for call in norm_calls():
        torch.testing.assert_close(
            elsewhere(program, call, tmp_path), native(call), atol=1e-6, rtol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("variant", ["avx512_vnni", "avx_vnni"])
def test_the_compiler_takes_the_flags_of_every_variant(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path))
    # Half the time, and the same instructions.
    monkeypatch.setattr(cpu, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in cpu.FLAGS))
    try:
        library = cpu.build_variant(variant, cpu.compiler())
    except cpu.CompilerError as error:
        pytest.skip(str(error))
    text = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=False).stdout
    assert not text or "vpdpbusd" in text
