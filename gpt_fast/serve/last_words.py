"""Time for TorchServe to hear what a worker said last.

TorchServe 0.12 tells clients "Worker died." only if the worker's connection ends while it waits for an answer. Where it
ends a moment earlier, while TorchServe still hands out the last answer (``WorkerThread.run``, where ``req`` is null),
the requests of a running batch are forgotten, and their clients wait for ever.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess

log = logging.getLogger(__name__)

HELD_S = 0.3  # to hand out one answer takes a few milliseconds; requests that come meanwhile get an error
# By a rank that follows. TorchServe takes the end of any rank's connection for the worker's; until then rank 0, which
# answers for a moment longer, has said its last words and fallen silent. torchrun must not have started ranks anew.
FOLLOWER_S = 0.6


def hold_open(connection: socket.socket, seconds: float = HELD_S) -> subprocess.Popen[bytes] | None:
    """Let ``connection`` end ``seconds`` after this process does, however that ends. None: no shell can be started, and
    it ends at once.

    A shell holds it as well, and waits for the end of a pipe from here."""
    shell = shutil.which("sh")
    if shell is None:
        return None
    # Without this process's variables: those of a rank would make it look like one.
    try:
        return subprocess.Popen(
            [shell, "-c", f"read -r _; exec sleep {seconds:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
        )
    except OSError as why:  # no more processes are allowed: no reason to fail a request
        log.warning("warning: clients may wait for ever if this worker is killed: %s", why)
        return None
