"""Kills random ranks of a served model at random moments under load, and looks what that costs.

    scripts/quickstart.sh --config configs/model_config_tp.yaml --port 18080
    python benchmarks/rank_kills.py --url http://127.0.0.1:18080/predictions/gpt-fast --pid PID [--kills 100]

PID: TorchServe's (`pid` in .run/server.json). Clients ask for greedy completions whose texts are known, streamed
and in one piece. An answer that comes with status 200 in one piece must be the known text, and a stream its beginning.
After each kill the server must answer again without a hand, and the processes of before must be gone. The last line is
JSON. A third of the victims is stopped (SIGSTOP) and not killed: it hangs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import signal
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
from tqdm import tqdm

PROMPTS = ("Once upon a time", "The little dog", "Lily and Tom", "Her mom said", "One day", "The sun", "A bird", "Ben")
CLIENTS, TOKENS, TRY_S = 4, 150, 60.0


class Load:
    """Clients that ask on and on. ``counts``: what came of it."""

    def __init__(self, url: str) -> None:
        self.url, self.counts = url, collections.Counter[str]()
        self.known = {prompt: self.ask(prompt, stream=False) for prompt in PROMPTS}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def ask(self, prompt: str, stream: bool) -> str:
        """The text of one completion. Raises OSError or ValueError for anything but a whole one."""
        body = {"prompt": prompt, "max_new_tokens": TOKENS, "temperature": 0, "stream": stream, "ignore_eos": True}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TRY_S) as reply:
            text: str = reply.read().decode()
        return text if stream else json.loads(text)["text"]

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            prompt, stream = rng.choice(PROMPTS), rng.random() < 0.5
            try:
                text = self.ask(prompt, stream)
            except Exception as error:
                self.counts[type(error).__name__] += 1
                time.sleep(0.2)
                continue
            known = self.known[prompt]
            before, word, _ = text.partition('\n{"error"')
            if text == known:
                self.counts["right"] += 1
            elif stream and known.startswith(before):
                self.counts["ended with a word" if word else "ended early"] += 1
            else:
                self.counts["WRONG"] += 1
                print(f"\nasked {prompt!r}, got {text!r}, not {known!r}", file=sys.stderr)

    def stop(self) -> None:
        """Let the clients end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TRY_S)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of the ranks below ``pid``, rank 0 first."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "RANK" in process.environ():
                found.append((int(process.environ()["RANK"]), process))
        except psutil.Error:
            continue
    return [process for _, process in sorted(found, key=lambda each: each[0])]


def all_maps() -> Iterator[str]:
    """What each process that may be asked has in its memory."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def main() -> int:
    """Kill, wait, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    load = Load(arguments.url)
    ended_s, served_s, left = [], [], 0
    for _ in tqdm(range(arguments.kills), disable=not sys.stderr.isatty()):
        time.sleep(rng.uniform(0, 3))
        everyone = ranks_of(arguments.pid)
        victim = rng.choice(everyone)
        begin = time.monotonic()
        victim.send_signal(signal.SIGSTOP if rng.random() < 1 / 3 else signal.SIGKILL)
        _, alive = psutil.wait_procs(everyone, timeout=30)
        ended_s.append(time.monotonic() - begin)
        left += len(alive)
        while True:
            try:
                assert load.ask(PROMPTS[0], stream=False) == load.known[PROMPTS[0]]
                break
            except (OSError, ValueError, KeyError):
                assert time.monotonic() - begin < 120, "it does not serve again"
                time.sleep(0.2)
        served_s.append(time.monotonic() - begin)
    load.stop()
    found = {
        "kills": arguments.kills,
        "ended_s": {"median": statistics.median(ended_s), "most": max(ended_s)},
        "served_again_s": {"median": statistics.median(served_s), "most": max(served_s)},
        "processes_left": left,
        "ranks": len(ranks_of(arguments.pid)),
        "processes_with_ranks_memory": sum("gpt-fast-ranks" in maps for maps in all_maps()),
        "answers": dict(load.counts),
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))
    return 1 if left or load.counts["WRONG"] or found["ranks"] != found["processes_with_ranks_memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
