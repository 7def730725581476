"""``gpt-fast batch`` as a process that is killed at any moment: the file that comes out is the uninterrupted run's.
With Ray, where it is installed, workers are killed as well."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from batch_kills import differences, make_lines  # noqa: E402

MODEL = ROOT / "tests" / "data" / "models" / "stories260K_hf"
NUM_ROWS = 300

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None,
    reason="needs the extra ray: pip install 'gpt-fast-serve[ray]'",
)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = Work(tmp_path)
    yield made
    made.kill()


class Work:
    """An input of rows, and processes that answer it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.input = folder, folder / "in.jsonl"
        self.process: subprocess.Popen[str] | None = None
        self.input.write_text("".join(line + "\n" for line in make_lines(NUM_ROWS, seed=3)), encoding="utf-8")

    def start(self, output: str, *more: str, model: Path = MODEL) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpt_fast", "batch", "--checkpoint", model, "--input", self.input]
        words = [*map(str, command), "--output", str(self.folder / output), "--dtype", "float32", "--json", *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        return self.process

    def finish(self, process: subprocess.Popen[str]) -> dict[str, int]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return dict(json.loads(out.splitlines()[-1]))

    def num_kept(self, output: str) -> int:
        part = self.folder / f"{output}.part"
        return part.read_bytes().count(b"\n") if part.exists() else 0

    def wait_for(self, output: str, num_rows: int) -> None:
        """Until the journal has so many rows, or the process has ended."""
        assert self.process is not None
        while self.num_kept(output) < num_rows and self.process.poll() is None:
            time.sleep(0.002)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.mark.slow
def test_killed_three_times_and_finished_once(work: Work) -> None:
    rng, kept = random.Random(5), []
    for _ in range(3):
        process = work.start("killed.jsonl")
        work.wait_for("killed.jsonl", work.num_kept("killed.jsonl") + rng.randint(1, NUM_ROWS // 5))
        work.kill()
        assert process.returncode == -signal.SIGKILL
        kept.append(work.num_kept("killed.jsonl"))
    assert 0 < kept[0] < kept[1] < kept[2] < NUM_ROWS
    assert not (work.folder / "killed.jsonl").exists()
    done = work.finish(work.start("killed.jsonl"))
    assert (done["known_before"], done["answered"]) == (kept[2], NUM_ROWS - kept[2])
    work.finish(work.start("whole.jsonl"))
    assert differences(work.input, work.folder / "killed.jsonl", work.folder / "whole.jsonl") == []


@pytest.mark.slow
@needs_ray
def test_ray_workers_and_the_driver_are_killed(work: Work) -> None:
    work.finish(work.start("whole.jsonl"))
    process = work.start("ray.jsonl", "--workers", "2")
    work.wait_for("ray.jsonl", 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = work.num_kept("ray.jsonl")
    process = work.start("ray.jsonl", "--workers", "2")
    work.wait_for("ray.jsonl", kept + 1)
    workers = ray_workers(process.pid)
    if workers:  # one that has ended by itself is no failure
        os.kill(workers[0], signal.SIGKILL)
    done = work.finish(process)
    assert done["known_before"] == kept > 0
    assert differences(work.input, work.folder / "ray.jsonl", work.folder / "whole.jsonl") == []


def ray_workers(driver: int) -> list[int]:
    """Process ids of the engines below ``driver``."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    found = [line.split(None, 2) for line in listed.splitlines()[1:]]
    below, size = {driver}, 0
    while size != len(below):
        size = len(below)
        below |= {int(pid) for pid, parent, _ in found if int(parent) in below}
    return [int(pid) for pid, _, args in found if int(pid) in below and "MapWorker" in args]


@pytest.mark.slow
@needs_ray
def test_a_worker_that_cannot_load_ends_the_run_with_its_reason(work: Work) -> None:
    process = work.start("bad.jsonl", "--workers", "2", "--max-seq-len", "1000000000")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "KV cache would need" in err
    assert not (work.folder / "bad.jsonl").exists()
