"""Starts, watches, asks and stops one TorchServe on loopback, for scripts/quickstart.sh.

Not a supervisor: one server per run directory, known by ``server.json`` there. What TorchServe keeps in shared places
(its pid file, its sockets, its logs) goes to folders of this server alone, so that several live side by side.

    python scripts/server.py --run-dir .run start --model gpt-fast --archive gpt-fast --config config.properties
    python scripts/server.py --run-dir .run status | ask request.json | drafts | stop
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from processes import end_marked, end_processes, is_running, marked_processes, process_mark, still_running

HOST = "127.0.0.1"
# In the environment of every process of a server: its own temp folder, and the run directory it was started for.
MARK = "GPT_FAST_SERVER"
RUN_MARK = "GPT_FAST_SERVER_RUN_DIR"
# TorchServe's log lines, as its console writes them.
MODEL_LOG = re.compile(r"-(?:stdout|stderr) MODEL_LOG - (.*)")
DIED = re.compile(r"-> WORKER_(?:STOPPED|ERROR)\b|worker process died|Load model failed|Worker disconnected")
GREETING = re.compile(r"^(Connection accepted|Torch worker started|\[PID\]|Listening on|Python runtime|s_name_part)")


class ServerError(RuntimeError):
    """What went wrong, said to the person at the terminal."""


@dataclass(frozen=True)
class Server:
    """A running TorchServe. ``created`` is its process's start time: a pid alone may be someone else's by now."""

    pid: int
    created: float
    port: int
    model: str
    serves: str  # what was asked for, to tell whether a second start means the same
    tmp_dir: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/predictions/{self.model}"

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 2 and is_running(process)
        except psutil.Error:
            return False


def load_server(run_dir: Path) -> Server | None:
    """The server that was started from this run directory, if it still runs."""
    try:
        server = Server(**json.loads((run_dir / "server.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return server if server.is_alive() else None


# ---- ports and configuration ----------------------------------------------------------------------------------------


def ports_for(base: int) -> dict[str, int]:
    """TorchServe's five ports; the default base 8080 gives its own defaults."""
    return {
        "inference_address": base,
        "management_address": base + 1,
        "metrics_address": base + 2,
        "grpc_inference_port": base - 1010,
        "grpc_management_port": base - 1009,
    }


def busy_ports(base: int) -> list[int]:
    """Those of the five that something listens on."""
    busy = []
    for port in ports_for(base).values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                busy.append(port)
    return busy


def derive_config(text: str, base: int) -> str:
    """The given config.properties on other ports; the host of an address stays what it is."""
    ports = ports_for(base)
    kept, hosts = [], {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() not in ports:
            kept.append(line)
        elif match := re.match(r"(https?://.*):\d+$", value.strip()):
            hosts[key.strip()] = match[1]
    for key, port in ports.items():
        kept.append(f"{key}={hosts.get(key, 'http://' + HOST)}:{port}" if key.endswith("address") else f"{key}={port}")
    return "\n".join(kept) + "\n"


# ---- start ----------------------------------------------------------------------------------------------------------


def start(run_dir: Path, args: argparse.Namespace) -> Server:
    """Starts TorchServe and waits until the model answers. When that fails, ends what it started and says so."""
    if busy := busy_ports(args.port):
        raise ServerError(
            f"port {', '.join(map(str, busy))} on {HOST} is taken by another program. "
            "Stop it, or choose other ports: --port 9080 (or GPT_FAST_PORT=9080) uses 9080 to 9082, 8070 and 8071."
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir / "config.properties"
    config.write_text(derive_config(Path(args.config).read_text(), args.port))
    log = run_dir / "server.log"
    # A short path: Unix sockets are made here and may have no more than about a hundred characters.
    tmp_dir = tempfile.mkdtemp(prefix="gpt-fast-")
    try:
        process = launch(args, run_dir, config, log, tmp_dir)
        server = Server(process.pid, process.create_time(), args.port, args.model, args.serves, tmp_dir)
        (run_dir / "server.json").write_text(json.dumps(asdict(server)))
        wait_until_ready(server, log, args.timeout)
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


def launch(args: argparse.Namespace, run_dir: Path, config: Path, log: Path, tmp_dir: str) -> psutil.Process:
    """Runs TorchServe's launcher, which starts Java in the background and writes its pid into ``tmp_dir``."""
    environment = {
        # Between two steps the worker's threads leave the cores to TorchServe instead of waiting on them.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        MARK: tmp_dir,
        RUN_MARK: str(run_dir),
        "TMPDIR": tmp_dir,  # where the launcher keeps its pid file
        "TEMP": tmp_dir,  # Java's temp folder: sockets, unpacked archives
        "LOG_LOCATION": str(run_dir / "logs"),
        "METRICS_LOCATION": str(run_dir / "logs"),
    }
    command = [sys.executable, "-m", "ts.model_server", "--start", "--ncs", "--disable-token-auth"]
    command += ["--ts-config", str(config), "--model-store", args.model_store]
    command += ["--models", f"{args.model}={args.archive}"]
    log_config = Path(__file__).resolve().parent.parent / "configs" / "log4j2.xml"
    command += ["--log-config", str(log_config)]
    with log.open("wb") as output:
        subprocess.run(
            command,
            cwd=args.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for the server
            timeout=60,
            check=False,
        )
    try:
        return psutil.Process(int((Path(tmp_dir) / ".model_server.pid").read_text()))
    except (OSError, ValueError, psutil.Error) as error:
        raise ServerError("TorchServe did not start:\n" + last_lines(log)) from error


def wait_until_ready(server: Server, log: Path, timeout_s: float) -> None:
    """Until a worker is READY, saying what is waited for; a worker's death ends it at once."""
    started = time.monotonic()
    progress = Progress()
    while True:
        elapsed = time.monotonic() - started
        text = log.read_text(errors="replace")
        if is_ready(server):
            progress.close(f"  TorchServe with the model {server.model}: {elapsed:.0f} s")
            return
        failure = ""
        if not server.is_alive():
            failure = "TorchServe ended"
        elif DIED.search(text):
            time.sleep(1.0)  # the rest of the traceback is on its way
            failure = "the worker died while it loaded the model"
        elif elapsed > timeout_s:
            failure = f"the model was not ready after {timeout_s:.0f} s"
        if failure:
            progress.close("")
            raise ServerError(
                f"{failure}. The last lines of its log:\n{last_lines(log)}\nAll of it: {log}, {log.parent / 'logs'}"
            )
        progress.show(elapsed, phase(text))
        time.sleep(0.3)


def is_ready(server: Server) -> bool:
    """Whether TorchServe reports a READY worker. /ping would say yes while the model still loads."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{server.port + 1}/models/{server.model}", timeout=5) as answer:
            workers = json.load(answer)[0]["workers"]
    except (OSError, ValueError, LookupError):
        return False
    return any(worker["status"] == "READY" for worker in workers)


def phase(log_text: str) -> str:
    """What the start is busy with, from the end of the log."""
    lines = [line for line in MODEL_LOG.findall(log_text) if line.strip()]
    if lines:
        return f"loading the model: {lines[-1].strip()}"
    return "starting a worker" if "Model server started" in log_text else "starting TorchServe"


class Progress:
    """One living line on a terminal; elsewhere a line whenever the phase changes or 20 seconds have passed."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self.said_at = 0.0
        self.ticks = 0

    def show(self, elapsed: float, what: str) -> None:
        self.ticks += 1
        if self.is_terminal:
            mark = "|/-+"[self.ticks % 4]
            line = f"{mark} TorchServe, {elapsed:.0f} s  {what}"
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif elapsed - self.said_at >= 20:
            self.said_at = elapsed
            print(f"  {elapsed:.0f} s: {what}", flush=True)

    def close(self, line: str) -> None:
        if self.is_terminal:
            print("\r\033[K", end="")
        if line:
            print(line, flush=True)


def last_lines(log: Path, count: int = 15) -> str:
    """The end of what the worker said, its traceback above all; without a worker the end of the log itself."""
    lines = log.read_text(errors="replace").splitlines()
    said = [match[1] for line in lines if (match := MODEL_LOG.search(line))]
    # The worker is started again after it died: its first life is the one that tells.
    births = [index for index, line in enumerate(said) if line.startswith("Torch worker started")]
    if len(births) > 1:
        said = said[: births[1]]
    if "Backend worker process died." in said:  # what follows is TorchServe on its own account
        said = said[: said.index("Backend worker process died.")]
    said = [line for line in said if line.strip(" ^~") and not GREETING.match(line)]
    return "\n".join("    " + line for line in (said or lines)[-count:])


# ---- ask and stop ---------------------------------------------------------------------------------------------------


def ask(server: Server, request_file: Path) -> None:
    """Sends one request and prints the answer as it comes: what ``curl -N`` does, for machines without curl."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=600)
    connection.request(
        "POST",
        f"/predictions/{server.model}",
        body=request_file.read_bytes(),
        headers={"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
    while piece := answer.read1():
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    if answer.status >= 400:
        raise ServerError(f"\nthe server answered with status {answer.status}")


def drafts(server: Server) -> str:
    """What became of the tokens that were guessed ahead since the model was loaded; nothing where none ever are."""
    with urllib.request.urlopen(f"{server.url}/1.0/metrics", timeout=60) as answer:
        page = answer.read().decode()
    numbers = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\{[^}]*\} (\d+)$", page, re.MULTILINE))
    if not numbers:
        return ""
    drafted, accepted = int(numbers["draft"]), int(numbers["accepted"])
    if not drafted:
        return "No tokens were guessed ahead so far."
    return f"{drafted} tokens were guessed ahead so far, and {accepted} of them were right ({accepted / drafted:.0%})."


def stop(run_dir: Path) -> str:
    """Stops Java, its workers and what they started; says what happened.

    Looks for the marks of its processes and not only at server.json, which a failed start or somebody may have removed.
    Raises ServerError when something survives.
    """
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
    for tmp_dir in tmp_dirs:  # a run directory that was moved is marked under its old name
        left += end_marked(MARK, tmp_dir, grace_s=20)
    if left:
        raise ServerError(still_running(left))
    forget(run_dir, tmp_dirs)
    if server is not None:
        return "Stopped."
    if found:
        return f"Stopped what was left of a server: {len(found)} processes."
    return "It was not running any more." if was_recorded else "No server was started from here."


def forget(run_dir: Path, tmp_dirs: set[str]) -> None:
    """Removes what a server was known by, its temp folder too. The logs stay."""
    (run_dir / "server.json").unlink(missing_ok=True)
    for tmp_dir in tmp_dirs:
        if Path(tmp_dir).name.startswith("gpt-fast-"):
            shutil.rmtree(tmp_dir, ignore_errors=True)


# ---- command line ---------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """The command line as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="where the server's files and logs are kept")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("start", help="start TorchServe and wait until the model is ready")
    verb.add_argument("--model", required=True, help="name in the URL")
    verb.add_argument("--archive", required=True, help="file or folder in the model store")
    verb.add_argument("--model-store", required=True)
    verb.add_argument("--config", required=True, help="config.properties to start from")
    verb.add_argument("--port", type=int, default=8080, help="inference port; the others follow from it")
    verb.add_argument("--timeout", type=float, default=600, help="seconds until the model must be ready")
    verb.add_argument("--serves", default="", help="what is served, in words; shown by status")
    verb.add_argument("--cwd", default=".", help="TorchServe's working directory")
    verbs.add_parser("status", help="exit 0 and one line about the running server, else exit 3")
    verbs.add_parser("ask", help="send a request file").add_argument("request", type=Path)
    verbs.add_parser("drafts", help="tell what became of the tokens that were guessed ahead")
    verbs.add_parser("stop", help="stop the server")
    verb = verbs.add_parser("sweep", help="end every process that has NAME=VALUE in its environment")
    verb.add_argument("name")
    verb.add_argument("value")
    return parser.parse_args()


def main() -> int:
    """Runs one verb; returns the exit status."""
    args = parse_args()
    args.run_dir = args.run_dir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that start cleans up
    try:
        if args.verb == "stop":
            print(stop(args.run_dir))
            return 0
        if args.verb == "sweep":
            if told := still_running(end_marked(args.name, args.value, grace_s=10)):
                raise ServerError(told)
            return 0
        server = load_server(args.run_dir)
        if args.verb == "start":
            if server is None:
                stop(args.run_dir)  # what a server that died has left
                start(args.run_dir, args)
            return 0
        if server is None:
            print("not running", file=sys.stderr)
            return 3
        if args.verb == "ask":
            ask(server, args.request)
        elif args.verb == "drafts":
            print(drafts(server))
        else:
            print(f"{server.port} {server.model} {server.serves}")
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
