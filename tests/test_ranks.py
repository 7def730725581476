"""Ranks that share a model compute what one process computes, bit for bit on the C++ kernels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "model_store" / "demo" / "target"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def ranks(checkpoint: Path, out: Path, count: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``count`` processes of rank.py."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "rank.py"), str(checkpoint), str(out), *arguments]
    started = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def logits(checkpoint: Path, out: Path, count: int, *arguments: str) -> list[Tensor]:
    """What each of ``count`` ranks computes."""
    with ranks(checkpoint, out, count, *arguments) as started:
        assert [process.wait(120) for process in started] == [0] * count
    return [torch.load(f"{out}.{rank}") for rank in range(count)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", ["shared", "gloo"])
@pytest.mark.parametrize("how", [["--dtype", "float32"], ["--dtype", "bfloat16"], ["--quantize", "int8"]], ids=str)
def test_ranks_compute_the_same_bits_as_one_process(how: list[str], way: str, count: int, tmp_path: Path) -> None:
    (alone,) = logits(TARGET, tmp_path / "one", 1, *how)
    assert alone.std() > 0.1
    for found in logits(TARGET, tmp_path / "several", count, *how, "--way", way):
        assert torch.equal(found, alone)


def test_torchrun_generates_what_one_process_does() -> None:
    command = ["gpt_fast", "generate", "--checkpoint", str(TARGET), "--prompt", "Once upon a time", "--threads", "1"]
    command += ["--max-new-tokens", "30", "--temperature", "0.8", "--seed", "5"]
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options: dict[str, Any] = {"check": True, "capture_output": True, "timeout": 120, "cwd": ROOT}
    one = subprocess.run([sys.executable, "-m", *command], **options)
    two = subprocess.run([sys.executable, "-m", *several, *command], **options)
    assert two.stdout == one.stdout != b""


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_is_killed_the_others_end(victim: int, tmp_path: Path) -> None:
    with ranks(TARGET, tmp_path / "out", 2, "--stay") as started:
        while not all(Path(f"{tmp_path / 'out'}.{rank}").exists() for rank in range(2)):
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
        started[victim].kill()
        assert started[1 - victim].wait(10) == 1
