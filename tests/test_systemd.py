"""configs/systemd/: the unit is one that systemd understands, and its times fit each other."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from gpt_fast.cli import main
from gpt_fast.commands import serve

UNIT = Path(__file__).resolve().parent.parent / "configs" / "systemd" / "gpt-fast@.service"


def section(name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser[name])


def test_the_command_parses_and_systemd_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(serve, "run", lambda given: seen.append(given.drain_seconds) or 0)
    service = section("Service")
    assert main(service["ExecStart"].replace("%i", "8080").split()[1:]) == 0
    assert int(service["TimeoutStopSec"]) >= seen[0] + 60
    assert service["KillMode"] == "mixed", "systemd would send SIGTERM to TorchServe and its workers too"


def test_systemd_understands_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    program = section("Service")["ExecStart"].split()[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(program, str(shutil.which("true"))))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
