"""Loading the peers of one precision side by side, and measuring them in turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(eq=False)
class _Loaded:
    """An entry whose worker is up. ``left``: what it is measured in; ``warm``: what this worker has done once."""

    entry: Entry
    worker: Worker
    left: list[Measure]
    warm: set[Measure] = field(default_factory=set)


def run(entries: Sequence[Entry], measures: Sequence[Measure], setting: Setting, found: Found) -> None:
    """Load ``entries``, measure each once for nothing, then in rounds; fill ``found``. What an entry cannot do is
    skipped; where its worker ended over it, another one is started for the rest."""
    with contextlib.ExitStack() as stack:
        turns = _Turns(setting, found, stack)
        wanted = [(entry, [measure for measure in measures if entry.takes(measure)]) for entry in entries]
        loaded = [one for entry, left in wanted if (one := turns.load(entry, left))]
        for number in range(setting.rounds + 1):
            if number:
                found.bandwidths.append(setting.bandwidth())
            for measure in measures:
                order = [one for one in loaded if measure in one.left]
                shift = number % len(order) if order else 0  # nobody is always the first
                for one in order[shift:] + order[:shift]:
                    turns.take(one, measure, number)
        for one in loaded:
            if one.left:
                with contextlib.suppress(WorkerError):
                    found.facts[one.entry.label] |= one.worker.ask("notes")


@dataclass
class _Turns:
    """What starts workers, lets them measure, and writes down what came of it."""

    setting: Setting
    found: Found
    stack: contextlib.ExitStack  # ends the workers

    def load(self, entry: Entry, measures: list[Measure]) -> _Loaded | None:
        """None if it cannot be: it is skipped."""
        room = available_bytes()
        if not measures:
            self._leave_out(entry.label, "it is not measured in anything that was asked for")
            return None
        if room is not None and room < _SPARE * entry.num_bytes:
            need = f"about {_SPARE * entry.num_bytes / 1e9:.1f} GB more memory are needed, {room / 1e9:.1f} are free"
            self._leave_out(entry.label, need)
            return None
        self.setting.say(f"loading {entry.label}")
        begin = time.perf_counter()
        told = {"format": entry.format, "threads": self.setting.threads, "measures": [asdict(m) for m in measures]}
        try:
            worker = self.stack.enter_context(self.setting.start(entry.peer, entry.label))
            facts = worker.ask("load", _LOAD_S, **entry.options, **told)
        except WorkerError as error:
            self._leave_out(entry.label, error)
            return None
        self.found.facts[entry.label] = {"start_s": time.perf_counter() - begin, **facts}
        return _Loaded(entry, worker, list(measures))

    def take(self, one: _Loaded, measure: Measure, number: int) -> None:
        """Measure ``one`` in round ``number``, of which 0 does not count. A measure that fails is left out from then
        on, and its numbers of earlier rounds stay."""
        label = one.entry.label
        try:
            if number and measure not in one.warm:  # another worker than in the warm-up
                _measure(one.worker, measure)
            seconds, others = _measure(one.worker, measure)
        except WorkerError as error:
            self._leave_out(f"{label} in {measure.name}", error)
            one.left.remove(measure)
            if not error.goes_on:
                self._start_again(one)
            return
        one.warm.add(measure)
        name = f"round {number} of {self.setting.rounds}" if number else "warm-up"
        rate = measure.num_tokens / seconds
        self.setting.say(f"{one.entry.precision} {name}: {measure.name}: {label} {rate:.2f} tokens/s")
        if number:
            self.found.seconds.setdefault((label, measure), []).append(seconds)
            self.found.others.setdefault((label, measure), []).append(others)

    def _start_again(self, one: _Loaded) -> None:
        one.worker.close()
        again = self.load(one.entry, one.left) if one.left else None
        if again is None:
            one.left.clear()
        else:
            one.worker, one.warm = again.worker, again.warm

    def _leave_out(self, what: str, reason: object) -> None:
        self.found.skip(what, reason)
        self.setting.say(f"skipped {what}: {reason}")


def _measure(worker: Worker, measure: Measure) -> tuple[float, float]:
    """Seconds, and CPUs busy with something else. Raises WorkerError."""
    time.sleep(_SETTLE_S)
    begin, busy = time.perf_counter(), busy_s()
    answer = worker.ask("measure", _MEASURE_S, **asdict(measure))
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
