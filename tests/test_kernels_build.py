"""How the C++ kernels are built, kept and found again, and the threads that run them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import needs_cpp

from gpt_fast import user_cache
from gpt_fast.errors import CompilerError, UnavailableError
from gpt_fast.kernels.cpu import building
from gpt_fast.kernels.cpu import library as cpu

_PROBE = "import logging; logging.basicConfig(); import torch; from gpt_fast.kernels.cpu import library as k; "
# A model's step by the kernels where they are, by plain torch where not.
_STEP = (
    "from gpt_fast.config import ModelConfig; from gpt_fast.model.building import random_model; "
    "from gpt_fast.model.steps import serve; from gpt_fast.engine.runner import Runner; "
    "served = serve(random_model(ModelConfig('llama', 32, 32, 1, 2, 1, 16, 32, 64), torch.float32), compile=False); "
    "r = Runner(served, max_batch=1, max_seq_len=32, num_pages=3, page_size=16, prefill_chunk=8); "
    "r.warm_up(); print(k.available(), r.path)"
)


def probe(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-c", _PROBE + code],
        cwd=root,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_reference_runs_after_one_warning(tmp_path: Path) -> None:
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_CACHE=str(tmp_path), GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["False", "eager"], done.stderr
    assert done.stderr.count("CPU kernels are off") == 1
    assert "no-such-compiler" in done.stderr


def test_the_kernels_can_be_switched_off_without_a_warning() -> None:
    done = probe("print(k.available())", GPT_FAST_KERNELS="reference")
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@needs_cpp
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = building.build()
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    assert building.build() == path


@needs_cpp
def test_tiles_that_give_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "variants", lambda: ["amx", "avx512_bf16"])
    monkeypatch.setattr(building, "build", lambda names: (names or building.variants())[0])
    monkeypatch.setattr(
        cpu, "_load", lambda name: SimpleNamespace(name=name, gpt_fast_tiles_work=lambda: name != "amx")
    )
    assert cpu.library.__wrapped__().name == "avx512_bf16"
    assert "do without them" in caplog.text


PLANTED = b"not a library, and not this user's"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own, and a compiler that copies what was built before: its folder is returned."""
    built = building.build()
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nfor last; do :; done\ncp {built} "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    user_cache._temporary.cache_clear()
    return tmp_path / "cache" / "kernels"


def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``path`` to another user, or without the right to do that take another user's part."""
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)


@needs_cpp
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_a_built_library_is_for_its_owner_alone_whatever_the_umask(cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        library = building.build()
    finally:
        os.umask(before)
    assert library.parent == cache
    assert [p.stat().st_mode & 0o777 for p in (cache.parent, cache, library)] == [0o700] * 3
    stamp = library.stat().st_mtime_ns
    assert building.build() == library
    assert library.stat().st_mtime_ns == stamp, "built again"


@needs_cpp
@pytest.mark.parametrize("how", ["file of somebody else", "file that others can write"])
def test_a_planted_library_is_built_anew(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = building.build()
    good = library.read_bytes()
    library.write_bytes(PLANTED)
    if how == "file of somebody else":
        if os.getuid():
            pytest.skip("only root can give a file away")
        foreign(library, monkeypatch)
    else:
        library.chmod(0o777)
    assert building.build() == library
    assert library.read_bytes() == good
    assert caplog.text.count("is not used") == 1
    building.build()
    assert caplog.text.count("is not used") == 1, "the next start finds it in order"


@needs_cpp
def test_a_folder_that_others_could_write_in_is_emptied(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = building.build()
    good = library.read_bytes()
    library.write_bytes(PLANTED)
    cache.chmod(0o777)
    assert building.build() == library
    assert library.read_bytes() == good
    assert cache.stat().st_mode & 0o777 == 0o700
    assert "could write in it" in caplog.text


@needs_cpp
@pytest.mark.parametrize("how", ["of somebody else", "that others can write"])
def test_a_cache_of_somebody_else_is_left_alone(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what lies in it is loaded, nor is anything put there; the library is built for this process."""
    library = building.build()
    library.write_bytes(PLANTED)
    if how == "of somebody else":
        foreign(cache.parent, monkeypatch)
    else:
        cache.parent.chmod(0o777)
    elsewhere = building.build()
    assert cache.parent not in elsewhere.parents
    assert elsewhere.read_bytes() != PLANTED
    assert library.read_bytes() == PLANTED
    assert elsewhere.parent.parent.stat().st_mode & 0o777 == 0o700
    building.build()
    assert caplog.text.count("is not kept for the next start") == 1


@needs_cpp
@pytest.mark.parametrize(
    ("version", "takes_all"), [("g++ (Debian 12.2.0-14) 12.2.0", True), ("Apple clang version 17.0.0", False)]
)
def test_clang_gets_no_flag_that_it_refuses(version: str, takes_all: bool, cache: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    Path(os.environ["CXX"]).write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\n'
        f'echo "$@" >>{said}\nfor last; do :; done\ntouch "$last"\n'
    )
    building.build()
    commands = said.read_text().splitlines()
    assert len(commands) == len(building.COMPILED) + 1
    assert [flag in command for flag in building.FLAGS_OF_GCC for command in commands] == [takes_all] * len(commands)


@needs_cpp
def test_without_a_compiler_what_another_one_built_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = building.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert building.build() == library
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_CACHE=str(cache.parent), GPT_FAST_KERNELS="")
    assert (done.stdout.split(), done.stderr) == (["True", "kernels"], "")
    # Of other sources or flags, or not to be trusted: not used.
    with monkeypatch.context() as patch:
        patch.setattr(building, "FLAGS", (*building.FLAGS, "-DNEWER"))
        with pytest.raises(UnavailableError, match="no-such-compiler"):
            building.build()
    library.chmod(0o777)
    with pytest.raises(UnavailableError, match="no-such-compiler"):
        building.build()


@needs_cpp
def test_kernels_are_built_for_other_machines(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container: built by root for all CPUs, run by somebody else on any of them, without a compiler."""
    folder = tmp_path / "kernels"
    built = building.build_all(folder)
    assert [path.name.split("-")[1] for path in built] == building._of_this_architecture()
    assert [path.stat().st_mode & 0o777 for path in (folder, *built)] == [0o755] * (1 + len(built))
    assert not cache.exists(), "it was kept in this user's cache as well"
    by_name = dict(zip(building._of_this_architecture(), built, strict=True))
    monkeypatch.setenv("GPT_FAST_KERNEL_DIR", str(folder))
    for compiler in (os.environ["CXX"], "no-such-compiler"):  # what was built goes before the compiler
        monkeypatch.setenv("CXX", compiler)
        for name in by_name:
            monkeypatch.setattr(building, "variants", lambda name=name: [name])
            assert building.build() == by_name[name]
    monkeypatch.setattr(building, "variants", lambda: [*by_name])
    built[0].unlink()
    assert building.build() == built[1], "the next older one"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # Of other sources, or not to be trusted: said, and looked for elsewhere.
    for path in built[1:]:
        path.chmod(0o777)
    with pytest.raises(UnavailableError, match="no-such-compiler"):
        building.build()
    assert f"GPT_FAST_KERNEL_DIR: {folder} holds no kernels of these sources for this CPU" in caplog.text


@needs_cpp
def test_a_folder_of_kernels_runs_without_a_compiler(cache: Path, tmp_path: Path) -> None:
    """A new process loads the kernels for this CPU from the folder."""
    building.build_all(tmp_path / "kernels")
    given = {"GPT_FAST_KERNEL_DIR": str(tmp_path / "kernels"), "GPT_FAST_CACHE": str(tmp_path / "empty")}
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_KERNELS="", **given)
    assert (done.stdout.split(), done.stderr) == (["True", "kernels"], "")


@needs_cpp
def test_a_variant_that_the_compiler_does_not_know_is_left_out(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = building._of_this_architecture()
    compile_one = building._compile

    def refuse(command: list[str], sources: list[Path], target: Path) -> None:
        if f"-{first}-" in target.name or not rest:
            raise CompilerError("unknown instructions")
        compile_one(command, sources, target)

    monkeypatch.setattr(building, "_compile", refuse)
    assert [path.name.split("-")[1] for path in building.build_all(tmp_path / "kernels")] == rest
    assert f"no {first} kernels: unknown instructions" in caplog.text
    rest.clear()
    with pytest.raises(UnavailableError, match="built none of the kernels"):
        building.build_all(tmp_path / "none")


@needs_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_team_has_a_limit_whoever_asks_for_more() -> None:
    code = (
        "import os, ctypes; from gpt_fast.kernels.cpu.library import library; "
        "before = len(os.listdir('/proc/self/task')); "
        "data = torch.ones(1 << 24, dtype=torch.uint8); library().gpt_fast_read(data.data_ptr(), 1 << 24, 0, 100_000); "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = probe(code, GPT_FAST_KERNELS="", OMP_NUM_THREADS="1")  # no threads of torch's beside them
    assert 0 < int(done.stdout) < 512, done.stderr


@needs_cpp
def test_a_failed_build_says_what_the_compiler_said(tmp_path: Path) -> None:
    sources = [tmp_path / "broken.cpp", tmp_path / "whole.cpp"]
    for source, text in zip(sources, ("int main( {", "int one() { return 1; }"), strict=True):
        source.write_text(text)
    with pytest.raises(UnavailableError, match=r"failed: .*broken\.cpp"):
        building._compile([building.compiler()], sources, tmp_path / "broken.so")
    assert sorted(tmp_path.iterdir()) == sources


@needs_cpp
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another that is whole"])
def test_a_library_that_was_cut_short_is_built_again(
    others: int, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = building.build()
    path.write_bytes(b"")
    if others:  # without a compiler, the next one is taken
        shutil.copy2(_whole(), path.with_name(path.name.replace(".so", "z.so")))
        monkeypatch.setenv("CXX", "no-such-compiler")
    lib = cpu._built_and_loaded(None)
    assert lib.gpt_fast_rounded_together() > 0
    assert "is built again" in caplog.text
    assert path.exists() != bool(others)


@needs_cpp
@pytest.mark.usefixtures("cache")
def test_a_library_that_was_cut_short_in_a_read_only_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    building.build().write_bytes(b"")
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UnavailableError, match="Read-only"):
        cpu._built_and_loaded(None)


def _whole() -> Path:
    return Path(cpu.library()._name)


@needs_cpp
@pytest.mark.parametrize("says", [b"\x7fELF of another machine", b"#!/bin/sh\nprintf '\\377'; exit 1\n"])
def test_a_compiler_that_cannot_be_asked_is_a_warning(says: bytes, tmp_path: Path) -> None:
    odd = tmp_path / "odd-c++"
    odd.write_bytes(says)
    odd.chmod(0o755)
    done = probe("print(k.available())", CXX=str(odd), GPT_FAST_CACHE=str(tmp_path / "cache"), GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["False"], done.stderr
    assert done.stderr.count("CPU kernels are off") == 1


@needs_cpp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_a_thread_that_begins_a_call() -> None:
    """Else the child finds a guard locked, whose owner is not there to give it back."""
    code = (
        "import os, signal, threading; data = torch.ones(1 << 17, dtype=torch.uint8); going = [True]\n"
        "def read(): k.library().gpt_fast_read(data.data_ptr(), 1 << 17, 1, 2)\n"
        "def busy():\n    while going: read()\n"
        "threads = [threading.Thread(target=busy) for _ in range(2)]; [t.start() for t in threads]; ends = set()\n"
        "for _ in range(100):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: signal.alarm(60); read(); os._exit(0)\n"
        "    ends.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "going.clear(); [t.join() for t in threads]; print(*ends)"
    )
    done = probe(code, GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["0"], done.stderr


@needs_cpp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    code = (  # torch's own threads do not survive a fork, so the child uses the library alone
        "import os; data = torch.ones(1 << 24, dtype=torch.uint8); "
        "read = lambda: k.library().gpt_fast_read(data.data_ptr(), 1 << 24, 1, 2); read(); pid = os.fork(); read(); "
        "os._exit(0) if pid == 0 else None; "
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = probe(code, GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["0"], done.stderr
