"""A level's progress on a terminal: requests done, how many run, pieces of text a second."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from gpt_fast.bench.load.client import Level, run_level
from gpt_fast.bench.load.prompts import Prompt

_REFRESH_S = 0.5


async def run_level_shown(level: Level, prompts: Iterator[Prompt], name: str) -> None:
    """``run_level`` with a bar named ``name`` where stderr is a terminal; elsewhere nothing is written."""
    bar = asyncio.create_task(_show(level, name)) if sys.stderr.isatty() else None
    try:
        await run_level(level, prompts)
    finally:
        if bar is not None:
            bar.cancel()
            await asyncio.wait([bar])


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
