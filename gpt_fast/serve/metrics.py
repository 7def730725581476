"""What the engine does, in numbers (metric_table.py).

They leave this process in two ways. :meth:`Metrics.start` writes what changed since the last time, for TorchServe's own
endpoint (torchserve_metrics.py). :meth:`Metrics.exposition` is text in Prometheus' format, for a route of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.errors import RequestError
from gpt_fast.serve.metric_table import ERRORS, FAMILIES, Family, draft_families

if TYPE_CHECKING:
    from gpt_fast.engine.engine import Engine
    from gpt_fast.engine.speculate.speculation import DraftCounts

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of exposition()


class Sample(NamedTuple):
    """One number of one series. The parts of a histogram are counters, as they are in Prometheus itself."""

    name: str  # without prefix
    kind: Literal["counter", "gauge"]
    unit: str
    labels: tuple[tuple[str, str], ...]  # always in the same order: TorchServe goes by position
    value: float


Emit = Callable[[Sequence[Sample]], None]


class Histogram:
    """Counts of observations up to each of ``bounds`` (ascending; a bound includes itself), and of those above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.names = [*(repr(float(bound)) for bound in bounds), "+Inf"]  # "1.0", as vLLM's client library writes 1
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """Counts what ``engine`` does from now on, and logs one line for every request that ends. Any thread may call any
    method; the engine's calls take microseconds. ``model_name`` and ``worker`` become labels of every series; two
    engines must differ in one of them. ``clock`` is what :class:`Request` takes its times from."""

    def __init__(
        self, engine: Engine, model_name: str, worker: str = "0", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._clock = engine, clock
        self._labels = (("model_name", model_name), ("engine", worker))
        self._lock = threading.Lock()
        speculation = engine.speculation
        self._families = FAMILIES if speculation is None else FAMILIES + draft_families(speculation.most)
        self._values: dict[tuple[str, str], float] = {
            (f.name, value): 0 for f in self._families if f.kind != "histogram" for value in f.label_values
        }
        self._histograms = {f.name: Histogram(f.buckets) for f in FAMILIES if f.kind == "histogram"}
        self._seen: dict[str, tuple[float, int]] = {}  # of running requests: last_token and num_output as counted
        self._flushing = threading.Lock()
        self._flushed: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        engine.on_step, engine.on_finish = self.step, self.finished

    # Called by the engine's thread.

    def step(self, plan: StepPlan, seconds: float) -> None:
        with self._lock:
            self._histograms["iteration_tokens_total"].observe(plan.num_tokens)
            for request in self._engine.scheduler.running:
                self._follow(request)

    def finished(self, request: Request) -> None:
        now = self._clock()
        times, found = request.timings(now), self._histograms
        with self._lock:
            self._follow(request)  # one that ends is no longer running when its last step is reported
            seen = self._seen.pop(request.id, None)
            self._values["request_success_total", request.finish_reason or "abort"] += 1
            found["e2e_request_latency_seconds"].observe(times.total_s)
            found["request_queue_time_seconds"].observe(times.queue_s)
            found["request_prompt_tokens"].observe(request.num_prompt)
            found["request_generation_tokens"].observe(request.num_output)
            if seen is not None:  # else it never got a token: there was no prefill to time, and no decode
                found["request_prefill_time_seconds"].observe(times.prefill_s)
                found["request_decode_time_seconds"].observe(times.decode_s)
                found["request_inference_time_seconds"].observe(times.prefill_s + times.decode_s)
            if request.num_output > 1:
                found["request_time_per_output_token_seconds"].observe(times.decode_s / (request.num_output - 1))
        log.info("%s", log_line(request, now))

    def _follow(self, request: Request) -> None:
        """Count the tokens that ``request`` got since the last look, and the time they took to come."""
        last = request.last_token
        if last is None:
            return
        before, num_counted = self._seen.get(request.id, (None, 0))
        if before is None:
            self._histograms["time_to_first_token_seconds"].observe((request.first_token or last) - request.arrival)
            self._values["prompt_tokens_total", ""] += request.num_prompt
        elif last != before:  # tokens that one step brought together (speculation) are one arrival, as in vLLM
            self._histograms["inter_token_latency_seconds"].observe(last - before)
        else:
            return
        self._seen[request.id] = last, request.num_output
        self._values["generation_tokens_total", ""] += request.num_output - num_counted

    # Called by whoever answers.

    def count_error(self, error: Exception) -> None:
        """Count a request whose client was told ``error``, whether the engine has ever seen it or not."""
        with self._lock:
            self._values["request_errors_total", error_kind(error)] += 1

    # Called by whoever reports.

    def _read(self) -> list[tuple[Family, str, list[Sample]]]:
        """The series of every family, under each of its names."""
        engine, scheduler, pages = self._engine, self._engine.scheduler, self._engine.scheduler.pages
        with self._lock:  # around the reading as well: of two readers the later one writes what is newer
            values = self._values
            values["num_requests_running", ""] = len(scheduler.running)
            values["num_requests_waiting", ""] = engine.num_waiting
            values["time_since_last_step_seconds", ""] = round(engine.since_last_step_s, 3)
            values["kv_cache_usage_perc", ""] = pages.num_used / (pages.num_pages - 1)
            values["num_preemptions_total", ""] = scheduler.num_preemptions
            if pages.prefix_cache:
                values["prefix_cache_queries_total", ""] = pages.queries
                values["prefix_cache_hits_total", ""] = pages.hits
            if engine.speculation is not None:
                self._read_drafts(engine.speculation.counts)
            named = [(family, name) for family in self._families for name in (family.name, family.former) if name]
            return [(family, name, list(self._samples(family, name))) for family, name in named]

    def _read_drafts(self, counts: DraftCounts) -> None:
        values = self._values
        values["spec_decode_num_drafts_total", ""] = counts.num_drafts
        values["spec_decode_num_draft_tokens_total", ""] = counts.num_draft_tokens
        values["spec_decode_num_accepted_tokens_total", ""] = counts.num_accepted_tokens
        for position, accepted in enumerate(tuple(counts.accepted_per_position)):
            values["spec_decode_num_accepted_tokens_per_pos_total", str(position)] = accepted

    def exposition(self) -> str:
        """Everything in Prometheus' text format, version 0.0.4, with vLLM's names. Send it as CONTENT_TYPE."""
        lines = []
        for family, name, samples in self._read():
            lines += [f"# HELP vllm:{name} {family.help}", f"# TYPE vllm:{name} {family.kind}", *map(_exposed, samples)]
        return "\n".join(lines) + "\n"

    def stats(self) -> dict[str, Any]:
        """The numbers of the page: every gauge and counter by its name (one that has another label is an object of
        its values), every histogram as the ``count`` of what it saw and their ``sum``; and the batch and the pages."""
        found: dict[str, Any] = {}
        for family, name, samples in self._read():
            if name == family.former:
                continue
            if family.kind == "histogram":
                found[name] = {"count": samples[-1].value, "sum": samples[-2].value}
            elif family.label:
                found[name] = {sample.labels[-1][1]: sample.value for sample in samples}
            else:
                found[name] = samples[0].value
        scheduler = self._engine.scheduler
        pages = {"pages_used": scheduler.pages.num_used, "pages_total": scheduler.pages.num_pages - 1}
        return found | {"max_batch": scheduler.max_batch} | pages

    def flush(self, emit: Emit) -> None:
        """Give ``emit`` what changed since the last flush: a gauge's new value, a counter's increase. The first flush
        gives every series, counters at 0, so that each bucket of a histogram exists from the start."""
        with self._flushing:
            samples = [sample for _, _, part in self._read() for sample in part]
            changed = []
            # From the end: a histogram's count goes before its buckets and those in falling order, so that whoever
            # reads in between never finds more observations below a bound than below the next.
            for sample in reversed(samples):
                key = sample.name, sample.labels
                before = self._flushed.get(key, 0)
                delta = round(sample.value - before, 9)
                if key in self._flushed and delta == 0:
                    continue
                self._flushed[key] = before + delta  # what the other side has now, rounding included
                changed.append(sample if sample.kind == "gauge" else sample._replace(value=delta))
            if changed:
                emit(changed)

    def _samples(self, family: Family, name: str) -> Iterator[Sample]:
        if family.kind != "histogram":
            for value in family.label_values:
                extra = ((family.label, value),) if family.label else ()
                yield Sample(name, family.kind, family.unit, self._labels + extra, self._values[family.name, value])
            return
        histogram = self._histograms[family.name]
        for le, count in zip(histogram.names, accumulate(histogram.counts), strict=True):
            yield Sample(f"{name}_bucket", "counter", "Count", (*self._labels, ("le", le)), count)
        yield Sample(f"{name}_sum", "counter", family.unit, self._labels, histogram.sum)
        yield Sample(f"{name}_count", "counter", "Count", self._labels, sum(histogram.counts))

    # The thread that reports.

    def start(self, emit: Emit, interval_s: float = 1.0, busy_interval_s: float = 5.0) -> None:
        """Flush now, and from now on in a thread: every ``busy_interval_s`` while requests run, as each flush may be a
        few hundred lines of log; within ``interval_s`` when none do, so that a quiet engine shows its last figures."""
        self.flush(emit)
        work = (emit, interval_s, busy_interval_s)
        threading.Thread(target=self._report, args=work, name="gpt-fast-metrics", daemon=True).start()

    def _report(self, emit: Emit, interval_s: float, busy_interval_s: float) -> None:
        due = 0.0
        try:
            while True:
                time.sleep(interval_s)
                if time.monotonic() >= due or not self._engine.scheduler.running:
                    self.flush(emit)
                    due = time.monotonic() + busy_interval_s
        except OSError as error:  # the output is closed, and with it the only way to report
            log.warning("metrics are no longer reported: %s", error)


def error_kind(error: Exception) -> str:
    """Which of ERRORS ``error`` is. A full queue, a server that stops and a time limit are apart, since a client may
    wait and ask again. All that a client wrote wrong is one kind."""
    if not isinstance(error, RequestError):
        return "server_error"
    return error.code if error.code in ERRORS else "invalid_request" if error.status < 500 else "server_error"


def log_line(request: Request, now: float) -> str:
    """One line about a request that ended at ``now``, without a word of what was asked or answered."""
    times = request.timings(now)
    first_token = "-" if request.first_token is None else f"{times.first_token_s * 1e3:.1f}"
    return (
        f"request id={request.id} prompt_tokens={request.num_prompt} cached_tokens={request.num_cached} "
        f"completion_tokens={request.num_output} finish_reason={request.finish_reason} "
        f"queue_ms={times.queue_s * 1e3:.1f} ttft_ms={first_token} total_ms={times.total_s * 1e3:.1f} "
        f"tokens_per_s={times.tokens_per_second(request.num_output):.1f}"
    )


def number_text(value: float) -> str:
    """Never 1e+16 (repr, from there on): TorchServe's pattern of a number has no plus sign."""
    return str(int(value)) if value == int(value) else repr(round(value, 9))


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _exposed(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sample.labels)
    return f"vllm:{sample.name}{{{labels}}} {number_text(sample.value)}"
