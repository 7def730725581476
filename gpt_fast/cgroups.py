"""The control groups that this process is in (containers, systemd), versions 1 and 2, as Linux shows them below ``/``.

A limit of any group holds, the parents' included. Source: the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Group(NamedTuple):
    version: int
    folder: Path


def groups(controller: str, root: Path = ROOT) -> Iterator[Group]:
    """Those in which ``controller`` (``memory``, ``cpu``) may set limits, from the innermost to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        below = PurePosixPath(path.lstrip("/"))
        if ".." in below.parts:  # seen from another namespace; the mount shows what holds here
            below = PurePosixPath()
        for group in (below, *below.parents):  # the last is ".", the mount itself
            yield Group(1 if controllers else 2, mount / group)


def num_cores() -> int:
    """The CPU cores that this process may use: those that it is bound to, and no more than the whole ones for which the
    quota of its container lasts. More threads than that would use it up together, and all of them stand still for the
    rest of each tenth of a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Seconds of CPU a second that the groups of this process allow, of all its threads together; None: no limit."""
    quotas = (_quota(*group) for group in groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(version: int, folder: Path) -> float | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (folder.joinpath(f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such files, or "max"
        return None


def number(file: Path) -> int | None:
    """The number in ``file``; None where there is no such file or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
