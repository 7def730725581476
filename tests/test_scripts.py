"""The shell scripts without what they start: syntax, help, refusals, environments."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

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
        ("quickstart.sh", ["--draft"]),
        ("test.sh", ["--venv"]),
        ("prepare.sh", []),
        ("prepare.sh", ["--bogus"]),
        ("prepare.sh", ["one/model", "another/model"]),
        ("prepare.sh", ["one/model", "--quantize", "int5"]),
        ("archive.sh", ["--bogus"]),
    ],
)
def test_a_wrong_command_line_gives_usage_and_status_2(name: str, arguments: list[str], tmp_path: Path) -> None:
    refused = run(ROOT / "scripts" / name, *arguments, cwd=tmp_path, env={**os.environ, "GPT_FAST_VENV": str(tmp_path)})
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "usage:" in refused.stderr
    assert not list(tmp_path.iterdir()), "it began to work before it had read its options"


def test_a_folder_that_is_no_virtual_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    refused = bash("make_venv", GPT_FAST_VENV=str(tmp_path))
    assert refused.returncode == 1
    assert "not a virtual environment" in refused.stderr
    assert (tmp_path / "photo.jpg").exists()


def test_stop_without_a_server(tmp_path: Path) -> None:
    places = {"GPT_FAST_RUN_DIR": str(tmp_path), "GPT_FAST_VENV": sys.prefix}
    done = run(ROOT / "scripts" / "quickstart.sh", "--stop", env={**os.environ, **places})
    assert (done.returncode, done.stdout.strip()) == (0, f"No server was started from {tmp_path}.")


# ---- which environment, which server --------------------------------------------------------------------------------

# Stands for the Python of an environment in which everything is installed already: notes what it is asked to do.
PYTHON = """\
#!/bin/sh
printf '%s\\n' "$0 $*" >>"$ASKED"
case "$*" in
  *importlib.metadata*) printf '%s\\n' "$OWNER" ;;
  *hashlib*) cat >/dev/null; echo key ;;
  *launch.java*) echo 'Java 17 of a test' ;;
esac
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
    variables = {"ASKED": str(tmp_path / "asked"), "OWNER": ""}
    return {**{k: v for k, v in os.environ.items() if not k.startswith("GPT_FAST_")}, **variables}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], ["--port 9080"]),
        (["--port", "7080"], ["--port 9080", "--port 7080"]),
        (["--speculative", "--config", "my config"], ["--speculative", "--config my config"]),
        (
            ["--checkpoint", "a/b", "--draft", "c", "--request", "r.json"],
            ["--checkpoint a/b --draft c --request r.json"],
        ),
    ],
)
def test_options_go_on_to_the_command_and_the_last_one_holds(
    options: list[str], asked: list[str], installed: dict[str, str], tmp_path: Path
) -> None:
    chosen = {"GPT_FAST_RUN_DIR": str(tmp_path / "it's run"), "GPT_FAST_PORT": "9080", "GPT_FAST_START_TIMEOUT": "77"}
    options += ["--venv", "my venv"]
    done = run(ROOT / "scripts" / "quickstart.sh", *options, cwd=tmp_path, env={**installed, **chosen})
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in (tmp_path / "asked").read_text().splitlines() if "-m gpt_fast serve" in line)
    assert line.startswith(
        f"{tmp_path}/my venv/bin/python -m gpt_fast serve --run-dir {tmp_path}/it's run --background "
    )
    places = [line.index(words) for words in (f"--request {ROOT}/request.json", "--timeout 77", *asked)]
    assert places[2:] == sorted(places[2:])


def test_stop_finds_the_environment_that_the_server_was_started_with(installed: dict[str, str], tmp_path: Path) -> None:
    """Without --venv, where .venv is not there."""
    variables = {**installed, "GPT_FAST_RUN_DIR": str(tmp_path / "run"), "GPT_FAST_VENV": str(tmp_path / "none")}
    script = ROOT / "scripts" / "quickstart.sh"
    assert run(script, "--venv", tmp_path / "my venv", env=variables).returncode == 0
    (tmp_path / "asked").unlink()
    assert run(script, "--stop", env=variables).returncode == 0
    assert (tmp_path / "asked").read_text().startswith(f"{tmp_path / 'my venv'}/bin/python -m gpt_fast serve ")
    assert (tmp_path / "asked").read_text().endswith(" --stop\n")
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


def long_stage(tmp_path: Path) -> tuple[str, Path]:
    """Some bash that runs a stage for longer than a test may take, and the file that gets the number of its process."""
    pid_file = tmp_path / "pid"
    stage = f'stage long "{tmp_path}/log" bash -c \'echo $$ >"{pid_file}"; exec sleep {2 * HANG_S}\''
    return f'. "{ROOT}/scripts/lib.sh"; {{before}} {stage}', pid_file


def check_it_ends(pid_file: Path) -> None:
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"the stage's process {pid} outlived the script")


def test_an_interrupted_stage_leaves_nothing_running(tmp_path: Path) -> None:
    code, pid_file = long_stage(tmp_path)
    script = subprocess.Popen(["bash", "-c", f"set -eu; {code.format(before='')}"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_S
    while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=HANG_S) == 143
    check_it_ends(pid_file)


def test_a_stage_ends_with_the_reader_of_what_the_script_prints(tmp_path: Path) -> None:
    """As in ``quickstart.sh | head -1``: the script ends at the next line that it prints, and the stage with it."""
    code, pid_file = long_stage(tmp_path)
    # A stage says every 20 seconds that it goes on. Here it does once its process is there.
    before = f'sleep() {{ command sleep 0.05; if [ -s "{pid_file}" ]; then SECONDS=$((SECONDS + 20)); fi; }};'
    with subprocess.Popen(["bash", "-c", f"set -eu; {code.format(before=before)}"], stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        script.stdout.close()
        assert script.wait(HANG_S) == 141
    check_it_ends(pid_file)
