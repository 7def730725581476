"""The scripts without what they start: syntax, help, refusals, and the parts of server.py that are functions."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
COMMANDS = ("quickstart.sh", "test.sh", "prepare.sh", "archive.sh")  # lib.sh is sourced

HANG_S = 300  # whoever waits longer waits for ever

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


def run(*command: str | Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """A command's output, without a terminal and without input."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=HANG_S,
        **kwargs,  # type: ignore[call-overload]
    )


def bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Some bash after lib.sh."""
    code = f'set -euo pipefail\n. "{ROOT}/scripts/lib.sh"\n{code}'
    return run("bash", "-c", code, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def server() -> ModuleType:
    """scripts/server.py as a module."""
    pytest.importorskip("psutil")
    spec = importlib.util.spec_from_file_location("server", ROOT / "scripts" / "server.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ---- the shell scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_syntax_and_safety(script: Path) -> None:
    checked = run("bash", "-n", script)
    assert checked.returncode == 0, checked.stderr
    text = script.read_text()
    if script.name != "lib.sh":
        assert os.access(script, os.X_OK), "not executable"
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text
    assert not re.search(r"pkill|killall", text), "ends processes by name: those may be someone else's"
    assert not re.search(r"^\s*cd (?!\")", text, re.MULTILINE), "an unquoted cd breaks on paths with spaces"
    # bash 3.2 is what macOS has
    assert not re.search(r"\bdeclare -A|\bmapfile\b|\breadarray\b|\$\{\w+(?:,,|\^\^)\}", text), "needs bash 4"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_to_use_it(name: str, tmp_path: Path) -> None:
    told = run(ROOT / "scripts" / name, "--help", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "usage:" in told.stdout
    assert not told.stderr


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("quickstart.sh", ["--bogus"]),
        ("quickstart.sh", ["--venv"]),
        ("quickstart.sh", ["--port", "eighty"]),
        ("quickstart.sh", ["--port", "80"]),
        ("test.sh", ["--venv"]),
        ("prepare.sh", []),
        ("prepare.sh", ["--bogus"]),
        ("prepare.sh", ["one/model", "another/model"]),
        ("archive.sh", ["--bogus"]),
    ],
)
def test_a_wrong_command_line_gives_usage_and_status_2(name: str, arguments: list[str], tmp_path: Path) -> None:
    refused = run(ROOT / "scripts" / name, *arguments, cwd=tmp_path, env={**os.environ, "GPT_FAST_VENV": str(tmp_path)})
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "usage:" in refused.stderr
    assert not list(tmp_path.iterdir()), "it began to work before it had read its options"


def test_a_missing_checkpoint_is_said_before_anything_is_installed(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    refused = run(ROOT / "scripts" / "quickstart.sh", "--checkpoint", tmp_path / "none", "--venv", venv)
    assert refused.returncode == 1
    assert refused.stderr.strip()
    assert not venv.exists()


def test_a_folder_that_is_no_virtual_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    refused = bash("make_venv", GPT_FAST_VENV=str(tmp_path))
    assert refused.returncode == 1
    assert "not a virtual environment" in refused.stderr
    assert (tmp_path / "photo.jpg").exists()


def test_stop_without_a_server(tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / "quickstart.sh", "--stop", env={**os.environ, "GPT_FAST_RUN_DIR": str(tmp_path)})
    assert (done.returncode, done.stdout.strip()) == (0, "No server was started from here.")


@pytest.mark.parametrize(
    ("says", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "17"),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21" 2023-09-19', "21"),
        ('java version "1.8.0_402"', "8"),
        ('openjdk version "22-ea" 2024-03-19', "22"),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", ""),
    ],
)
def test_java_versions(says: str, major: str, tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit 1\n")
    java.chmod(0o755)
    assert bash(f'java_major "{java}"').stdout.strip() == major


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.8.18'\nexit 1\n")
    old.chmod(0o755)
    refused = bash("find_python", PYTHON=str(old))
    assert refused.returncode == 1
    assert "3.10" in refused.stderr


def test_a_failed_stage_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs with space" / "x.log"
    failed = bash(f"stage 'packing' '{log}' bash -c 'echo the reason; exit 3'")
    assert failed.returncode == 3
    assert "the reason" in failed.stdout
    assert str(log) in failed.stdout
    assert "\033" not in failed.stdout, "escape codes where no terminal is"


def test_an_interrupted_stage_leaves_nothing_running(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f'. "{ROOT}/scripts/lib.sh"; stage long "{tmp_path}/log" bash -c \'echo $$ >"{pid_file}"; exec sleep 60\''
    script = subprocess.Popen(["bash", "-c", f"set -eu; {code}"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_S
    while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=HANG_S) == 143
    pid = int(pid_file.read_text())
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"the stage's process {pid} outlived the script")


# ---- server.py ------------------------------------------------------------------------------------------------------


def test_derived_config_moves_the_ports_and_nothing_else(server: ModuleType) -> None:
    given = "# ours\ninference_address=http://localhost:8080\nmodel_store=model_store\ngrpc_inference_port=7070\n"
    lines = server.derive_config(given, 9080).splitlines()
    assert "# ours" in lines
    assert "model_store=model_store" in lines
    assert "inference_address=http://localhost:9080" in lines
    assert "management_address=http://127.0.0.1:9081" in lines, "an address that is not given stays on loopback"
    assert "metrics_address=http://127.0.0.1:9082" in lines
    assert "grpc_inference_port=8070" in lines
    assert len([line for line in lines if line.startswith("grpc_inference_port")]) == 1


def test_a_taken_port_is_found(server: ModuleType) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = port if port <= 65533 else port - 2
        assert port in server.busy_ports(base)


LOG = """\
2025-01-01T00:00:00,000 [INFO ] main org.pytorch.serve.ModelServer - Model server started.
2025-01-01T00:00:01,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Torch worker started.
2025-01-01T00:00:01,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - loading weights
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - CheckpointError: no such checkpoint
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG -
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - RuntimeError: no model
2025-01-01T00:00:03,000 [INFO ] epollEventLoopGroup-5-1 org.pytorch.serve.wlm.WorkerThread - 9000 Worker disconnected. X
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Torch worker started.
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - OSError: of the second try
"""


def test_a_dead_worker_is_seen_and_its_first_error_shown(server: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    assert server.DIED.search(LOG)
    shown = server.last_lines(log)
    assert "CheckpointError: no such checkpoint" in shown
    assert shown.endswith("RuntimeError: no model")
    assert "second try" not in shown


def test_the_phase_comes_from_the_log(server: ModuleType) -> None:
    lines = LOG.splitlines()
    assert server.phase("") == "starting TorchServe"
    assert server.phase(lines[0]) == "starting a worker"
    assert server.phase("\n".join(lines[:3])) == "loading the model: loading weights"


def test_a_pid_that_is_someone_elses_is_not_our_server(server: ModuleType) -> None:
    mine = server.Server(os.getpid(), 0.0, 8080, "m", "", "")
    assert not mine.is_alive()


def test_sweep_ends_marked_processes_and_no_others(server: ModuleType) -> None:
    value = f"test-{os.getpid()}"
    marked = subprocess.Popen(["sleep", "60"], env={**os.environ, "GPT_FAST_SWEEP": value}, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "GPT_FAST_SWEEP": "other"})
    try:
        server.end_processes(server.marked_processes("GPT_FAST_SWEEP", value), grace_s=10)
        assert marked.wait(timeout=HANG_S) != 0
        assert other.poll() is None
    finally:
        other.kill()
        marked.kill()
        other.wait()
