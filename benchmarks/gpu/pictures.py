"""A picture of the GPU programme's report: decode steps against rows and against the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt_fast.bench import plots

Row = Mapping[str, Any]

_SHORT = 128  # tokens of context of the left panel


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Tokens per second of the first shape's steps: against sequences that decode together, each precision beside what
    the copy's bandwidth allows; and of one sequence against its context. Raises MissingPackageError, ValueError."""
    plots.check(path)
    from matplotlib.figure import Figure

    rows = [row for row in report["decode"] if row["shape"] == report["decode"][0]["shape"] and row["each"] == 1]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, precision in enumerate(dict.fromkeys(row["precision"] for row in rows)):
        mine = [row for row in rows if row["precision"] == precision]
        batches = sorted((r for r in mine if r["context"] == _SHORT), key=lambda r: r["batch"])
        _line(left, "batch", batches, precision, number)
        limits = [r["tokens_per_second"] / r["share_of_copy"] for r in batches]
        left.plot([r["batch"] for r in batches], limits, "--", color=f"C{number}", alpha=0.5)
        contexts = sorted((r for r in mine if r["batch"] == 1), key=lambda r: r["context"])
        _line(right, "context", contexts, precision, number)
    left.set(title=f"behind {_SHORT} tokens; dashed: the copy's bandwidth", xlabel="sequences", yscale="log")
    right.set(title="one sequence", xlabel="context")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set(ylabel="tokens/s", xscale="log")
        ticks = sorted({x for line in axes.get_lines() for x in line.get_xdata()})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"{rows[0]['shape']}, decode steps, {report['device']}", fontsize="medium")
    figure.savefig(path, dpi=130)


def _line(axes: Any, key: str, rows: Sequence[Row], label: str, number: int) -> None:
    axes.plot([r[key] for r in rows], [r["tokens_per_second"] for r in rows], "o-", color=f"C{number}", label=label)
