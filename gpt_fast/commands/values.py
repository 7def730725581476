"""Values of options that have a range: types for argparse, whose messages say what would be accepted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Whole numbers from ``lowest`` to ``highest``; None: without an end."""
    wanted = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def read(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= (highest or int(text)):
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, not {text}")
        return int(text)

    return read


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return number


def _number(text: str) -> float:
    """NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
