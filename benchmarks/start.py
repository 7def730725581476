"""From the start of a process to the first token of a model, by phase, each phase beside its limit.

    python benchmarks/start.py model_store/demo/target [--modes stored,int8,int4] [--caches warm,cold] [--rounds 5]
    python benchmarks/start.py --shape llama-3.1-8b --folder DIR [--layers 4]

Each start is a new process (starting/worker.py), all kinds of start in turns. ``--modes``: the weights as stored, or
rounded while loading. ``--caches``: the files of weights are in the page cache (warm), or were dropped from it (cold;
Linux, no rights needed; torch's own files stay where they are). ``--shape`` writes random bfloat16 weights once, into
``--folder``; ``--layers`` keeps that many layers only. Then a column says what the whole shape would take: phases that
handle weights grow with the number of parameters. Other phases stay as they are. The KV cache does too, because free
memory decides its size.

Seconds are medians of the rounds, the total is their sum. "system s" is the system's own work in a phase, of all
threads: mostly memory that is touched for the first time, which no limit here counts. Limits are measured in the same
rounds: a bare interpreter that imports torch; for reading, a loop that touches each page of the same files in the same
state; for work on weights and for clearing the KV cache, the bytes that are read and written over the memory's read
bandwidth; for the first token, the same request again, and twice that for the two steps of the warm-up; "none": there
is no natural one. A start that compiles the kernels for the first time takes 10 to 60 seconds longer: one start before
the first round is not counted. The last line is JSON. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_FOLDERS = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # peers here, gpt_fast above
sys.path[:0] = [folder for folder in _FOLDERS if folder not in sys.path]

import torch  # noqa: E402
from peers import files as made  # noqa: E402
from starting.worker import CACHE, ELSE, READING  # noqa: E402
from tqdm import tqdm  # noqa: E402

from gpt_fast.cgroups import num_cores  # noqa: E402
from gpt_fast.checkpoint.checkpoint import Checkpoint  # noqa: E402
from gpt_fast.checkpoint.stored import map_file  # noqa: E402
from gpt_fast.kernels.roofline import read_bandwidth  # noqa: E402
from gpt_fast.model.describing import describe  # noqa: E402
from gpt_fast.model.shapes import shape  # noqa: E402

WORKER = Path(__file__).resolve().parent / "starting" / "worker.py"
BARE = "import time; begin = time.monotonic(); import torch; print([begin, time.monotonic()])"
GIVEN = "give a checkpoint, or --shape and --folder"
FIXED = ("interpreter", "import torch", "import gpt_fast", "configuration, headers", "tokenizer", "kernels' library")
_CHUNK = 4 << 20
_MOST = 2 << 30  # bytes that are read to measure a rate


class Kind(NamedTuple):
    """A kind of start."""

    mode: str  # stored, or a mode of quantize
    cache: str  # warm or cold


class Limits(NamedTuple):
    """What the machine allows, in one round."""

    interpreter_s: float
    torch_s: float
    reading: float  # bytes per second
    memory: float  # the same

    def of(self, run: dict[str, Any]) -> dict[str, float]:
        """Seconds by phase of a start, for those phases that have a limit."""
        found = {name: num_bytes / self.memory for name, num_bytes in run["bytes"].items()}
        if READING in found:
            found[READING] = run["bytes"][READING] / self.reading
        found |= {"interpreter": self.interpreter_s, "import torch": self.torch_s}
        return found | {"warm-up steps": 2 * run["again_s"], "first token": run["again_s"]}


def read_rate(files: Sequence[Path], most: int = _MOST) -> float:
    """Bytes per second of mapping ``files`` and touching their pages, ``most`` bytes of them."""
    begin, left = time.perf_counter(), most
    for path in files:
        data = map_file(path)[:left]
        left -= len(data)
        for start in range(0, len(data), _CHUNK):
            data[start : start + _CHUNK : mmap.PAGESIZE].sum()
    return (most - left) / (time.perf_counter() - begin)


def drop(files: Sequence[Path]) -> None:
    """Take ``files`` out of the page cache, as far as no process has their pages mapped."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not on the disk yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: Sequence[str], threads: int) -> Any:
    """The JSON on the last line of what ``command`` prints. Raises RuntimeError with the end of its errors."""
    path = os.pathsep.join(word for word in (*_FOLDERS, os.environ.get("PYTHONPATH", "")) if word)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-8:]))
    return json.loads(done.stdout.splitlines()[-1])


def start(checkpoint: Path, options: dict[str, Any], threads: int) -> dict[str, Any]:
    """One start, as the worker tells it."""
    told = {"begun": time.monotonic(), "checkpoint": str(checkpoint), "options": options}
    found: dict[str, Any] = run([sys.executable, str(WORKER), json.dumps(told)], threads)
    return found


def limits(files: Sequence[Path], cache: str, threads: int) -> Limits:
    """Measure them, and leave ``files`` in the page cache or outside of it."""
    begun = time.monotonic()
    entered, imported = run([sys.executable, "-c", BARE], threads)
    read_bandwidth.cache_clear()
    memory = read_bandwidth("cpu", threads)
    if cache == "cold":
        drop(files)
        reading = read_rate(files)
        drop(files)
    else:
        read_rate(files, sum(path.stat().st_size for path in files))
        reading = read_rate(files)
    return Limits(entered - begun, imported - entered, reading, memory)


class Measured:
    """The starts of one kind."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.limits: list[dict[str, float]] = []

    def add(self, run: dict[str, Any], limits: Limits) -> None:
        self.runs.append(run)
        self.limits.append(limits.of(run))

    def summary(self, growth: float | None = None) -> dict[str, Any]:
        """Medians by phase. ``growth``: parameters of the whole shape over those that were loaded."""
        names = sorted(self.runs[0]["seconds"], key=lambda name: name == ELSE)  # that one last
        phases: dict[str, dict[str, float]] = {}
        for name in names:
            phases[name] = {
                "s": statistics.median(run["seconds"].get(name, 0.0) for run in self.runs),
                "system_s": statistics.median(run["system"].get(name, 0.0) for run in self.runs),
            }
            if all(name in each for each in self.limits):
                phases[name]["limit_s"] = statistics.median(each[name] for each in self.limits)
            if growth is not None:
                phases[name]["whole_s"] = phases[name]["s"] * (1 if name in (*FIXED, CACHE, ELSE) else growth)
        disk = [run["from_disk"] for run in self.runs if run["from_disk"] is not None]
        return {
            "phases": phases,
            "total_s": sum(phase["s"] for phase in phases.values()),
            "starts_s": [run["total_s"] for run in self.runs],
            "from_disk_bytes": statistics.median(disk) if disk else None,
        }


def table(found: dict[str, Any]) -> str:
    """A ``Measured.summary`` for people."""
    whole = any("whole_s" in phase for phase in found["phases"].values())
    head = f"{'phase':26} {'s':>8} {'share':>6} {'limit s':>8} {'system s':>8}"
    lines = [head + "  whole shape s, not measured" * whole]
    for name, phase in found["phases"].items():
        limit = f"{phase['limit_s']:8.3f}" if "limit_s" in phase else f"{'none':>8}"
        more = f" {phase['whole_s']:28.3f}" if whole else ""
        lines.append(
            f"{name:26} {phase['s']:8.3f} {phase['s'] / found['total_s']:6.1%} {limit} {phase['system_s']:8.3f}{more}"
        )
    more = f" {'':24} {sum(phase['whole_s'] for phase in found['phases'].values()):28.3f}" if whole else ""
    return "\n".join([*lines, f"{'total':26} {found['total_s']:8.3f}{more}"])


def options() -> argparse.ArgumentParser:
    """The command line."""

    def words(text: str) -> list[str]:
        return text.split(",")

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="what gpt-fast loads; or give --shape")
    parser.add_argument("--shape", help="random weights of a named shape, written once")
    parser.add_argument("--folder", type=Path, help="where to; an 8B shape has 16 GB")
    parser.add_argument("--layers", type=int, metavar="N", help="keep only N layers of the shape")
    parser.add_argument("--modes", type=words, default=["stored", "int8", "int4"], metavar="MODE,...")
    parser.add_argument("--caches", type=words, default=["warm", "cold"], metavar="warm,cold")
    parser.add_argument("--draft", help="as gpt-fast takes it")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def measure(args: argparse.Namespace, checkpoint: Path) -> dict[Kind, Measured]:
    """All kinds of start in turns, ``--rounds`` times."""
    files = Checkpoint.open(checkpoint).files
    found = {Kind(mode, cache): Measured() for mode in args.modes for cache in args.caches}
    with tqdm(total=1 + args.rounds * len(found), unit="start", disable=not sys.stderr.isatty()) as bar:
        for number in range(args.rounds + 1):
            for kind, measured in found.items() if number else [(next(iter(found)), Measured())]:
                allowed = limits(files, kind.cache, args.threads)
                extra = {} if kind.mode == "stored" else {"quantize": kind.mode}
                extra |= {"draft": args.draft} if args.draft else {}
                measured.add(start(checkpoint, extra, args.threads), allowed)
                bar.update()
    return found


def main() -> None:
    """See the module's docstring."""
    parser = options()
    args = parser.parse_args()
    if (args.checkpoint is None) == (args.shape is None) or (args.shape is None) != (args.folder is None):
        parser.error(GIVEN)
    if not set(args.caches) <= {"warm", "cold"} or ("cold" in args.caches and not hasattr(os, "posix_fadvise")):
        parser.error("--caches: warm, and where files can be dropped from the page cache cold")
    torch.set_num_threads(args.threads)
    checkpoint, growth = args.checkpoint, None
    try:
        if args.shape is not None:
            said = lambda text: print(text, file=sys.stderr)  # noqa: E731
            checkpoint = made.ensure_checkpoint(args.shape, args.folder, None, said, args.layers)
            if args.layers is not None:
                loaded = Checkpoint.open(checkpoint).num_parameters
                growth = describe(shape(args.shape)).num_parameters / loaded
        measured = measure(args, checkpoint)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"start.py: {error}")
    report: dict[str, Any] = {"checkpoint": str(checkpoint), "threads": args.threads, "kinds": []}
    for kind, each in measured.items():
        summary = each.summary(growth)
        report["kinds"].append(kind._asdict() | summary)
        disk = summary["from_disk_bytes"]
        said_disk = "" if disk is None else f", {disk / 1e9:.2f} GB from the disk"
        print(f"{checkpoint}, weights {kind.mode}, page cache {kind.cache}{said_disk}\n{table(summary)}\n")
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        print("PYTHONDONTWRITEBYTECODE is set: each import of gpt_fast may have compiled its sources")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
