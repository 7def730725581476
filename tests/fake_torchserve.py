"""Stands for TorchServe's package ``ts.model_server``: as a launcher, a front end and a worker.

The front end starts a worker again when one ends, also for a while after it was asked to end, and then leaves it alone:
what the real one does on a bad day. Each process notes its pid in $FAKE_PIDS. $FAKE_STATE: "ready" answers on the
management port, with "late" in it once the file $FAKE_PIDS.loaded is there, with "busy" in it a request runs until the
file $FAKE_PIDS.done is there, "broken" says in the log that the model cannot be loaded, "loading" says nothing; with
"stubborn" in it the front end ignores the request to end.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

LINGERS_S = 0.5


def again(role: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Another process of this module."""
    return subprocess.Popen([sys.executable, "-m", "ts.model_server", role, *arguments], start_new_session=True)


def note() -> None:
    with open(os.environ["FAKE_PIDS"], "a") as file:
        file.write(f"{os.getpid()}\n")


class Ready(http.server.BaseHTTPRequestHandler):
    """A model whose worker is ready: the management API, and the model's health."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        done = Path(os.environ["FAKE_PIDS"] + ".done").exists()
        health = {"open": 0 if done else 1, "running": 0, "waiting": 0}
        answer = health if self.path.endswith("/health") else [{"workers": [{"status": "READY"}]}]
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


def front_end(port: int) -> None:
    state, ends_at = os.environ["FAKE_STATE"], [float("inf")]

    def asked_to_end(number: int, frame: FrameType | None) -> None:
        if "stubborn" not in state:
            ends_at[0] = time.monotonic() + LINGERS_S

    signal.signal(signal.SIGTERM, asked_to_end)
    note()
    worker = again("worker")
    while len(Path(os.environ["FAKE_PIDS"]).read_text().split()) < 2:
        time.sleep(0.01)
    while "late" in state and not Path(os.environ["FAKE_PIDS"] + ".loaded").exists():
        time.sleep(0.01)
    if "ready" in state:
        for one in (port, port - 1)[: 1 + ("busy" in state)]:
            server = http.server.HTTPServer(("127.0.0.1", one), Ready)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    if "broken" in state:
        print("Load model failed: m", flush=True)
    while time.monotonic() < ends_at[0]:
        if worker.poll() is not None:
            worker = again("worker")
        time.sleep(0.01)
    os._exit(0)


def launch(arguments: list[str]) -> None:
    config = Path(arguments[arguments.index("--ts-config") + 1]).read_text()
    found = re.search(r"management_address=.*:(\d+)", config)
    assert found
    process = again("front end", found[1])
    Path(os.environ["TMPDIR"], ".model_server.pid").write_text(str(process.pid))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        note()
        time.sleep(300)
    elif sys.argv[1] == "front end":
        front_end(int(sys.argv[2]))
    else:
        launch(sys.argv)
