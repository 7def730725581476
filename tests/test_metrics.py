"""Metrics against a simulated engine whose every token is known, and the two forms in which they leave the process."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_text import Exposition, check_histograms, parse, quantile
from waiting import eventually

from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.scheduler import Scheduler, SequencePlan, StepPlan
from gpt_fast.engine.speculate.lookup import LookupDrafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.engine.text import TextStream
from gpt_fast.errors import RequestError, try_later
from gpt_fast.params import SamplingParams
from gpt_fast.serve import metrics as module
from gpt_fast.serve.metric_table import ERRORS, FAMILIES, draft_families
from gpt_fast.serve.metrics import Metrics, Sample, log_line
from gpt_fast.serve.torchserve_metrics import torchserve_line, worker_id, write_torchserve

ROOT = Path(__file__).resolve().parent.parent
SECRET = "a word of the prompt"


class Silent:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return SECRET


def request(name: str, num_prompt: int, max_tokens: int, arrival: float = 0.0) -> Request:
    return Request(
        id=name,
        token_ids=[int(name.strip("r")) % 3 + 1] * num_prompt,  # some begin like others
        params=SamplingParams(max_tokens=max_tokens).resolved(),
        seed=0,
        max_tokens=max_tokens,
        end_ids=frozenset(),
        text=TextStream(Silent()),
        arrival=arrival,
    )


class Simulation:
    """The engine's loop around the real scheduler, on its own clock. Writes down when each token came."""

    def __init__(self, num_pages: int = 40, max_batch: int = 4, prefix_cache: bool = True, seed: int = 0) -> None:
        self.now = 0.0
        self.draw = random.Random(seed)
        self.scheduler = Scheduler(PageAllocator(num_pages, 4, prefix_cache), max_batch, prefill_chunk=16)
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.speculation: Speculation | None = None
        self.since_last_step_s = 0.0
        self.requests: list[Request] = []
        self.tokens: dict[str, list[float]] = {}
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.step_tokens: list[int] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def add(self, num_prompt: int, max_tokens: int) -> Request:
        added = request(f"r{len(self.requests)}", num_prompt, max_tokens, self.now)
        self.requests.append(added)
        self.tokens[added.id] = []
        self.scheduler.add(added)
        return added

    def step(self, num_drafted: int = 0) -> None:
        """``num_drafted``: tokens that a request gets beside the usual one, as from speculation."""
        for r in self.scheduler.running:
            r.drafts = (7,) * num_drafted
        before = list(self.scheduler.running)
        plan, requests = self.scheduler.schedule()
        self.num_preemptions += sum(r in self.scheduler.waiting for r in before)
        for r in requests:
            if r.id not in self.begun:
                self.begun[r.id] = r.first_scheduled = self.now
        self.now += self.draw.choice([0.0002, 0.003, 0.04, 0.7])
        self.step_tokens.append(sum(len(s.tokens) for s in plan.sequences))
        for r, s in zip(requests, plan.sequences, strict=True):
            num_known = r.num_tokens
            r.append([7] * s.num_logits, self.now)
            self.tokens[r.id] += [self.now] * (r.num_tokens - num_known)
            self.scheduler.advance(r, len(s.tokens))
            if r.finish_reason is not None:
                self.end(r)
        self.on_step(plan, 0.001)

    def abort(self, r: Request) -> None:
        r.finish_reason = "abort"
        self.end(r)

    def end(self, r: Request) -> None:
        self.scheduler.finish(r)
        self.ended[r.id] = self.now
        self.on_finish(r)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


def watched(simulation: Any, **names: str) -> Metrics:
    return Metrics(simulation, names.get("model_name", "m"), names.get("engine", "0"), lambda: float(simulation.now))


def busy(metrics_of: Callable[[Simulation], Metrics] = watched, **options: Any) -> tuple[Simulation, Metrics]:
    """Forty requests that come while others run, wait, are preempted and aborted at any point of their life."""
    simulation = Simulation(**{"num_pages": 14, **options})
    metrics = metrics_of(simulation)
    draw = random.Random(3)
    for _ in range(40):
        simulation.add(draw.choice([1, 3, 9, 16, 30]), draw.randrange(1, 20))
        for _ in range(draw.randrange(4)):
            simulation.step()
        alive = [*simulation.scheduler.running, *simulation.scheduler.waiting]
        if alive and draw.random() < 0.2:
            simulation.abort(draw.choice(alive))
    simulation.run()
    return simulation, metrics


def truth(s: Simulation) -> dict[str, list[float]]:
    """Every observation of every histogram, from what the simulation wrote down."""
    begun = [(r, s.tokens[r.id]) for r in s.requests if s.tokens[r.id]]
    gaps = [b - a for r in s.requests for a, b in zip(s.tokens[r.id], s.tokens[r.id][1:], strict=False)]
    return {
        "iteration_tokens_total": [float(n) for n in s.step_tokens],
        "time_to_first_token_seconds": [times[0] - r.arrival for r, times in begun],
        "inter_token_latency_seconds": gaps,
        "time_per_output_token_seconds": gaps,
        "request_time_per_output_token_seconds": [
            (times[-1] - times[0]) / (len(times) - 1) for _, times in begun if len(times) > 1
        ],
        "e2e_request_latency_seconds": [s.ended[r.id] - r.arrival for r in s.requests],
        "request_queue_time_seconds": [s.begun.get(r.id, s.ended[r.id]) - r.arrival for r in s.requests],
        "request_inference_time_seconds": [times[-1] - s.begun[r.id] for r, times in begun],
        "request_prefill_time_seconds": [times[0] - s.begun[r.id] for r, times in begun],
        "request_decode_time_seconds": [times[-1] - times[0] for _, times in begun],
        "request_prompt_tokens": [float(r.num_prompt) for r in s.requests],
        "request_generation_tokens": [float(len(s.tokens[r.id])) for r in s.requests],
    }


# ---- what is counted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_pages": 80}, {"max_batch": 1}], ids=["short of pages", "roomy", "alone"])
def test_every_number_is_what_happened(options: dict[str, int]) -> None:
    simulation, metrics = busy(**options)
    found = parse(metrics.exposition())
    check_histograms(found)
    expected = truth(simulation)
    labels = frozenset({"model_name": "m", "engine": "0"}.items())
    groups = {name.removeprefix("vllm:"): buckets for (name, _), buckets in found.histograms().items()}
    assert groups.keys() == expected.keys()
    for name, values in expected.items():
        for le, count in groups[name].items():
            # A bound that a value meets exactly may go either way: the simulation's sums are floating point too.
            assert sum(v <= le - 1e-9 for v in values) <= count <= sum(v <= le + 1e-9 for v in values), (name, le)
        assert found.values[f"vllm:{name}_sum", labels] == pytest.approx(sum(values)), name
        assert found.values[f"vllm:{name}_count", labels] == len(values), name
    begun = [r for r in simulation.requests if simulation.tokens[r.id]]
    pages = simulation.scheduler.pages
    assert {name: found.value(f"vllm:{name}") for name in SCALARS} == {
        "prompt_tokens_total": sum(r.num_prompt for r in begun),
        "generation_tokens_total": sum(map(len, simulation.tokens.values())),
        "num_preemptions_total": simulation.num_preemptions,
        "prefix_cache_queries_total": pages.queries,
        "prefix_cache_hits_total": pages.hits,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "time_since_last_step_seconds": 0,
        "kv_cache_usage_perc": 0,
        "gpu_cache_usage_perc": 0,
    }
    reasons = Counter(r.finish_reason for r in simulation.requests)
    for reason in ("stop", "length", "abort"):
        assert found.value("vllm:request_success_total", finished_reason=reason) == reasons[reason]


def test_errors_are_counted_by_their_kind() -> None:
    simulation = Simulation()
    metrics, front_end = watched(simulation), FrontEnd()
    metrics.flush(front_end.emit)
    told: dict[str, list[Exception]] = {
        "invalid_request": [RequestError("x"), RequestError("x", "p", "not_found", 404)],
        "queue_full": [try_later("full")],
        "stopping": [RequestError("x", None, "stopping", 503, 10)],
        "timeout": [RequestError("x", "timeout_s", "timeout", 504)] * 3,
        "server_error": [RequestError("x", None, "internal_error", 500), ValueError("x")],
    }
    for error in (error for errors in told.values() for error in errors):
        metrics.count_error(error)
    metrics.flush(front_end.emit)
    for found in (parse(metrics.exposition()), front_end.scraped()):
        shown = {kind: found.value("vllm:request_errors_total", error=kind) for kind in ERRORS}
        assert shown == {kind: len(errors) for kind, errors in told.items()}


SCALARS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_requests_running",
    "num_requests_waiting",
    "time_since_last_step_seconds",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
)


def test_the_simulation_has_every_case() -> None:
    """Otherwise the test above would say nothing about them."""
    simulation, _ = busy()
    assert simulation.num_preemptions > 5
    assert simulation.scheduler.pages.hits > 0
    assert {r.finish_reason for r in simulation.requests} == {"length", "abort"}
    assert any(not simulation.tokens[r.id] and r.id not in simulation.begun for r in simulation.requests)
    assert any(len(times) == 1 for times in simulation.tokens.values())


def test_gauges_follow_the_engine() -> None:
    simulation = Simulation(num_pages=11, max_batch=2)
    metrics = watched(simulation)
    for _ in range(3):
        simulation.add(8, 5)
    simulation.step()
    simulation.since_last_step_s = 12.3456
    found = parse(metrics.exposition())
    assert found.value("vllm:time_since_last_step_seconds") == 12.346
    assert found.value("vllm:num_requests_running") == 2
    assert found.value("vllm:num_requests_waiting") == 1
    assert found.value("vllm:kv_cache_usage_perc") == 4 / 10  # page 0 is nobody's
    # Tokens count as they come, not when their request ends: a dashboard's rate would have steps otherwise.
    assert found.value("vllm:generation_tokens_total") == 2
    assert found.value("vllm:e2e_request_latency_seconds_count") == 0


def test_stats_are_the_numbers_of_the_exposition() -> None:
    simulation, metrics = busy()
    found, stats = parse(metrics.exposition()), metrics.stats()
    for family in FAMILIES:
        told, name = stats.pop(family.name), f"vllm:{family.name}"
        if family.kind == "histogram":
            assert told == {"count": found.value(f"{name}_count"), "sum": pytest.approx(found.value(f"{name}_sum"))}
        elif family.label:
            assert told == {value: found.value(name, **{family.label: value}) for value in family.label_values}
        else:
            assert told == found.value(name)
    assert stats == {"max_batch": simulation.scheduler.max_batch, "pages_used": 0, "pages_total": 13}


def test_a_prefix_cache_that_is_off_has_no_queries() -> None:
    simulation, metrics = busy(prefix_cache=False)
    assert simulation.scheduler.pages.queries > 0
    assert parse(metrics.exposition()).value("vllm:prefix_cache_queries_total") == 0


def test_tokens_that_come_together_are_counted_each_and_timed_once() -> None:
    simulation = Simulation()
    metrics = watched(simulation)
    simulation.add(3, 9)
    simulation.step()
    simulation.step(num_drafted=3)
    simulation.step(num_drafted=3)
    found = parse(metrics.exposition())
    assert found.value("vllm:generation_tokens_total") == 9
    assert found.value("vllm:inter_token_latency_seconds_count") == 2
    assert found.value("vllm:inter_token_latency_seconds_sum") == pytest.approx(
        simulation.tokens["r0"][-1] - simulation.tokens["r0"][0]
    )


def test_drafts_are_counted_by_what_became_of_them_and_by_position() -> None:
    simulation = Simulation()
    simulation.speculation = Speculation(LookupDrafter(), most=3)
    metrics, r = watched(simulation), simulation.add(3, 9)
    front_end = FrontEnd()
    metrics.flush(front_end.emit)
    assert [found_at(front_end.scraped(), position) for position in range(3)] == [0, 0, 0]
    for drafted, right in ((3, 3), (3, 1), (2, 0), (0, 0)):
        simulation.speculation.note(r, drafted, right, right + 1)
    metrics.flush(front_end.emit)
    for found in (parse(metrics.exposition()), front_end.scraped()):
        assert found.value("vllm:spec_decode_num_drafts_total") == 3
        assert found.value("vllm:spec_decode_num_draft_tokens_total") == 8
        assert found.value("vllm:spec_decode_num_accepted_tokens_total") == 4
        assert [found_at(found, position) for position in range(3)] == [2, 1, 1]


def found_at(found: Exposition, position: int) -> float:
    return found.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position))


def test_without_a_drafter_there_is_no_series_of_drafts() -> None:
    assert "spec_decode" not in busy()[1].exposition()


def test_nothing_is_kept_of_requests_that_ended() -> None:
    _, metrics = busy()
    assert not metrics._seen


def test_buckets_hold_what_vllm_has_and_resolve_a_quarter_of_a_millisecond() -> None:
    buckets = {f.name: f.buckets for f in FAMILIES if f.buckets}
    assert buckets["inter_token_latency_seconds"][0] == 0.00025
    # vLLM's own, of which alerts and recording rules name some.
    short = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640}
    gaps = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
    long = {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
    assert gaps < set(buckets["inter_token_latency_seconds"])
    assert short | {2560} == set(buckets["time_to_first_token_seconds"])
    assert long < set(buckets["e2e_request_latency_seconds"])
    assert buckets["iteration_tokens_total"] == (1, *(8 * 2**i for i in range(12)))
    assert all(list(bounds) == sorted(set(bounds)) for bounds in buckets.values())
    names = module.Histogram((0.00025, 1, 2.5)).names
    assert names == ["0.00025", "1.0", "2.5", "+Inf"], "vLLM writes 1 as 1.0, and labels are compared as text"


def test_a_bound_includes_itself_and_quantiles_come_out() -> None:
    histogram = module.Histogram((1, 2, 4))
    for value in (0.5, 1.0, 1.0, 3.0, 9.0):
        histogram.observe(value)
    assert (histogram.names, histogram.counts) == (["1.0", "2.0", "4.0", "+Inf"], [3, 0, 1, 1])
    assert quantile(0.3, {1: 3, 2: 3, 4: 4, float("inf"): 5}) == pytest.approx(0.5)


# ---- the text format ------------------------------------------------------------------------------------------------


def test_the_exposition_declares_what_it_shows() -> None:
    simulation = Simulation()
    simulation.speculation = Speculation(LookupDrafter(), most=3)
    found = parse(watched(simulation).exposition())
    for family in (*FAMILIES, *draft_families(3)):
        for name in filter(None, (family.name, family.former)):
            assert found.types[f"vllm:{name}"] == family.kind
            assert found.help[f"vllm:{name}"] == family.help


def test_labels_survive_the_text_format() -> None:
    names = {"model_name": 'a"b\\c\nd, {e}|:', "engine": "9000"}
    found = parse(watched(Simulation(), **names).exposition())
    assert found.value("vllm:num_requests_running", **names) == 0


@pytest.mark.parametrize(
    "bad",
    [
        "a 1",  # not declared
        "# TYPE a counter\na 1\na 2\n",
        "# TYPE a counter\n# TYPE b counter\na 1\n",
        "# TYPE a histogram\na 1\n",
        '# TYPE a counter\na{b="c"d="e"} 1x\n',
        "# TYPE a counter\na NaN\n",
        '# TYPE a counter\na{b="c\\d"} 1\n',
    ],
)
def test_the_reader_that_these_tests_rely_on_is_strict(bad: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        parse(bad)


# ---- TorchServe -----------------------------------------------------------------------------------------------------

# TorchServe 0.12.0's patterns: WorkerLifeCycle.java for the line, Metric.java for what follows the mark.
LINE = re.compile(
    r"\s*([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)\|#([^|]*)(\|#type:([^|,]+))?\|#hostname:([^,]+),([^,]+)(,(.*))?", re.ASCII
)


class FrontEnd:
    """What TorchServe does with a worker's lines, here as far as metrics go."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.declared: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.after_each: Callable[[], None] = lambda: None
        self.num_lines = 0
        self.closed = False

    def read(self, line: str) -> None:
        assert line.startswith("[METRICS]"), line
        match = LINE.fullmatch(line.removeprefix("[METRICS]"))
        assert match, f"TorchServe cannot parse {line!r}"
        pairs = [pair.split(":") for pair in match[4].split(",")]
        assert all(len(pair) == 2 and pair[1] for pair in pairs), line
        names, values = zip(*pairs, strict=True)
        kind = self.declared.setdefault(match[1], (match[6], names))
        assert kind == (match[6], names), f"another kind or other labels than before: {line}"
        value, key = float(match[3]), (match[1], values)
        if match[6] == "COUNTER":
            assert value >= 0, line
            self.values[key] = self.values.get(key, 0) + value
        else:
            self.values[key] = value
        self.num_lines += 1
        self.after_each()

    def emit(self, samples: Sequence[Sample]) -> None:
        if self.closed:
            raise BrokenPipeError("gone")
        out = io.StringIO()
        write_torchserve(samples, out)
        for line in out.getvalue().splitlines():
            self.read(line)

    def scraped(self) -> Exposition:
        """As Prometheus has it after configs/prometheus.yml."""
        [job] = yaml.safe_load((ROOT / "configs" / "prometheus.yml").read_text())["scrape_configs"]
        [rule] = job["metric_relabel_configs"]
        assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
        found = Exposition()
        for (name, values), value in self.values.items():
            name = re.sub(f"^{rule['regex']}$", rule["replacement"].replace("$", "\\"), name)
            found.values[name, frozenset(zip(self.declared_labels(name), values, strict=True))] = value
        return found

    def declared_labels(self, name: str) -> tuple[str, ...]:
        return self.declared[name.replace("vllm:", "vllm_")][1]


def test_torchserve_ends_up_with_the_same_numbers() -> None:
    front_end = FrontEnd()

    def flushing(simulation: Simulation) -> Metrics:
        metrics = watched(simulation)
        metrics.flush(front_end.emit)  # every series is there before anything has happened
        assert front_end.scraped().values == parse(metrics.exposition()).values
        counting, draw = metrics.step, random.Random(5)

        def step(plan: StepPlan, seconds: float) -> None:
            counting(plan, seconds)
            if draw.random() < 0.3:
                metrics.flush(front_end.emit)

        simulation.on_step = step
        return metrics

    _, metrics = busy(flushing)
    metrics.flush(front_end.emit)
    exact = parse(metrics.exposition()).values
    scraped = front_end.scraped().values
    assert scraped.keys() == exact.keys()
    assert scraped == {key: pytest.approx(value, abs=1e-6) for key, value in exact.items()}
    before = front_end.num_lines
    metrics.flush(front_end.emit)
    assert front_end.num_lines == before, "nothing has changed, and nothing is written"


def test_whoever_reads_in_the_middle_of_a_flush_finds_buckets_that_rise() -> None:
    simulation, metrics = busy()
    front_end = FrontEnd()
    metrics.flush(front_end.emit)
    for _ in range(3):
        simulation.add(9, 9)
    simulation.run()
    num_checked = 0

    def check() -> None:
        nonlocal num_checked
        found = front_end.scraped()
        for (name, labels), buckets in found.histograms().items():
            counts = [*buckets.values(), found.values[f"{name}_count", labels]]
            assert counts == sorted(counts), name
        num_checked += 1

    front_end.after_each = check
    metrics.flush(front_end.emit)
    assert num_checked > 50


def test_labels_that_torchserve_would_split_are_changed() -> None:
    front_end = FrontEnd()
    watched(Simulation(), model_name="a,b:c|d", engine="").flush(front_end.emit)
    assert front_end.scraped().value("vllm:num_requests_running", model_name="a_b_c_d", engine="_") == 0


@pytest.mark.parametrize("value", [0, 1, 10**17, 0.5, 1e-9, 1.5e-5, 123456.789, 1e15 + 0.5, 3e20])
def test_numbers_are_written_as_torchserve_reads_them(value: float) -> None:
    line = torchserve_line(Sample("x_sum", "counter", "Seconds", (("a", "b"),), value), "host", 1)
    match = LINE.fullmatch(line.removeprefix("[METRICS]"))
    assert match, line
    assert float(match[3]) == value


def test_a_flush_is_one_write() -> None:
    """Lines that another thread's could come between would be lost, and a system call each is slow."""

    class Stream(io.StringIO):
        num_writes = 0

        def write(self, text: str) -> int:
            self.num_writes += bool(text)
            return super().write(text)

    stream = Stream()
    watched(Simulation()).flush(lambda samples: write_torchserve(samples, stream))
    assert stream.num_writes == 1
    assert stream.getvalue().endswith("\n")
    assert 200 < len(stream.getvalue().splitlines()) < 400
    assert len(stream.getvalue()) < 65536, "more than a pipe holds: the engine's process would wait for TorchServe"


def test_the_metrics_file_declares_what_is_reported() -> None:
    front_end, simulation = FrontEnd(), Simulation()
    simulation.speculation = Speculation(LookupDrafter(), most=3)
    watched(simulation).flush(front_end.emit)
    config = yaml.safe_load((ROOT / "configs" / "metrics.yaml").read_text())
    declared = {
        m["name"]: (kind.upper(), tuple(m["dimensions"]))
        for kind, several in config["model_metrics"].items()
        for m in several
    }
    assert {name: how for name, how in declared.items() if name.startswith("vllm_")} == front_end.declared


@pytest.mark.parametrize(
    ("argv", "worker"),
    [
        (
            ["worker.py", "--sock-type", "unix", "--sock-name", "/tmp/.ts.sock.9003", "--metrics-config", "m.yaml"],
            "9003",
        ),
        (["worker.py", "--sock-type", "tcp", "--port", "9001"], "9001"),
        (["pytest"], "0"),
        (["worker.py", "--sock-name"], "0"),
    ],
)
def test_the_worker_tells_its_number(argv: list[str], worker: str) -> None:
    assert worker_id(argv) == worker


# ---- the thread that reports ----------------------------------------------------------------------------------------


def test_an_engine_that_falls_quiet_is_shown_quiet_soon() -> None:
    simulation = Simulation()
    metrics = watched(simulation)
    front_end = FrontEnd()

    def running() -> float:
        return front_end.scraped().value("vllm:num_requests_running")

    def generated() -> float:
        return front_end.scraped().value("vllm:generation_tokens_total")

    metrics.start(front_end.emit, interval_s=0.01, busy_interval_s=1000.0)
    simulation.add(3, 5)
    simulation.step()
    eventually(lambda: running() == 1)  # the first flush of a busy time comes at once
    simulation.step()
    time.sleep(0.1)
    assert generated() == 1, "the second one has to wait"
    simulation.run()
    eventually(lambda: running() == 0 and generated() == 5)  # a report may come between the last token and its count
    front_end.closed = True  # ends the thread with the next report
    simulation.add(3, 5)
    simulation.run()


def test_a_closed_output_ends_the_reports_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation()
    metrics = watched(simulation)
    front_end = FrontEnd()
    metrics.start(front_end.emit, interval_s=0.01)
    front_end.closed = True
    simulation.add(3, 5)
    simulation.run()
    eventually(lambda: "no longer reported" in caplog.text)
    eventually(lambda: not any(thread.name == "gpt-fast-metrics" for thread in threading.enumerate()))
    assert parse(metrics.exposition()).value("vllm:generation_tokens_total") == 5


def test_readers_and_the_engine_do_not_disturb_each_other() -> None:
    """Exposition and flush all the time from other threads, and still every number is right at the end."""
    front_end, over, reading = FrontEnd(), threading.Event(), threading.Barrier(3)
    readers: list[Future[int]] = []

    def read(metrics: Metrics) -> int:
        num_turns = 0
        while not over.is_set():
            check_histograms(parse(metrics.exposition()))
            metrics.flush(front_end.emit)
            num_turns += 1
            if num_turns == 1:
                reading.wait(120)
        return num_turns

    with ThreadPoolExecutor(2) as pool:

        def with_readers(simulation: Simulation) -> Metrics:
            metrics = watched(simulation)
            readers.extend(pool.submit(read, metrics) for _ in range(2))
            reading.wait(120)  # nothing runs before both have begun
            return metrics

        try:
            simulation, metrics = busy(with_readers)
        finally:
            over.set()
    assert all(reader.result() > 0 for reader in readers)
    metrics.flush(front_end.emit)
    num_tokens = sum(map(len, simulation.tokens.values()))
    assert front_end.scraped().value("vllm:generation_tokens_total") == num_tokens
    gaps = truth(simulation)["inter_token_latency_seconds"]
    assert front_end.scraped().value("vllm:inter_token_latency_seconds_count") == len(gaps)


def test_a_step_costs_a_few_calls_for_each_request() -> None:
    """Calls, and not time: they are the same on every machine. A line of log takes some hundred for each request."""
    simulation = Simulation(num_pages=200, max_batch=8)
    metrics = watched(simulation)
    for _ in range(8):
        simulation.add(4, 1000)
    while len(simulation.scheduler.running) < 8:
        simulation.step()
    plan = StepPlan(tuple(SequencePlan(slot, (7,), 5, 1, (), 1, 4) for slot in range(8)))
    for r in simulation.scheduler.running:
        r.append([7], simulation.now + 0.001)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
    try:
        metrics.step(plan, 0.001)
    finally:
        sys.setprofile(None)
    assert parse(metrics.exposition()).value("vllm:generation_tokens_total") > 8
    assert len(calls) < 8 * 20


# ---- the line for a request -----------------------------------------------------------------------------------------


def test_the_log_line_has_the_numbers_and_no_text() -> None:
    r = request("r7", 12, 3, arrival=100.0)
    r.num_cached, r.first_scheduled = 8, 100.25
    for now in (100.5, 101.0, 101.5):
        r.append([9], now)
    assert log_line(r, 102.0) == (
        "request id=r7 prompt_tokens=12 cached_tokens=8 completion_tokens=3 finish_reason=length "
        "queue_ms=250.0 ttft_ms=500.0 total_ms=2000.0 tokens_per_s=2.0"
    )
    assert SECRET in r.text.text, "the request had text"


def test_the_log_line_of_a_request_that_never_started() -> None:
    r = request("r1", 5, 3, arrival=100.0)
    r.finish_reason = "abort"
    assert log_line(r, 100.5) == (
        "request id=r1 prompt_tokens=5 cached_tokens=0 completion_tokens=0 finish_reason=abort "
        "queue_ms=500.0 ttft_ms=- total_ms=500.0 tokens_per_s=0.0"
    )


def test_every_request_that_ends_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gpt_fast.serve.metrics"):
        simulation, _ = busy()
    ids = [re.search(r"id=(\S+)", record.message) for record in caplog.records]
    assert Counter(found[1] for found in ids if found) == Counter(r.id for r in simulation.requests)


def test_metrics_need_no_torch() -> None:
    code = "import sys, gpt_fast.serve.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
