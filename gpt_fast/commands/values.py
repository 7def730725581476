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


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas between."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        wanted = "whole numbers of at least 1 with commas between, such as 1,8"
        raise argparse.ArgumentTypeError(f"must be {wanted}, not {text}")
    return tuple(map(int, words))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    found = tuple(map(_number, text.split(",")))
    if any(map(math.isnan, found)):
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, such as 50,99.9, not {text}")
    return found


def _number(text: str) -> float:
    """NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
