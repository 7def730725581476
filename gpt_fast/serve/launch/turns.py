"""One start at a time in a run folder. Two at once would end each other's servers and mix up their files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(run_dir: Path) -> Iterator[None]:
    """While this lasts, no other command starts a server in ``run_dir``. Waits for one that does so."""
    folder = os.open(run_dir, os.O_RDONLY)  # no program that is started inherits it
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another command is starting a server there: waiting for it", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
