"""Ranks that share a model compute what one process computes, bit for bit on the C++ kernels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def logits(checkpoint: Path, out: Path, count: int, *arguments: str) -> list[Tensor]:
    """What each of ``count`` ranks computes."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "rank.py"), str(checkpoint), str(out), *arguments]
    started = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(count)]
    try:
        assert [process.wait(120) for process in started] == [0] * count
    finally:
        for process in started:
            process.kill()
    return [torch.load(f"{out}.{rank}") for rank in range(count)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", ["shared", "gloo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_compute_the_same_bits_as_one_process(dtype: str, way: str, count: int, tmp_path: Path) -> None:
    checkpoint = ROOT / "model_store" / "demo" / "target"
    (alone,) = logits(checkpoint, tmp_path / "one", 1, "--dtype", dtype)
    for found in logits(checkpoint, tmp_path / "several", count, "--dtype", dtype, "--way", way):
        assert torch.equal(found, alone)
