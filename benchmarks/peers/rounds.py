"""Loading the peers of one precision side by side, and measuring them in turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.measures import Measure
from peers.process import Worker, WorkerError
from peers.registry import Peer

_LOAD_S = 1800.0  # with compilation
_MEASURE_S = 1800.0  # a slow peer's long prompt
_SETTLE_S = 0.2  # threads of the process that worked last may spin for so long
_SPARE = 1.25  # of a format's weights: what else a worker holds


@dataclass(frozen=True, eq=False)
class Entry:
    """A peer in one format, and what its worker is told at ``load``."""

    peer: Peer
    precision: str
    format: str
    num_bytes: int
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """As tables call it."""
        return f"{self.peer.name} {self.format}"

    def takes(self, measure: Measure) -> bool:
        """Whether the peer is measured in it."""
        if measure.kind == "prefill":
            return self.peer.prefill
        long = measure.name.startswith("decode at")
        return (self.peer.contexts or not long) and (self.peer.batches or measure.batch == 1)


@dataclass
class Found:
    """Everything measured. ``seconds``: of each round, by entry and measure; ``others``: how many CPUs were busy
    meanwhile with something else."""

    seconds: dict[tuple[str, Measure], list[float]] = field(default_factory=dict)
    others: dict[tuple[str, Measure], list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    bandwidths: list[float] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def skip(self, what: str, reason: object) -> None:
        """Leave ``what`` out from here on."""
        self.skipped.append({"what": what, "reason": str(reason)})


@dataclass(frozen=True)
class Setting:
    """How to run. ``pythons``: interpreters by peer, ``bandwidth``: measures bytes per second."""

    pythons: Mapping[str, str]
    threads: int
    rounds: int
    logs: Path
    bandwidth: Callable[[], float]
    say: Callable[[str], object]
    path: tuple[str, ...] = ()

    def start(self, peer: Peer, label: str) -> Worker:
        """A worker that has not loaded anything. Raises WorkerError."""
        log = self.logs / f"{label.replace(' ', '-')}.log"
        return Worker(label, self.pythons[peer.name], peer.module, log, threads=self.threads, path=self.path)


def check(peers: Sequence[Peer], setting: Setting, found: Found) -> dict[str, dict[str, Any]]:
    """Versions of the peers that can be imported; the others are skipped, with what would install them."""
    versions = {}
    for peer in peers:
        try:
            with setting.start(peer, peer.name) as worker:
                versions[peer.name] = worker.ask("check", timeout_s=_LOAD_S)
        except WorkerError as error:
            where = setting.pythons[peer.name]
            missing = f"not installed for {where} (no module {error.missing}): {peer.install}"
            found.skip(peer.name, missing if error.missing else error)
            setting.say(f"skipped {peer.name}: {found.skipped[-1]['reason']}")
    return versions


def run(entries: Sequence[Entry], measures: Sequence[Measure], setting: Setting, found: Found) -> None:
    """Load ``entries``, measure each once for nothing, then in rounds; fill ``found``."""
    with contextlib.ExitStack() as stack:
        workers = dict(_load(entries, measures, setting, found, stack))
        for number in range(setting.rounds + 1):
            name = f"round {number} of {setting.rounds}" if number else "warm-up"
            if number:
                found.bandwidths.append(setting.bandwidth())
            for measure in measures:
                order = [entry for entry in workers if entry.takes(measure)]
                shift = number % len(order) if order else 0  # nobody is always the first
                for entry in order[shift:] + order[:shift]:
                    done = _measure(entry, workers, measure, setting, found)
                    if done is None:
                        continue
                    rate = measure.num_tokens / done[0]
                    setting.say(f"{entry.precision} {name}: {measure.name}: {entry.label} {rate:.2f} tokens/s")
                    if number:
                        found.seconds.setdefault((entry.label, measure), []).append(done[0])
                        found.others.setdefault((entry.label, measure), []).append(done[1])
        for entry, worker in workers.items():
            with contextlib.suppress(WorkerError):
                found.facts[entry.label] |= worker.ask("notes")


def _load(
    entries: Sequence[Entry],
    measures: Sequence[Measure],
    setting: Setting,
    found: Found,
    stack: contextlib.ExitStack,
) -> Iterator[tuple[Entry, Worker]]:
    for entry in entries:
        room = available_bytes()
        if room is not None and room < _SPARE * entry.num_bytes:
            need = f"about {_SPARE * entry.num_bytes / 1e9:.1f} GB more memory are needed, {room / 1e9:.1f} are free"
            found.skip(entry.label, need)
            setting.say(f"skipped {entry.label}: {need}")
            continue
        setting.say(f"loading {entry.label}")
        begin = time.perf_counter()
        mine = [asdict(measure) for measure in measures if entry.takes(measure)]
        try:
            worker = stack.enter_context(setting.start(entry.peer, entry.label))
            facts = worker.ask(
                "load", _LOAD_S, **entry.options, format=entry.format, threads=setting.threads, measures=mine
            )
        except WorkerError as error:
            found.skip(entry.label, error)
            setting.say(f"skipped {entry.label}: {error}")
            continue
        found.facts[entry.label] = {"start_s": time.perf_counter() - begin, **facts}
        yield entry, worker


def _measure(
    entry: Entry, workers: dict[Entry, Worker], measure: Measure, setting: Setting, found: Found
) -> tuple[float, float] | None:
    """Seconds, and CPUs busy with something else. None when the worker failed: it is left out from then on, and its
    numbers of earlier rounds stay."""
    time.sleep(_SETTLE_S)
    begin, busy = time.perf_counter(), busy_s()
    try:
        answer = workers[entry].ask("measure", _MEASURE_S, **asdict(measure))
    except WorkerError as error:
        found.skip(f"{entry.label} from {measure.name} on", error)
        setting.say(f"skipped {entry.label}: {error}")
        workers.pop(entry).close()
        return None
    others = (busy_s() - busy - answer["cpu_s"]) / (time.perf_counter() - begin)
    return float(answer["seconds"]), max(0.0, others)


def busy_s() -> float:
    """Seconds that all CPUs together have been busy or stolen since the start, on Linux; 0 elsewhere."""
    path = Path("/proc/stat")
    if not path.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text(encoding="utf-8").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int | None:
    """Memory that can be had without swapping, on Linux; None elsewhere."""
    path = Path("/proc/meminfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
