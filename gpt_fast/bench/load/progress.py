"""A level's progress on a terminal: requests done, how many run, pieces of text a second."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator

from gpt_fast.bench.load.client import Level, LoadOptions, run_level
from gpt_fast.bench.load.prompts import Prompt

_REFRESH_S = 0.5


async def run_level_shown(options: LoadOptions, prompts: Iterator[Prompt], name: str) -> Level:
    """``run_level`` with a bar named ``name`` where stderr is a terminal; elsewhere nothing is written."""
    if not sys.stderr.isatty():
        return await run_level(options, prompts)
    bars: list[asyncio.Task[None]] = []
    try:
        return await run_level(options, prompts, lambda level: bars.append(asyncio.create_task(_show(level, name))))
    finally:
        for bar in bars:
            bar.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await bar


async def _show(level: Level, name: str) -> None:
    """Redraws twice a second, whatever the load: per token it would cost more than reading the token does."""
    from tqdm import tqdm

    total = None if level.options.duration_s is not None else level.options.num_prompts
    with tqdm(total=total, desc=name, unit="req", file=sys.stderr) as bar:

        def draw(*running: str) -> None:
            ended = [f"{level.counts[o]} {o}" for o in ("failed", "refused", "aborted") if level.counts[o]]
            bar.set_postfix_str(", ".join([*running, *ended]), refresh=False)
            bar.update(len(level.records) - bar.n)

        try:
            while True:
                seen = level.num_pieces
                await asyncio.sleep(_REFRESH_S)
                draw(f"{level.in_flight} running", f"{(level.num_pieces - seen) / _REFRESH_S:.0f} tok/s")
        finally:
            draw()
