"""This engine and its peers on this CPU, in turns in one run: tokens per second, ratios, shares of what memory allows.

    python benchmarks/compare_peers.py --shape tinyllama-1.1b --peers llama.cpp,transformers
        [--python llama.cpp=/path/to/bin/python] [--convert llama.cpp/convert_hf_to_gguf.py] [--plot peers.png] [--json]
        [--checkout ik_llama.cpp=/path/to/ik_llama.cpp]  # built in its folder build
    python benchmarks/compare_peers.py --contexts 128,512,2048,8192 --batch '' --prompt-tokens 0 --against contexts
        --plot contexts.png --json > contexts.json
    python benchmarks/compare_peers.py --from contexts.json --against contexts --plot contexts.png

Every peer in every format runs in a separate process, which loads the same weights once and waits without using the CPU
until it is told to measure. The processes of one precision are up together, and in each round each of them measures in
turn, so that what else the machine does meets all of them. Ratios are of rounds, ours over the peer's; the table shows
their median with the least and the greatest. All use the same number of threads; for each number in --threads
everything is run once, one number after the other.

  decode         one sequence after a short prompt, one token a step, greedy
  decode xB      B sequences together, tokens per second of all
  prefill P      a prompt of P tokens
  decode at C    one sequence, the last of whose steps is at context C

The ceiling is the read bandwidth, measured before and in each round, over the bytes of weights and cache that a step
reads in that format. A peer that is not installed is left out and listed, with what would install it; so is a measure
that a peer cannot do, with its reason. Weights and the files that peers load are made once in --work. The last lines of
stdout are JSON with --json, an object for each number of threads; --from reads them and measures nothing. --plot draws
bars of every measure, and with --against lines over one axis. Progress goes to stderr. peers/*.py say how each peer is
run. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

_FOLDERS = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # peers here, gpt_fast above
sys.path[:0] = [folder for folder in _FOLDERS if folder not in sys.path]

from peers import files, measures, plots, registry, report, rounds  # noqa: E402

_BEGIN = time.perf_counter()


def options() -> argparse.ArgumentParser:
    """The command line."""

    def integers(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 2)[0], formatter_class=formatter)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--shape", default="tinyllama-1.1b", help="random weights of a named shape")
    target.add_argument("--checkpoint", type=Path, help="a Hugging Face directory instead")
    parser.add_argument("--peers", type=words, default=["llama.cpp", "transformers"], metavar="NAME,...")
    parser.add_argument("--precisions", type=words, default=list(registry.PRECISIONS), metavar="P,...")
    parser.add_argument("--threads", type=integers, default=[os.cpu_count() or 1], metavar="T,...")
    parser.add_argument(
        "--batch", type=integers, default=[1, 8], metavar="B,...", help="rows: sequences together; '' for none"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of prefill; 0: none")
    parser.add_argument("--new-tokens", type=int, default=30, help="steps of each decode")
    parser.add_argument("--contexts", type=integers, default=[128, 2048], metavar="C,...", help="'' for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, default=_default_work(), help="weights, files from them, logs (%(default)s)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.model beside random weights; default: made up")
    parser.add_argument("--convert", type=Path, metavar="FILE", help=f"llama.cpp's {files.CONVERTER}")
    parser.add_argument("--convert-python", default=sys.executable, help="with torch and transformers")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=FILE", help="interpreter of a peer")
    parser.add_argument("--checkout", action="append", default=[], metavar="PEER=DIR", help="source of a peer")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs the extra plot")
    parser.add_argument("--against", choices=plots.AXES, help="draw lines against this, in place of bars")
    parser.add_argument("--json", action="store_true", help="everything as the last line, one for each of --threads")
    parser.add_argument("--from", type=Path, nargs="+", dest="saved", metavar="FILE", help="show what --json wrote")
    return parser


def _default_work() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gpt-fast" / "peers"


def by_peer(option: str, given: Sequence[str]) -> dict[str, str]:
    """PEER=PATH words as paths by peer. Raises ValueError."""
    paths = {}
    for word in given:
        name, equals, path = word.partition("=")
        if not equals or name not in registry.REGISTRY:
            raise ValueError(f"{option} {word!r} is not PEER=PATH with a peer of {', '.join(registry.REGISTRY)}")
        paths[name] = path
    return paths


def checkouts(peers: Sequence[registry.Peer], given: Sequence[str]) -> dict[str, str]:
    """The folder of each peer that has no package. Raises ValueError where it is not what the peer needs."""
    paths = by_peer("--checkout", given)
    for peer in peers:
        if peer.checkout and not (peer.name in paths and Path(paths[peer.name], peer.checkout).is_file()):
            raise ValueError(
                f"--checkout {peer.name}=DIR: {peer.name} needs its checkout, the folder of {peer.checkout}: "
                f"{peer.install}"
            )
    return paths


def read_bandwidth(threads: int) -> float:
    """Bytes per second, measured anew."""
    import torch

    from gpt_fast.kernels import roofline

    torch.set_num_threads(threads)
    roofline.read_bandwidth.cache_clear()
    return roofline.read_bandwidth("cpu", threads)


def entries(
    peers: Sequence[registry.Peer],
    arguments: argparse.Namespace,
    folders: Mapping[str, str],
    found: rounds.Found,
    setting: rounds.Setting,
) -> list[rounds.Entry]:
    """Every peer in every format with its files; peers whose files cannot be made are skipped.

    ``folders``: the checkouts by peer.
    """
    if arguments.checkpoint is not None:
        checkpoint, work = arguments.checkpoint, files.folder_of(arguments.checkpoint, arguments.work)
    else:
        checkpoint = files.ensure_checkpoint(arguments.shape, arguments.work, arguments.tokenizer, setting.say)
        work = checkpoint.parent
    num_bytes = sum(p.stat().st_size for p in checkpoint.iterdir() if p.suffix in (".safetensors", ".bin"))
    out = []
    for peer in peers:
        formats = {p: peer.formats.get(p, ()) for p in arguments.precisions}
        if not any(formats.values()):
            found.skip(peer.name, f"it has no format for {', '.join(arguments.precisions)}")
            continue
        try:
            paths = model_files(peer, [f for fs in formats.values() for f in fs], checkpoint, work, arguments, setting)
        except files.FilesError as error:
            found.skip(peer.name, error)
            setting.say(f"skipped {peer.name}: {error}")
            continue
        extra = {"checkout": folders[peer.name]} if peer.checkout else {}
        for precision, names in formats.items():
            for f in names:
                told = {peer.wants: str(paths[f]), **extra}
                out.append(rounds.Entry(peer, precision, f, peer.num_bytes(f, num_bytes), told))
    return out


def model_files(
    peer: registry.Peer,
    formats: Sequence[str],
    checkpoint: Path,
    work: Path,
    arguments: argparse.Namespace,
    setting: rounds.Setting,
) -> dict[str, Path]:
    """What the peer loads, by format; made in ``work`` where it is not there yet. Raises FilesError."""
    if peer.wants == "gguf":
        return files.ensure_gguf(
            checkpoint,
            work,
            formats,
            convert=arguments.convert,
            convert_python=arguments.convert_python,
            quantize_python=setting.pythons[registry.LLAMA_CPP],
            threads=setting.threads,
            say=setting.say,
        )
    if peer.wants == "openvino":
        return files.ensure_openvino(checkpoint, work, formats, setting.pythons[peer.name], setting.say)
    return dict.fromkeys(formats, checkpoint)


def check(arguments: argparse.Namespace) -> None:
    """Raise before a long run what would end it: ValueError for options that contradict each other or cannot be,
    MissingPackageError."""
    if arguments.against and not arguments.plot:
        raise ValueError("--against says how to draw: give --plot FILE.png")
    if arguments.plot:
        from gpt_fast.bench import plots as pictures

        pictures.check(arguments.plot)
    if arguments.saved:
        return
    for precision in arguments.precisions:
        if precision not in registry.PRECISIONS:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(registry.PRECISIONS)}")
    if arguments.rounds < 1 or min(arguments.threads, default=0) < 1:
        raise ValueError("rounds and threads must be at least 1")
    if arguments.checkpoint is not None and not (arguments.checkpoint / "config.json").is_file():
        raise ValueError(f"--checkpoint: there is no config.json in {arguments.checkpoint}")
    if arguments.against:
        planned = [asdict(measure) | {"threads": n} for measure in plan(arguments) for n in arguments.threads]
        plots.check(arguments.against, planned)


def plan(arguments: argparse.Namespace) -> list[measures.Measure]:
    """What is measured. Raises ValueError."""
    return measures.plan(arguments.batch, arguments.prompt_tokens, arguments.new_tokens, arguments.contexts)


def compare(arguments: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Measure with ``threads`` threads. Raises ValueError where there is nothing to compare."""
    peers = registry.choose(arguments.peers)
    folders = checkouts(peers, arguments.checkout)
    measured = plan(arguments)
    setting = rounds.Setting(
        dict.fromkeys(registry.REGISTRY, sys.executable) | by_peer("--python", arguments.python),
        threads,
        arguments.rounds,
        arguments.work / "logs",
        lambda: read_bandwidth(threads),
        _say,
    )
    found = rounds.Found()
    versions = rounds.check(peers, setting, found)
    usable = [peer for peer in peers if peer.name in versions]
    refuse_alone({peer.name for peer in usable}, found)  # before weights are written for nobody
    chosen = entries(usable, arguments, folders, found, setting)
    refuse_alone({entry.peer.name for entry in chosen}, found)
    found.bandwidths.append(setting.bandwidth())
    _say(f"read bandwidth {found.bandwidths[0] / 1e9:.1f} GB/s with {threads} threads")
    for precision in arguments.precisions:
        rounds.run([entry for entry in chosen if entry.precision == precision], measured, setting, found)
    rows = report.results(chosen, measured, found)
    return {
        "benchmark": "peers",
        "model": str(arguments.checkpoint or arguments.shape),
        "weights": "checkpoint" if arguments.checkpoint else "random",
        "cpu": cpu_name(),
        "threads": threads,
        "rounds": arguments.rounds,
        "commit": commit(),
        "versions": versions,
        "read_bandwidth_gb_s": statistics.median(found.bandwidths) / 1e9,
        "read_bandwidth_gb_s_rounds": [b / 1e9 for b in found.bandwidths],
        "formats": found.facts,
        "results": rows,
        "ratios": report.ratios(rows),
        "scaling": report.scaling(rows),
        "skipped": found.skipped,
    }


def refuse_alone(names: set[str], found: rounds.Found) -> None:
    """Raise ValueError, with the reasons in ``found``, unless this engine and a peer are among ``names``."""
    if registry.OURS not in names or names == {registry.OURS}:
        reasons = "".join(f"\n  {skip['what']}: {skip['reason']}" for skip in found.skipped)
        raise ValueError(f"there is nothing to compare{reasons}")


def cpu_name() -> str:
    """As Linux tells it, else the machine's kind."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """This repository's, with ``-dirty`` when something is changed; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _BEGIN:6.0f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read, and print; 0 if at least one ratio was measured with each number of threads."""
    given = options().parse_args(arguments)
    try:
        check(given)
        if given.saved:
            runs = report.read(given.saved)
        else:
            runs = [compare(given, threads) for threads in dict.fromkeys(given.threads)]
        for run in runs:
            print(report.text(run))
        if given.json:
            for run in runs:
                print(json.dumps(run))
        if given.plot:
            plots.draw(runs, given.plot, given.against)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"compare_peers.py: {error}", file=sys.stderr)
        return 1
    return 0 if all(run["ratios"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
