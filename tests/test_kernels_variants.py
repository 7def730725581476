"""The C++ kernels for other CPUs than this one: the same sources for AVX2, VNNI's, BF16's and AMX's by their formulas,
NEON's emulated.

Each step is run by the native kernels and, its memory in a file, by a program made of the same sources for the other
CPU (kernel_calls.cpp). Their results must agree to the bit.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from programs import Twin, bytes_of_attention, flags_with, needs_cpp
from quantized import noisy_rows
from test_program import CASES as OPERATIONS
from torch import Tensor

from gpt_fast.kernels.cpu import building, packing, quantizing, structs, translation
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import program as program_module
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.kernels.reference import dequantize_int4, quantize_activations
from gpt_fast.model import description as d

HERE = Path(__file__).parent
pytestmark = needs_cpp

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# What the instruction computes: even and odd bytes apart, because 16 bits do not hold the sum of two products.
DPBUSD = """
#include <immintrin.h>
inline __m256i dpbusd(__m256i sum, __m256i u, __m256i x) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(u, 8), odd));
}
#define GPT_FAST_DPBUSD dpbusd
"""


class Memory:
    """Pieces of memory that one step reads, as they are before it runs, and the pointers in them."""

    def __init__(self, program: Program, address: int) -> None:
        step = structs.Step.from_address(address)
        n, slots = step.num_tokens, step.slots
        kind = ctypes.c_void_p * (2 * (1 + max(program._halves, default=-1)))
        angles = kind.from_address(step.angles) if step.angles else kind()
        positions = (ctypes.c_int64 * n).from_address(step.positions) if step.turns else range(n)
        self._regions: list[tuple[int, int, Any]] = []  # address, bytes, what lies there
        for item in (program._program, step, angles, *program._translation._kept):
            if isinstance(item, Tensor):
                self._add(item.data_ptr(), item.nbytes)
            else:
                self._add(ctypes.addressof(item), ctypes.sizeof(item), item)
        for table, half in program._halves.items():
            for at in angles[2 * table : 2 * table + 2]:
                self._add(at, 4 * (1 + max(positions)) * half)
        for at, size in (
            (step.tokens, 8 * n), (step.positions, 8 * n), (step.rows, 8 * step.num_rows), (step.write_slots, 8 * n),
            (step.query_start, 4 * (slots + 1)), (step.context_len, 4 * slots),
            (step.page_table, 4 * slots * step.pages_per_slot),
            (step.input, 4 * n * program._translation._buffers.widths[0]), (step.output, 4 * n * program._width),
        ):  # fmt: skip
            self._add(at, size)
        self._pieces = []
        for at, size, item in self._regions:
            pointers = [(offset, *self._find(to)) for offset, to in _pointers(item, 0) if to]
            self._pieces.append((ctypes.string_at(at, size) if size else b"", pointers))

    def _add(self, address: int | None, size: int, item: Any = None) -> None:
        self._regions.append((address or 0, size, item))

    def _find(self, address: int) -> tuple[int, int]:
        """The piece that ``address`` is in, and where; what points to nothing may point anywhere."""
        for i, (begin, size, _) in enumerate(self._regions):
            if begin <= address < begin + size:
                return i, address - begin
        return 0, 0

    def file(self, threads: int) -> bytes:
        """As kernel_calls.cpp reads it."""
        out = struct.pack("<qq", threads, len(self._pieces))
        for data, pointers in self._pieces:
            out += struct.pack("<q", len(data)) + data + struct.pack("<q", len(pointers))
            out += b"".join(struct.pack("<qqq", *pointer) for pointer in pointers)
        return out


def _pointers(item: Any, at: int) -> Iterator[tuple[int, int | None]]:
    """Offsets and values of the pointers in a struct or an array."""
    if isinstance(item, ctypes.Structure):
        for name, kind in item._fields_:  # type: ignore[misc]
            offset, value = at + getattr(type(item), name).offset, getattr(item, name)
            yield from [(offset, value)] if kind is ctypes.c_void_p else _pointers(value, offset)
    elif isinstance(item, ctypes.Array):
        size = ctypes.sizeof(item._type_)
        for i, value in enumerate(item):
            yield from [(at + i * size, value)] if item._type_ is ctypes.c_void_p else _pointers(value, at + i * size)


def run_both(
    program: Program, run: Callable[[], Tensor], command: Sequence[str], folder: Path
) -> tuple[Tensor, Tensor]:
    """What ``run``, which runs ``program`` once, gives by ``command`` and natively."""
    native, caught = program._library, list[Memory]()

    def record(address: int, step: int, threads: int) -> None:
        caught.append(Memory(program, step))
        native.gpt_fast_run(address, step, threads)

    program._library = SimpleNamespace(gpt_fast_run=record)  # type: ignore[assignment]
    expected = run()
    (folder / "in").write_bytes(caught[0].file(2))
    subprocess.run([*command, str(folder / "in"), str(folder / "out")], check=True, timeout=600)
    got = torch.frombuffer(bytearray((folder / "out").read_bytes()), dtype=torch.float32)
    return got.view(expected.shape), expected


def quantized_by(command: Sequence[str], rows: Tensor, group_size: int, folder: Path) -> bytes:
    """What ``command`` makes of ``rows``, float32 or bfloat16 [n, K], in int4."""
    kind = cpu.FORMATS[str(rows.dtype).removeprefix("torch.")]
    head = struct.pack("<qqqq", kind, *rows.shape, group_size)
    (folder / "in").write_bytes(head + rows.view(torch.uint8).numpy().tobytes())
    arguments = ["quantize", str(folder / "in"), str(folder / "out")]
    subprocess.run([*command, *arguments], check=True, timeout=600)
    return (folder / "out").read_bytes()


class Case(NamedTuple):
    """A program of one product with random weights, its input, and what comes out where x is rounded as dense weights
    are, or for integers as `together` and `in_pairs` say."""

    program: Program
    x: Tensor
    rounded: Tensor


def in_blocks(x: Tensor, together: int, in_pairs: bool, by_powers: bool) -> Tensor:
    """x rounded to int8 in blocks of ``together``."""
    values, scales = quantize_activations(x, together, in_pairs, by_powers)
    return (values * scales[..., None]).flatten(-2)[..., : x.shape[-1]]


def product_of(
    kind: str, rows: int, n: int, k: int, group: int = 32, *, together: int = 128, in_pairs: bool = False
) -> Case:
    """``rows`` rows times [n, k]."""
    g = torch.Generator().manual_seed(n + k)
    scale, by_powers = None, together == 32 and not in_pairs
    x, bias = torch.randn(rows, k, generator=g), torch.randn(n, generator=g)
    bias[::3] = 0  # which hides no small sums
    if kind in ("float32", "bfloat16"):
        plain = torch.randn(n, k, generator=g).to(getattr(torch, kind))
        data, rounded = packing.pack_dense(plain), x.to(plain.dtype).float() @ plain.float().T + bias
    elif kind == "int8":
        values = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        data, scale = packing.pack_int8(values), torch.rand(n, generator=g)
        rounded = in_blocks(x, together, in_pairs, by_powers) @ (values * scale[:, None]).T + bias
    else:
        codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        grid = torch.randint(0, 256, (2, n, k // group), generator=g, dtype=torch.uint8)
        data, scale = packing.pack_int4(packing.nibbles(codes), *grid), torch.rand(n, generator=g)
        plain = dequantize_int4(packing.nibbles(codes), *grid, scale)
        rounded = in_blocks(x, together, False, by_powers) @ plain.T + bias
    size = group if kind == "int4" else 0
    w = PackedWeights(kind, data, n, k, scale, size, bias)
    program = Program([([d.Product("in", "out", "w")], Weights({"w": [w]}))], "out", input=("in", k))
    return Case(program, x, rounded)


PRODUCTS = [
    (kind, rows, n, k)
    for kind in ("float32", "bfloat16", "int8", "int4")
    for rows, n, k in ((1, 40, 96), (5, 37, 640), (8, 100, 1088), (19, 64, 128), (50, 530, 1088))
] + [("int4", 3, 24, 256, 128), ("bfloat16", 3, 20, 45), ("int4", 100, 37, 1088), ("int4", 97, 40, 1152, 128)]
CACHES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], list[str]]:
    """Makes the command of a CPU, once: compiling takes longer than everything else here."""

    @functools.cache
    def command(name: str, rounds: bool) -> list[str]:
        folder = tmp_path_factory.mktemp(name)
        target = str(folder / "kernel_calls")
        # One for ARM as users get it; the others compile in a third of the time.
        flags = list(building.FLAGS if name == "neon_dot" else flags_with("-O1"))
        # kernel_calls.cpp includes kernels.cpp.
        others = [str(building.SOURCES / file) for file in building.COMPILED if file != "kernels.cpp"]
        flags += [f"-I{building.SOURCES}", str(HERE / "kernel_calls.cpp"), *others, "-o", target]
        flags += ["-DGPT_FAST_BFLOAT16_DOTS"] * rounds
        flags += ["-DGPT_FAST_TILES"] * (name == "tiles")
        if name.startswith("neon"):
            flags += [*building.FLAGS_OF_GCC, "-static"]
            subprocess.run([ARM_COMPILER, *building.VARIANTS[name], *flags], check=True, timeout=600)
            return [ARM_EMULATOR, target]
        (folder / "dpbusd.h").write_text("" if name == "avx2" else DPBUSD)
        include = ["-include", str(folder / "dpbusd.h")]
        subprocess.run([building.compiler(), *building.VARIANTS["avx2"], *include, *flags], check=True, timeout=600)
        return [target]

    return command


@pytest.fixture(params=["neon", "neon_dot", "avx2", "formulas", "tiles"])
def command(
    request: pytest.FixtureRequest, build: Callable[[str, bool], list[str]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The command that runs kernel_calls.cpp as built for another CPU. It rounds x for products of bfloat16 if this CPU
    does, or by the formula. What is native does without tiles, whose blocks are others, if the command does."""
    if request.param.startswith("neon"):
        for tool in (ARM_COMPILER, ARM_EMULATOR):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    if request.param != "tiles" and "amx" in building.variants():
        without = cpu._load(building.build([name for name in building.variants() if name != "amx"]))
        monkeypatch.setattr(program_module, "library", lambda: without)
    rounds = cpu.rounding("bfloat16") or 2 * (request.param in ("formulas", "tiles"))
    monkeypatch.setattr(translation, "rounding", lambda kind: rounds if kind == "bfloat16" else cpu.rounding(kind))
    return build(request.param, bool(rounds))


def test_results_equal_the_native_kernels(command: list[str], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """All steps in one test, which is skipped where there is no emulator."""

    def compare(name: str, program: Program, run: Callable[[], Tensor], tolerance: float) -> None:
        got, expected = run_both(program, run, command, tmp_path)
        close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
        torch.testing.assert_close(got, expected, **close, msg=lambda text: f"{name}: {text}")

    tiles, amx = "[tiles]" in request.node.name, "amx" in building.variants()
    pairs = translation.rounding("bfloat16") == cpu.rounding("bfloat16")  # both multiply bfloat16 in the same way
    in_pairs = "[avx2]" in request.node.name  # rounds x to int8 so
    by_bytes = {bytes_of_attention(), "[formulas]" in request.node.name}  # attention to int8 caches, natively and there
    wide = building.variants()[0].startswith(("avx512", "amx"))  # takes 64 keys of bytes together, others 32
    same_integers = amx if tiles else by_bytes == {False} or (by_bytes == {True} and not wide)
    for kind, *sizes in PRODUCTS:
        together = 128 if tiles else 32
        program, x, rounded = product_of(kind, *sizes, together=together, in_pairs=in_pairs)
        rows = torch.arange(x.shape[0])
        run = functools.partial(program.run, rows, rows, [], None, rows, x)
        # Tiles add bfloat16 in another order, and round to int8 in other blocks; where sums are of 16 bits, scales of x
        # are no powers of two.
        same = {"float32": True, "bfloat16": pairs and not tiles}
        same["int4"] = same["int8"] = tiles <= amx and in_pairs == cpu.rounded_in_pairs()
        if same[kind]:
            compare(f"{kind} {sizes}", program, run, 0)
            continue
        got = run_both(program, run, command, tmp_path)[0]
        close = 1e-4 if kind == "bfloat16" else 1e-5 * float(rounded.abs().max())
        torch.testing.assert_close(got, rounded, atol=close, rtol=1e-4, msg=lambda text, kind=kind: f"{kind}: {text}")
    for dtype, size in ((torch.float32, 32), (torch.bfloat16, 128)):
        rows = noisy_rows(9, 300).to(dtype)
        expected = b"".join(t.numpy().tobytes() for t in quantizing.quantize_int4(rows, size).values())
        assert quantized_by(command, rows, size, tmp_path) == expected, dtype
    for name, case in OPERATIONS.items():
        exact = name.startswith(("embed", "positions", "product", "attention"))
        for cache in CACHES if name.startswith("attention") else CACHES[:1]:
            twin = Twin(**case, cache=cache)
            program, x = twin.program(), twin.input(13)
            if name.startswith(("norm", "activation", "cap")):
                x[1, 0], x[2], x[3] = torch.nan, -200.0, 200.0
            # Queries and weights of attention are rounded otherwise; with tiles weights are powers of two in steps of
            # a 128th, and int8 caches are taken as bfloat16.
            same_pairs = pairs and tiles <= amx
            rounded_alike = {torch.float32: True, torch.bfloat16: same_pairs, torch.int8: same_integers}[cache]
            coarse = 0.03 if cache is torch.int8 and True in by_bytes else 0.02
            tolerance = coarse if not rounded_alike else 0 if exact else 1e-5
            compare(f"{name} {cache}", program, lambda t=twin, x=x, p=program: t.fast(x, p), tolerance)


@pytest.mark.parametrize("command", ["tiles"], indirect=True)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_row_has_the_same_bits_in_tiles_of_any_number_of_rows(kind: str, command: list[str], tmp_path: Path) -> None:
    program, x, _ = product_of(kind, 50, 530, 1088)  # several tiles for each of two threads
    x[0] *= 1e-38  # rounded to int8, zeros

    def run(first: int, last: int) -> Tensor:
        some = x[first:last]
        rows = torch.arange(some.shape[0])
        return run_both(program, lambda: program.run(rows, rows, [], None, rows, some), command, tmp_path)[0]

    whole = run(0, 50)
    for first, last in ((0, 1), (30, 47), (16, 48), (49, 50)):
        assert torch.equal(run(first, last), whole[first:last])


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seventh of the time to compile, and the same instructions."""
    monkeypatch.setattr(building, "FLAGS", flags_with("-O0"))


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("variant", ["amx", "avx512_bf16", "avx512_vnni", "avx_vnni"])
def test_the_compiler_takes_the_flags_of_every_variant(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path))
    try:
        library = building.build_variant(variant, building.compiler())
    except cpu.CompilerError as error:
        if str(building.SOURCES) in str(error):  # a mistake there, not a flag that is not known
            raise
        pytest.skip(str(error))
    text = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=False).stdout
    assert not text or "vpdpbusd" in text
    assert not text or ("vdpbf16ps" in text) == (variant in ("amx", "avx512_bf16"))
    assert not text or ("tdpbf16ps" in text) == ("tdpbssd" in text) == (variant == "amx")


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang_builds_the_kernels_too(tmp_path: Path) -> None:
    """All that macOS has."""
    for name in building.variants():
        library = cpu._load(building.build_variant(name, "clang++", tmp_path))
        assert library.gpt_fast_rounding(cpu.FORMATS["int8"]) == 1
