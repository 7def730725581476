"""Ranks that share a model compute what one process computes, bit for bit on the C++ kernels."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank import HOW, logits
from torch import Tensor
from waiting import free_port

from gpt_fast import cli
from gpt_fast.engine.following import Leader, follow
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import RankError
from gpt_fast.kernels.cpu.library import rounded_together
from gpt_fast.parallel.ranks import Ranks

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "model_store" / "demo" / "target"


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


def assert_ranks_agree(found: Tensor, alone: Tensor, integers: bool) -> None:
    """Logits of a rank and of one process, for a small model: the same bits.

    Where blocks of activations are long (tiles), a rank's share of a small model is not a whole number of them: then
    products with integers round them otherwise, and as well.
    """
    assert alone.std() > 0.1
    if integers and rounded_together() > 32:
        assert (found - alone).std() < 0.2 * alone.std()
    else:
        assert torch.equal(found, alone)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_the_same_bits_as_one_process(count: int, tmp_path: Path) -> None:
    """In float32, bfloat16, int8 and int4, by shared memory and by gloo."""
    with ranks(TARGET, tmp_path / "out", count) as started:
        assert [process.wait(180) for process in started] == [0] * count
    alone = {how: logits(TARGET, how) for how in HOW}
    for rank in range(count):
        for (how, way), found in torch.load(f"{tmp_path / 'out'}.{rank}").items():
            print(rank, how, way)
            assert_ranks_agree(found, alone[how], how.startswith("int"))


def test_torchrun_generates_what_one_process_does() -> None:
    """With two ranks in one group of processes, and with one in each of two, as on two machines."""
    command = ["gpt_fast", "generate", "--checkpoint", str(TARGET), "--prompt", "Once upon a time", "--threads", "1"]
    command += ["--max-new-tokens", "30", "--temperature", "0.8", "--seed", "5"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "cwd": ROOT}
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    machine = [*torchrun, "--nnodes", "2", "--nproc-per-node", "1", *meeting, "-m", *command]
    started = [
        subprocess.Popen(each, **options)
        for each in (
            [sys.executable, "-m", *command],
            [*torchrun, "--standalone", "--nproc-per-node", "2", "-m", *command],
            machine,
            machine,
        )
    ]
    alone, two, *machines = (process.communicate(timeout=240)[0] for process in started)
    assert two == alone != b""
    assert sorted(machines) == [b"", alone]
    assert not any(process.returncode for process in started)


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--perplexity", str(ROOT / "README.md"), "--max-tokens", "300", "--context", "64"],
        ["bench", "--prompt-tokens", "8", "--new-tokens", "8", "--repeats", "1", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_other_commands_run_under_torchrun(command: list[str]) -> None:
    command = ["gpt_fast", command[0], "--checkpoint", str(TARGET), "--threads", "1", *command[1:]]
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    two = subprocess.run([sys.executable, "-m", *ranks, *command], cwd=ROOT, stdout=subprocess.PIPE, timeout=240)
    assert two.returncode == 0
    if command[1] == "bench":
        assert json.loads(two.stdout.splitlines()[-1])["results"][0]["decode_tokens_per_second"] > 0
    else:
        one = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, timeout=240)
        assert two.stdout == one.stdout != b""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_when_a_rank_is_lost_the_others_end(number: int, victim: int, tmp_path: Path) -> None:
    with ranks(TARGET, tmp_path / "out", 2, "--stay") as started:
        while not all(Path(f"{tmp_path / 'out'}.{rank}").exists() for rank in range(2)):
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
        started[victim].send_signal(number)
        assert started[1 - victim].wait(60) == 1


def test_a_rank_that_waits_for_the_others_ends_with_who_started_it(tmp_path: Path) -> None:
    parent = "import subprocess, sys; rank = subprocess.Popen(sys.argv[1:]); print(rank.pid, flush=True); rank.wait()"
    command = [sys.executable, str(ROOT / "tests" / "rank.py"), str(TARGET), str(tmp_path / "out")]
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(60)
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        env |= {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
        started = subprocess.Popen([sys.executable, "-c", parent, *command], env=env, stdout=subprocess.PIPE)
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        try:
            with store.accept()[0]:  # and it gets no answer
                started.kill()
                started.communicate(timeout=20)  # until the rank ends, which has the pipe as well
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_whose_torchrun_has_ended_before_it_began_ends(tmp_path: Path) -> None:
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    env |= {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(ROOT / "tests" / "rank.py"), str(TARGET), str(tmp_path / "out")]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert b"torchrun has ended" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--draft", "lookup"],
        ["generate", "--draft", str(TARGET.parent / "draft"), "--method", "chen", "--prompt", "Once"],
        ["batch", "--input", str(ROOT / "README.md"), "--output", os.devnull],
    ],
    ids=lambda command: command[0],
)
def test_what_ranks_do_not_do_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([command[0], "--checkpoint", str(TARGET), *command[1:]]) == 1
    assert "start one process" in capsys.readouterr().err


MOST = 40


class Told:
    """Ranks of which one tells what the other hears, at most ``MOST`` numbers."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []

    def tell(self, numbers: list[int]) -> None:
        if len(numbers) > MOST:
            raise RankError("too long")
        self.messages.append(list(numbers))

    def hear(self) -> list[int]:
        return self.messages.pop(0)


class Recorder:
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)


PLANS = [
    StepPlan((SequencePlan(0, (5, 6, 7), 0, 0, (1, 2), 1, 3), SequencePlan(3, (8,), 41, 0, (), 1, 42))),
    StepPlan((SequencePlan(0, (9,), 3, 0, (), 1, 4),)),
]


def test_more_ranks_than_can_add_up_are_refused() -> None:
    with pytest.raises(RankError, match="at most 64"):
        Ranks(SimpleNamespace(rank=0, count=65))  # type: ignore[arg-type]


def test_a_follower_runs_what_rank_0_tells_and_notices_what_it_missed() -> None:
    told: Any = Told()
    leader, heard = Leader(told), Recorder()
    for plan in PLANS:
        leader.tell(plan)
    leader.end()
    missing: Any = Told()
    missing.messages = told.messages[1:]
    follow(heard, told)  # type: ignore[arg-type]
    assert heard.plans == PLANS
    with pytest.raises(RankError, match="digest"):
        follow(Recorder(), missing)  # type: ignore[arg-type]


def test_a_plan_that_is_too_long_to_be_told_is_not_missed() -> None:
    """It is computed in halves."""
    told: Any = Told()
    leader, heard = Leader(told), Recorder()
    with pytest.raises(RankError, match="too long"):
        leader.tell(StepPlan((SequencePlan(0, (5,) * MOST, 0, 0, (1, 2, 3), 1, MOST),)))
    for plan in PLANS:
        leader.tell(plan)
    leader.end()
    follow(heard, told)  # type: ignore[arg-type]
    assert heard.plans == PLANS
