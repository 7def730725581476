"""A bar for what takes long: weights being read or written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from gpt_fast.checkpoint.stored import Report


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, what: str) -> Iterator[Report]:
    """A function to report bytes to, of ``total``, or None when nobody would see the bar."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what) as bar:
        yield bar.update
