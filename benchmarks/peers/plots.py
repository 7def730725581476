"""Pictures of runs: bars for each measure, or lines against the sequences, the context or the threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers.measures import SHORT_PROMPT

Row = Mapping[str, Any]  # of a run's results, with the run's ``threads``


class Axis(NamedTuple):
    """What tokens per second are drawn against. The functions take a row, or as much of one as is planned."""

    label: str
    has: Callable[[Row], bool]  # whether the row is drawn
    value: Callable[[Row], int]  # where
    panels: tuple[str, str] = ("threads", "precision")  # keys of rows: a line of panels and a column for each value


def _decodes(row: Row) -> bool:
    return bool(row["new_tokens"])


AXES = {
    "rows": Axis(
        "sequences decoded together",
        lambda row: _decodes(row) and row["prompt_tokens"] == SHORT_PROMPT,
        lambda row: int(row["batch"]),
    ),
    "contexts": Axis(
        "context of one sequence, tokens",
        lambda row: _decodes(row) and row["prompt_tokens"] != SHORT_PROMPT,
        lambda row: int(row["prompt_tokens"] + row["new_tokens"] + 1),
    ),
    "threads": Axis("threads", lambda row: True, lambda row: int(row["threads"]), ("measure", "precision")),
}
_BARS = ("threads", "measure")
_LEAST_WIDTH = 6.0  # inches, for a processor's name and the legend


def check(against: str, rows: Sequence[Row]) -> None:
    """Raise ValueError unless ``rows``, measured or planned, have two points at least on the axis."""
    axis = AXES[against]
    if len({axis.value(row) for row in rows if axis.has(row)}) < 2:
        raise ValueError(f"--against {against}: measure at two values or more to draw a line")


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of all runs, each with its ``threads``."""
    return [{**row, "threads": run["threads"]} for run in runs for row in run["results"]]


def draw(runs: Sequence[Mapping[str, Any]], path: str | Path, against: str | None = None) -> None:
    """Median tokens per second with the least and the greatest round.

    Without ``against``, a key of AXES: a panel for each measure with a group of bars for each precision, ceilings as
    lines. With it: a panel for each precision with a line for each peer. Raises ValueError, PlotError, OSError.
    """
    from gpt_fast.bench import plots

    plots.check(path)
    from matplotlib.figure import Figure

    rows = rows_of(runs)
    if against:
        check(against, rows)
        rows = [row for row in rows if AXES[against].has(row)]
    names = list(dict.fromkeys(_name(row) for row in rows))
    keys = AXES[against].panels if against else _BARS
    down, right = (list(dict.fromkeys(row[key] for row in rows)) for key in keys)
    figure = Figure(figsize=(max(_LEAST_WIDTH, 1 + 3.2 * len(right)), 0.8 + 3.2 * len(down)), layout="constrained")
    grid = figure.subplots(len(down), len(right), squeeze=False)
    for line, upper in zip(grid, down, strict=True):
        for axes, left in zip(line, right, strict=True):
            mine = [row for row in rows if (row[keys[0]], row[keys[1]]) == (upper, left)]
            title = f"{left}, {upper} threads" if keys[0] == "threads" else f"{left}, {upper}"
            axes.set(title=title, ylabel="tokens/s")
            axes.grid(axis="both" if against else "y", alpha=0.3)
            if against:
                _lines(axes, mine, names, AXES[against])
            else:
                _bars(axes, mine, names, list(dict.fromkeys(row["precision"] for row in rows)))
            axes.set_ylim(bottom=0)
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
    shown = {label: handle for some in pairs for handle, label in some}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(names))
    note = "bands: least and greatest round" if against else "lines: ceiling by bandwidth"
    figure.suptitle(f"{runs[0]['model']}, {runs[0]['cpu']}\n{note}", fontsize="medium")
    figure.savefig(path, dpi=130)


def _lines(axes: Any, rows: Sequence[Row], names: Sequence[str], axis: Axis) -> None:
    """A line for each peer in its colour, and a band around it."""
    for number, name in enumerate(names):
        mine = sorted((row for row in rows if _name(row) == name), key=axis.value)
        if mine:
            where = [axis.value(row) for row in mine]
            rounds = [row["tokens_per_second_rounds"] for row in mine]
            axes.fill_between(where, list(map(min, rounds)), list(map(max, rounds)), color=f"C{number}", alpha=0.2)
            rates = [row["tokens_per_second"] for row in mine]
            axes.plot(where, rates, "o-", color=f"C{number}", label=name, markersize=4)
    ticks = sorted({axis.value(row) for row in rows})
    if len(ticks) > 1 and ticks[-1] >= 8 * ticks[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(axis.label)


def _bars(axes: Any, rows: Sequence[Row], names: Sequence[str], precisions: Sequence[str]) -> None:
    """A group of bars for each precision, each with its ceiling."""
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [row for row in rows if _name(row) == name]
        where = [precisions.index(row["precision"]) + (number - (len(names) - 1) / 2) * width for row in mine]
        rates = [row["tokens_per_second"] for row in mine]
        spread = [
            [rate - min(row["tokens_per_second_rounds"]) for rate, row in zip(rates, mine, strict=True)],
            [max(row["tokens_per_second_rounds"]) - rate for rate, row in zip(rates, mine, strict=True)],
        ]
        axes.bar(where, rates, width, yerr=spread, label=name, color=f"C{number}", capsize=2)
        for x, row in zip(where, mine, strict=True):
            if "ceiling_tokens_per_second" in row:
                axes.hlines(row["ceiling_tokens_per_second"], x - width / 2, x + width / 2, color="black")
    axes.set(xticks=range(len(precisions)), xticklabels=precisions)


def _name(row: Row) -> str:
    """A colour for each peer; the same peer twice in a precision is told apart by its format."""
    return f"{row['peer']} {row['format']}" if row["format"] == "float32" else str(row["peer"])
