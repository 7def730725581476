"""Which cores a rank runs on: its own ones, of one memory node where there are several."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")


def bind(local_rank: int, local_count: int) -> int:
    """Where the machine has several memory nodes, let this process run on its share of the cores alone, so that what it
    allocates from now on lies in their memory. Returns the threads that a rank has for itself, one at least: its share
    of the cores, or of ``$OMP_NUM_THREADS`` where that is more than the 1 that torchrun writes there."""
    share = set(range((os.cpu_count() or 1) // local_count))
    if hasattr(os, "sched_setaffinity"):
        nodes = by_node(os.sched_getaffinity(0))
        share = cores_of(local_rank, local_count, nodes)
        if len(nodes) > 1 and share:
            os.sched_setaffinity(0, share)
            log.info("rank %d of %d on this machine runs on the cores %s", local_rank, local_count, sorted(share))
    asked = os.environ.get("OMP_NUM_THREADS", "1")
    threads = int(asked) // local_count if asked.isdecimal() and int(asked) > 1 else len(share)
    return max(1, min(threads, len(share)))


def cores_of(rank: int, count: int, nodes: list[list[int]]) -> set[int]:
    """The share of ``rank`` of the cores in ``nodes``: those of some whole nodes, of a part of one, or where that does
    not come out even, some of them all in order. Empty where there are fewer cores than ranks."""
    if len(nodes) % count == 0:
        each = len(nodes) // count
        return {core for node in nodes[rank * each : (rank + 1) * each] for core in node}
    if count % len(nodes) == 0:
        each = count // len(nodes)
        cores, rank, count = nodes[rank // each], rank % each, each
    else:
        cores = [core for node in nodes for core in node]
    size = len(cores) // count
    return set(cores[rank * size : (rank + 1) * size])


def by_node(usable: set[int], folder: Path = _NODES) -> list[list[int]]:
    """The cores of ``usable`` in each memory node that has some."""
    listed = [numbers(path.read_text()) & usable for path in sorted(folder.glob("node[0-9]*/cpulist"))]
    found = [sorted(cores) for cores in listed if cores]
    return found if sum(map(len, found)) == len(usable) else [sorted(usable)]


def numbers(text: str) -> set[int]:
    """What Linux writes as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
