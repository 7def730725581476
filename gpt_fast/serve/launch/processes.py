"""Finds processes by a variable in their environment, and ends them.

python -m gpt_fast.serve.launch.processes NAME=VALUE     ends every process that has it
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil

GIVE_UP_S = 20  # after this time a process that SIGKILL does not end is left to whoever reads its pid


def still_running(pids: list[int]) -> str:
    """What to do about processes that could not be ended; empty when there are none."""
    listed = " ".join(map(str, sorted(set(pids))))
    return f"Still running, and could not be ended: process {listed}. By hand: kill -9 {listed}" if pids else ""


def end_marked(name: str, value: str, grace_s: float) -> list[int]:
    """Ends every process with this variable in its environment; returns the pids of those that survive it.

    TorchServe's front end starts a worker again when one ends. So what starts others goes first, and the list is made
    anew until nobody is on it: twice, as a process that is just being started has no environment for a moment.
    """
    deadline = time.monotonic() + grace_s + GIVE_UP_S
    empty_looks = 0
    while empty_looks < 2:
        found = marked_processes(name, value)
        if not found:
            empty_looks += 1
            time.sleep(0.1)
            continue
        if time.monotonic() > deadline:
            return [process.pid for process in found]
        empty_looks = 0
        pids = {process.pid for process in found}
        end_processes([process for process in found if parent_pid(process) not in pids], grace_s)
    return []


def marked_processes(name: str, value: str) -> list[psutil.Process]:
    """Processes with this variable in their environment, this one and its ancestors excepted."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if is_running(process)]


def process_mark(process: psutil.Process, name: str) -> str:
    """The variable ``name`` in the environment of ``process``; empty if it has none or is gone."""
    try:
        return str(process.environ().get(name, ""))
    except (psutil.Error, OSError):
        return ""


def parent_pid(process: psutil.Process) -> int:
    """0 when the process is gone."""
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0


def end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """SIGTERM, and after ``grace_s`` SIGKILL for those that are still there, with a second to take effect."""
    for process in processes:
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.Error:
            continue
    deadline = time.monotonic() + grace_s
    while (left := [process for process in processes if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    deadline = time.monotonic() + 1
    while any(is_running(process) for process in left) and time.monotonic() < deadline:
        time.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    """False for a zombie too: in a container nobody may be there to reap it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main() -> int:
    """End them; returns the exit status."""
    name, _, value = sys.argv[1].partition("=")
    if told := still_running(end_marked(name, value, grace_s=10)):
        print(told, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
