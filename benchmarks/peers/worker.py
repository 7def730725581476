"""A worker's side of the protocol: a process that loads one peer in one format and measures when told to.

One JSON object a line on stdin, one on stdout for each. ``{"do": "check"}``: versions, without loading.
``{"do": "load", ...}``: facts. ``{"do": "measure", ...}`` with the fields of Measure: ``{"seconds": s, "cpu_s": c}``,
the latter of everything that was done for it.
``{"do": "notes"}``: what the worker chose by itself. An answer has ``"ok"``; where it is false, ``"error"``, and
``"missing"`` with the module that could not be imported. Between commands the process waits in a read and uses no CPU;
the end of stdin ends it, also in the middle of a command: whoever asked is gone. Standard library only.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from peers.measures import Measure

_END_S = 5.0  # after the end of stdin, for what is being done


class Subject(Protocol):
    """A loaded model. ``measure`` returns the seconds that the run took, as Measure defines it."""

    def facts(self) -> dict[str, Any]:
        """``weight_bytes`` read for a token, ``kv_bytes_per_token`` cached, and whatever else is worth reporting."""
        ...

    def measure(self, measure: Measure) -> float: ...

    def notes(self) -> dict[str, Any]: ...


def serve(check: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], Subject]) -> None:
    """Answer commands until stdin ends. What libraries print goes to stderr, also where they print from C."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    subject: Subject | None = None
    for line in _lines():
        command = json.loads(line)
        action = command.pop("do")
        answer: dict[str, Any] = {"ok": True}
        try:
            if action == "check":
                answer |= check()
            elif action == "load":
                subject = load(command)
                answer |= subject.facts()
            elif subject is None:
                raise RuntimeError(f"{action!r} before load")
            elif action == "measure":
                begin = time.process_time()
                answer["seconds"] = subject.measure(Measure(**command))
                answer["cpu_s"] = time.process_time() - begin
            elif action == "notes":
                answer |= subject.notes()
            else:
                raise RuntimeError(f"unknown command {action!r}")
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            if isinstance(error, ModuleNotFoundError):
                answer["missing"] = error.name
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _lines() -> Iterator[str]:
    """Of stdin, which a thread reads; its end ends this process."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")
        time.sleep(_END_S)
        os._exit(1)  # a computation goes on that nobody waits for

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, "")
