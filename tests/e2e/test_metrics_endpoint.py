"""TorchServe's own metrics endpoint, compared with what clients of a real server saw and with the exact exposition."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from brake import Brake
from prometheus_text import Exposition, check_histograms, parse, quantile
from serving import ROOT, Server, read_properties, serve, wait_for

from gpt_fast.serve.archive import build_archive

# Nothing but an engine and its metrics: what is under test here is the way from there to the scrape.
HANDLER = """\
import json
import sys

from gpt_fast import LLM, SamplingParams
from gpt_fast.serve.metrics import CONTENT_TYPE, Metrics
from gpt_fast.serve.torchserve_metrics import worker_id, write_torchserve


class Handler:
    def initialize(self, ctx):
        checkpoint = ctx.model_yaml_config["handler"]["checkpoint"]
        self.llm = LLM(checkpoint, compile=False, dtype="float32", device="cpu", threads=1, max_batch=2)
        self.metrics = Metrics(self.llm.engine, ctx.model_name, worker_id(sys.argv))
        self.metrics.start(write_torchserve, interval_s=0.1, busy_interval_s=0.2)

    def handle(self, data, ctx):
        if ctx.get_request_header(0, "url_path") == "metrics":
            ctx.set_response_content_type(0, CONTENT_TYPE)
            return [self.metrics.exposition()]
        job = json.loads(data[0]["body"])
        done = self.llm.generate(job["prompts"], SamplingParams(**job["params"]))
        seen = [(c.num_prompt_tokens, c.num_cached_tokens, len(c.token_ids), c.finish_reason) for c in done]
        return [json.dumps(seen)]
"""
CONFIG = """\
minWorkers: 1
maxWorkers: 1
responseTimeout: 300
startupTimeout: 300
handler:
    checkpoint: auto
"""
SCALARS = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("brake"), "metered")


@pytest.fixture(scope="module")
def store(checkpoint: Path, brake: Brake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metrics")
    (path / "model_config.yaml").write_text(CONFIG)
    options: dict[str, Any] = {"config": path / "model_config.yaml", "handler": brake.handler(HANDLER)}
    build_archive(checkpoint, name="metered", by_reference=True, output=path / "model_store", **options)
    return path / "model_store"


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    """With the repository's config.properties, and the metric lines kept out of the log."""
    options = ("--disable-token-auth", "--log-config", str(ROOT / "configs" / "log4j2.xml"))
    with serve(store, {"metered": "metered"}, options=options) as running:
        running.wait_ready("metered")
        yield running


def scrape(server: Server) -> Exposition:
    """What Prometheus gets: TorchServe's endpoint, with the names that configs/prometheus.yml gives them."""
    port = int(read_properties(server.config)["metrics_address"].rpartition(":")[2])
    reply = server.request("GET", "/metrics", port=port)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = parse(reply.text)
    found.values = {(name.replace("vllm_", "vllm:"), labels): v for (name, labels), v in found.values.items()}
    return found


def vllm_part(found: Exposition) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The series of ours without the label that TorchServe adds to each."""
    ours = ((name, labels, value) for (name, labels), value in found.values.items() if name.startswith("vllm:"))
    return {(n, frozenset(pair for pair in labels if pair[0] != "Hostname")): value for n, labels, value in ours}


@dataclass
class Client:
    """Sends requests and adds up what came back."""

    server: Server
    answers: list[tuple[int, int, int, str]] = field(default_factory=list)
    seconds: float = 0.0

    def generate(self, prompts: list[str], **params: Any) -> None:
        body = json.dumps({"prompts": prompts, "params": params}).encode()
        begin = time.monotonic()
        reply = self.server.predict(body, "metered")
        self.seconds += time.monotonic() - begin
        assert reply.status == 200, reply.text
        self.answers += [tuple(answer) for answer in reply.json()]


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    """After three prompts in a batch of two, one that is there again, and one that has no time at all."""
    client = Client(server)
    for n in (5, 30, 1):
        client.generate([f"Once upon a time number {n}", "A dog", "Tim"], max_tokens=n, ignore_eos=True)
    client.generate(["Lily and Tom went to the park to play with the big red ball and the dog"] * 2, max_tokens=40)
    client.generate(["Lily and Tom went to the park to play with the big red ball and the dog"], max_tokens=40)
    client.generate(["A cat"], max_tokens=400, ignore_eos=True, timeout_s=0.0001)
    wait_for(lambda: scrape(server).value("vllm:e2e_request_latency_seconds_count") == len(client.answers))
    return client


def test_the_endpoint_shows_what_the_clients_saw(server: Server, client: Client) -> None:
    found = scrape(server)
    num_requests = len(client.answers)
    begun = [answer for answer in client.answers if answer[2]]
    assert {name: found.value(f"vllm:{name}", model_name="metered", engine="9000") for name in SCALARS} == {
        "prompt_tokens_total": sum(prompt for prompt, _, _, _ in begun),
        "generation_tokens_total": sum(tokens for _, _, tokens, _ in begun),
        "prefix_cache_queries_total": sum(prompt for prompt, _, _, _ in begun),
        "prefix_cache_hits_total": sum(cached for _, cached, _, _ in begun),
    }
    reasons = Counter(reason for _, _, _, reason in client.answers)
    assert reasons["abort"] == 1
    for reason in ("stop", "length", "abort"):
        assert found.value("vllm:request_success_total", finished_reason=reason) == reasons[reason]
    assert found.value("vllm:request_queue_time_seconds_count") == num_requests
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert found.value(f"vllm:{name}_seconds_count") == len(begun), name
    assert found.value("vllm:inter_token_latency_seconds_count") == sum(tokens - 1 for _, _, tokens, _ in begun)
    assert found.value("vllm:request_generation_tokens_sum") == found.value("vllm:generation_tokens_total")
    phases = ("request_queue_time", "request_prefill_time", "request_decode_time")
    total = found.value("vllm:e2e_request_latency_seconds_sum")
    assert 0 < sum(found.value(f"vllm:{name}_seconds_sum") for name in phases) <= total + 1e-6
    assert total < 3 * client.seconds, "no more than three prompts ran in a request"


def test_histogram_quantile_works_on_the_endpoint(server: Server, client: Client) -> None:
    found = scrape(server)
    ours = Exposition({key: value for key, value in found.values.items() if key[0].startswith("vllm:")})
    check_histograms(ours)
    # TorchServe's own label stands beside ours, and all buckets of a histogram have the same ones.
    assert len({labels for _, labels in ours.histograms()}) == 1
    [buckets] = [b for (name, _), b in ours.histograms().items() if name == "vllm:e2e_request_latency_seconds"]
    longest = min(bound for bound in buckets if bound >= client.seconds)  # no latency is in a bucket behind this
    assert 0 < quantile(0.5, buckets) <= quantile(0.99, buckets) <= longest


def test_the_route_has_the_same_numbers_under_the_exact_names(server: Server, client: Client) -> None:
    wait_for(lambda: scrape(server).value("vllm:num_requests_running") == 0)
    reply = server.request("GET", "/predictions/metered/1.0/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    exact = parse(reply.text)
    assert exact.types["vllm:time_to_first_token_seconds"] == "histogram"
    shown = vllm_part(scrape(server))
    assert shown.keys() == exact.values.keys()
    assert shown == {key: pytest.approx(value, abs=1e-6) for key, value in exact.values.items()}


def test_gauges_rise_with_a_request_and_fall_with_its_end(server: Server, client: Client, brake: Brake) -> None:
    def gauge(name: str) -> float:
        return scrape(server).value(f"vllm:{name}")

    with ThreadPoolExecutor(1) as pool, brake.held(5):
        prompts = ["Once upon a time"] * 6  # two at a time
        sent = pool.submit(client.generate, prompts, max_tokens=20, ignore_eos=True)
        wait_for(lambda: gauge("num_requests_running") == 2 and gauge("num_requests_waiting") > 0)
        wait_for(lambda: 0 < gauge("kv_cache_usage_perc") <= 1)
        wait_for(lambda: gauge("time_since_last_step_seconds") > 1)  # the brake lets it make no step
        assert not sent.done(), "seen while they ran"
    sent.result()
    quiet = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_since_last_step_seconds")
    wait_for(lambda: not any(gauge(name) for name in quiet))


def test_the_log_has_a_line_for_each_request_and_none_for_each_message(server: Server, client: Client) -> None:
    assert server.log.count(" MODEL_LOG - request id=") >= len(client.answers)
    assert "Lily" not in server.log
    for chatter in ("[METRICS]", "Flushing req", "Looping backend", "Backend response"):
        assert chatter not in server.log
    assert "State change WORKER_STARTED -> WORKER_MODEL_LOADED" in server.log, (
        "gpt_fast/serve/launch/watching.py looks for these"
    )
    assert "Failed to" not in server.log


def test_the_shipped_handler_and_the_metrics_file_where_nothing_is_detected(store: Path, checkpoint: Path) -> None:
    config = store.parent / "shipped.yaml"
    config.write_text(CONFIG + "    compile: false\n    dtype: float32\n    device: cpu\n    max_batch: 1\n")
    build_archive(checkpoint, name="shipped", by_reference=True, output=store, config=config)
    properties = {"model_metrics_auto_detect": "false", "metrics_config": str(ROOT / "configs" / "metrics.yaml")}
    with serve(store, {"shipped": "shipped"}, properties=properties) as server:
        server.wait_ready("shipped")
        request = {"prompt": "Once upon a time", "max_new_tokens": 5, "ignore_eos": True}
        assert server.predict(request, "shipped").status == 200
        wait_for(lambda: scrape(server).value("vllm:generation_tokens_total") == 5)
        assert server.request("GET", "/predictions/shipped/1.0/health").json()["since_last_step_s"] == 0
        assert server.predict({"prompt": 5}, "shipped").status == 400
        wait_for(lambda: scrape(server).value("vllm:request_errors_total", error="invalid_request") == 1)
        exact = parse(server.request("GET", "/predictions/shipped/1.0/metrics").text)
        wait_for(lambda: vllm_part(scrape(server)).keys() == exact.values.keys())
        assert scrape(server).value("vllm:request_success_total", model_name="shipped", finished_reason="length") == 1
        assert scrape(server).value("Requests2XX", Level="Host") >= 1, "TorchServe's own are still there"
        assert "Failed to" not in server.log

        # A worker that dies takes what it has not reported along; its successor goes on with the same series.
        [dying] = server.workers("shipped")
        os.kill(dying["pid"], signal.SIGKILL)
        wait_for(lambda: server.workers("shipped")[0]["pid"] not in (dying["pid"], -1))
        server.wait_ready("shipped")
        assert server.predict(request, "shipped").status == 200
        wait_for(lambda: scrape(server).value("vllm:generation_tokens_total") == 10)
        assert vllm_part(scrape(server)).keys() == exact.values.keys()
