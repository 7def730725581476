"""Builds the C++ kernels of ``src/``: once per machine, by the compiler that is there, for what its CPU can do.

Plain C functions on raw pointers build in seconds; including torch's headers would take most of a minute. As many
sources are compiled at a time as there are cores. The library is kept in the user's own cache folder (user_cache.py),
under a name made of the sources, the flags and the compiler, and put there by an atomic rename, so that processes may
build at the same time. Without a compiler one of the same sources and flags is taken that any compiler built.
``$GPT_FAST_KERNEL_DIR`` names a folder that ``gpt-fast kernels`` has filled for all CPUs, in a container for instance:
what lies there goes before everything else. ``$CXX`` names another compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpt_fast.cgroups import num_cores
from gpt_fast.errors import CompilerError, UnavailableError
from gpt_fast.kernels.cpu.structs import SOURCES
from gpt_fast.user_cache import private_folder, trusted

log = logging.getLogger(__name__)

# Where a compiler joins a product and a sum differs from CPU to CPU: joined is only what says so (plus_product).
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-fPIC")
# Without this gcc gathers integer sums at the end of a block and spills every register on the way. Clang refuses it.
FLAGS_OF_GCC = ("-fno-tree-reassoc",)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=256")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_X86 = {
    "amx": (*_AVX512_BF16, "-mavx512vbmi", "-mgfni", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
_ARM = {"neon_dot": ("-march=armv8.2-a+dotprod",), "neon": ()}
VARIANTS = {**_X86, **_ARM}  # flags for the compiler
COMPILED = ("product.cpp", "attention.cpp", "kernels.cpp")  # of SOURCES; what takes longest first
_ARCHITECTURES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}  # variants, the fastest first
_BUILD_TIMEOUT_S = 300
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # a system call of Linux on x86-64, and its arguments


def variants() -> list[str]:
    """Of VARIANTS those that this CPU runs, the fastest first. Raises UnavailableError."""
    names, flags = _of_this_architecture(), _cpu_flags()
    # torch says AVX2 only where FMA is there as well.
    if "avx2" in names and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise UnavailableError("this CPU has no AVX2")
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
    bf16 = avx512 | {"avx512_bf16"} <= flags
    have = {
        "amx": bf16 and {"avx512vbmi", "gfni", "amx_tile", "amx_int8", "amx_bf16"} <= flags and _may_use_tiles(),
        "avx512_bf16": bf16,
        "avx512_vnni": avx512 <= flags,
        "avx_vnni": "avx_vnni" in flags,
        "neon_dot": "asimddp" in flags or platform.system() == "Darwin",
    }
    return [name for name in names if have.get(name, True)]


def _may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX's registers, for which every process has to ask once."""
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0)


def _of_this_architecture() -> list[str]:
    """Of VARIANTS those for this kind of CPU, whatever this one can do. Raises UnavailableError."""
    names = _ARCHITECTURES.get(platform.machine().lower())
    if names is None:
        raise UnavailableError(f"there is no variant for {platform.machine()} CPUs")
    return list(names)


def _cpu_flags() -> set[str]:
    """What Linux names the CPU's extensions of the instruction set; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def compiler() -> str:
    """The C++ compiler: $CXX, else the first of g++, c++, clang++. Raises UnavailableError."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise UnavailableError(f"no C++ compiler was found (tried {', '.join(names)})")
    return found


def build(names: Sequence[str] | None = None) -> Path:
    """The shared library for this CPU, one of the variants ``names``, None: the fastest, compiled now unless it was
    built before. Raises UnavailableError.

    A compiler that does not know the newest instructions gets the next older ones. Without a compiler the library is
    taken that another one has built from the same sources.
    """
    names = variants() if names is None else names
    if given := os.environ.get("GPT_FAST_KERNEL_DIR"):
        if found := _built_in(Path(given), names):
            return found
        log.warning("GPT_FAST_KERNEL_DIR: %s holds no kernels of these sources for this CPU", given)
    try:
        cxx = compiler()
    except UnavailableError:
        if found := _built_in(private_folder("kernels"), names):
            return found
        raise
    for name in names:
        try:
            return build_variant(name, cxx)
        except CompilerError as error:
            log.info("no %s kernels: %s", name, error)
            why = error
    raise UnavailableError(f"the kernels could not be built: {why}") from why


def build_all(folder: Path) -> list[Path]:
    """Libraries in ``folder`` for every CPU of this machine's architecture, for machines without a compiler.

    The folder is for everybody to read and for its owner to write. A variant that the compiler does not know is left
    out with a line in the log. Raises UnavailableError without a compiler, and when none could be built.
    """
    cxx, built = compiler(), []
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in _of_this_architecture():
        try:
            built.append(build_variant(name, cxx, folder))
            built[-1].chmod(0o755)
        except CompilerError as error:
            log.warning("no %s kernels: %s", name, error)
    if not built:
        raise UnavailableError(f"{cxx} built none of the kernels")
    return built


def _built_in(folder: Path, names: Sequence[str]) -> Path | None:
    """Of the libraries in ``folder`` that any compiler built from these sources the first by ``names``."""
    found = (path for name in names for path in sorted(folder.glob(f"{_stem(name)}-*.so")))
    return next(filter(trusted, found), None)


def build_variant(name: str, cxx: str, folder: Path | None = None) -> Path:
    """One of VARIANTS, by the compiler ``cxx``; ``folder``: None is the user's cache. Raises CompilerError or
    UnavailableError."""
    try:
        asked = subprocess.run([cxx, "--version"], capture_output=True, check=False, timeout=_BUILD_TIMEOUT_S)
        version = asked.stdout.decode(errors="replace")
        target = (folder or private_folder("kernels")) / f"{_stem(name)}-{_digest(version.encode())}.so"
        if not trusted(target):
            log.info("compiling the C++ kernels (%s) for the first time; that takes 5 to 40 seconds", name)
            flags = FLAGS if "clang" in version else (*FLAGS, *FLAGS_OF_GCC)
            _compile([cxx, *flags, *VARIANTS[name]], [SOURCES / file for file in COMPILED], target)
    except (OSError, subprocess.TimeoutExpired) as error:  # a full disk, a read-only cache, a compiler that cannot run
        raise UnavailableError(f"the kernels could not be built: {error}") from error
    return target


def _stem(name: str) -> str:
    """The beginning of a library's name: what it was made of, and for which CPU."""
    sources = [part for path in sorted(SOURCES.iterdir()) for part in (path.name.encode(), path.read_bytes())]
    flags = [flag.encode() for flag in (*FLAGS, *FLAGS_OF_GCC, *VARIANTS[name], platform.machine())]
    return f"kernels-{name}-{_digest(*sources, *flags)}"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:16]


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """A shared library of ``sources``. ``command``: the compiler and its flags."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, ThreadPoolExecutor(num_cores()) as pool:
        objects, built = [f"{scratch}/{source.stem}.o" for source in sources], Path(scratch) / target.name
        commands = ([*command, "-c", str(source), "-o", to] for source, to in zip(sources, objects, strict=True))
        list(pool.map(_run_compiler, commands))  # raises what the first of them raised
        _run_compiler([*command, "-shared", *objects, "-o", str(built)])
        built.chmod(0o700)  # whatever the umask: what others can write is not loaded
        with built.open("rb") as file:
            os.fsync(file)  # so that a power cut leaves no empty file under the library's name
        os.replace(built, target)


def _run_compiler(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took more than {_BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        why = next((line for line in lines if " error: " in line), lines[0])
        raise CompilerError(f"{command[0]} failed: {why}")
