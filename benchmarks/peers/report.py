"""Rounds to medians and ratios; a table for the terminal. What an earlier run wrote is read here, too.

A ratio is the median over the rounds of ours over the peer's, both of the same round: what slows the machine down for
a minute slows both. Its least and greatest round say how far to trust it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.measures import Measure
from peers.registry import OURS
from peers.rounds import Entry, Found

_QUIET_CPUS = 0.1  # taken by others without a word


def results(entries: Sequence[Entry], measures: Sequence[Measure], found: Found) -> list[dict[str, Any]]:
    """A row for each entry and measure that was measured. Shares are of the median bandwidth."""
    bandwidth = statistics.median(found.bandwidths) if found.bandwidths else None
    rows = []
    for entry in entries:
        for measure in measures:
            seconds = found.seconds.get((entry.label, measure))
            if seconds:
                row = _row(entry, measure, seconds, found.facts[entry.label], bandwidth)
                rows.append(row | {"other_cpus_rounds": found.others[entry.label, measure]})
    return rows


def _row(
    entry: Entry, measure: Measure, seconds: Sequence[float], facts: Mapping[str, Any], bandwidth: float | None
) -> dict[str, Any]:
    rates = [measure.num_tokens / s for s in seconds]
    row: dict[str, Any] = {
        "precision": entry.precision,
        "peer": entry.peer.name,
        "format": entry.format,
        "measure": measure.name,
        "batch": measure.batch,
        "prompt_tokens": measure.prompt_tokens,
        "new_tokens": measure.new_tokens,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_rounds": rates,
    }
    if measure.kind == "decode" and bandwidth is not None:
        cached = measure.batch * measure.mean_context * facts["kv_bytes_per_token"]
        ceiling = measure.batch * bandwidth / (facts["weight_bytes"] + cached)
        row |= {
            "bytes_per_step": facts["weight_bytes"] + cached,
            "ceiling_tokens_per_second": ceiling,
            "share_of_ceiling": row["tokens_per_second"] / ceiling,
        }
    return row


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over each peer, of the same precision and measure."""
    ours = {(row["precision"], row["measure"]): row for row in rows if row["peer"] == OURS}
    out = []
    for row in rows:
        own = ours.get((row["precision"], row["measure"]))
        if row["peer"] != OURS and own is not None:
            where = {key: row[key] for key in ("precision", "measure", "peer", "format")}
            out.append(where | _pairwise(own["tokens_per_second_rounds"], row["tokens_per_second_rounds"]))
    return out


def scaling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Within each peer: several sequences over one, and each longer context over the shortest one."""
    out = []
    for entry in dict.fromkeys((row["precision"], row["peer"], row["format"]) for row in rows):
        mine = [row for row in rows if (row["precision"], row["peer"], row["format"]) == entry]
        decodes = [row for row in mine if "decode" in row["measure"]]
        contexts = sorted((r for r in decodes if " at " in r["measure"]), key=lambda r: int(r["prompt_tokens"]))
        pairs = [(row, base) for base in decodes for row in decodes if base["measure"] == "decode" and row["batch"] > 1]
        pairs += [(row, contexts[0]) for row in contexts[1:]]
        for row, base in pairs:
            where = dict(zip(("precision", "peer", "format"), entry, strict=True))
            where |= {"measure": row["measure"], "over": base["measure"]}
            out.append(where | _pairwise(row["tokens_per_second_rounds"], base["tokens_per_second_rounds"]))
    return out


def _pairwise(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Of the rounds that both have; a peer that failed has fewer."""
    pairs = [a / b for a, b in zip(mine, theirs, strict=False)]
    return {"ratio": statistics.median(pairs), "least": min(pairs), "greatest": max(pairs), "rounds": pairs}


def text(report: Mapping[str, Any]) -> str:
    """The machine, and the table."""
    times, bandwidth = len(report["read_bandwidth_gb_s_rounds"]), report["read_bandwidth_gb_s"]
    return (
        f"{report['model']} on {report['cpu']}, {report['threads']} threads\n"
        f"read bandwidth {bandwidth:.1f} GB/s, median of {times}\n{table(report)}"
    )


def table(report: Mapping[str, Any]) -> str:
    """Tokens per second with the share of the ceiling, a column for each measure, and the ratios under them."""
    rows = report["results"]
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    entries = list(dict.fromkeys((row["precision"], row["peer"], row["format"]) for row in rows))
    lines = [[f"tokens/s, median of {report['rounds']} (share of ceiling)", *measures]]
    cells = {(row["precision"], row["peer"], row["format"], row["measure"]): _cell(row) for row in rows}
    for precision in dict.fromkeys(entry[0] for entry in entries):
        lines.append([precision])
        for entry in (entry for entry in entries if entry[0] == precision):
            lines.append([f"  {entry[1]} {entry[2]}", *(cells.get((*entry, m), "-") for m in measures)])
        compared = [ratio for ratio in report["ratios"] if ratio["precision"] == precision]
        for peer, format in dict.fromkeys((ratio["peer"], ratio["format"]) for ratio in compared):
            found = {r["measure"]: _spread(r) for r in compared if (r["peer"], r["format"]) == (peer, format)}
            lines.append([f"  ours / {peer} {format}", *(found.get(m, "-") for m in measures)])
    text = _columns(lines)
    for ratio in report["scaling"]:
        who = f"{ratio['precision']} {ratio['peer']} {ratio['format']}"
        text += f"\n{who}: {ratio['measure']} is {_spread(ratio)} of {ratio['over']}"
    others = [cpus for row in rows for cpus in row["other_cpus_rounds"]]
    if others and max(others) > _QUIET_CPUS:
        text += f"\nother processes kept {statistics.median(others):.1f} CPUs busy meanwhile, up to {max(others):.1f}: "
        text += "repeat this when nothing else runs"
    for skip in report["skipped"]:
        text += f"\nskipped {skip['what']}: {skip['reason']}"
    return text


def _cell(row: Mapping[str, Any]) -> str:
    share = f" ({row['share_of_ceiling']:.0%})" if "share_of_ceiling" in row else ""
    return f"{row['tokens_per_second']:.1f}{share}"


def _spread(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['ratio']:.2f}x ({ratio['least']:.2f}-{ratio['greatest']:.2f})"


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
    out = []
    for line in lines:
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=False)]
        out.append("  ".join([line[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(out)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs that ``--json`` wrote into files, among other lines. Raises ValueError, OSError."""
    runs: list[dict[str, Any]] = []
    seen: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('{"benchmark"')]
        if not lines:
            raise ValueError(f"{path} has no line that compare_peers.py --json wrote")
        found = [json.loads(line) for line in lines]
        runs += found
        for run in found:
            for row in run["results"]:
                cell = (row["precision"], row["peer"], row["format"], row["measure"], run["threads"])
                if cell in seen:
                    raise ValueError(f"{path} has what {seen[cell]} has: {' '.join(map(str, cell))} threads")
                seen[cell] = path
    for key in ("model", "cpu"):
        if len({run[key] for run in runs}) > 1:
            raise ValueError(f"the files differ in their {key}: {', '.join(sorted({run[key] for run in runs}))}")
    return runs
