"""``gpt-fast batch``: answer a file of requests; a run that was interrupted goes on where it was."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpt_fast.commands import options


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("batch", help="answer a file of requests", description=__doc__)
    formats = "one request a line, in OpenAI's batch format or as {\"prompt\": ...}; '-' reads stdin"
    parser.add_argument("--input", required=True, metavar="FILE", help=formats)
    kept = "a row for each line, in order; answers that it already has are kept"
    parser.add_argument("--output", required=True, metavar="FILE", help=kept)
    engines = "engines that share the work, one for each GPU or part of the cores; needs the extra ray (default: 1)"
    parser.add_argument("--workers", type=int, default=1, metavar="N", help=engines)
    served = "another name that requests may have in model (may be repeated; gpt-fast and the folder's name always may)"
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help=served)
    options.add_output_options(parser)
    engine = parser.add_argument_group("engine")
    options.add_options(engine, options.CHECKPOINT | options.ENGINE | options.MAX_SEQ_LEN | options.MAX_BATCH)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer what has no answer yet, write the output, say how fast that was."""
    options.set_up_logging(arguments.verbose)

    from gpt_fast.batch.run import Batch, run_batch

    options.refuse_absent(arguments.checkpoint)
    engine = options.engine_options(arguments)
    checkpoint, output, names = Path(arguments.checkpoint), Path(arguments.output), tuple(arguments.model)
    try:
        done = run_batch(Batch(checkpoint, arguments.input, output, arguments.workers, names, engine))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what is done is kept, and the same command goes on from here") from None
    print(summary(done), file=sys.stderr)
    if arguments.json:
        print(json.dumps(done))
    return 0


def summary(done: dict[str, Any]) -> str:
    """``done``, the counts of a run, for people."""
    known = f", {done['known_before']} of them from before" if done["known_before"] else ""
    seconds = max(1e-3, done["seconds"])
    speed = f"{done['answered'] / seconds:.1f} rows/s, {done['new_tokens'] / seconds:.0f} tokens/s"
    return (
        f"{done['output']}: {done['rows']} rows{known}, errors: {done['errors']}; "
        f"{done['answered']} answered in {seconds:.1f} s, loading included: {speed}"
    )
