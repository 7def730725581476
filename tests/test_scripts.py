"""The scripts without what they start: syntax, help, refusals, and the parts of server.py that are functions."""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import socket
import subprocess
import time
import venv
from pathlib import Path
from types import ModuleType

import pytest
from server_script import load_server_script

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
    return load_server_script()


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
        ("quickstart.sh", ["--draft"]),
        ("quickstart.sh", ["--speculative", "--checkpoint", "mine"]),
        ("quickstart.sh", ["--draft", "mine", "--speculative"]),
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


@pytest.mark.parametrize("option", ["--checkpoint", "--draft"])
def test_a_missing_checkpoint_is_said_before_anything_is_installed(option: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    refused = run(ROOT / "scripts" / "quickstart.sh", option, tmp_path / "none", "--venv", venv)
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


# ---- which environment, which server --------------------------------------------------------------------------------

# Stands for the Python of an environment in which everything is installed already: notes what it is asked to do.
PYTHON = """\
#!/bin/sh
printf '%s\\n' "$0 $*" >>"$ASKED"
case "$*" in
  *importlib.metadata*) printf '%s\\n' "$OWNER" ;;
  *hashlib*) cat >/dev/null; echo key ;;
  *" status") exit 3 ;;
esac
"""
CURL = """\
#!/bin/sh
while [ $# -gt 0 ]; do
  if [ "$1" = -D ]; then echo 'HTTP/1.1 200 OK' >"$2"; fi
  shift
done
echo Lily
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a machine where quickstart.sh has nothing left to install, start or ask."""
    venv = tmp_path / "my venv"
    program(venv / "bin" / "python", PYTHON)
    (venv / "gpt-fast-installed.txt").write_text("key\nextra serve\n")
    program(tmp_path / "bin" / "curl", CURL)
    program(tmp_path / "java" / "bin" / "java", "#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    variables = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "JAVA_HOME": str(tmp_path / "java"),
        "ASKED": str(tmp_path / "asked"),
        "OWNER": "",
    }
    return {**{k: v for k, v in os.environ.items() if not k.startswith("GPT_FAST_")}, **variables}


@pytest.mark.parametrize("named_by", ["option", "variable"])
@pytest.mark.parametrize("cwd", [".", ROOT, ROOT / "scripts"], ids=["elsewhere", "the root", "scripts"])
def test_the_printed_stop_command_works_as_printed(
    installed: dict[str, str], tmp_path: Path, cwd: str | Path, named_by: str
) -> None:
    where = tmp_path / cwd
    asked, run_dir, venv = tmp_path / "asked", tmp_path / "it's run", tmp_path / "my venv"
    chosen = {"GPT_FAST_RUN_DIR": str(run_dir), "GPT_FAST_PORT": "9080"}
    if named_by == "variable":
        chosen["GPT_FAST_VENV"] = str(venv)
    options = ["--venv", os.path.relpath(venv, where)] if named_by == "option" else []
    started = run(ROOT / "scripts" / "quickstart.sh", *options, cwd=where, env={**installed, **chosen})
    assert started.returncode == 0, started.stdout + started.stderr
    assert "Lily" in started.stdout
    assert "http://127.0.0.1:9080/predictions/gpt-fast" in started.stdout
    (printed,) = (line for line in started.stdout.splitlines() if line.startswith("Stop the server:"))
    asked.unlink()
    stopped = run("bash", "-c", printed.partition(":")[2], cwd=where, env=installed)  # without what was chosen
    assert stopped.returncode == 0, stopped.stderr
    by, _, what = asked.read_text().strip().partition("bin/python ")
    assert os.path.realpath(by) == str(venv)
    assert what == f"{ROOT}/scripts/server.py --run-dir {run_dir} stop"


@pytest.mark.parametrize(
    ("options", "draft", "config"),
    [
        ([], None, "model_config.yaml"),
        (["--speculative"], f"{ROOT}/model_store/demo/draft", "configs/model_config_speculative.yaml"),
        (["--speculative", "--config", "request.json"], f"{ROOT}/model_store/demo/draft", "request.json"),
        (["--draft", f"{ROOT}/model_store/demo"], f"{ROOT}/model_store/demo", "model_config.yaml"),
    ],
)
def test_a_draft_goes_into_the_archive_and_into_what_the_server_is_known_by(
    options: list[str], draft: str | None, config: str, installed: dict[str, str], tmp_path: Path
) -> None:
    variables = {**installed, "GPT_FAST_RUN_DIR": str(tmp_path / "run"), "GPT_FAST_VENV": str(tmp_path / "my venv")}
    done = run(ROOT / "scripts" / "quickstart.sh", *options, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    (packed,) = (line for line in asked if "-m gpt_fast archive" in line)
    (started,) = (line for line in asked if "server.py" in line and " start " in line)
    assert f"--config {ROOT}/{config} " in packed
    assert (f"--draft {draft} " in packed) == (draft is not None)
    assert (f" and the draft model {draft} " in started) == (draft is not None)


def test_stop_finds_the_environment_that_the_server_was_started_with(installed: dict[str, str], tmp_path: Path) -> None:
    """Without --venv, where .venv is not there."""
    variables = {**installed, "GPT_FAST_RUN_DIR": str(tmp_path / "run"), "GPT_FAST_VENV": str(tmp_path / "none")}
    script = ROOT / "scripts" / "quickstart.sh"
    assert run(script, "--venv", tmp_path / "my venv", env=variables).returncode == 0
    (tmp_path / "asked").unlink()
    assert run(script, "--stop", env=variables).returncode == 0
    assert (tmp_path / "asked").read_text().startswith(f"{tmp_path / 'my venv'}/bin/python ")
    (tmp_path / "my venv" / "bin" / "python").unlink()
    stuck = run(script, "--stop", env=variables)
    assert stuck.returncode == 1, "nobody looked, so nobody can say that no server runs"
    assert "--venv" in stuck.stderr


def test_an_environment_of_another_checkout_is_not_taken_over(installed: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "other" / "scripts" / "lib.sh", "")
    venv, stamp = tmp_path / "my venv", tmp_path / "my venv" / "gpt-fast-installed.txt"
    stamp.write_text("another key\nextra serve\n")
    variables = {**installed, "GPT_FAST_RUN_DIR": str(tmp_path / "run"), "OWNER": str(tmp_path / "other")}
    refused = run(ROOT / "scripts" / "quickstart.sh", "--venv", venv, env=variables)
    assert refused.returncode == 1
    assert f"{venv} belongs to another checkout, {tmp_path / 'other'}" in refused.stderr
    assert "--venv" in refused.stderr
    assert stamp.read_text().startswith("another key")
    assert " pip install" not in (tmp_path / "asked").read_text()


def test_an_environment_whose_checkout_is_gone_or_this_one_is_used(installed: dict[str, str], tmp_path: Path) -> None:
    variables = {**installed, "GPT_FAST_RUN_DIR": str(tmp_path / "run"), "GPT_FAST_VENV": str(tmp_path / "my venv")}
    script = ROOT / "scripts" / "quickstart.sh"
    moved = run(script, "--install-only", env={**variables, "OWNER": str(tmp_path / "gone")})
    assert moved.returncode == 0, moved.stderr
    assert f"belonged to the checkout {tmp_path / 'gone'}, which is gone" in moved.stdout
    own = run(script, "--install-only", env={**variables, "OWNER": str(ROOT.resolve())})
    assert own.returncode == 0, own.stderr
    assert "belong" not in own.stdout


@pytest.mark.parametrize(
    ("direct_url", "owner"),
    [
        ('{"dir_info": {"editable": true}, "url": "file:///some%20where/repo"}', "/some where/repo"),
        ('{"dir_info": {}, "url": "file:///some/repo"}', ""),
        ('{"archive_info": {}, "url": "file:///some/repo/dist/x.whl"}', ""),
        (None, ""),
    ],
)
def test_whose_an_environment_is_comes_from_pips_own_note(direct_url: str | None, owner: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=False)
    if direct_url is not None:
        (site,) = (tmp_path / "v" / "lib").glob("python*/site-packages")
        info = site / "gpt_fast_serve-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpt-fast-serve\nVersion: 0.1.0\n")
        (info / "direct_url.json").write_text(direct_url)
    told = bash("owner_of_venv", GPT_FAST_VENV=str(tmp_path / "v"))
    assert (told.returncode, told.stdout.strip()) == (0, owner), told.stderr


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


def test_the_servers_compile_cache_is_not_where_others_can_guess_it(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker puts it into the user's own cache folder, unless the environment says where."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(server.subprocess, "run", lambda *_, env, **__: given.append(env))
    arguments = argparse.Namespace(model="m", archive="a", model_store="s", cwd=".")
    for own in ({}, {"TORCHINDUCTOR_CACHE_DIR": "mine"}):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(server.ServerError):  # nothing was started
            server.launch(arguments, tmp_path, tmp_path / "config", tmp_path / "log", str(tmp_path / "tmp"))
    assert [env.get("TORCHINDUCTOR_CACHE_DIR") for env in given] == [None, "mine"]


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


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ('vllm:num_requests_running{a="b"} 1\n', ""),
        ("{draft} 0\n{accepted} 0\n", "No tokens were guessed ahead so far."),
        ("{draft} 8\n{accepted} 6\n", "8 tokens were guessed ahead so far, and 6 of them were right (75%)."),
    ],
)
def test_what_became_of_drafts_is_told(
    page: str, says: str, server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draft", "accepted"):
        page = page.replace(f"{{{name}}}", f'vllm:spec_decode_num_{name}_tokens_total{{model_name="m",engine="0"}}')
    monkeypatch.setattr(server.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(page.encode()))
    assert server.drafts(server.Server(1, 0.0, 8080, "m", "", "")) == says


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
