"""What a running server is known by: ``server.json`` in its run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpt_fast.serve.launch.ports import LOOPBACK
from gpt_fast.serve.launch.processes import is_running

MODEL = "gpt-fast"  # the model's name in the URLs, and of its archive


@dataclass(frozen=True)
class Server:
    """A running TorchServe. ``created`` is its process's start time: a pid alone may be someone else's by now."""

    pid: int
    created: float
    host: str
    port: int
    serves: str  # what was asked for, to tell whether a second start means the same
    tmp_dir: str

    @property
    def address(self) -> str:
        """The host and port that a client on this machine connects to."""
        return f"{LOOPBACK if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def management(self) -> str:
        """The host and port of the management API."""
        return f"{LOOPBACK}:{self.port + 1}"

    @property
    def url(self) -> str:
        """Of the model."""
        return f"http://{self.address}/predictions/{MODEL}"

    def is_alive(self) -> bool:
        """Whether its front end runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 2 and is_running(process)
        except psutil.Error:
            return False


def load_server(run_dir: Path) -> Server | None:
    """The server that was started from this run folder, if it still runs."""
    try:
        server = Server(**json.loads((run_dir / "server.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return server if server.is_alive() else None
