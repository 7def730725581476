"""The engine benchmark on a tiny model: what it counts is what the engine did, and ``LLM.from_model`` under it."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import check_idle

from gpt_fast import SamplingParams, cli
from gpt_fast.bench import throughput as bench
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.commands import bench as bench_command
from gpt_fast.config import ModelConfig
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.errors import ConfigError
from gpt_fast.llm import LLM
from gpt_fast.model.building import random_model

TINY = ModelConfig("llama", 256, 32, 2, 4, 2, 8, 64, 256)
WANTED = bench.BenchOptions(batch_sizes=(1, 3), prompt_tokens=(20, 5), new_tokens=8, repeats=2)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = random_model(TINY, torch.float32)
    with LLM.from_model(
        model, max_batch=3, max_seq_len=200, prefill_chunk=16, prefix_cache=False, compile=False
    ) as llm:
        yield llm


class Steps:
    """Notes the plan of every step."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        monkeypatch.setattr(llm.engine, "on_step", lambda plan, seconds: self.plans.append(plan))

    def num_full_decodes(self, batch_size: int) -> int:
        full = [(1, 1)] * batch_size
        return [[(len(s.tokens), s.num_logits) for s in p.sequences] for p in self.plans].count(full)


def test_decode_is_counted_while_all_sequences_decode(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(llm, monkeypatch)
    stamps: list[float] = []
    note, running = llm.engine.on_step, llm.engine.scheduler.running

    def noting(plan: StepPlan, seconds: float) -> None:
        note(plan, seconds)
        if len(plan.sequences) == 3 and all(s.num_logits for s in plan.sequences) and running:
            stamps.append(max(request.last_token or 0.0 for request in running))

    monkeypatch.setattr(llm.engine, "on_step", noting)
    run = bench.measure(llm, 3, 20, 8, random.Random(0))
    check_idle(llm)
    assert steps.num_full_decodes(3) >= 7  # the window; a step more can run until the others are cancelled
    assert run.decode_s <= stamps[-1] - stamps[0]
    widths = [b - a for a, b in zip(stamps, stamps[7:], strict=False)]
    assert run.decode_s == pytest.approx(min(widths, key=lambda w: abs(w - run.decode_s)), abs=1e-9)
    assert run.ttft_s > 0


def test_prefill_has_no_decode_beside_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(llm, monkeypatch)
    handles = bench._run_together(llm, 20, [1, 1, 1], random.Random(0))
    assert [len(h.completion.token_ids) for h in handles if h.completion] == [1, 1, 1]
    # Were a sequence decoded, its token would be computed beyond the 60 of the prompts.
    assert sum(plan.num_tokens for plan in steps.plans) == 60


def test_sequences_that_do_not_decode_together_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_slack", lambda *_: -4)  # now the first sequence ends before the last
    with pytest.raises(RuntimeError, match="did not decode together"):
        bench.measure(llm, 3, 20, 8, random.Random(0))


def test_a_row_follows_from_its_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(9.0, 9.0, 9.0), (0.5, 0.1, 2.0), (1.5, 0.3, 4.0)])  # the first run does not count
    monkeypatch.setattr(bench, "measure", lambda *_: bench.Run(*next(times)))
    wanted = bench.BenchOptions(batch_sizes=(3,), prompt_tokens=(20,), new_tokens=13, repeats=2)
    (row,) = bench.benchmark(llm, wanted)
    assert row["prefill_tokens_per_second"] == pytest.approx(3 * 20 / 1.0)
    assert row["time_to_first_token_s"] == pytest.approx(0.2)
    assert row["decode_tokens_per_second_per_sequence"] == pytest.approx(12 / 3.0)
    assert row["decode_tokens_per_second"] == pytest.approx(3 * 12 / 3.0)
    context = 20 + 13 // 2
    num_bytes = llm.model.bytes_per_token(3 * context, 4)
    assert num_bytes - llm.model.bytes_per_token(0, 4) == 3 * context * TINY.kv_bytes_per_token(4)
    assert row["achieved_bandwidth_gb_s"] == pytest.approx(4.0 * num_bytes / 1e9)
    assert row["share_of_ceiling"] == pytest.approx(row["decode_tokens_per_second"] / row["ceiling_tokens_per_second"])


def test_every_row_is_measured_and_reported(llm: LLM) -> None:
    reported: list[dict[str, Any]] = []
    rows = bench.benchmark(llm, WANTED, reported.append)
    assert rows == reported
    assert [(r["prompt_tokens"], r["batch_size"]) for r in rows] == [(20, 1), (20, 3), (5, 1), (5, 3)]
    assert all(r["decode_tokens_per_second"] > 0 and r["peak_rss_gb"] > 0 for r in rows)
    json.dumps(rows, allow_nan=False)
    check_idle(llm)


def test_from_model_answers_as_the_same_weights_from_a_directory(tmp_path: Path, llm: LLM) -> None:
    save_checkpoint(random_model(llm.config, torch.float32), tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(tmp_path, dtype="float32", device="cpu", compile=False) as loaded:
        ours, theirs = llm.generate([[5, 6, 7]], params), loaded.generate([[5, 6, 7]], params)
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    assert ours[0].token_ids == theirs[0].token_ids
    assert ours[0].text == ""


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"device": "cpu"}, {"max_bach": 2}])
def test_from_model_refuses_what_it_cannot_use(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM.from_model(random_model(TINY, torch.float32), compile=False, **options)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--shape", "llama-9000b"], 1, "llama-68m"),
        (["--shape", "llama-68m", "--prompt-tokens", "2040"], 1, "context of 2048"),
        (["--shape", "llama-68m", "--new-tokens", "1"], 1, "new_tokens"),
        (["--shape", "llama-68m", "--batch-sizes", "1,0"], 2, "argument --batch-sizes: must be whole numbers"),
        (["--shape", "llama-68m", "--batch-sizes", "1,x"], 2, "with commas between, such as 1,8, not 1,x"),
        (["--url", "http://x", "--percentiles", "50,x"], 2, "with commas between, such as 50,99.9, not 50,x"),
        (["--shape", "llama-68m", "--output", "/dev"], 1, "--output: /dev cannot be used: Is a directory"),
        (["--url", "http://x", "--plot", "/nowhere/a.png"], 1, "--plot: there is no folder /nowhere"),
        (
            ["--shape", "llama-68m", "--num-prompts", "3"],
            2,
            "--num-prompts means nothing with --checkpoint and --shape",
        ),
        (["--shape", "llama-68m", "--checkpoint", "x"], 2, "not allowed with"),
        ([], 2, "--url"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure_bandwidth", lambda *_: None)
    try:
        returned: object = cli.main(["bench", *arguments])
    except SystemExit as left:  # argparse's own refusals
        returned = left.code
    assert returned == status
    assert words in capsys.readouterr().err


def test_the_command_prints_the_ceiling_first(
    tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(random_model(llm.config, torch.float32), tmp_path)
    monkeypatch.setattr("gpt_fast.llm.read_bandwidth", lambda *_: 10e9)
    monkeypatch.setattr(bench, "read_bandwidth", lambda *_: 10e9)
    arguments = ["--checkpoint", str(tmp_path), "--dtype", "float32", "--no-compile", "--device", "cpu"]
    sizes = ["--batch-sizes", "1,2", "--context", "9", "--new-tokens", "4", "--repeats", "1"]
    assert cli.main(["bench", *arguments, *sizes, "--json", "--output", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ceiling: 10.0 GB/s measured")
    assert len(lines) == 3 + 2 + 1
    found = json.loads(lines[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert found["ceiling_tokens_per_second"] == pytest.approx(10e9 / found["bytes_per_token"])
    assert [(r["batch_size"], r["prompt_tokens"], r["new_tokens"]) for r in found["results"]] == [(1, 9, 4), (2, 9, 4)]


def test_help_offers_no_option_that_every_mode_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["bench", "--shape", "llama-68m"])
    refused = arguments.names - set().union(*arguments.modes.values())
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "--help"])
    shown = capsys.readouterr().out
    assert "--speculate-k" in shown
    assert not [name for name in refused if re.search(rf"--{name.replace('_', '-')}\s", shown)]
