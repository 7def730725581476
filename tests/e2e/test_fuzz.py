"""A few hundred requests of benchmarks/fuzz.py against a real TorchServe: nobody else notices, whatever they hold.

Latency and memory are not judged here: they are the machine's as much as the server's, and need minutes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import ROOT, Server, serve

sys.path.insert(0, str(ROOT / "benchmarks"))

from fuzzing import report
from fuzzing.campaign import Campaign
from fuzzing.shot import Target

from gpt_fast.serve.archive import build_archive

NUM_REQUESTS = 400
SEED = 8

CONFIG = """\
minWorkers: 1
maxWorkers: 1
continuousBatching: true
batchSize: 64
maxBatchDelay: 1
responseTimeout: 60
startupTimeout: 120
handler:
    compile: false
    dtype: float32
    device: cpu
    max_batch: 8
    max_waiting: 56
"""


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("model_store")
    config = store.parent / "model_config.yaml"
    config.write_text(CONFIG)
    build_archive(checkpoint, name="gpt-fast", config=config, output=store, by_reference=True)
    with serve(store, {"gpt-fast": "gpt-fast"}) as running:
        running.wait_ready("gpt-fast")
        yield running


def test_no_generated_request_hurts_anyone(server: Server) -> None:
    campaign = Campaign(Target.of(f"http://127.0.0.1:{server.port}/predictions/gpt-fast"), SEED, NUM_REQUESTS)
    asyncio.run(campaign.run())
    of_the_machine = ("latency", "memory")
    judged = [d for d in report.demands(campaign) if not any(word in d.name for word in of_the_machine)]
    broken = [d for d in judged if d.held is not True]
    assert not broken, f"{broken}\n{report.failures(campaign, 'benchmarks/fuzz.py')}\n{report.table(campaign)}"
    assert campaign.sent == NUM_REQUESTS
    assert campaign.good.counts["right"] > len(campaign.good.requests), "the good client hardly asked"
    assert campaign.repeats_compared > 20
    assert set(campaign.outcomes) >= {"200", "400", "404", "gone"}
