"""scripts/server.py with a TorchServe that restarts its workers: what it says is left running, and what is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from server_script import SCRIPTS, load_server_script

psutil = pytest.importorskip("psutil", reason="psutil comes with the extra serve")
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_server_script()


class Fake:
    """A run directory, and scripts/server.py for it with the TorchServe of fake_torchserve.py."""

    def __init__(self, folder: Path, script: ModuleType) -> None:
        self.script, self.run_dir, self.noted = script, folder / "run", folder / "pids"
        (folder / "fake" / "ts").mkdir(parents=True)
        (folder / "fake" / "ts" / "__init__.py").touch()
        shutil.copy(HERE / "fake_torchserve.py", folder / "fake" / "ts" / "model_server.py")
        (folder / "config.properties").touch()
        self.port = next(p for p in iter(lambda: random.randrange(20_000, 60_000), 0) if not script.busy_ports(p))
        self.folder = folder

    def command(self, verb: str) -> list[str]:
        start = ["--model", "m", "--archive", "m", "--model-store", ".", "--port", str(self.port), "--timeout", "60"]
        start += ["--config", str(self.folder / "config.properties"), "--cwd", str(self.folder)]
        return [
            sys.executable,
            str(SCRIPTS / "server.py"),
            "--run-dir",
            str(self.run_dir),
            verb,
            *(start if verb == "start" else []),
        ]

    def environment(self, state: str) -> dict[str, str]:
        fake = {"FAKE_STATE": state, "FAKE_PIDS": str(self.noted), "PYTHONPATH": str(self.folder / "fake")}
        return {**os.environ, **fake}

    def run(self, verb: str, state: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(verb), env=self.environment(state), capture_output=True, text=True, check=False, timeout=120
        )

    def running(self) -> list[int]:
        """Which of all the processes that there ever were are still there; there were two at least."""
        pids = [int(line) for line in self.noted.read_text().split()]
        assert len(pids) >= 2, "no front end, or no worker"
        return [pid for pid in pids if psutil.pid_exists(pid) and self.script.is_running(psutil.Process(pid))]


@pytest.fixture
def fake(tmp_path: Path, script: ModuleType) -> Iterator[Fake]:
    made = Fake(tmp_path, script)
    yield made
    while made.noted.exists() and (left := made.running()):  # a test that failed
        for pid in left:
            psutil.Process(pid).kill()


@pytest.mark.parametrize("state", ["broken", "broken and stubborn"])
def test_after_a_failed_start_nothing_is_left_running(fake: Fake, state: str) -> None:
    """Workers that come back while the front end is being ended, and a front end that must be killed."""
    failed = fake.run("start", state)
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("\nNothing is left running.")
    assert not fake.running()
    assert not (fake.run_dir / "server.json").exists()
    assert fake.run("stop").stdout.strip() == "No server was started from here."


def test_a_start_that_is_ended_leaves_nothing_running(fake: Fake) -> None:
    starting = subprocess.Popen(
        fake.command("start"), env=fake.environment("loading"), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (fake.noted.exists() and len(fake.noted.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    starting.terminate()
    _, told = starting.communicate(timeout=60)
    assert starting.returncode == 143
    assert told.decode().strip() == "Nothing is left running."
    assert not fake.running()


@pytest.mark.parametrize("state", ["ready", "ready but stubborn"])
def test_stop_finds_a_server_that_nothing_is_written_about(fake: Fake, state: str) -> None:
    started = fake.run("start", state)
    assert started.returncode == 0, started.stderr
    (fake.run_dir / "server.json").unlink()
    assert len(fake.running()) == 2
    if "stubborn" in state:
        # The front end is killed in 20 s by stop; here by the test, so that its worker is an orphan.
        psutil.Process(fake.running()[0]).kill()
    stopped = fake.run("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("Stopped what was left of a server")
    assert not fake.running()
    assert fake.run("stop").stdout.strip() == "No server was started from here."


def test_stop_ends_a_server_and_its_temp_folder(fake: Fake) -> None:
    assert fake.run("start", "ready").returncode == 0
    tmp_dir = fake.script.process_mark(psutil.Process(fake.running()[0]), fake.script.MARK)
    assert Path(tmp_dir).is_dir()
    assert fake.run("stop").stdout.strip() == "Stopped."
    assert not fake.running()
    assert not Path(tmp_dir).exists()


def test_a_process_that_survives_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, script.RUN_MARK: str(tmp_path.resolve())}
    survivor = subprocess.Popen(["sleep", "300"], env=environment)
    (tmp_path / "server.json").write_text("{}")
    try:
        monkeypatch.setattr("processes.end_processes", lambda *_, **__: time.sleep(0.01))
        monkeypatch.setattr("processes.GIVE_UP_S", -20)
        monkeypatch.setattr(sys, "argv", ["server.py", "--run-dir", str(tmp_path), "stop"])
        assert script.main() == 1
        told: Any = capsys.readouterr()
        assert f"kill -9 {survivor.pid}" in told.err
        assert "Stopped" not in told.out
        assert (tmp_path / "server.json").exists(), "the next --stop looks for it again"
    finally:
        survivor.kill()
        survivor.wait()
