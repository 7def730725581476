"""Waiting for what nobody tells a test of, and a port that nobody has."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

HANG_S = 300.0  # whoever waits longer waits for ever


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
