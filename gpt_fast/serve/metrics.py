"""What the engine does, in numbers, under vLLM's names, so that dashboards made for vLLM show this engine as well.

The numbers leave this process in two ways. :meth:`Metrics.start` writes what changed since the last time as the lines
that TorchServe picks out of a worker's output, for its own endpoint (port 8082, /metrics). TorchServe's pattern for
names has no colon, so they begin with ``vllm_`` there; configs/prometheus.yml renames them while they are scraped.
:meth:`Metrics.exposition` is text in Prometheus' format with the exact names (``vllm:``), for a route of ours.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, get_args

from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.errors import RequestError
from gpt_fast.outputs import FinishReason

if TYPE_CHECKING:
    from gpt_fast.engine.engine import Engine
    from gpt_fast.engine.speculate.speculation import DraftCounts

log = logging.getLogger(__name__)

NO_WORKER = "0"  # the number outside of TorchServe
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of exposition()

# vLLM's bounds, so that its recording rules and alerts find every `le` they name, and finer ones below where a small
# model lives: vLLM's own start at 10 ms between tokens and at 300 ms for a request.
TOKEN_GAP_S: tuple[float, ...] = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
TOKEN_GAP_S += (0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_S: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
FIRST_TOKEN_S += (10, 20, 40, 80, 160, 640, 2560)
REQUEST_S: tuple[float, ...] = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
REQUEST_S += (120, 240, 480, 960, 1920, 7680)
TOKENS = (*(m * 10**e for e in range(5) for m in (1, 2, 5)), 100_000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Family:
    """A metric as it is declared."""

    name: str  # without vLLM's prefix
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = "Count"
    buckets: tuple[float, ...] = ()
    former: str | None = None  # the name vLLM had for it, which older dashboards ask for
    label: str | None = None  # the one that it has beside those of every metric
    label_values: tuple[str, ...] = ("",)


def _seconds(name: str, help: str, buckets: tuple[float, ...] = REQUEST_S, former: str | None = None) -> Family:
    return Family(name, "histogram", help, "Seconds", buckets, former)


_USED = "Part of the KV cache's pages that running requests hold; 1 is all."
ERRORS = ("invalid_request", "queue_full", "stopping", "timeout", "server_error")  # error_kind()
_ERRORS = "Requests that were answered with an error, or ended in one after their first piece, by its kind."
_ENDED = "Requests that ended, by the reason."
_STEP = "Since a step last ended, while there are requests; 0 without any."
_GAP = "Between one step that brought a request tokens and the next."
FAMILIES = (
    Family("num_requests_running", "gauge", "Requests that hold a place in the batch."),
    Family("num_requests_waiting", "gauge", "Requests that wait for a place in the batch."),
    Family("time_since_last_step_seconds", "gauge", _STEP, "Seconds"),
    Family("kv_cache_usage_perc", "gauge", _USED, "Percent", former="gpu_cache_usage_perc"),
    Family("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Family("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."),
    Family("prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token."),
    Family("generation_tokens_total", "counter", "Tokens generated."),
    Family("num_preemptions_total", "counter", "Times a running request had to give its pages to an older one."),
    Family("request_success_total", "counter", _ENDED, label="finished_reason", label_values=get_args(FinishReason)),
    Family("request_errors_total", "counter", _ERRORS, label="error", label_values=ERRORS),
    Family("iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=STEP_TOKENS),
    _seconds("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S),
    _seconds("inter_token_latency_seconds", _GAP, TOKEN_GAP_S, former="time_per_output_token_seconds"),
    _seconds("request_time_per_output_token_seconds", "A request's mean time per token after its first.", TOKEN_GAP_S),
    _seconds("e2e_request_latency_seconds", "From arrival to the end."),
    _seconds("request_queue_time_seconds", "From arrival to the first step, or to the end without one."),
    _seconds("request_inference_time_seconds", "From the first step to the last token."),
    _seconds("request_prefill_time_seconds", "From the first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
    Family("request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=TOKENS),
    Family("request_generation_tokens", "histogram", "Tokens generated for a request.", buckets=TOKENS),
)


def draft_families(most: int) -> tuple[Family, ...]:
    """What became of drafts, of which a step has at most ``most`` for each sequence. Without a drafter there are none
    of these series, as in vLLM."""
    at = "Drafts that were right, by their position in the step; 0 is the first."
    return (
        Family("spec_decode_num_drafts_total", "counter", "Times that a sequence had drafts in a step."),
        Family("spec_decode_num_draft_tokens_total", "counter", "Tokens that were drafted, and verified."),
        Family("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that were right."),
        Family(
            "spec_decode_num_accepted_tokens_per_pos_total", "counter", at, label="position",
            label_values=tuple(str(position) for position in range(most)),
        ),
    )  # fmt: skip


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


def _number(value: float) -> str:
    # Never 1e+16 (repr, from there on): TorchServe's pattern of a number has no plus sign.
    return str(int(value)) if value == int(value) else repr(round(value, 9))


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _exposed(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sample.labels)
    return f"vllm:{sample.name}{{{labels}}} {_number(sample.value)}"


# ---- TorchServe's side ----------------------------------------------------------------------------------------------


def worker_id(argv: Sequence[str]) -> str:
    """TorchServe's number of the worker that was started with ``argv``, "9000" for instance; NO_WORKER elsewhere. It
    stays the same when the worker dies and is replaced, so a replaced worker goes on with the same series."""
    for flag, value in pairwise(argv):
        if flag in ("--sock-name", "--port") and (number := re.search(r"\d+$", value)):
            return number[0]
    return NO_WORKER


def torchserve_line(sample: Sample, hostname: str, timestamp: int) -> str:
    """``sample`` as TorchServe expects it in a worker's output. ts/metrics/caching_metric.py writes the same, one
    system call and some 70 us a line; a flush has hundreds."""
    # TorchServe splits at these signs and drops a dimension without a value, and with it the whole line.
    labels = ((name, re.sub(r"[,:|\r\n]", "_", value) or "_") for name, value in sample.labels)
    dimensions = ",".join(f"{name}:{value}" for name, value in labels)
    return (
        f"[METRICS]vllm_{sample.name}.{sample.unit}:{_number(sample.value)}|#{dimensions}"
        f"|#type:{sample.kind.upper()}|#hostname:{hostname},{timestamp}"
    )


def write_torchserve(samples: Sequence[Sample], stream: TextIO | None = None) -> None:
    """Report ``samples`` to TorchServe: write them to a worker's standard output, in one piece."""
    hostname, timestamp = socket.gethostname(), int(time.time())
    text = "".join(torchserve_line(sample, hostname, timestamp) + "\n" for sample in samples)
    print(text, end="", file=stream, flush=True)
