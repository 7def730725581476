"""guidellm: a short sweep of loads by completions, and a load of chats, every request answered."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKPOINT, run

# Between two loads guidellm sometimes waits for its own processes for ever (its issue 431), with no request open.
_TRIALS, _TRIAL_S = 3, 120


# Without max_concurrency a sweep sends 512 requests at once, and those that find the queue full are answered 503.
@pytest.mark.parametrize(
    ("route", "profile", "count"),
    [
        ("completions", "kind=sweep,sweep_size=3,max_concurrency=32", 3),
        ("chat/completions", "kind=concurrent,streams=4", 1),
    ],
)
def test_a_load_has_no_errors(base_url: str, route: str, profile: str, count: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    target = base_url.removesuffix("/v1")
    command = (
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={target},model=gpt-fast,request_format=/v1/{route}"),
        *("--profile", profile),
        *("--constraint", "kind=max_duration,seconds=2"),
        *("--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    for _ in range(_TRIALS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            run(*command, timeout=_TRIAL_S)
            break
    assert report.exists(), f"guidellm stood still {_TRIALS} times; the server's logs say whether it was asked anything"
    benchmarks = json.loads(report.read_text())["benchmarks"]
    assert len(benchmarks) == count
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] > 0
        assert totals["errored"] == 0, benchmark["requests"]["errored"][:2]
