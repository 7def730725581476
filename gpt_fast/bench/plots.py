"""Pictures of benchmark results. Needs matplotlib, which is the extra ``plot``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt_fast.errors import MissingPackageError

FORMATS = (".png", ".svg", ".pdf")


def check(path: str | Path) -> None:
    """Raise before a long run what ``plot_load`` would raise after it: MissingPackageError or ValueError."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"plot {str(path)!r}: the name must end in one of {', '.join(FORMATS)}")
    _figure_class()


def plot_load(results: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw TTFT and ITL (median and p99, milliseconds) and throughput against load, one point for each of ``results``.

    ``results`` are those of :func:`gpt_fast.bench.load.metrics.summarize`, with 99 among their percentiles. Load is the
    request rate where the results differ in it, else the concurrency. Raises MissingPackageError, ValueError, OSError.
    """
    check(path)
    by_rate = len({r["request_rate"] for r in results}) > 1
    loads = [r["request_rate"] if by_rate else r["max_concurrency"] or r["max_concurrent_requests"] for r in results]
    figure = _figure_class()(figsize=(12, 3.8), layout="constrained")
    ttft, itl, throughput = figure.subplots(1, 3)
    for axes, name, heading in ((ttft, "ttft", "Time to first token"), (itl, "itl", "Inter-token latency")):
        for key, style in ((f"median_{name}_ms", "o-"), (f"p99_{name}_ms", "s--")):
            axes.plot(loads, _values(results, key), style, label=key.split("_")[0])
        axes.set(title=heading, ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    throughput.plot(loads, _values(results, "output_throughput"), "o-")
    throughput.set(title="Output throughput", ylabel="tokens/s")
    throughput.set_ylim(bottom=0)
    for axes in (ttft, itl, throughput):
        if len(loads) > 1 and max(loads) >= 8 * min(loads):
            axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.set_xlabel("requests per second" if by_rate else "concurrent requests")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def plot_shares(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw tokens per second against the share of right drafts, one picture for each batch size: fixed numbers of
    drafts, plain decoding and the controller. ``rows`` are those of benchmarks/speculation.py."""
    check(path)
    sizes = sorted({row["batch_size"] for row in rows})
    figure = _figure_class()(figsize=(4.2 * len(sizes), 3.8), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        own = [row for row in rows if row["batch_size"] == size]
        shares = [row["share"] for row in own]
        for count in own[0]["fixed"]:
            label = f"{count} drafts" if count else "plain: where a line crosses it, drafts break even"
            axes.plot(shares, [row["fixed"][count] for row in own], "-" if count else "k--", label=label, alpha=0.7)
        axes.plot(shares, [row["auto"] for row in own], "ko", label="controller")
        axes.set(title=f"batch of {size}", xlabel="share of right drafts", ylabel="tokens/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=130)


def plot_drafts(results: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """For each batch size two pictures against k, the number of drafts. Tokens per second, median and quartiles, with
    the target alone and other methods without a k as lines; and the accepted drafts beside those of the break-even.

    ``results`` are rows of :class:`gpt_fast.bench.speculation.Bench`. Raises what ``plot_load`` raises."""
    check(path)
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in results))
    figure = _figure_class()(figsize=(10, 3.8 * len(batch_sizes)), layout="constrained")
    for pair, batch_size in zip(figure.subplots(len(batch_sizes), 2, squeeze=False), batch_sizes, strict=True):
        rows = [row for row in results if row["batch_size"] == batch_size]
        fixed = [row for row in rows if row["k"] is not None]
        numbers = [row["k"] for row in fixed]
        _draw_rates(pair[0], rows, fixed)
        pair[0].set(title=f"Batch {batch_size}: speed", ylabel="tokens/s")
        pair[1].plot(numbers, _values(fixed, "accepted_per_draft"), "o-", label="accepted")
        pair[1].plot(numbers, _values(fixed, "accepted_needed"), "s--", label="needed to break even")
        pair[1].set(title=f"Batch {batch_size}: break-even", ylabel="drafts for each step")
        for axes in pair:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            axes.set_xticks(numbers)
            axes.set_xlabel("k, drafts for each step")
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=130)


def _draw_rates(axes: Any, rows: Sequence[Mapping[str, Any]], fixed: Sequence[Mapping[str, Any]]) -> None:
    """``fixed`` against k. The other ``rows``, but not the draft model alone."""
    medians = _values(fixed, "tokens_per_second")
    quartiles = [row["tokens_per_second_quartiles"] for row in fixed]
    below = [median - low for median, (low, _) in zip(medians, quartiles, strict=True)]
    above = [high - median for median, (_, high) in zip(medians, quartiles, strict=True)]
    axes.errorbar([row["k"] for row in fixed], medians, [below, above], fmt="o-", capsize=3, label="k drafts")
    lines = [rows[0], *(row for row in rows[1:] if row["k"] is None and (row["same_tokens"] or row["acceptance"]))]
    for i, row in enumerate(lines):
        style = {"ls": ("-", "--", ":", "-.")[i % 4], "color": f"C{i + 1}"}
        axes.axhline(row["tokens_per_second"], label=row["method"], **style)


def _values(results: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Missing ones as NaN, which leave a gap in the line."""
    return [float("nan") if r.get(key) is None else float(r[key]) for r in results]


def _figure_class() -> Any:
    try:
        # Not pyplot: it keeps figures alive and picks a window system, for a file neither is wanted.
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise MissingPackageError("--plot needs matplotlib: pip install 'gpt-fast-serve[plot]'") from None
