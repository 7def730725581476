"""Records of one load level to numbers, under the names that `vllm bench serve` gives them in its result files.

All of them are over completed requests. With n tokens in the answer, times in milliseconds as read from the socket:

TTFT   from before the connection was opened to the first piece of text.
E2EL   from there to the end of the response.
TPOT   (E2EL - TTFT) / (n - 1): one value for each request with n > 1, however tokens were grouped.
ITL    every gap between two pieces of text of a request, 0 where they were read at once. When ``tokens_per_piece`` is
       not 1, the mean of ITL is that many times the time of a token: trust TPOT then.

Where n comes from is said by ``output_tokens_from``:
"usage"         the server's own count.
"fixed length"  native streams have none, but with ignore_eos as many tokens come as were asked for (``warm_up``).
"tokenizer"     the text was encoded again, which may differ by a token here and there.
"pieces"        every piece counted as a token, a lower bound when pieces hold several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gpt_fast.bench.load.client import Level, Record

_TITLES = {
    "ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency", "e2el": "End-to-end Latency",
}  # fmt: skip
METRICS = tuple(_TITLES)


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` -> {"ttft": 500.0, "tpot": 50.0}, milliseconds. Raises ValueError."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"goodput {word!r}: give ttft:MS, tpot:MS or e2el:MS")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"goodput {word!r}: {value!r} is not a number of milliseconds") from None
        if not limits[name] > 0:
            raise ValueError(f"goodput {word!r}: the limit must be more than 0")
    return limits


def summarize(
    level: Level,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> dict[str, Any]:
    """Every number of one level, ready for JSON; None where there is nothing to compute it from.

    ``duration`` is in seconds, from the start to the end of the last answer; throughputs are per second of it.
    ``goodput``: limits in milliseconds, a request is good when it keeps all of them. ``count_tokens``: a tokenizer's
    count, for prompts and answers whose length is not known otherwise."""
    done = [r for r in level.records if r.outcome == "completed"]
    outputs, source = _output_lengths(done, count_tokens)
    inputs = [
        count_tokens(str(r.prompt.content)) if r.num_input is None and count_tokens else r.num_input for r in done
    ]
    total_input = sum(n or 0 for n in inputs) if None not in inputs else None
    total_output = sum(outputs)
    num_pieces = sum(len(r.times) for r in done)
    seconds = level.duration_s
    latencies = [_latencies(r, n) for r, n in zip(done, outputs, strict=True)]
    o = level.options
    result: dict[str, Any] = {
        "max_concurrency": o.max_concurrency,
        "request_rate": None if math.isinf(o.request_rate) else o.request_rate,
        "duration": seconds,
        "num_prompts": len(level.records),
        "completed": len(done),
        "failed": level.counts["failed"],
        "refused": level.counts["refused"],
        "aborted": level.counts["aborted"],
        "errors": dict(Counter(r.error for r in level.records if r.error)),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "output_tokens_from": source,
        "tokens_per_piece": total_output / num_pieces if num_pieces else None,
        "request_throughput": _rate(len(done), seconds),
        "output_throughput": _rate(total_output, seconds),
        "total_token_throughput": None if total_input is None else _rate(total_input + total_output, seconds),
        "max_concurrent_requests": level.peak_in_flight,
        "client_cpu_share": level.cpu_s / seconds if seconds else None,
        "client_cpu_us_per_piece": 1e6 * level.cpu_s / level.num_pieces if level.num_pieces else None,
    }
    if goodput:
        good = [all(ms <= limit for name, limit in goodput.items() for ms in found[name]) for found in latencies]
        result["request_goodput"] = _rate(sum(good), seconds)
    for name in METRICS:
        result |= _statistics(name, [ms for found in latencies for ms in found[name]], percentiles)
    return result


def describe(result: Mapping[str, Any]) -> str:
    """``result`` for people, laid out as `vllm bench serve` prints it."""
    lines = [f"{' Serving Benchmark Result ':=^58}"]
    rows = {
        "Maximum request concurrency:": "max_concurrency", "Request rate configured (RPS):": "request_rate",
        "Successful requests:": "completed", "Failed requests:": "failed", "Refused requests (429, 503):": "refused",
        "Aborted requests (hung up):": "aborted", "Benchmark duration (s):": "duration",
        "Total input tokens:": "total_input_tokens", "Total generated tokens:": "total_output_tokens",
        "Request throughput (req/s):": "request_throughput", "Request goodput (req/s):": "request_goodput",
        "Output token throughput (tok/s):": "output_throughput",
        "Total token throughput (tok/s):": "total_token_throughput",
        "Peak concurrent requests:": "max_concurrent_requests", "Tokens per piece of text:": "tokens_per_piece",
        "CPU of this client (cores):": "client_cpu_share",
    }  # fmt: skip
    optional = ("max_concurrency", "request_rate", "request_goodput")
    shown = {
        title: result.get(key) for title, key in rows.items() if key not in optional or result.get(key) is not None
    }
    lines += [_row(title, value) for title, value in shown.items()]
    for name in METRICS:
        lines.append(f"{_TITLES[name]:-^58}")
        keys = [key for key in result if key.endswith(f"_{name}_ms")]
        lines += [_row(f"{_label(key)} {name.upper()} (ms):", result[key]) for key in keys]
    lines.append("=" * 58)
    if result["output_tokens_from"] != "usage":
        lines.append(f"generated tokens counted by: {result['output_tokens_from']}")
    lines += [f"{count} x {error}" for error, count in sorted(result["errors"].items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def _output_lengths(done: Sequence[Record], count_tokens: Callable[[str], int] | None) -> tuple[list[int], str]:
    """Tokens of each answer, and how the least certain of them was found."""
    known = [r.num_output for r in done]
    if None not in known:
        by_usage = all(r.usage is not None for r in done)
        return [n or 0 for n in known], "usage" if by_usage else "fixed length"
    if count_tokens is not None:
        return [count_tokens(r.text) if n is None else n for r, n in zip(done, known, strict=True)], "tokenizer"
    return [len(r.times) if n is None else n for r, n in zip(done, known, strict=True)], "pieces"


def _latencies(record: Record, num_output: int) -> dict[str, list[float]]:
    """Milliseconds, by metric; empty where there is nothing to measure, such as the TPOT of an answer of one token."""
    first = record.times[:1]
    seconds = {
        "ttft": [time - record.start for time in first],
        "tpot": [(record.end - time) / (num_output - 1) for time in first if num_output > 1],
        "itl": [after - before for before, after in pairwise(record.times)],
        "e2el": [record.end - record.start],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def _statistics(name: str, ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Percentiles are by linear interpolation, numpy's default."""
    keys = [f"{what}_{name}_ms" for what in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))]
    if not ms:
        return dict.fromkeys(keys)
    numbers = (np.mean(ms), np.median(ms), np.std(ms), *np.percentile(ms, percentiles))
    return dict(zip(keys, map(float, numbers), strict=True))


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _label(key: str) -> str:
    word = key.split("_")[0]
    return word.upper() if word[1:2].isdigit() else word.capitalize()


def _row(title: str, value: object) -> str:
    shown = "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<44}{shown:>14}"
