"""Is each line of a batch answered exactly once, whenever the run is killed?

    python benchmarks/batch_kills.py --checkpoint model_store/demo/target [--rows 10000] [--kills 3] [--workers 2]
        [--new-tokens 24] [--seed 0] [--keep DIR] [--json]

Writes ``--rows`` requests of both formats, made of stories; some have mistakes in them. One run answers them without a
pause. Another one, on another output, is killed ``--kills`` times (SIGKILL, which no program can answer), each time
when a random number of further rows is in its journal, and then left alone; with ``--workers`` 2 it is the Ray
pipeline. Its output must have the same rows in the same order, except for what tells about the run itself: when an
OpenAI answer was created, and how much of its prompt another row had left in the cache.

Exit status: 1 if anything differs, if a kill came too late, or if the journal is still there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORIES = ROOT / "tests" / "data" / "text" / "tinystories.txt"


def make_lines(num_rows: int, seed: int, new_tokens: int = 24) -> Iterator[str]:
    """Lines of an input: three of four in our own format, the others in OpenAI's; one of fifty is wrong."""
    rng, words = random.Random(seed), STORIES.read_text(encoding="utf-8").split()
    for i in range(num_rows):
        begin = rng.randrange(len(words) - 40)
        prompt = " ".join(words[begin : begin + rng.randint(3, 40)])
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, new_tokens)}
        body |= rng.choice(({}, {"temperature": 0.8}, {"temperature": 1, "top_p": 0.9, "seed": rng.randrange(99)}))
        if i % 50 == 49:
            yield rng.choice(('{"prompt": "broken', json.dumps({"prompt": prompt, "temprature": 1}), "[]"))
        elif i % 4:
            yield json.dumps(body | {"id": f"row {i}"})
        else:
            envelope = {"custom_id": f"row {i}", "method": "POST", "url": "/v1/completions"}
            yield json.dumps(envelope | {"body": body | {"model": "gpt-fast"}})


def differences(input_file: Path, one: Path, other: Path) -> list[str]:
    """What is wrong with two outputs of ``input_file`` that should be equal and have one row for each line."""
    names = [_name(line) for line in input_file.read_text(encoding="utf-8").splitlines()]
    outputs = [path.read_text(encoding="utf-8").splitlines() for path in (one, other)]
    wrong = [f"{len(rows)} rows for {len(names)} lines" for rows in outputs if len(rows) != len(names)]
    for number, (name, ours, theirs) in enumerate(zip(names, *outputs, strict=False), 1):
        first, second = _answer(ours), _answer(theirs)
        if first != second:
            wrong.append(f"line {number}: {ours[:300]} and {theirs[:300]}")
        elif first.get("custom_id", first.get("id")) != name or first.get("line", number) != number:
            wrong.append(f"line {number} is {name!r}, and its row is {ours[:300]}")
    return wrong


def _name(line: str) -> str | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value.get("custom_id", value.get("id")) if isinstance(value, dict) else None


def _answer(row: str) -> dict[str, Any]:
    """``row`` without what tells about the run."""
    read: dict[str, Any] = json.loads(row)
    body = (read.get("response") or {}).get("body", {})
    body.pop("created", None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return read


class Runs:
    """``gpt-fast batch`` as processes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.checkpoint, self.input = arguments.checkpoint, folder / "in.jsonl"

    def start(self, output: Path, workers: int) -> subprocess.Popen[str]:
        """Begin, or go on."""
        command = [sys.executable, "-m", "gpt_fast", "batch", "--checkpoint", self.checkpoint, "--json"]
        command += ["--input", str(self.input), "--output", str(output), "--workers", str(workers)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def finish(self, output: Path, workers: int) -> dict[str, Any]:
        """One run to its end. Raises RuntimeError if it fails."""
        process = self.start(output, workers)
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"gpt-fast batch ended with status {process.returncode}")
        return dict(json.loads(said.splitlines()[-1]))

    def kill(self, output: Path, workers: int, more: int) -> tuple[int, bool]:
        """One run that is killed when ``more`` rows have come to the journal. Returns the rows in it, and whether the
        run was still under way."""
        process, part = self.start(output, workers), output.with_name(output.name + ".part")
        wanted = _num_rows(part) + more
        while _num_rows(part) < wanted and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return _num_rows(part), process.returncode == -signal.SIGKILL


def _num_rows(part: Path) -> int:
    return part.read_bytes().count(b"\n") if part.exists() else 0


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; prints as it goes."""
    rng, runs = random.Random(arguments.seed), Runs(arguments, folder)
    lines = make_lines(arguments.rows, arguments.seed, arguments.new_tokens)
    runs.input.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    whole, killed = folder / "whole.jsonl", folder / "killed.jsonl"
    one = runs.finish(whole, 1)
    print(f"uninterrupted, one engine: {one['rows']} rows, {one['errors']} errors, {one['seconds']:.1f} s", flush=True)
    kept = []
    for _ in range(arguments.kills):
        rows, was_running = runs.kill(
            killed, arguments.workers, rng.randint(1, arguments.rows // (arguments.kills + 2))
        )
        print(f"killed with {rows} rows in the journal{'' if was_running else ': too late'}", flush=True)
        kept.append(rows if was_running else -1)
    last = runs.finish(killed, arguments.workers)
    print(f"finished: {last['known_before']} rows were there, {last['answered']} answered, {last['seconds']:.1f} s")
    wrong = differences(runs.input, killed, whole)
    if min(kept, default=0) < 0:
        wrong.append("a run ended before it was killed")
    if left := sorted(path.name for path in folder.iterdir() if path.suffix in (".part", ".new")):
        wrong.append(f"{', '.join(left)} is still there")
    print("\n".join(wrong[:20]) or f"equal: {one['rows']} rows, each line once")
    facts = {"rows": one["rows"], "workers": arguments.workers, "kept": kept, "errors": one["errors"]}
    times = {"uninterrupted_s": one["seconds"], "last_run_s": last["seconds"], "answered_last": last["answered"]}
    return {**facts, **times, "differences": len(wrong)}


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--rows", type=int, default=10_000, metavar="N")
    parser.add_argument("--kills", type=int, default=3, metavar="N")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="of the runs that are killed")
    parser.add_argument("--new-tokens", type=int, default=24, metavar="N", help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="DIR", help="write the files here, and leave them")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(arguments, folder)
    if arguments.json:
        print(json.dumps(found))
    return 1 if found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
