"""``gpt-fast serve`` with a real TorchServe whose model cannot load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
from serving import ROOT, base_port


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
    broken, run_dir = tmp_path / "broken", tmp_path / "run"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:100_000])
    command = [sys.executable, "-m", "gpt_fast", "serve", "--checkpoint", str(broken), "--run-dir", str(run_dir)]
    command += ["--timeout", "180", "--port", str(base_port())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert failed.returncode == 1
    assert "the worker died while it loaded the model" in failed.stderr
    assert "model.safetensors" in failed.stderr
    assert failed.stderr.rstrip().endswith("\nNothing is left running.")
    assert not marked(run_dir)
