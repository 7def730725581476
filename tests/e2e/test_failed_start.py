"""scripts/server.py with a real TorchServe whose model cannot load."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
from serving import ROOT, TORCHSERVE, java_home

from gpt_fast.serve.archive import build_archive


def marked(run_dir: Path) -> list[psutil.Process]:
    """Processes whose environment names ``run_dir`` or a folder in it."""
    found = []
    for process in psutil.process_iter():
        try:
            named = any(value.startswith(str(run_dir)) for value in process.environ().values())
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_after_a_failed_start_nothing_runs_and_the_reason_is_said(checkpoint: Path, tmp_path: Path) -> None:
    archive = build_archive(checkpoint, name="m", output=tmp_path / "store", by_reference=True)
    with (archive / "model_config.yaml").open("a") as file:  # build_archive would refuse it
        file.write("    kompile: true\n")
    java = java_home()
    assert java is not None
    environment = {**os.environ, "JAVA_HOME": java, "PATH": f"{TORCHSERVE.parent}{os.pathsep}{os.environ['PATH']}"}
    for key in ("PYTHONPATH", "TS_CONFIG_FILE"):
        environment.pop(key, None)
    run_dir = tmp_path / "run"
    command = [sys.executable, str(ROOT / "scripts" / "server.py"), "--run-dir", str(run_dir), "start", "--model", "m"]
    command += ["--archive", "m", "--model-store", str(tmp_path / "store"), "--cwd", str(tmp_path), "--timeout", "180"]
    command += ["--config", str(ROOT / "config.properties"), "--port"]
    for _ in range(20):  # five ports that nobody listens on
        port = str(random.randrange(20_000, 60_000))
        failed = subprocess.run([*command, port], env=environment, capture_output=True, text=True, timeout=300)
        if "is taken by another program" not in failed.stderr:
            break
    assert failed.returncode == 1
    assert "unknown key 'kompile'" in failed.stderr
    assert failed.stderr.rstrip().endswith("\nNothing is left running.")
    assert not marked(run_dir)
