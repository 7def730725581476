"""Starts and stops one TorchServe.

Not a supervisor: one server per run folder, known by ``server.json`` there. What TorchServe keeps in shared places
(its pid file, its sockets, its logs) goes to folders of this server alone, so that several live side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import psutil

from gpt_fast.errors import ServerError
from gpt_fast.serve import closing
from gpt_fast.serve.launch.java import Java
from gpt_fast.serve.launch.ports import derive_config
from gpt_fast.serve.launch.processes import (
    end_marked,
    end_processes,
    marked_processes,
    process_mark,
    still_running,
)
from gpt_fast.serve.launch.record import MODEL, Server, load_server
from gpt_fast.serve.launch.watching import last_lines, wait_until_ready
from gpt_fast.serve.repository import ROOT

STORE = "model_store"
LONGEST = 103 - len("/.ts.sock.65535")  # bytes of a socket's path on macOS; Linux takes four more
# In the environment of every process of a server: its own temp folder, and the run folder it was started for.
MARK = "GPT_FAST_SERVER"
RUN_MARK = "GPT_FAST_SERVER_RUN_DIR"


def start(run_dir: Path, java: Java, host: str, port: int, serves: str, timeout_s: float) -> Server:
    """Start TorchServe with the archive in ``run_dir`` and wait until the model answers, for ``timeout_s`` at most.

    When that fails, ends what it started and raises ServerError, which says so."""
    log = run_dir / "server.log"
    tmp_dir = new_tmp_dir()
    try:
        process = launch(run_dir, java, derive_config((ROOT / "config.properties").read_text(), port, host), tmp_dir)
        server = Server(process.pid, process.create_time(), host, port, serves, tmp_dir)
        (run_dir / "server.json").write_text(json.dumps(asdict(server)))
        wait_until_ready(server, log, timeout_s)
    except BaseException as error:
        left = end_marked(MARK, tmp_dir, grace_s=5)
        if not left:
            forget(run_dir, {tmp_dir})
        outcome = still_running(left) or "Nothing is left running."
        if isinstance(error, ServerError):
            raise ServerError(f"{error}\n{outcome}") from None
        print(f"\n{outcome}", file=sys.stderr)
        raise
    return server


def new_tmp_dir() -> str:
    """A new folder for a server's temporary files, with a short path: TorchServe makes its Unix sockets there, and a
    worker whose socket's path is too long ends without a word."""
    folder = tempfile.mkdtemp(prefix="gpt-fast-")
    if len(os.fsencode(folder)) > LONGEST:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="gpt-fast-", dir="/tmp")
    return folder


def launch(run_dir: Path, java: Java, properties: str, tmp_dir: str) -> psutil.Process:
    """Run TorchServe's launcher, which starts Java in the background and writes its pid into ``tmp_dir``.

    ``properties``: the text of config.properties. Raises ServerError."""
    config, log_config, log = Path(tmp_dir, "config.properties"), Path(tmp_dir, "log4j2.xml"), run_dir / "server.log"
    config.write_text(properties)
    # Java gets its path as a URL that is not encoded: one with a space in it would not be found.
    shutil.copyfile(ROOT / "configs" / "log4j2.xml", log_config)
    command = [sys.executable, "-m", "ts.model_server", "--start", "--ncs", "--disable-token-auth"]
    command += ["--ts-config", str(config), "--log-config", str(log_config)]
    command += ["--model-store", str(run_dir / STORE), "--models", f"{MODEL}={MODEL}"]
    log.write_bytes(b"")
    with log.open("ab") as output:  # who truncates it finds what comes next at its beginning
        subprocess.run(
            command,
            cwd=run_dir,
            env=environment_of(run_dir, java, tmp_dir),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in this terminal goes to this process alone
            timeout=60,
            check=False,
        )
    try:
        return psutil.Process(int((Path(tmp_dir) / ".model_server.pid").read_text()))
    except (OSError, ValueError, psutil.Error) as error:
        raise ServerError("TorchServe did not start:\n" + last_lines(log)) from error


def environment_of(run_dir: Path, java: Java, tmp_dir: str) -> dict[str, str]:
    """Of the processes of a server: this one's, with what is theirs alone."""
    # JAVA_HOME may lead to a Java that is too old; TS_CONFIG_FILE would replace the configuration.
    given = {key: value for key, value in os.environ.items() if key not in ("JAVA_HOME", "TS_CONFIG_FILE")}
    if java.home is not None:
        given["JAVA_HOME"] = str(java.home)
    if given.get("LC_ALL") in ("C", "POSIX"):  # in which Java opens no file whose path has more than ASCII
        given["LC_ALL"] = "C.UTF-8"
    return {
        # Between two steps the worker's threads leave the cores to TorchServe instead of waiting on them.
        "OMP_WAIT_POLICY": "passive",
        **given,
        # torchrun, which TorchServe starts ranks with, lies beside this Python.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{given.get('PATH', os.defpath)}",
        MARK: tmp_dir,
        closing.VARIABLE: str(Path(tmp_dir, closing.FILE)),
        RUN_MARK: str(run_dir),
        "TMPDIR": tmp_dir,  # where the launcher keeps its pid file
        "TEMP": tmp_dir,  # Java's temp folder: sockets, unpacked archives
        "LOG_LOCATION": str(run_dir / "logs"),
        "METRICS_LOCATION": str(run_dir / "logs"),
    }


def stop(run_dir: Path) -> str:
    """Stop Java, its workers and what they started; says what happened, nothing where nothing was there.

    Looks for the marks of its processes and not only at server.json, which a failed start or somebody may have removed.
    Raises ServerError when something survives."""
    server, record = load_server(run_dir), run_dir / "server.json"
    was_recorded = record.exists()
    found = marked_processes(RUN_MARK, str(run_dir))
    tmp_dirs = {process_mark(process, MARK) for process in found}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        tmp_dirs.add(json.loads(record.read_text())["tmp_dir"])
    tmp_dirs.discard("")
    if server is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            end_processes([psutil.Process(server.pid)], grace_s=20)  # Java ends its workers in good order
    left = end_marked(RUN_MARK, str(run_dir), grace_s=20)
    for tmp_dir in tmp_dirs:  # a run folder that was moved is marked under its old name
        left += end_marked(MARK, tmp_dir, grace_s=20)
    if left:
        raise ServerError(still_running(left))
    forget(run_dir, tmp_dirs)
    if server is not None:
        return "Stopped."
    if found:
        return f"Stopped what was left of a server: {len(found)} processes."
    return "It was not running any more." if was_recorded else ""


def run_dir_on(port: int) -> Path | None:
    """The run folder of the server on ``port``, wherever it is, if this user started it by ``gpt-fast serve``."""
    marks = {process_mark(process, RUN_MARK) for process in psutil.process_iter()} - {""}
    servers = {Path(mark): load_server(Path(mark)) for mark in marks}
    return next((folder for folder, server in servers.items() if server and server.port == port), None)


def forget(run_dir: Path, tmp_dirs: set[str]) -> None:
    """Remove what a server was known by, its temp folder too. The logs stay."""
    (run_dir / "server.json").unlink(missing_ok=True)
    for tmp_dir in tmp_dirs:
        if Path(tmp_dir).name.startswith("gpt-fast-"):
            shutil.rmtree(tmp_dir, ignore_errors=True)
