"""A batch from beginning to end: read, answer what has no answer yet, write in order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.batch.answering import Job, OneEngine
from gpt_fast.batch.journal import Journal
from gpt_fast.batch.pipeline import Cluster, import_ray
from gpt_fast.batch.progress import Progress
from gpt_fast.batch.rows import error_in, new_tokens, write_row
from gpt_fast.batch.setup import Setup, set_up
from gpt_fast.batch.source import Row, Source, check_files
from gpt_fast.errors import BatchError
from gpt_fast.parallel.group import refuse_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """``input``: a path, or "-" for stdin. ``workers``: engines; more than one need Ray. ``names``: what requests may
    call the model, besides ``gpt-fast`` and the name of its folder. ``engine``: fields of EngineConfig."""

    checkpoint: Path
    input: str
    output: Path
    workers: int
    names: tuple[str, ...]
    engine: Mapping[str, Any]


def run_batch(batch: Batch) -> dict[str, Any]:
    """Bring ``batch.output`` to its end; returns counts and times. Raises BatchError, ConfigError, CheckpointError and
    MissingPackageError; what was answered before is kept then, and the next run goes on from there."""
    if batch.workers < 1:
        raise BatchError(f"--workers: {batch.workers} is not a number of engines; give at least 1")
    refuse_ranks("gpt-fast batch")
    output = check_files(batch.input, batch.output)
    if batch.workers > 1:
        import_ray()
    with (
        closing(Journal(output)) as journal,
        closing(Cluster(batch.workers) if batch.workers > 1 else OneEngine()) as engines,
    ):
        device = engines.device if batch.engine.get("device", "auto") == "auto" else None
        setup = set_up(batch.checkpoint, batch.engine, batch.names, device)
        with closing(Source(batch.input, setup.digest)) as source:
            rows = source.rows()
            progress = _answer(source, rows, journal, engines, setup)
            errors = _write(source, rows, journal)
    return {
        "rows": len(rows),
        "answered": progress.answered,
        "known_before": progress.known,
        "errors": errors,
        "new_tokens": progress.tokens,
        "seconds": round(progress.seconds, 3),
        "output": str(output),
    }


def _answer(
    source: Source, rows: Sequence[Row], journal: Journal, engines: Cluster | OneEngine, setup: Setup
) -> Progress:
    """Put an answer into ``journal`` for each of ``rows`` that has none."""
    wanted = [row for row in rows if row.digest not in journal]
    with Progress(len(rows), len(rows) - len(wanted)) as progress:
        jobs = (Job(row.digest, source.raw(row)) for row in wanted)
        with closing(engines.answers(setup, jobs)) as answers:
            for digest, answer in answers if wanted else ():  # no engine is loaded for nothing
                if digest not in journal:  # a worker that died may have told of it before
                    journal.add(digest, answer)
                    progress.add(new_tokens(answer), error_in(answer) is not None)
    if missing := sum(row.digest not in journal for row in rows):
        raise BatchError(f"{missing} rows came back without an answer; the others are kept: run the same command again")
    return progress


def _write(source: Source, rows: Sequence[Row], journal: Journal) -> int:
    """Write the output, in the order of the input. Returns the number of rows with errors."""
    errors = 0
    seen: Counter[str | int] = Counter()

    def written() -> Iterator[bytes]:
        nonlocal errors
        for row in rows:
            line, answer = source.line(row), journal.get(row.digest)
            errors += error_in(answer) is not None
            if line.name is not None:
                seen[line.name] += 1
            yield write_row(line, row.number, row.digest, answer)

    journal.finish(written())
    if twice := [name for name, count in seen.items() if count > 1]:
        log.warning("%d names of rows (custom_id, id) are there more than once, such as %r", len(twice), twice[0])
    return errors
