"""What speculation.py found, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LINE = "{:<12}{:<9}{:<17}{:<7}{:<11}{:>8}{:>10}{:>8}{:>9}{:>9}{:>9}{:>9}"
_HEADS = (
    ("", "tokens/s", "", "ratio", "", "drafts", "accepted", "tokens", "draft", "verify", "plain", "expected"),
    ("", "median", "quartiles", "median", "quartiles", "a step", "of them", "a step", "ms", "ms", "ms", "ratio"),
)
HEAD = "\n".join(_LINE.format(*words).rstrip() for words in _HEADS)
NOTES = """\
ratio: tokens/s over those of the target alone in the same round. a step: each step of the target for one sequence.
draft, verify, plain ms: one draft, a step of the target that verifies drafts, a step without drafts.
expected ratio: (accepted + 1) x plain / (drafts x draft + verify), of steps with drafts in which the whole batch
decodes; drafts pay where it is above 1. Times are means of a round, and figures medians of the rounds.
-: not measured. Rules of --method compute whole sequences without a cache: compare them with each other only."""


def describe(row: dict[str, Any]) -> str:
    """``row`` as a line beneath HEAD."""
    low, high = row["tokens_per_second_quartiles"]
    ratio_low, ratio_high = row["ratio_quartiles"]
    return _LINE.format(
        row["method"],
        f"{row['tokens_per_second']:.1f}",
        f"{low:.1f}-{high:.1f}",
        f"{row['ratio']:.2f}",
        f"{ratio_low:.2f}-{ratio_high:.2f}",
        _cell(row["drafts_per_step"] or None, ".2f"),
        _cell(row["acceptance"], ".1%"),
        _cell(row["mean_accepted_length"], ".2f"),
        *(_cell(row[name], ".3f", 1e3) for name in ("draft_s", "verify_s", "plain_s")),
        _cell(row["expected_ratio"], ".2f"),
    )


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:{form}}"


def verdict(made: Sequence[dict[str, Any]]) -> str:
    """What to learn from the rows of one batch size: the best fixed number of drafts, and ``auto`` beside it."""
    best = max((row for row in made if row["k"] is not None), key=lambda row: row["ratio"])
    (auto,) = (row for row in made if row["method"] == "auto")
    return (
        f"best fixed number of drafts: {best['k']}, {best['ratio']:.2f} times the target alone; "
        f"auto: {auto['ratio']:.2f} times"
    )


def agreement(made: Sequence[dict[str, Any]]) -> str:
    """Which methods gave the target's tokens, for people. The others need not."""
    others = dict.fromkeys(row["method"] for row in made if row["same_tokens"] is None)
    return f"All methods{' but ' if others else ''}{', '.join(others)} gave the target's tokens in every round."
