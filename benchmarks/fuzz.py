"""Thousands of generated requests, right, odd and hostile, against a served model; nobody else may notice.

    python benchmarks/fuzz.py --url http://127.0.0.1:8080/predictions/gpt-fast --requests 10000 --seed 1
        [--concurrency 4] [--minutes 4] [--json] [--replay K]
    python benchmarks/fuzz.py --start model_store/demo/target       # starts a server with the shipped settings

Requests go to all routes: right ones in random combinations of fields, odd values, hostile grammars, broken JSON and
HTTP, very large ones, clients that are slow or hang up. Meanwhile a good client asks for what the idle server has
answered it before. Demanded of the server:

  no 5xx but refusals with Retry-After (and 504 where the request itself set a time limit)
  every answer arrives whole; requests that are right are served; the same request gets the same answer
  the tokens of a text make that text again
  no path of its machine and no traceback in any answer
  for the good client no wrong byte, and a worst latency under 1 s
  the worker's memory flat to 2 % from the second minute (judged from three minutes on, on the same machine)
  no page in use at the end, and the same worker process throughout

Request K of a seed is always the same for the same address: ``--replay K`` sends it again, alone and twice, and shows
both answers. Exit status: 0, every demand held; 1, one did not; 3, none failed but one could not be judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [folder for folder in (str(ROOT / "benchmarks"), str(ROOT)) if folder not in sys.path]

from fuzzing import report  # noqa: E402
from fuzzing.campaign import Campaign  # noqa: E402
from fuzzing.client import fire  # noqa: E402
from fuzzing.generator import Generator  # noqa: E402
from fuzzing.judge import BACK, faults, normal  # noqa: E402
from fuzzing.round_trip import lost  # noqa: E402
from fuzzing.shot import Target  # noqa: E402
from fuzzing.worker import WorkerGoneError  # noqa: E402

MODEL = "gpt-fast"


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="http://host:port/predictions/<model>")
    where.add_argument(
        "--start", metavar="CHECKPOINT", help="start a server with this checkpoint, and stop it at the end"
    )
    parser.add_argument("--port", type=int, default=9380, help="of a server that is started")
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument("--seed", type=int, default=1, help="which requests")
    parser.add_argument("--concurrency", type=int, default=4, help="clients that send them")
    parser.add_argument("--minutes", type=float, default=4.0, help="at least so long; memory is judged from 3 on")
    parser.add_argument("--replay", type=int, metavar="K", help="send request K alone, twice, and show the answers")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON on the last line")
    return parser.parse_args()


@contextmanager
def started(checkpoint: str, port: int) -> Iterator[str]:
    """A server with the settings that the repository ships; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        serve = [sys.executable, "-m", "gpt_fast", "serve", "--run-dir", folder]
        try:
            start = ["--background", "--checkpoint", checkpoint, "--port", str(port)]
            subprocess.run([*serve, *start], check=True, stdout=sys.stderr)
            yield f"http://127.0.0.1:{port}/predictions/{MODEL}"
        finally:
            subprocess.run([*serve, "--stop"], check=False, stdout=sys.stderr)


async def replay(target: Target, seed: int, index: int) -> int:
    """Send one request twice and show what came; 1 if an answer is not as it must be."""
    shot = Generator(target, seed).shot(index)
    how = [f"{name} {getattr(shot, name)}" for name in ("cuts", "pause_s", "hang_up", "of") if getattr(shot, name)]
    print(f"request {index} of seed {seed}: {shot.kind}, {shot.route}, {len(shot.data)} bytes {', '.join(how)}")
    print(shot.data[:3000].decode("latin-1") + ("..." if len(shot.data) > 3000 else ""))
    bad = False
    seen = set()
    for _ in range(2):
        answer = await fire(target.host, target.port, shot)
        seen.add(normal(answer))
        print(f"\n-> {answer.status} {answer.content_type} {answer.took_s:.3f} s {answer.fault}{' gone' * answer.gone}")
        print(answer.body[:3000].decode("utf-8", "replace"))
        found = list(faults(shot, answer))
        found += [(BACK, what) for what in [await lost(target, shot, answer)] if what]
        for demand, what in found:
            print(f"BROKEN: {demand}: {what}")
            bad = True
    if shot.same and len(seen) > 1:
        print("BROKEN: two answers to the same request")
        bad = True
    return int(bad)


def run(url: str, arguments: argparse.Namespace) -> int:
    """Everything, and the verdict."""
    campaign = Campaign(
        Target.of(url), arguments.seed, arguments.requests, arguments.minutes, concurrency=arguments.concurrency
    )
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=arguments.requests, unit="req", file=sys.stderr) as bar:

            def show(now: Campaign) -> None:
                bar.total = max(bar.total, now.sent)
                bar.set_postfix_str(f"{sum(now.num_problems.values())} problems", refresh=False)
                bar.update(now.sent - bar.n)

            asyncio.run(campaign.run(show))
    else:
        asyncio.run(campaign.run())
    where = f"--start {arguments.start}" if arguments.start else f"--url {url}"
    if shown := report.failures(campaign, f"python benchmarks/fuzz.py {where} --seed {arguments.seed}"):
        print(shown + "\n")
    print(report.table(campaign))
    if arguments.json:
        print(json.dumps(report.as_json(campaign)))
    return report.exit_status(report.demands(campaign))


def main() -> int:
    """Run it; the exit status is the verdict."""
    arguments = read_arguments()
    if arguments.start:
        with started(arguments.start, arguments.port) as url:
            return _at(url, arguments)
    return _at(arguments.url, arguments)


def _at(url: str, arguments: argparse.Namespace) -> int:
    try:
        if arguments.replay is not None:
            return asyncio.run(replay(Target.of(url), arguments.seed, arguments.replay))
        return run(url, arguments)
    except (ValueError, WorkerGoneError, RuntimeError) as error:
        print(f"fuzz.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
