"""scripts/container.py without TorchServe: what it reads and writes, and how it ends. tests/e2e starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from container_script import load_container_script

from gpt_fast.serve import closing

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script() -> ModuleType:
    """It, as it stands."""
    return load_container_script()


def test_the_environment_has_a_default_for_everything(script: ModuleType) -> None:
    found = script.Settings.read({})
    assert (found.model, found.run, found.drain_s) == (Path("/mnt/models"), Path("/run/gpt-fast"), 60)
    assert found.config == ROOT / "model_config.yaml"
    given = {"GPT_FAST_MODEL": "/m", "GPT_FAST_CONFIG": "/c.yaml", "GPT_FAST_RUN": "/r", "GPT_FAST_DRAIN_S": "5"}
    assert script.Settings.read(given) == script.Settings(Path("/m"), Path("/c.yaml"), Path("/r"), 5.0)


def test_the_documents_have_the_variables_with_their_defaults(script: ModuleType) -> None:
    rows = re.findall(r"^\| `(GPT_FAST_\w+)` \| (.*?) \|", (ROOT / "docs/cluster.md").read_text(encoding="utf-8"), re.M)
    found = script.Settings.read({})
    config = f"the image's `{found.config.relative_to(ROOT)}`"
    told = {"MODEL": f"`{found.model}`", "CONFIG": config, "RUN": f"`{found.run}`", "DRAIN_S": f"{found.drain_s:g}"}
    assert dict(rows) == {f"GPT_FAST_{name}": default for name, default in told.items()}


@pytest.mark.parametrize("wrong", ["", "soon", "-1", "1.5"])
def test_a_wrong_number_is_refused_by_name(wrong: str, script: ModuleType) -> None:
    with pytest.raises(ValueError, match="GPT_FAST_DRAIN_S must be a whole number of seconds"):
        script.Settings.read({"GPT_FAST_DRAIN_S": wrong})


def test_the_inference_port_alone_is_opened(script: ModuleType) -> None:
    before = (ROOT / "config.properties").read_text().splitlines()
    after = script.open_inference((ROOT / "config.properties").read_text()).splitlines()
    changed = [line for line in after if line not in before]
    assert changed == ["inference_address=http://0.0.0.0:8080", "disable_token_authorization=true"]
    assert len(after) == len(before) + 1
    addresses = [line for line in after if "address=" in line and not line.startswith("#")]
    assert sum("127.0.0.1" in line for line in addresses) == len(addresses) - 1 == 4
    with pytest.raises(ValueError, match="needs one line"):
        script.open_inference("inference_address=http://0.0.0.0:8080\n")


def test_all_that_is_written_goes_to_the_run_folder(script: ModuleType, tmp_path: Path) -> None:
    model = ROOT / "model_store/demo/target"
    settings = script.Settings(model, ROOT / "model_config.yaml", tmp_path / "run", 1.0)
    command = script.prepare(settings)
    environment = script.environment_of(settings, {"OMP_WAIT_POLICY": "active", "HOME": "/nowhere"})
    assert environment.pop("OMP_WAIT_POLICY") == "active"
    assert all(Path(value).is_relative_to(settings.run) for value in environment.values())
    archive = settings.run / "model_store" / "gpt-fast"
    assert yaml.safe_load((archive / "model_config.yaml").read_text())["handler"]["checkpoint"] == str(model)
    assert not (archive / "checkpoint").exists(), "the weights are not copied"
    named = [Path(word) for word in command if word.startswith("/")]
    assert all(path.exists() for path in named)
    # A container that starts again finds what the last one left.
    assert script.prepare(settings) == command


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    environment = {"GPT_FAST_MODEL": str(tmp_path / "none"), "GPT_FAST_RUN": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts/container.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cannot serve: checkpoint: {tmp_path / 'none'} does not exist\n"
    assert subprocess.run([*command, "helthy"], capture_output=True, check=False).returncode == 2


def test_it_knows_where_its_torchserve_is(script: ModuleType, tmp_path: Path) -> None:
    settings = script.Settings(tmp_path, tmp_path, tmp_path, 1.0)
    place = script.place(settings)
    assert (place.inference, place.management, place.model) == ("127.0.0.1:8080", "127.0.0.1:8081", "gpt-fast")
    named = script.environment_of(settings, {})[closing.VARIABLE]
    assert str(place.closed) == named, "what the workers look for is not what closes them"


def test_java_is_asked_to_end_and_its_launcher_where_there_is_none(script: ModuleType, tmp_path: Path) -> None:
    launcher, java = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        (tmp_path / "pid").write_text(str(java.pid))
        script.end(launcher.pid, tmp_path / "pid")
        assert java.wait(60) == -signal.SIGTERM
        script.end(launcher.pid, tmp_path / "pid")  # it is gone already
        assert launcher.poll() is None
        script.end(launcher.pid, tmp_path / "no pid yet")
        assert launcher.wait(60) == -signal.SIGTERM
    finally:
        for process in (launcher, java):
            process.kill()
            process.wait()


def test_children_of_others_are_reaped_meanwhile(script: ModuleType) -> None:
    """In its own process: waiting for any child takes those of whoever else runs here."""
    code = (
        "import sys, subprocess; sys.path.insert(0, 'scripts'); import container; "
        "short, long = subprocess.Popen(['true']), subprocess.Popen(['sleep', '0.5']); container.wait_for(long.pid); "
        "import os; print(os.path.exists(f'/proc/{short.pid}') and sys.platform == 'linux')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
