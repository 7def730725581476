"""Checkouts of this project in turns: steps of a model's shape by the C++ kernels of each.

    python benchmarks/compare_trees.py TREE[:CACHE[:VARIANT]] ... [--shape tinyllama-1.1b] [--kind int4]
        [--work 1x1x128,8x1x128,1x256x8192] [--attention] [--rounds 15] [--threads 2]

TREE: a folder with ``gpt_fast`` in it, as of ``git worktree add ../before HEAD~3``. CACHE: of keys and values,
bfloat16 unless given. VARIANT: of the kernels (``avx2``, ...), else what this CPU has. WORK: sequences x new tokens of
each x the context they end at. ``--attention``: attention alone, not whole steps.

Each tree has a process that loads its ``gpt_fast`` under the steps of this folder's kernels_cpu.py. In each round every
tree does each piece of work, in changing order. Printed are the median in ms, the least, and the median over the rounds
of the ratio to the first tree. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

Work = tuple[int, int, int]  # sequences, new tokens, context
_FORMER = {  # where older trees have what these modules have now
    "gpt_fast.kernels.cpu.building": "gpt_fast.kernels.cpu.library",
    "gpt_fast.kernels.cpu.translation": "gpt_fast.kernels.cpu.program",
    "gpt_fast.model.describing": "gpt_fast.model.description",
}


def serve(setup: dict[str, Any]) -> None:
    """A tree's process: seconds of each piece of work that stdin names by its number."""
    sys.path.insert(0, setup["tree"])
    import torch

    import gpt_fast
    from gpt_fast.kernels.cpu import library
    from gpt_fast.model.shapes import shape

    if not str(gpt_fast.__file__).startswith(setup["tree"]):
        raise SystemExit(f"{gpt_fast.__file__} was imported, not {setup['tree']}")
    for name, former in _FORMER.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = importlib.import_module(former)
    import kernels_cpu

    torch.set_num_threads(setup["threads"])
    if setup["variant"]:
        kernels: Any = importlib.import_module("gpt_fast.kernels.cpu.building")
        kernels.variants = lambda: [setup["variant"]]
    if not library.available():
        raise SystemExit(f"the C++ kernels of {setup['tree']} do not run here")
    work = setup["work"]
    steps = kernels_cpu.steps_for(shape(setup["shape"]), setup["kind"], work, getattr(torch, setup["cache"]))
    for step in work:
        steps.run(*step)
    print("ready", flush=True)
    for line in sys.stdin:
        print(steps.seconds(*work[int(line)]), flush=True)


class Tree:
    """One of the compared, with its process."""

    def __init__(self, spec: str, common: dict[str, Any]) -> None:
        self.spec = spec
        folder, cache, variant = (*spec.split(":"), "", "")[:3]
        setup = common | {"tree": str(Path(folder).resolve()), "cache": cache or "bfloat16", "variant": variant}
        command = [sys.executable, __file__, "--serve", json.dumps(setup)]
        env = {"OMP_WAIT_POLICY": "passive", **os.environ}  # as in kernels_cpu.py
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        if self._read() != "ready":
            raise SystemExit(f"{self.spec}: no answer from its process")

    def seconds(self, index: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self.spec}: its process ended with status {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(trees: Sequence[Tree], work: Sequence[Work], rounds: int) -> list[dict[str, Any]]:
    """One row for each piece of work and tree."""
    times: list[list[list[float]]] = [[[] for _ in trees] for _ in work]
    for i in tqdm(range(rounds), leave=False, disable=None):
        for index, of_trees in enumerate(times):
            order = range(len(trees))
            for t in order if (i + index) % 2 else reversed(order):
                of_trees[t].append(trees[t].seconds(index))
    return [
        {
            "work": "x".join(map(str, step)),
            "tree": tree.spec,
            "ms": statistics.median(seconds) * 1e3,
            "least_ms": min(seconds) * 1e3,
            "ratio": statistics.median(own / first for own, first in zip(seconds, of_trees[0], strict=True)),
        }
        for step, of_trees in zip(work, times, strict=True)
        for tree, seconds in zip(trees, of_trees, strict=True)
    ]


def main() -> None:
    """See the module's docstring."""

    def works(text: str) -> list[Work]:
        return [(int(s), int(n), int(c)) for s, n, c in (each.split("x") for each in text.split(","))]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="TREE[:CACHE[:VARIANT]]")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--kind", default="int4", choices=("float32", "bfloat16", "int8", "int4"))
    parser.add_argument("--work", default=works("1x1x128,4x1x128,8x1x128,1x256x256,1x1x8192"), type=works)
    parser.add_argument("--attention", action="store_true", help="alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if not args.trees:
        parser.error("name at least one tree")
    kind = "attention" if args.attention else args.kind
    common = {"shape": args.shape, "kind": kind, "work": args.work, "threads": args.threads}
    trees: list[Tree] = []
    try:
        for spec in args.trees:
            trees.append(Tree(spec, common))
            trees[-1].wait_until_ready()  # one by one: they build their kernels and draw weights
        rows = compare(trees, args.work, args.rounds)
    finally:
        for tree in trees:
            tree.close()
    for row in rows:
        print(f"{row['work']:14} {row['tree']:40} {row['ms']:9.2f} ms ({row['least_ms']:9.2f}) {row['ratio']:6.3f}")
    print(json.dumps({"shape": args.shape, "kind": kind, "rows": rows}))


if __name__ == "__main__":
    main()
