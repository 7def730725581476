"""Does speculation change an answer? Hundreds of requests that mix every parameter, with drafts and without.

    python benchmarks/same_answers.py --target model_store/demo/target \
        --draft model_store/demo/draft lookup int8 int4 random [--requests 500] [--seed 0]
        [--dtype float32] [--quantize int8] [--kv-cache-dtype int8] [--threads 2] [--json]

The truth is what the target answers without drafts, one request at a time, nothing cached. Then the same requests run
with each ``--draft`` (a folder, lookup, int8, int4, or ``random``: half of the target's layers with random weights):
alone, in batches with arrivals, pauses and cancellations, without a prefix cache, with prompts in small chunks, and
with so few pages that sequences are preempted; and without drafts in the batches, to know who is to blame. Tokens,
texts, finish reasons, errors and log probabilities must be the same to the last bit.

Exit status: 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [folder for folder in (str(ROOT / "benchmarks"), str(ROOT)) if folder not in sys.path]

import torch  # noqa: E402
from identity.difference import described, difference  # noqa: E402
from identity.mixed import LONGEST, Ask, Mix  # noqa: E402
from identity.serving import Answer, Serving  # noqa: E402
from tqdm import tqdm  # noqa: E402

from gpt_fast import LLM  # noqa: E402
from gpt_fast.checkpoint.checkpoint import Checkpoint  # noqa: E402
from gpt_fast.checkpoint.saving import save_checkpoint  # noqa: E402
from gpt_fast.model.building import random_model  # noqa: E402

PAGE_SIZE = 16
CONTEXT = 2 * LONGEST
PLAIN = "none"


class Run(NamedTuple):
    """How the requests are served. ``pages``: how many of full length have room; None: all of them."""

    options: dict[str, Any]
    at_once: int = 12
    pages: float | None = None


ALONE = Run({"max_batch": 1, "prefix_cache": False}, at_once=1)
RUNS = {
    "alone": Run({"max_batch": 1, "speculate_k": 4}, at_once=1),
    "alone, 15 drafts": Run({"max_batch": 1, "speculate_k": 15}, at_once=1),
    "batch of 8": Run({"max_batch": 8, "speculate_k": 3}),
    "no prefix cache": Run({"max_batch": 8, "speculate_k": 7, "prefix_cache": False}),
    "chunks of 7": Run({"max_batch": 8, "speculate_k": 5, "prefill_chunk": 7, "page_size": 4}),
    "few pages": Run({"max_batch": 16, "speculate_k": 4, "page_size": 8}, at_once=24, pages=1.0),
    "as many as pay": Run({"max_batch": 8, "speculate_k": 6, "speculate": "auto"}),
    "one draft": Run({"max_batch": 5, "speculate_k": 1, "prefix_cache": False}, at_once=7, pages=1.0),
}


class Row(NamedTuple):
    """What one run showed. ``inside``: answers that ended on a draft, before the step's last token."""

    draft: str
    run: str
    answers: int
    differing: int
    cancelled: int
    inside: int
    steps: int
    drafted: int
    accepted: int
    preemptions: int
    seconds: float


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="a checkpoint's folder")
    parser.add_argument("--draft", nargs="+", required=True, help="folders, lookup, int8, int4, random")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="which requests")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help="those to make")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/text/tinystories.txt", help="for prompts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-kernels", action="store_true", help="plain torch instead of the kernels")
    parser.add_argument("--json", action="store_true", help="the table as JSON on the last line")
    return parser.parse_args()


def main() -> int:
    """Run everything; 1 if an answer differs."""
    arguments = read_arguments()
    options = {
        "dtype": arguments.dtype, "quantize": None if arguments.quantize == "none" else arguments.quantize,
        "kv_cache_dtype": arguments.kv_cache_dtype, "threads": arguments.threads, "page_size": PAGE_SIZE,
        "kernels": not arguments.no_kernels, "compile": False,
    }  # fmt: skip
    target = Checkpoint.open(arguments.target)
    context = min(CONTEXT, target.config.max_seq_len)
    story = target.tokenizer.encode(arguments.text.read_text(encoding="utf-8"), bos=False)
    asks = Mix(story, target.tokenizer.vocab_size, context, arguments.seed).requests(arguments.requests)
    campaign = Campaign(arguments.target, asks, options | {"max_seq_len": context})
    with contextlib.closing(campaign), tempfile.TemporaryDirectory(prefix="draft-") as folder:
        for name in [PLAIN, *arguments.draft]:
            draft = random_draft(target, Path(folder)) if name == "random" else name
            for run in arguments.runs:
                if name != PLAIN or "alone" not in run:
                    campaign.run(name, run, None if name == PLAIN else draft)
    print(table(campaign.rows))
    if arguments.json:
        print(json.dumps([row._asdict() for row in campaign.rows]))
    return int(any(row.differing for row in campaign.rows))


class Campaign:
    """All runs of ``asks`` on one target, compared with the truth."""

    def __init__(self, target: Path, asks: Sequence[Ask], options: dict[str, Any]) -> None:
        self._target, self._asks, self._options = target, asks, options
        self.rows: list[Row] = []
        self._bar = tqdm(unit="answer", disable=not sys.stderr.isatty(), file=sys.stderr)
        self._truth = self._serve("the truth", ALONE, {"speculate": "never"})[0]
        ends = [a.completion.finish_reason if a.completion else "error" for a in self._truth]
        print(f"{len(asks)} answers; {', '.join(f'{end}: {ends.count(end)}' for end in sorted(set(ends)))}", flush=True)

    def close(self) -> None:
        """Take the progress bar away."""
        self._bar.close()

    def run(self, name: str, run: str, draft: str | Path | None) -> None:
        """Serve all as ``run`` says with ``draft``, add a row, and tell of the first answer that differs."""
        how = RUNS[run]
        more: dict[str, Any] = {"speculate": "never"} if draft is None else {"draft": str(draft)}
        if how.pages is not None:
            page_size = how.options.get("page_size", PAGE_SIZE)
            more["num_pages"] = -(-int(how.pages * self._options["max_seq_len"]) // page_size)
        begin = time.perf_counter()
        answers, counts = self._serve(f"{name}, {run}", how, more)
        whys = [difference(*pair) for pair in zip(self._truth, answers, strict=True)]
        wrong = [which for which, why in enumerate(whys) if why]
        done = [a.completion for a in answers if a.completion is not None]
        row = Row(
            name, run, len(answers), len(wrong), sum(d.finish_reason == "abort" for d in done),
            sum(d.finish_reason == "stop" and d.origins[-1:] == ("accepted",) for d in done), counts["steps"],
            sum(d.num_drafted for d in done), sum(d.num_accepted for d in done), counts["preemptions"],
            round(time.perf_counter() - begin, 1),
        )  # fmt: skip
        self.rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row._asdict().items()), flush=True)
        if wrong:
            print(f"DIFFERS: {whys[wrong[0]]}; {described(wrong[0], self._asks[wrong[0]])}", flush=True)

    def _serve(self, title: str, how: Run, more: dict[str, Any]) -> tuple[list[Answer], dict[str, int]]:
        counts = {"steps": 0}
        self._bar.reset(len(self._asks))
        self._bar.set_description(title)
        with LLM(self._target, **{"speculate": "always"} | self._options | how.options | more) as llm:
            llm.engine.on_step = lambda plan, seconds: counts.update(steps=counts["steps"] + 1)
            answers = Serving(llm, self._asks, how.at_once, how.at_once > 1, self._bar.update).run()
            return answers, counts | {"preemptions": llm.engine.scheduler.num_preemptions}


def random_draft(target: Checkpoint, folder: Path) -> Path:
    """A checkpoint of half of the target's layers with random weights and the target's vocabulary in ``folder``."""
    config = dataclasses.replace(target.config, num_layers=max(1, target.config.num_layers // 2))
    save_checkpoint(random_model(config, torch.float32, torch.device("cpu")), folder)
    for file in target.directory.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def table(rows: Sequence[Row]) -> str:
    """The rows in columns."""
    cells = [Row._fields, *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


if __name__ == "__main__":
    sys.exit(main())
