"""README.md: its tables are whole and its commands can be copied."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_fast.serve.protocol import native

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def tables(text: str) -> list[list[str]]:
    """Each table's lines, as Markdown sees them: a line that is no row ends a table."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_every_table_begins_with_a_head() -> None:
    """Rows after a blank line are shown as text."""
    for table in tables(README):
        assert re.fullmatch(r"[|: -]+", table[1]), f"no table begins with {table[0]!r}"


def test_the_table_of_fields_has_every_field_that_is_taken_and_no_other() -> None:
    (table,) = (t for t in tables(README) if t[0].startswith("| field"))
    named = {name for row in table[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(native.FIELDS) - {"n"}, "n is taken as 1 alone"


def commands(verb: str) -> list[str]:
    return [line for line in README.splitlines() if line.startswith(f"gpt-fast {verb} ")]


@pytest.mark.slow
def test_the_quantize_commands_run_as_they_stand(tmp_path: Path) -> None:
    for name in ("model_store", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    lines = commands("quantize") + commands("eval")
    assert len(lines) == 3
    for line in lines:
        command = [sys.executable, "-m", "gpt_fast", *shlex.split(line, comments=True)[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"demo-int8", "demo-gptq"}
