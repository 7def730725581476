"""What it costs that several processes share one model, on this machine's CPU.

    python benchmarks/ranks.py exchange [--ranks 2]
    python benchmarks/ranks.py decode --checkpoint DIR [--quantize int8] [--ranks 2] [--rounds 5]

exchange: microseconds for a small product whose outputs, 8 and 64 kB, are summed over all ranks, in turns without that
sum (alone), by shared memory and by gloo inside a step; and for torch's all_reduce of as much. decode: tokens per
second and most memory of R ranks of one thread, in turns with one process of R threads. The last line is JSON. Run it
when nothing else runs, with no more ranks than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt_fast.kernels.cpu.packing import pack_dense
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.model import description as d
from gpt_fast.parallel.group import Group
from gpt_fast.parallel.ranks import Ranks

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8 * 1024, 64 * 1024)  # bytes
INPUTS = 16  # of the product that makes what is summed
PRODUCTS, REPEATS, ROUNDS = 40, 5, 15
WAYS = ("alone", "shared memory", "gloo in the step", "all_reduce")


def exchange_of_rank() -> None:
    """What each rank does; rank 0 prints."""
    torch.set_num_threads(1)
    group = Group.from_environment()
    assert group is not None
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        width = size // 4
        x, weight = torch.randn(1, INPUTS), torch.randn(width, INPUTS)
        packed = PackedWeights("float32", pack_dense(weight), width, INPUTS)
        weights = Weights({"w": [packed]}, splits={"w": "columns"})
        ranks = {"alone": None, "shared memory": Ranks(group), "gloo in the step": Ranks(group, shared=False)}
        row = torch.zeros(1, dtype=torch.int64)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        programs = {
            way: Program(
                [([d.Product("in", "out", "w")] * PRODUCTS, weights)], "out", input=("in", INPUTS), ranks=among
            )
            for way, among in ranks.items()
        }
        numbers = torch.zeros(width)
        for _ in range(ROUNDS):
            for way in WAYS:
                group.wait()
                begin = time.perf_counter()
                for _ in range(REPEATS):
                    if way != "all_reduce":
                        programs[way].run(row, row, [], None, row, x)
                    for _ in range(PRODUCTS if way == "all_reduce" else 0):
                        dist.all_reduce(numbers)
                times[way].append((time.perf_counter() - begin) / REPEATS / PRODUCTS * 1e6)
        found[f"{size // 1024} kB"] = {way: round(statistics.median(times[way]), 1) for way in WAYS}
    group.close()
    if group.rank == 0:
        for size_name, row_found in found.items():
            print(f"{size_name}: " + ", ".join(f"{way} {us} us" for way, us in row_found.items()))
        print(json.dumps(found))


def exchange(count: int) -> None:
    """Start the ranks of :func:`exchange_of_rank`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    command = [sys.executable, __file__, "exchange"]
    started = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(count)]
    if any(process.wait() for process in started):
        raise SystemExit("a rank failed")


def bench(count: int, arguments: argparse.Namespace, ranks: bool) -> tuple[float, float]:
    """Tokens per second of one sequence, and the most megabytes that one process held for itself."""
    command = ["gpt_fast", "bench", "--checkpoint", arguments.checkpoint, "--batch-sizes", "1", "--json"]
    command += ["--threads", "1" if ranks else str(count), "--new-tokens", "64", "--repeats", "3"]
    command += ["--quantize", arguments.quantize] if arguments.quantize else []
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"] if ranks else []
    most = 0.0
    with tempfile.TemporaryFile("w+") as printed:
        started = subprocess.Popen([sys.executable, "-m", *several, *command], stdout=printed, cwd=ROOT)
        while started.poll() is None:
            most = max([most, *map(own_megabytes, family(started.pid))])
            time.sleep(0.1)
        printed.seek(0)
        text = printed.read()
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return float(found["results"][0]["decode_tokens_per_second"]), most


def family(pid: int) -> list[int]:
    """``pid`` and what it started."""
    listed = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [pid, *(below for child in listed.stdout.split() for below in family(int(child)))]


def own_megabytes(pid: int) -> float:
    """Memory that is no page of a file."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return sum(int(kb) for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) / 1024


def decode(arguments: argparse.Namespace) -> None:
    """In turns."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    memory: dict[bool, float] = {False: 0.0, True: 0.0}
    for _ in range(arguments.rounds):
        for ranks in (False, True):
            speed, most = bench(arguments.ranks, arguments, ranks)
            speeds[ranks].append(speed)
            memory[ranks] = max(memory[ranks], most)
            print(f"{'ranks' if ranks else 'one process'}: {speed:.2f} tokens/s, {most:.0f} MB", flush=True)
    ratio = statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True))
    print(f"{arguments.ranks} ranks of one thread: {ratio:.3f} of one process of {arguments.ranks} threads")
    print(json.dumps({"one": speeds[False], "ranks": speeds[True], "ratio": ratio, "megabytes": list(memory.values())}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["exchange", "decode"])
    parser.add_argument("--checkpoint")
    parser.add_argument("--quantize")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        exchange_of_rank()
    elif arguments.what == "exchange":
        exchange(arguments.ranks)
    else:
        decode(arguments)


if __name__ == "__main__":
    main()
