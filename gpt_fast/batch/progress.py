"""How far a batch is: a bar on a terminal, and a line now and then where stderr is a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

_LINE_EVERY_S = 30.0


class Progress:
    """Counts the rows of this run, of ``total`` rows of which ``known`` had answers before it."""

    def __init__(self, total: int, known: int) -> None:
        self.total, self.known = total, known
        self.answered = self.errors = self.tokens = 0
        self._begin = self._said = time.monotonic()
        self._first: float | None = None  # when the first row came, behind the time that loading took
        shown = sys.stderr.isatty()
        self._bar: Any = tqdm(total=total, initial=known, unit="row", desc="batch", file=sys.stderr) if shown else None

    def add(self, tokens: int, failed: bool) -> None:
        """Count one more row, answered or refused, that made ``tokens`` new tokens."""
        now = time.monotonic()
        self._first = self._first or now
        self.answered, self.errors, self.tokens = self.answered + 1, self.errors + failed, self.tokens + tokens
        if self._bar is not None:
            speed = f"{self.tokens / max(1e-3, now - self._first):.0f} tokens/s"
            self._bar.set_postfix_str(f"{speed}, errors: {self.errors}", refresh=False)
            self._bar.update()
        elif now > self._said + _LINE_EVERY_S:
            self._said = now
            print(self.line(now - self._first), file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Since the begin, loading included."""
        return time.monotonic() - self._begin

    def line(self, seconds: float) -> str:
        """For a log, ``seconds`` after the first row."""
        done, rate = self.known + self.answered, self.answered / max(1e-3, seconds)
        left = tqdm.format_interval((self.total - done) / rate) if rate else "?"
        speed = f"{rate:.1f} rows/s, {self.tokens / max(1e-3, seconds):.0f} tokens/s"
        return f"batch: {done} of {self.total} rows, errors: {self.errors}; {speed}; {left} left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
