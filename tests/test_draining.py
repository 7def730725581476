"""A server is closed, and its requests come to their end: draining.py against a fake of both ports."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpt_fast.errors import RequestError
from gpt_fast.serve import closing

pytest.importorskip("psutil", reason="psutil comes with the extra serve")
from gpt_fast.serve.launch import draining

LONG_S = 3600.0
IDLE = {"open": 0, "running": 0, "waiting": 0}
READY, LOADING = {"status": "READY"}, {"status": "UNLOADING"}


class Model:
    """Both ports of a server, on one. It says ``states`` about itself one after the other, the last one for ever; None
    is an error's status."""

    def __init__(self, folder: Path) -> None:
        self.states: list[dict[str, int] | None] = [IDLE]
        self.workers = [READY]
        self.was_closed: list[bool] = []  # when it was asked
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer: Any = [{"workers": model.workers}]
                if self.path == "/predictions/m/1.0/health":
                    model.was_closed.append(model.place.closed.exists())
                    answer = model.states.pop(0) if len(model.states) > 1 else model.states[0]
                self.send_response(200 if answer else 503)
                self.end_headers()
                self.wfile.write(json.dumps(answer or {"code": 503}).encode())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        address = f"127.0.0.1:{self.server.server_address[1]}"
        self.place = draining.Place(address, address, "m", folder / "closed")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(draining, "POLL_S", 0.001)
    made = Model(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("kind", ["open", "running", "waiting"])
def test_it_waits_until_nothing_runs_twice_in_a_row(kind: str, model: Model) -> None:
    busy = IDLE | {kind: 1}
    model.states = [busy, None, busy, IDLE, busy, IDLE, IDLE, busy]
    assert draining.drain(model.place, LONG_S)
    assert model.states == [busy], "it asked once more or less than it had to"
    assert all(model.was_closed), "a request could begin after it was last asked"


@pytest.mark.parametrize(
    ("state", "workers"),
    [(IDLE | {"running": 1}, [READY]), (None, [READY]), (IDLE, [READY, READY])],
    ids=["it runs", "it says nothing", "one of several workers"],
)
def test_it_waits_no_longer_than_it_may(state: Any, workers: list[Any], model: Model) -> None:
    model.states, model.workers = [state], workers
    assert not draining.drain(model.place, 0.05)


def test_without_time_nothing_is_waited_for(model: Model) -> None:
    assert not draining.drain(model.place, 0.0)


def test_without_a_ready_worker_nothing_can_run(model: Model) -> None:
    model.workers = [LOADING]
    assert draining.drain(model.place, LONG_S)
    assert not model.was_closed, "the question would wait until the model is loaded"


def test_where_nobody_listens_nothing_runs(model: Model) -> None:
    model.server.shutdown()
    model.server.server_close()
    assert draining.drain(model.place, LONG_S)


def test_a_server_that_somebody_else_has_stopped_is_not_waited_for(model: Model, tmp_path: Path) -> None:
    place = draining.Place(model.place.inference, model.place.management, "m", tmp_path / "gone" / "closed")
    assert draining.drain(place, LONG_S)


@pytest.mark.parametrize("linger_s", [0.0, LONG_S])
def test_it_ends_at_once_when_it_is_told_to(linger_s: float, model: Model) -> None:
    model.states = [IDLE | {"running": 1}]
    at_once = threading.Event()
    threading.Timer(0.05, at_once.set).start()
    assert not draining.drain(model.place, LONG_S, at_once, linger_s)
    assert model.place.closed.exists() == (linger_s == 0)


def test_requests_that_come_late_are_taken_for_a_while(model: Model) -> None:
    started = time.monotonic()
    assert draining.drain(model.place, LONG_S, linger_s=0.1)
    assert time.monotonic() - started >= 0.1


def test_a_server_closes_when_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(closing.VARIABLE, raising=False)
    assert not closing.is_closed()
    monkeypatch.setenv(closing.VARIABLE, str(tmp_path / "closed"))
    closing.refuse_if_closed()
    (tmp_path / "closed").touch()
    with pytest.raises(RequestError, match="about to stop") as refused:
        closing.refuse_if_closed()
    assert (refused.value.status, refused.value.code) == (503, "stopping")
    assert refused.value.retry_after_s
