"""The package as pip installs it: a wheel in a new environment, outside the repository, serves and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving import ROOT, base_port, has_ended, wait_for

from gpt_fast.kernels.cpu.building import build
from gpt_fast.kernels.cpu.library import available


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy of what the repository tracks: the build leaves files where it runs."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", source / "dist", source], check=True, capture_output=True, text=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


class Installed:
    """An environment that holds the wheel, and sees the libraries of the environment that the tests run in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.home, self.cache = folder / "home", folder / "the cache"
        self.home.mkdir()
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=False)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GPT_FAST_"))},
            "HOME": str(self.home),
            "GPT_FAST_CACHE": str(self.cache),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if available():  # its cache is empty at first
            self.environment["GPT_FAST_KERNEL_DIR"] = str(build().parent)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-deps"]
        elsewhere = {**self.environment, "HOME": str(folder)}  # pip's own traces are not of interest
        subprocess.run([*pip, "--no-index", str(wheel)], env=elsewhere, check=True, capture_output=True)
        # Behind its own: torch, TorchServe and all else, but not the checkout.
        (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        self.site, self.package = site, site / "gpt_fast"
        for path in [self.package, *self.package.rglob("*")]:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)

    def command(self, *words: str) -> psutil.Popen:
        """``gpt-fast`` with these words, as somebody types it in a home folder."""
        pipe = subprocess.PIPE
        line = [str(self.bin / "gpt-fast"), *words]
        return psutil.Popen(line, env=self.environment, cwd=self.home, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Installed]:
    made = Installed(tmp_path_factory.mktemp("a user's"), wheel)
    yield made
    made.package.chmod(0o755)
    for folder, _, _ in os.walk(made.package):
        os.chmod(folder, 0o755)


def test_a_wheel_holds_what_serve_needs_and_nothing_of_the_repository(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name.removeprefix("gpt_fast/serve/shipped/") for name in inside if "/shipped/" in name}
    for name in shipped:
        assert zipfile.ZipFile(wheel).read(f"gpt_fast/serve/shipped/{name}") == (ROOT / name).read_bytes()
    configs = {f"configs/{path.name}" for path in (ROOT / "configs").glob("model_config*.yaml")}
    assert shipped >= {"handler.py", "model_config.yaml", "config.properties", "configs/log4j2.xml", *configs}
    assert {f"model_store/demo/{part}/model.safetensors" for part in ("target", "draft")} <= shipped
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpt_fast").rglob("*.py")}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpt_fast/kernels/cpu/src").iterdir()}
    assert modules | sources <= inside
    assert not [name for name in inside if not name.startswith(("gpt_fast/", "gpt_fast_serve-"))]


def test_it_serves_the_demo_model_and_ctrl_c_ends_all_of_it(installed: Installed) -> None:
    port, there = base_port(), set(installed.site.rglob("*"))
    serving = installed.command("serve", "--port", str(port))
    try:
        said = []
        while line := serving.stdout.readline():
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        assert said[-1:] == ["Ctrl-C stops it.\n"], "".join(said) + serving.stderr.read()
        processes = psutil.Process(serving.pid).children(recursive=True)
        url = f"http://127.0.0.1:{port}/predictions/gpt-fast"
        assert f"  completions        {url}\n" in said
        words = {"prompt": "Once upon a time", "max_new_tokens": 5, "stream": False, "choice": [" there", " never"]}
        request = urllib.request.Request(url, json.dumps(words).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.load(answer)["text"] in words["choice"], "structured output is part of the extra serve"
        with urllib.request.urlopen(f"{url}/1.0/v1/models", timeout=60) as answer:
            assert json.load(answer)["data"][0]["id"] == "gpt-fast"
        run_dir = installed.cache / "serve" / str(port)
        marked = [p for p in psutil.process_iter() if is_of(p, run_dir)]
        assert len({process.name() for process in marked}) >= 2, "TorchServe's Java and its worker"
    finally:
        serving.send_signal(signal.SIGINT)
        told, err = serving.communicate(timeout=300)
    assert (serving.returncode, told) == (0, "Stopping\nStopped.\n"), err
    wait_for(lambda: all(has_ended(process) for process in (*processes, *marked)))
    assert {path.name for path in run_dir.iterdir()} == {"logs", "model_store", "server.log"}
    assert not list(installed.home.iterdir()), "state belongs into the cache"
    assert not set(installed.site.rglob("*")) - there, "an installed package is read-only"


def is_of(process: psutil.Process, run_dir: Path) -> bool:
    """Whether it was started for the server of ``run_dir``."""
    try:
        return str(run_dir) in process.environ().values()
    except psutil.Error:
        return False
