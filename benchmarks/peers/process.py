"""Workers seen from the process that compares them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TAIL_LINES = 8
_END_S = 10.0  # until a worker that should end is killed
BENCHMARKS = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A worker could not do what it was told. ``missing``: a module that could not be imported; ``goes_on``: the worker
    said so itself and takes other commands."""

    def __init__(self, message: str, missing: str | None = None, *, goes_on: bool = False) -> None:
        super().__init__(message)
        self.missing, self.goes_on = missing, goes_on


class Worker:
    """One worker process. ``log``: the file that its stderr is appended to.

    ``path``: folders for PYTHONPATH, beside this repository's. A context manager; leaving it ends the process.
    """

    def __init__(
        self, label: str, python: str, module: str, log: Path, *, threads: int = 1, path: Sequence[str | Path] = ()
    ) -> None:
        self.label = label
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        folders = [str(folder) for folder in (*path, BENCHMARKS, BENCHMARKS.parent, *inherited) if str(folder)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(folders),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment.pop("OMP_WAIT_POLICY", None)  # passive takes a quarter of the speed of peers that use OpenMP
        with log.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    text=True,
                    encoding="utf-8",
                )
            except OSError as error:
                raise WorkerError(f"{label}: {python} does not start: {error.strerror}") from None
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, do: str, timeout_s: float = 600.0, **fields: Any) -> dict[str, Any]:
        """One command and its answer, without ``ok``. Raises WorkerError, with the end of the log if it died."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: what it said last is told below
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerError(f"{self.label}: no answer to {do} in {timeout_s:g} s; see {self._log}") from None
        if not line:
            self._answers.put("")  # for the next question
            raise WorkerError(f"{self.label}: ended with status {self._process.wait()}{self._tail()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerError(f"{self.label}: answered {line.strip()[:200]!r} to {do}") from None
        if not answer.pop("ok"):
            raise WorkerError(f"{self.label}: {answer['error']}", answer.get("missing"), goes_on=True)
        return answer

    def close(self) -> None:
        """End the process; its memory is free afterwards."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "; the end of its log:\n  " + "\n  ".join(lines) if lines else ""
