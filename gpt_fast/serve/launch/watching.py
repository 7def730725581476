"""Waits for a TorchServe that was started, and says from its log what it is busy with or what went wrong."""

from __future__ import annotations

import http.client
import re
import shutil
import sys
import time
from pathlib import Path

from gpt_fast.errors import ServerError
from gpt_fast.serve.launch.asking import ready_workers
from gpt_fast.serve.launch.record import MODEL, Server

# TorchServe's log lines, as its console writes them.
MODEL_LOG = re.compile(r"-(?:stdout|stderr) MODEL_LOG - (.*)")
DIED = re.compile(r"-> WORKER_(?:STOPPED|ERROR)\b|worker process died|Load model failed|Worker disconnected")
LATE = "Backend worker did not respond in given time"
REFUSED = re.compile(r"MODEL_LOG - .*\bcannot serve \S+: (.+)")  # the words of handler.py
GREETING = re.compile(r"^(Connection accepted|Torch worker started|\[PID\]|Listening on|Python runtime|s_name_part)")


def wait_until_ready(server: Server, log: Path, timeout_s: float, after: int = 0) -> None:
    """Until a worker is READY, saying what is waited for; a worker's death ends it at once, if the log tells of it
    behind its first ``after`` characters. Raises ServerError."""
    started = time.monotonic()
    progress = Progress()
    while True:
        elapsed = time.monotonic() - started
        text = log.read_text(errors="replace")
        if is_ready(server):
            progress.close(f"  TorchServe with the model: {elapsed:.0f} s")
            return
        failure = ""
        if not server.is_alive():
            failure = "TorchServe ended"
        elif DIED.search(text, after):
            time.sleep(1.0)  # the rest of the traceback is on its way
            failure = "the worker died while it loaded the model"
            if LATE in log.read_text(errors="replace")[after:]:
                failure = (
                    "the model took longer to load than startupTimeout in its configuration; --timeout can raise it"
                )
        elif elapsed > timeout_s:
            failure = f"the model was not ready after {timeout_s:.0f} s"
        if failure:
            progress.close("")
            raise ServerError(told_by_the_worker(failure, log) or told_by_its_log(failure, log))
        progress.show(elapsed, phase(text))
        time.sleep(0.3)


def told_by_the_worker(failure: str, log: Path) -> str:
    """``failure`` with the handler's own words for it; nothing where it has said none."""
    found = REFUSED.search(log.read_text(errors="replace"))
    return f"{failure}: {found[1]}\nAll of its log: {log}" if found else ""


def told_by_its_log(failure: str, log: Path) -> str:
    """``failure`` with the end of the log, and where all of it is."""
    return f"{failure}. The last lines of its log:\n{last_lines(log)}\nAll of it: {log}, {log.parent / 'logs'}"


def is_ready(server: Server) -> bool:
    """Whether TorchServe reports a READY worker."""
    try:
        return ready_workers(server.management, MODEL) > 0
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return False


def phase(log_text: str) -> str:
    """What the start is busy with, from the end of the log."""
    lines = [line for line in MODEL_LOG.findall(log_text) if line.strip()]
    if lines:
        return f"loading the model: {clipped(lines[-1].strip(), 100)}"
    return "starting a worker" if "Model server started" in log_text else "starting TorchServe"


def clipped(text: str, width: int) -> str:
    """``text`` or, where it is longer, so much of its beginning."""
    return text if len(text) <= width else text[: width - 3] + "..."


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
