"""What ``gpt-fast serve`` prints to: stdout, whose reader may leave before the server does."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class _Lasting(io.BufferedWriter):
    """Once the pipe behind it has no reader, what is written goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self._leave_pipe()
            return len(data)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._leave_pipe()
            super().flush()

    def _leave_pipe(self) -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.fileno())


@contextlib.contextmanager
def lasting_stdout() -> Iterator[None]:
    """While this lasts, ``serve | head -1`` ends neither the command nor its server."""
    try:
        number = sys.stdout.fileno()
    except (OSError, AttributeError):  # somebody took it, and no pipe can break
        yield
        return
    sys.stdout.flush()
    raw = _Lasting(io.FileIO(number, "wb", closefd=False))
    text = io.TextIOWrapper(raw, sys.stdout.encoding, sys.stdout.errors, line_buffering=sys.stdout.isatty())
    with text, contextlib.redirect_stdout(text):
        yield
