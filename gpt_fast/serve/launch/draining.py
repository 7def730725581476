"""Lets a TorchServe finish the requests that run before it is stopped.

TorchServe 0.12 cuts every answer off when it is asked to end. So it is closed first (closing.py), and then watched
until nothing runs.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.serve.closing import FILE
from gpt_fast.serve.launch.asking import fetch, ready_workers
from gpt_fast.serve.launch.record import MODEL, Server

POLL_S = 0.25
LOOKS = 2  # so often in a row nothing runs: the last piece of an answer leaves TorchServe a moment after the worker
ANSWERS_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a server is. ``inference``, ``management``: host:port. ``model``: its name. ``closed``: the file that
    closes it, which VARIABLE of closing.py names to its workers."""

    inference: str
    management: str
    model: str
    closed: Path

    @classmethod
    def of(cls, server: Server) -> Place:
        """That of a server which ``gpt-fast serve`` has started."""
        return cls(server.address, server.management, MODEL, Path(server.tmp_dir, FILE))


def drain(place: Place, seconds: float, at_once: threading.Event | None = None, linger_s: float = 0.0) -> bool:
    """Close the server after ``linger_s``, and wait until nothing runs: for ``seconds`` at most, both together, or
    until ``at_once`` is set. Returns whether nothing runs any more."""
    deadline = time.monotonic() + seconds
    ended = (at_once or threading.Event()).wait
    if ended(min(linger_s, seconds)):
        return False
    try:
        place.closed.touch()
    except FileNotFoundError:
        return True  # somebody has stopped it meanwhile, and removed its folder
    looks = 0
    while looks < LOOKS:
        if ended(max(0.0, min(POLL_S, deadline - time.monotonic()))) or time.monotonic() >= deadline:
            return False
        looks = 0 if is_busy(place) else looks + 1
    return True


def is_busy(place: Place) -> bool:
    """Whether a request may be running or waiting."""
    try:
        ready = ready_workers(place.management, place.model)
        if ready != 1:  # without continuous batching there may be several, and one does not know of the others
            return ready > 1
        state = health(place)
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return True  # a worker without continuous batching says nothing beside the answer that it makes
    return bool(state["open"] + state["running"] + state["waiting"])


def health(place: Place) -> dict[str, Any]:
    """What the model says about itself. Raises OSError, HTTPException or ValueError while it loads or is not there."""
    return dict(json.loads(fetch(place.inference, f"/predictions/{place.model}/1.0/health", ANSWERS_S)))
