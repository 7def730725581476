"""What a container runs: packs the model's folder for TorchServe, starts TorchServe, and ends it in good order.

TorchServe 0.12 does not wait for requests that run when it is asked to end, and its launcher does not pass signals on.
So this process stays, as number 1 of the container. SIGTERM, which Kubernetes sends before it kills, means: take new
requests for five seconds more, refuse them from then on, and end when nothing runs. A second one means: end now.

Nothing but the folder GPT_FAST_RUN is written. Environment, all with a default:
    GPT_FAST_MODEL    the model's folder: config.json, weights, tokenizer (/mnt/models, where KServe puts it)
    GPT_FAST_CONFIG   the model_config.yaml to serve it with (the one beside handler.py)
    GPT_FAST_RUN      the folder for the archive, logs, sockets and caches (/run/gpt-fast)
    GPT_FAST_DRAIN_S  seconds that running requests may take after SIGTERM (60)

    python scripts/container.py            serve
    python scripts/container.py healthy    exit status 0 if the model is ready
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt_fast.serve import closing
from gpt_fast.serve.archive import build_archive
from gpt_fast.serve.launch.draining import Place, drain, health

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpt-fast"
# The lines of config.properties by which only this machine reaches the inference and the management port.
LOOPBACK = re.compile(r"^inference_address=http://(127\.0\.0\.1:(\d+))$", re.MULTILINE)
MANAGEMENT = re.compile(r"^management_address=http://(127\.0\.0\.1:\d+)$", re.MULTILINE)
# After SIGTERM requests still come for a while: Kubernetes takes the pod out of its lists at the same time.
LINGER_S = 5.0


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    model: Path
    config: Path
    run: Path
    drain_s: float

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Raises ValueError for a number that is none."""
        drain = environment.get("GPT_FAST_DRAIN_S", "60")
        if not re.fullmatch(r"\d+", drain):
            raise ValueError(f"GPT_FAST_DRAIN_S must be a whole number of seconds, not {drain!r}")
        return cls(
            Path(environment.get("GPT_FAST_MODEL", "/mnt/models")),
            Path(environment.get("GPT_FAST_CONFIG", ROOT / "model_config.yaml")),
            Path(environment.get("GPT_FAST_RUN", "/run/gpt-fast")),
            float(drain),
        )


def open_inference(properties: str) -> str:
    """The text of config.properties, for a container: the inference port is open to the network, without tokens.

    The management and metrics ports stay on loopback. TorchServe draws its tokens anew at each start, others in each
    container, and lets them end after an hour: behind a load balancer nobody can use them, nor can a probe.
    """
    opened, count = LOOPBACK.subn(r"inference_address=http://0.0.0.0:\2", properties)
    if count != 1:
        raise ValueError(f"config.properties needs one line like {LOOPBACK.pattern}, and has {count}")
    return opened + "disable_token_authorization=true\n"


def prepare(settings: Settings) -> list[str]:
    """Write what TorchServe needs into the run folder. Returns its command line."""
    store = settings.run / "model_store"
    for folder in (store, settings.run / "tmp", settings.run / "cache"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    build_archive(
        settings.model,
        name=NAME,
        config=settings.config,
        handler=ROOT / "handler.py",
        output=store,
        by_reference=True,
        say=print,
    )
    properties = settings.run / "config.properties"
    properties.write_text(open_inference((ROOT / "config.properties").read_text()))
    command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
    command += ["--ts-config", str(properties), "--log-config", str(ROOT / "configs" / "log4j2.xml")]
    return [*command, "--model-store", str(store), "--models", f"{NAME}={NAME}"]


def environment_of(settings: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """That of TorchServe: all that it and its workers write goes to the run folder."""
    run = settings.run
    ours = {"HOME": run, "TMPDIR": run / "tmp", "TEMP": run / "tmp", "GPT_FAST_CACHE": run / "cache"}
    logs = {"LOG_LOCATION": run / "logs", "METRICS_LOCATION": run / "logs"}
    ours[closing.VARIABLE] = run / "tmp" / closing.FILE
    # Between two steps the worker's threads leave the cores to TorchServe instead of waiting on them.
    return {"OMP_WAIT_POLICY": "passive", **given, **{name: str(path) for name, path in (ours | logs).items()}}


def place(settings: Settings) -> Place:
    """Where this container's TorchServe is."""
    properties = (ROOT / "config.properties").read_text()
    inference, management = (pattern.findall(properties)[0] for pattern in (LOOPBACK, MANAGEMENT))
    return Place(inference[0], management, NAME, settings.run / "tmp" / closing.FILE)


def is_ready(settings: Settings) -> bool:
    """Whether the model answers."""
    try:
        return bool(health(place(settings)))
    except (OSError, http.client.HTTPException, ValueError):
        return False


def end(launcher: int, pid_file: Path) -> None:
    """Ask TorchServe's Java to end, whose launcher has the process id ``launcher``; it ends its workers."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        pid = launcher  # there is no Java yet
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def wait_for(pid: int) -> None:
    """Until the child ``pid`` ends. Other children, which are orphans where this is process 1, are reaped meanwhile."""
    while os.wait()[0] != pid:
        pass


def serve(settings: Settings) -> int:
    """Returns the exit status: 0 after a signal, 1 when TorchServe ended by itself."""
    asked, at_once = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        (at_once if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    shutil.rmtree(settings.run / "tmp", ignore_errors=True)  # sockets of a container that was killed
    command = prepare(settings)
    environment = environment_of(settings, os.environ)
    # In a new session, so that Ctrl-C reaches this process and not that one.
    launcher = subprocess.Popen(command, cwd=settings.run, env=environment, start_new_session=True)

    def end_when_asked() -> None:
        asked.wait()
        print(f"asked to end: requests that run have {settings.drain_s:.0f} s", flush=True)
        drain(place(settings), settings.drain_s, at_once, LINGER_S)
        end(launcher.pid, settings.run / "tmp" / ".model_server.pid")

    threading.Thread(target=end_when_asked, daemon=True).start()
    wait_for(launcher.pid)
    return 0 if asked.is_set() else 1


def main() -> int:
    """Serve, or say whether the model is ready; returns the exit status."""
    if sys.argv[1:] == ["healthy"]:
        return 0 if is_ready(Settings.read(os.environ)) else 1
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return serve(Settings.read(os.environ))
    except (ValueError, OSError) as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
