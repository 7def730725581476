"""benchmarks/compare_trees.py: this checkout beside itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import needs_cpp

ROOT = Path(__file__).resolve().parent.parent


def compared(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_trees.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@needs_cpp
@pytest.mark.parametrize("only", [(), ("--attention",)])
def test_each_tree_does_each_piece_of_work(only: tuple[str, ...]) -> None:
    trees = [str(ROOT), f"{ROOT}:int8"]
    work = ("--work", "1x1x20,2x3x40", "--rounds", "2", "--threads", "1", "--shape", "llama-68m", "--kind", "int8")
    done = compared(*trees, *work, *only)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kind"] == ("attention" if only else "int8")
    assert [(row["work"], row["tree"]) for row in result["rows"]] == [
        (work, tree) for work in ("1x1x20", "2x3x40") for tree in trees
    ]
    assert all(0 < row["least_ms"] <= row["ms"] for row in result["rows"])
    assert [row["ratio"] for row in result["rows"]][::2] == [1.0, 1.0]
    assert len(done.stdout.splitlines()) == 5


def test_a_folder_without_the_project_is_named(tmp_path: Path) -> None:
    done = compared(str(tmp_path))
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
