"""configs/grafana.json, alerts.yml and prometheus.yml name metrics and labels that are exported, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt_fast.serve.metric_table import FAMILIES, draft_families

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((CONFIGS / "alerts.yml").read_text())["groups"][0]["rules"]
TORCHSERVE: dict[str, Any] = yaml.safe_load((CONFIGS / "metrics.yaml").read_text())["ts_metrics"]

PARTS = ("_bucket", "_sum", "_count")
OURS = {
    f"vllm:{name}{part}": {"model_name", "engine", family.label, "le" if part == "_bucket" else None}
    for family in (*FAMILIES, *draft_families(4))
    for name in (family.name, family.former)
    if name
    for part in (PARTS if family.kind == "histogram" else ("",))
}
# Of TorchServe itself, by the file that declares them; and the one that Prometheus makes of each scrape.
THEIRS = {metric["name"]: set(metric["dimensions"]) for kind in TORCHSERVE.values() for metric in kind} | {"up": set()}
PROMETHEUS = {"instance", "job"}  # labels of every series

EXPRESSIONS = {
    **{f"{p['title']} {t['refId']}": t["expr"] for p in DASHBOARD["panels"] for t in p["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')


def metrics_in(expression: str) -> dict[str, set[str]]:
    """The metrics of an expression, each with the labels that it is chosen by."""
    grouped = re.sub(r"\b(?:by|on|ignoring|without|group_left)\s*\([^)]*\)", " ", expression)
    bare = re.sub(r"\[[^]]*\]", " ", grouped)
    found = re.findall(r"\b([a-zA-Z_][\w:]*)\b(?!\s*\()\s*(\{[^}]*\})?", re.sub(r"\b(?:unless|and|or)\b", " ", bare))
    inside = {label for _, matchers in found for label in MATCHER.findall(matchers)}
    return {name: set(MATCHER.findall(matchers)) for name, matchers in found if matchers or name not in inside}


def test_the_names_of_an_expression_are_found() -> None:
    found = metrics_in('histogram_quantile(0.5, sum by (le) (rate(vllm:x_bucket{a=~"$b", c="d"}[5m]))) > 0 unless up')
    assert found == {"vllm:x_bucket": {"a", "c"}, "up": set()}


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_metric_and_label_is_exported(place: str) -> None:
    found = metrics_in(EXPRESSIONS[place])
    assert found, "no metric"
    for name, labels in found.items():
        assert name in OURS or name in THEIRS, name
        assert labels <= PROMETHEUS | OURS.get(name, set()) | THEIRS.get(name, set()), name


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_counters_are_read_by_their_rate(place: str) -> None:
    counters = {f"vllm:{f.name}" for f in (*FAMILIES, *draft_families(4)) if f.kind == "counter"}
    counters |= {name for name in OURS if name.endswith(PARTS)}
    expression = EXPRESSIONS[place]
    for name in metrics_in(expression):
        assert name not in counters or f"rate({name}" in expression


def test_the_dashboard_shows_what_operators_ask_for() -> None:
    shown = set().union(*(metrics_in(expression) for expression in EXPRESSIONS.values()))
    for needed in (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "generation_tokens_total",
        "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total", "request_success_total",
        "spec_decode_num_accepted_tokens_total",
    ):  # fmt: skip
        assert f"vllm:{needed}" in shown


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24, "wider than Grafana's grid"
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert {name for text in EXPRESSIONS.values() for name in re.findall(r"\$(\w+)", text)} <= variables


def test_alerts_say_where_to_look() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "look"}
    assert yaml.safe_load((CONFIGS / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


def test_prometheus_understands_all_of_it(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    rules = [
        {"record": f"panel:{i}", "expr": text.replace("$__rate_interval", "1m")}
        for i, text in enumerate(EXPRESSIONS.values())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for arguments in (("config", CONFIGS / "prometheus.yml"), ("rules", tmp_path / "panels.yml")):
        done = subprocess.run([promtool, "check", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
