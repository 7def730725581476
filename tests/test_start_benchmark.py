"""benchmarks/start.py: phases are disjoint and whole, no phase of a start is missing, and nothing slow is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import start
from starting.worker import CACHE, ELSE, Phases

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "models" / "stories260K_hf"
ALWAYS = {
    *start.FIXED, "modules without weights", "reading weights", "copying weights", "looking for NaN", "KV cache",
    "program of a step", "warm-up steps", "first token", ELSE,
}  # fmt: skip


class Clock:
    """Seconds and the system's seconds, as a test says."""

    def __init__(self) -> None:
        self.now = self.system = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.now, self.system

    def spend(self, seconds: float, system: float = 0.0) -> None:
        self.now, self.system = self.now + seconds, self.system + system


def test_a_phase_inside_another_one_is_not_counted_twice() -> None:
    clock = Clock()
    phases = Phases("interpreter", begun=-1.0, clock=clock)
    phases.switch(ELSE)
    with phases.timed("copying"):
        clock.spend(2)
        with phases.timed("reading"):
            clock.spend(4, system=3)
        clock.spend(8)
    clock.spend(16)
    phases.switch("first token")
    assert phases.seconds == {"interpreter": 1, ELSE: 16, "reading": 4, "copying": 10}
    assert phases.system == {"interpreter": 0, ELSE: 0, "reading": 3, "copying": 0}


def test_a_phase_ends_where_its_function_raises() -> None:
    clock = Clock()
    phases = Phases(ELSE, 0.0, clock)

    def fail(seconds: float) -> None:
        clock.spend(seconds)
        raise KeyError

    owner = SimpleNamespace(fail=fail)
    phases.wrap(owner, "fail", "failing")
    with pytest.raises(KeyError):
        owner.fail(2.0)
    clock.spend(1)
    phases.switch(ELSE)
    assert phases.seconds == {"failing": 2, ELSE: 1}


def test_arguments_choose_the_phase_and_the_bytes_are_counted() -> None:
    phases = Phases(ELSE, 0.0, Clock())
    owner = SimpleNamespace(pack=lambda kind, size: size // 2)
    phases.wrap(owner, "pack", lambda kind, size: f"packing {kind}", lambda packed, kind, size: size + packed)
    assert [owner.pack("int8", 8), owner.pack("int4", 4), owner.pack("int8", 2)] == [4, 2, 1]
    assert phases.num_bytes == {"packing int8": 15, "packing int4": 6}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"packing float32"}),
        ({"quantize": "int8"}, {"rounding to int8", "packing int8"}),
        ({"quantize": "int4"}, {"rounding to int4", "packing int4"}),
    ],
)
def test_the_phases_of_a_start_are_all_there_and_add_up(options: dict[str, Any], more: set[str]) -> None:
    found = start.start(TINY, options, threads=1)
    assert ALWAYS | more <= found["seconds"].keys()
    assert min(found["seconds"].values()) >= 0
    assert sum(found["seconds"].values()) == pytest.approx(found["total_s"], abs=0.05), "some time is in no phase"
    assert found["seconds"]["import torch"] > found["seconds"]["first token"]
    stored = (TINY / "model.safetensors").stat().st_size
    assert 0.9 * stored < found["bytes"]["reading weights"] <= stored, "every weight is read, and once"


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        start.start(tmp_path / "nothing", {}, threads=1)


def test_medians_limits_and_the_whole_shape() -> None:
    limits = start.Limits(interpreter_s=0.5, torch_s=1.0, reading=100.0, memory=10.0)
    measured = start.Measured()
    for reading in (3.0, 9.0, 4.0):
        seconds = {"interpreter": 1.0, ELSE: 1.0, CACHE: 1.0, "reading weights": reading, "packing int8": 5.0}
        run = {"seconds": seconds, "system": {}, "bytes": {"reading weights": 200, "packing int8": 30}}
        measured.add(run | {"again_s": 0.1, "from_disk": None, "total_s": sum(seconds.values())}, limits)
    found = measured.summary(growth=2.0)
    phases = found["phases"]
    assert list(phases)[-1] == ELSE
    assert phases["reading weights"] == {"s": 4, "system_s": 0, "limit_s": 2, "whole_s": 8}
    assert phases["packing int8"]["limit_s"] == 3
    assert phases["interpreter"] == {"s": 1, "system_s": 0, "limit_s": 0.5, "whole_s": 1}
    assert "limit_s" not in phases[ELSE]
    assert found["total_s"] == 12
    lines = start.table(found).splitlines()
    assert "not measured" in lines[0]
    assert lines[-1].split() == ["total", "12.000", "21.000"]
    assert "not measured" not in start.table(measured.summary())


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(TINY), "--modes", "int8", "--caches", "cold", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["start.py", *arguments])
    start.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rounding to int8") for line in lines)
    (kind,) = json.loads(lines[-1])["kinds"]
    assert (kind["mode"], kind["cache"], len(kind["starts_s"])) == ("int8", "cold", 1)
    assert kind["phases"]["import torch"]["limit_s"] > 0
    assert kind["total_s"] == pytest.approx(kind["starts_s"][0], abs=0.05)


def test_a_start_imports_no_sympy() -> None:
    """Half a second, which some of torch's functions on meta tensors take."""
    code = f"import sys, gpt_fast; gpt_fast.LLM({str(TINY)!r}, quantize='int8', compile=False).close()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('sympy' in sys.modules)"], cwd=ROOT, check=False, timeout=120
    )
    assert done.returncode == 0
