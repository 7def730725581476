"""A connection outlives the process that holds it open by a moment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from gpt_fast.serve import last_words
from gpt_fast.serve.last_words import HELD_S, hold_open

HANG_S = 60.0
HOLDER = """
import socket, sys, time
from gpt_fast.serve.last_words import hold_open
holder = hold_open(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
print(holder.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, HELD_S), (signal.SIGTERM, HELD_S), (signal.SIGKILL, 1)]
)
def test_a_connection_ends_a_moment_after_its_process(number: signal.Signals, seconds: float) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(HANG_S)
    command = [sys.executable, "-c", HOLDER, str(theirs.fileno()), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        assert process.stdout is not None
        holder = int(process.stdout.readline())
        assert os.path.exists(f"/proc/{holder}")
        before = time.monotonic()
        os.kill(process.pid, number)
        assert process.stdout.read() == b"", "the holder keeps no other file, which somebody may read to its end"
        assert ours.recv(1) == b""
        assert time.monotonic() - before >= seconds
    ours.close()


@pytest.mark.parametrize("found", [None, "/nowhere/sh"])
def test_without_a_shell_nothing_is_held_and_nothing_fails(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words.shutil, "which", lambda _: found)
    with socket.socket() as connection:
        assert hold_open(connection) is None
