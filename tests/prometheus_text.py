"""A strict reader of Prometheus' text format, version 0.0.4, and what must hold of every histogram in it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL},?)*)\}})? (\S+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = frozenset[tuple[str, str]]


@dataclass
class Exposition:
    """``values``: by name and labels. ``types`` and ``help``: by the name that was declared."""

    values: dict[tuple[str, Labels], float] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    help: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """The value of the one series of that name that has all of these labels; more labels do not matter.

        Raises KeyError if there is none, or more than one.
        """
        wanted = set(labels.items())
        found = [value for (n, has), value in self.values.items() if n == name and wanted <= has]
        if len(found) != 1:
            raise KeyError(f"{len(found)} series {name} {labels}")
        return found[0]

    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def histograms(self) -> dict[tuple[str, Labels], dict[float, float]]:
        """Every group of series that histogram_quantile would take for one histogram: le to count, in rising order."""
        groups: dict[tuple[str, Labels], dict[float, float]] = defaultdict(dict)
        for (name, labels), value in self.values.items():
            if name.endswith("_bucket"):
                le = dict(labels)["le"]
                rest = frozenset(pair for pair in labels if pair[0] != "le")
                groups[name.removesuffix("_bucket"), rest][float(le)] = value
        return {key: dict(sorted(buckets.items())) for key, buckets in groups.items()}


def parse(text: str) -> Exposition:
    """Raises AssertionError or ValueError, naming the line, for anything that the format does not allow."""
    found = Exposition()
    ended: set[str] = set()  # families that other lines have followed
    current = ""
    assert text.endswith("\n"), "the last line has no end"
    for line in text.splitlines():
        if line.startswith("# "):
            what, name, rest = line[2:].split(" ", 2)
            assert what in ("HELP", "TYPE"), line
            assert re.fullmatch(NAME, name), line
            into = found.help if what == "HELP" else found.types
            assert name not in into, f"a second one: {line}"
            assert what == "HELP" or rest in ("counter", "gauge", "histogram", "summary", "untyped"), line
            into[name] = rest
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"not a sample: {line!r}"
            name = declared(match[1], found.types)
            labels = re.findall(LABEL, match[2] or "")
            assert len({label for label, _ in labels}) == len(labels), f"a label twice: {line}"
            key = match[1], frozenset((label, unescaped(value)) for label, value in labels)
            assert key not in found.values, f"a series twice: {line}"
            found.values[key] = float(match[match.lastindex or 0])
            assert not math.isnan(found.values[key]), line
        if name != current:
            assert name not in ended, f"the lines of {name} are not together: {line}"
            ended.add(current)
            current = name
    return found


def declared(name: str, types: Mapping[str, str]) -> str:
    """The family that a series belongs to, by the declarations before it."""
    if name in types:
        assert types[name] in ("counter", "gauge"), f"{name} is a {types[name]}: it has buckets, sum and count"
        return name
    family = re.sub(r"_(bucket|sum|count)$", "", name)
    assert types.get(family) == "histogram", f"{name} is not declared before it is used"
    return family


def unescaped(value: str) -> str:
    return re.sub(r'\\["\\n]', lambda match: ESCAPES[match[0]], value)


def check_histograms(found: Exposition) -> None:
    """Buckets rise with ``le`` and end in +Inf, which counts what ``_count`` counts; no sum without observations."""
    groups = found.histograms()
    assert groups
    for (name, labels), buckets in groups.items():
        counts = list(buckets.values())
        assert counts == sorted(counts), (name, buckets)
        assert list(buckets)[-1] == math.inf, name
        assert counts[-1] == found.values[f"{name}_count", labels], name
        assert counts[-1] > 0 or found.values[f"{name}_sum", labels] == 0, name


def quantile(q: float, buckets: Mapping[float, float]) -> float:
    """Prometheus' histogram_quantile: linear within the bucket that holds the rank."""
    bounds, counts = list(buckets), list(buckets.values())
    rank = q * counts[-1]
    i = next(i for i, count in enumerate(counts) if count >= rank)
    if bounds[i] == math.inf:
        return bounds[-2]
    low, below = (bounds[i - 1], counts[i - 1]) if i else (0.0, 0.0)
    return low + (bounds[i] - low) * (rank - below) / (counts[i] - below)
