"""Drafts counted, timed and compared: what is told of them is what the engine did. No verdict here depends on speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from current_device import watch_current
from fake_model import FakeModel, FakeModelLLM, check_idle
from test_speculation import DEMO, same_model

from gpt_fast import Completion, SamplingParams, cli
from gpt_fast.bench import draft_table, plots, published
from gpt_fast.bench import speculation as bench
from gpt_fast.bench.drafting import BreakEven, DecodeStep, StepLog, Tally, break_even, plain_step_s, speculating
from gpt_fast.engine import engine as engine_module
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate import speculation as speculation_module
from gpt_fast.errors import ConfigError

LOOKUP = ("--draft", "lookup")

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- counts and times ----


def completion(*origins: Any, drafted: int = 0) -> Completion:
    accepted = origins.count("accepted")
    return Completion(
        "", tuple(range(len(origins))), "length", num_drafted=drafted, num_accepted=accepted, origins=origins
    )


def test_a_tally_counts_tokens_steps_and_drafts() -> None:
    tally = Tally()
    tally.add(completion("plain", "accepted", "accepted", "bonus", "accepted", "corrected", "plain", drafted=5))
    assert (tally.num_tokens, tally.num_steps, tally.num_drafted, tally.num_accepted) == (6, 3, 5, 3)
    assert tally.origins == {"plain": 2, "accepted": 3, "bonus": 1, "corrected": 1}
    tally.add(completion("plain", "accepted", "accepted", drafted=4))  # it ended within the drafts
    assert (tally.num_tokens, tally.num_steps, tally.acceptance) == (8, 4, 5 / 9)
    assert (tally.tokens_per_step, tally.drafts_per_step) == (2.0, 9 / 4)


def test_a_tally_of_no_drafts_and_of_nothing() -> None:
    tally = Tally()
    tally.add(Completion("", (), "abort"))
    assert (tally.acceptance, tally.tokens_per_step, tally.drafts_per_step) == (None, None, None)
    tally.add(Completion("", (4, 5, 6), "length"))  # no drafter was loaded
    assert (tally.origins, tally.num_tokens, tally.num_steps, tally.acceptance) == ({"plain": 3}, 2, 2, None)


STEPS = [
    *[DecodeStep(2, 8, 0.4, time) for time in (1.0, 1.0, 4.0)],  # one that was disturbed; it took its time all the same
    DecodeStep(2, 4, 0.4, 0.6),
    DecodeStep(1, 4, 9.0, 9.0),  # not the whole batch
    *[DecodeStep(2, 0, 0.0, time) for time in (0.4, 0.5, 0.9)],
]


def test_the_break_even_follows_from_the_steps() -> None:
    plain_s = plain_step_s(STEPS, batch_size=2)
    assert plain_s == pytest.approx(0.6)
    found = break_even(STEPS, 0.5, plain_s, batch_size=2)
    assert found is not None
    drafts = (3 * 8 + 4) / 4 / 2
    assert (found.drafts, found.accepted, found.plain_s) == (drafts, drafts / 2, plain_s)
    assert found.draft_s == pytest.approx(0.4 / drafts)
    assert found.verify_s == pytest.approx((1 + 1 + 4 + 0.6) / 4)
    assert plain_step_s(STEPS, batch_size=3) is None
    assert break_even(STEPS, None, plain_s, batch_size=2) is None
    assert break_even(STEPS[4:5], 0.5, plain_s, batch_size=2) is None


def test_the_side_of_the_drafts_is_all_the_time_that_its_steps_took() -> None:
    found, own = break_even(STEPS, 0.5, 0.6, batch_size=2), STEPS[:4]
    assert found is not None
    assert found.draft_side_s * len(own) == pytest.approx(sum(s.drafting_s + s.target_s for s in own))


def found_of(name: str, *rounds: tuple[list[DecodeStep], int, int]) -> bench.Found:
    """As if each round's one answer had come in exactly the time of its steps. A round: steps, tokens, accepted."""
    engine: Any = None
    method = bench.Method(name, lambda asked: pytest.fail("nobody asks"), engine)
    found = bench.Found(method)
    for steps, num_tokens, accepted in rounds:
        drafted = sum(step.num_drafts for step in steps)
        tally = Tally(num_tokens=num_tokens, num_steps=len(steps), num_drafted=drafted, num_accepted=accepted)
        seconds = sum(step.drafting_s + step.target_s for step in steps)
        found.rounds.append(bench.Round(num_tokens / seconds, tally, steps))
    return found


def test_the_expected_ratio_is_the_measured_one_where_every_step_has_drafts() -> None:
    """Whatever disturbed some steps, and some rounds: both are about the same time of the same rounds."""
    plain = [[DecodeStep(1, 0, 0.0, time) for time in times] for times in ((1, 1, 1, 5), (2, 2, 2, 2), (1, 1, 1, 1))]
    drafted = [[DecodeStep(1, 3, time, time + 1) for time in times] for times in ((0.5, 0.5), (3, 0.5), (0.5, 0.25))]
    target = found_of("target", *[(steps, 4, 0) for steps in plain])
    speculated = found_of("k = 3", *[(steps, 4, 2) for steps in drafted])  # each step 1 right draft and 1 token more
    row = bench.rows([target, speculated], batch_size=1)[1]
    ratios = [ours.rate / theirs.rate for ours, theirs in zip(speculated.rounds, target.rounds, strict=True)]
    assert ratios == pytest.approx([8 / 4, 8 / 9, 4 / 3.5])
    assert row["ratio"] == pytest.approx(4 / 3.5)
    assert row["expected_ratio"] == pytest.approx(row["ratio"])


class Clock:
    """In the place of the module ``time``: each look at it takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now

    monotonic = perf_counter


@pytest.mark.parametrize("drafts", [0, 4])
def test_decode_steps_add_up_to_the_time_between_the_first_and_the_last_token(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no time of the host is left out: that between two steps neither, which is long here."""
    clock, wait = Clock(), Engine._wait_for_work

    def wait_long(engine: Engine) -> bool:
        clock.now += 100
        return wait(engine)

    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(speculation_module, "time", clock)
    monkeypatch.setattr(Engine, "_wait_for_work", wait_long)
    with FakeModelLLM(drafter=same_model, num_drafts=4) as llm:
        times, speculation = StepLog(llm.engine), llm.engine.speculation
        assert speculation is not None
        for seed in (4, 5):  # the engine sleeps between them
            before = len(times.steps)
            with speculating(speculation, most=drafts):
                params = SamplingParams(max_tokens=26, temperature=1.0, seed=seed, ignore_eos=True)
                handle = llm.submit([5, 6, 7], params)
                for _ in handle:
                    pass
                check_idle(llm)
            steps, request = times.steps[before:], handle.request
            assert len(steps) == (5 if drafts else 25)
            assert request.first_token is not None
            assert request.last_token is not None
            wall = request.last_token - request.first_token
            assert sum(step.drafting_s + step.target_s for step in steps) == wall > 100 * len(steps)
            assert all((step.drafting_s > 0) == bool(drafts) for step in steps)


def test_speculation_pays_above_the_accepted_drafts_that_are_needed() -> None:
    even = BreakEven(drafts=4, accepted=2.0, draft_s=0.1, verify_s=0.6, plain_s=0.5)
    assert (even.plain_side_s, even.draft_side_s) == (1.5, 1.0)
    assert even.speedup == 1.5
    assert even._replace(accepted=even.accepted_needed).speedup == pytest.approx(1.0)


def test_a_steps_time_is_without_its_drafts_and_prompts_are_no_decode_steps() -> None:
    engine: Any = SimpleNamespace(speculation=SimpleNamespace(drafting_s=2.0, most=4), on_step=None)
    times = StepLog(engine)
    place = {"start": 4, "num_placed": 1, "new_pages": (), "rope_len": 7}
    verified = SequencePlan(slot=0, tokens=(1, 2, 3), num_logits=3, **place)
    decoded = SequencePlan(slot=1, tokens=(1,), num_logits=1, **place)
    prompt = SequencePlan(slot=2, tokens=(1, 2, 3), num_logits=1, **place)
    engine.on_step(StepPlan((verified, decoded)), 5.0)
    engine.on_step(StepPlan((verified, decoded, prompt)), 9.0)
    assert times.steps == [DecodeStep(num_sequences=2, num_drafts=2, drafting_s=2.0, target_s=3.0)]
    engine.speculation = None
    engine.on_step(StepPlan((decoded,)), 1.0)
    assert times.steps[1:] == [DecodeStep(1, 0, 0.0, 1.0)]


def test_steps_are_timed_with_drafts_and_without() -> None:
    params = SamplingParams(max_tokens=26, temperature=1.0, seed=4, ignore_eos=True)
    with FakeModelLLM(drafter=same_model, num_drafts=4) as llm:
        speculation = llm.engine.speculation
        assert speculation is not None
        times = StepLog(llm.engine)
        done = llm.generate([5, 6, 7], params)
        check_idle(llm)
        with_drafts = list(times.steps)
        with speculating(speculation, most=0):
            plain = llm.generate([5, 6, 7], params)
    assert isinstance(done, Completion)
    assert isinstance(plain, Completion)
    assert done.token_ids == plain.token_ids
    assert (plain.num_drafted, set(plain.origins)) == (0, {"plain"})
    assert {step.num_drafts for step in with_drafts} == {4}  # the step of the prompt is no decode step
    assert all(step.drafting_s > 0 and step.target_s > 0 for step in with_drafts)
    without = times.steps[len(with_drafts) :]
    assert len(without) >= 20
    assert {(step.num_sequences, step.num_drafts) for step in without} <= {(1, 0), (1, 4)}
    assert speculation.counts.drafted_per_position == [5, 5, 5, 5] == speculation.counts.accepted_per_position


# ---- the comparison ----


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("Once upon a time\nThe dog\nLily and Tom went. Lily and Tom went\n")
    return path


def compare(prompts: Path, draft: str, **wanted: Any) -> bench.Bench:
    options = bench.DraftOptions(**{"new_tokens": 8, "repeats": 2, "speculate_k": 2, "dataset": str(prompts)} | wanted)
    return bench.Bench(DEMO / "target", draft, options, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def demo(prompts: Path) -> Iterator[bench.Bench]:
    with compare(prompts, str(DEMO / "draft"), batch_sizes=(2,), temperature=0.8) as made:
        yield made


def test_every_method_has_a_row_of_what_it_did(demo: bench.Bench) -> None:
    advances: list[int] = []
    rows = demo.run(2, lambda: advances.append(1))
    assert [row["method"] for row in rows] == ["target", "draft alone", "k = 1", "k = 2", "auto"]
    assert len(advances) == demo.num_runs() == 5 * 3 * 2
    by_name = {row["method"]: row for row in rows}
    assert by_name["target"]["ratio"] == 1.0
    assert [row["k"] for row in rows] == [None, None, 1, 2, None]
    assert [row["same_tokens"] for row in rows] == [True, None, True, True, True]
    for row in rows:
        assert len(row["tokens_per_second_rounds"]) == 2
        low, high = row["tokens_per_second_quartiles"]
        assert 0 < low <= row["tokens_per_second"] <= high
        assert row["plain_s"] > 0
        if row["method"] != "auto":  # which may choose no drafts at all
            drafts = row["k"] is not None
            assert (row["acceptance"] is not None) == (row["draft_s"] is not None) == drafts
            assert (row["drafts_per_step"] > 0) == (row["mean_accepted_length"] > 1) == drafts
    assert by_name["k = 2"]["drafts_per_step"] > by_name["k = 1"]["drafts_per_step"]
    assert by_name["draft alone"]["plain_s"] != by_name["target"]["plain_s"] == by_name["auto"]["plain_s"]
    json.dumps(rows, allow_nan=False)


def test_rates_are_the_tokens_behind_the_first_by_their_seconds(
    demo: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = bench._ask
    monkeypatch.setattr(bench, "_ask", lambda llm, asked: ask(llm, asked)._replace(seconds=0.25))
    for row in demo.run(2):  # three prompts, and the first again to fill the second batch, of eight new tokens each
        assert row["tokens_per_second_rounds"] == [4 * 7 / (2 * 0.25)] * 2
    assert not demo.llm.engine.scheduler.pages.prefix_cache, "a round would find what the one before has computed"


def test_methods_take_turns_for_each_batch_of_prompts(demo: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, seen, speculation = bench._ask, [], demo.llm.engine.speculation
    assert speculation is not None
    controller, before = speculation.controller, speculation.most
    assert controller is not None

    def noting(llm: Any, asked: bench.Asked) -> bench.Answers:
        now = (speculation.most, speculation.controller) if llm is demo.llm else ("draft alone", None)
        seen.append((*now, tuple(params.seed for _, params in asked)))
        return ask(llm, asked)

    monkeypatch.setattr(bench, "_ask", noting)
    demo.run(2)
    assert (speculation.controller, speculation.most) == (controller, before)
    order = [(0, None), ("draft alone", None), (1, None), (2, None), (2, controller)]
    expected = []
    for first in range(3):
        for seeds in ((0, 1), (2, 3)):  # three prompts, the first one again
            expected += [(*which, seeds) for which in order[first:] + order[:first]]
    assert seen == expected


def test_another_answer_than_the_targets_is_an_error(demo: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, speculation = bench._ask, demo.llm.engine.speculation
    assert speculation is not None

    def spoiled(llm: Any, asked: bench.Asked) -> bench.Answers:
        answers = ask(llm, asked)
        if llm is demo.llm and speculation.controller is None and speculation.most == 2:
            last = answers.completions[-1]
            object.__setattr__(last, "token_ids", (*last.token_ids[:-1], 3))
        return answers

    monkeypatch.setattr(bench, "_ask", spoiled)
    told = "k = 2 gave another answer than the target alone to prompt 2: from its token 8"
    with pytest.raises(RuntimeError, match=told):
        demo.run(2)


def test_answers_without_a_second_token_are_an_error(demo: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = bench._ask
    monkeypatch.setattr(bench, "_ask", lambda *args: ask(*args)._replace(seconds=0.0))
    with pytest.raises(RuntimeError, match="target: no answer has a second token"):
        demo.run(2)


def test_lookup_and_fewer_bits_have_no_draft_alone(prompts: Path) -> None:
    with compare(prompts, "lookup") as made:
        assert [row["method"] for row in made.run(1)] == ["target", "k = 1", "k = 2", "auto"]
        assert made.draft_llm is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_published_rules_have_rows_and_answers_of_their_own(prompts: Path, temperature: float) -> None:
    names = ("coupled", "leviathan", "chen")
    with compare(prompts, str(DEMO / "draft"), method=names, temperature=temperature) as made:
        rows = made.run(1)
        asked = made._batches(3)[0]
        answers = {method.name: method.ask(asked) for method in made.methods()}
    assert [row["method"] for row in rows] == ["target", "draft alone", "k = 1", "k = 2", "auto", *names]
    assert len(draft_table.agreement(rows).splitlines()) == 1
    for row in rows[-3:]:
        assert (row["same_tokens"], row["k"]) == (None, None)
        assert [row[name] for name in ("draft_s", "verify_s", "plain_s", "expected_ratio")] == [None] * 4
        assert row["tokens_per_second"] > 0
        assert 0 < row["acceptance"] < 1
        assert row["mean_accepted_length"] == pytest.approx(1 + row["drafts_per_step"] * row["acceptance"], abs=0.3)
        assert draft_table.describe(row).split()[-4:] == ["-"] * 4
    tokens = {name: [done.token_ids for done in got.completions] for name, got in answers.items()}
    assert tokens["coupled"] == tokens["target"]
    for name in ("leviathan", "chen"):
        assert (tokens[name] == tokens["target"]) == (temperature == 0.0)
        assert answers[name].tally.num_tokens == sum(map(len, tokens[name]))  # all, the first ones as well
        assert answers["target"].tally.num_tokens == sum(len(one) - 1 for one in tokens["target"])


def test_published_rules_compute_by_the_threads_and_on_the_device_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = watch_current(published, monkeypatch)
    engine, config = SimpleNamespace(threads=2), SimpleNamespace(compile=True)
    llm: Any = SimpleNamespace(engine=engine, engine_config=config, model=FakeModel(), device=torch.device("cuda:1"))
    assert torch.get_num_threads() == 1
    with published.calling(llm):
        assert torch.get_num_threads() == 2
        assert inside == [llm.device]
    assert torch.get_num_threads() == 1
    assert not inside


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"method": ("leviathan", "other")}, "method"),
        ({"method": ("chen",)}, "--method chen compares probabilities with those of a draft model"),
        ({"batch_sizes": (1, 0)}, "batch_sizes"),
        ({"new_tokens": 1}, "new_tokens"),
        ({"repeats": 0}, "repeats"),
        ({"temperature": -1.0}, "temperature"),
        ({"speculate_k": 0}, "speculate_k"),
        ({"new_tokens": 510}, "exceed the context of 512"),
        ({"dataset": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_what_cannot_be_compared_is_refused(prompts: Path, wanted: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, ValueError, OSError), match=told):
        compare(prompts, "lookup", **wanted)


# ---- the command ----


def test_the_command_prints_writes_and_draws(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, output = tmp_path / "drafts.svg", tmp_path / "out.json"
    arguments = ["--checkpoint", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--speculate-k", "2"]
    sizes = ["--dataset", str(prompts), "--new-tokens", "5", "--repeats", "1", "--batch-sizes", "1,3"]
    out = ["--json", "--output", str(output), "--plot", str(picture)]
    traces = tmp_path / "traces"
    assert cli.main(["bench", *arguments, *sizes, *out, "--method", "leviathan", "--profile", str(traces)]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[1].endswith("; 3 prompts, at most 5 new tokens, temperature 0; rounds: 1")
    assert [line for line in lines if line.startswith("batch")] == ["batch 1", "batch 3"]
    names = ["target", "draft alone", "k = 1", "k = 2", "auto", "leviathan"]
    assert [line[:12].strip() for line in lines[2:] if line[:12].strip() in names] == names * 2
    assert lines[-2] == "All methods but draft alone, leviathan gave the target's tokens in every round."
    written = ["target", "draft-alone", "k1", "k2", "auto", "leviathan"]
    paths = [traces / f"{name}.trace.json" for name in written]
    assert told.err.splitlines() == [f"trace: {path}" for path in paths]  # and no bar where no terminal is
    assert all(json.loads(path.read_text())["traceEvents"] for path in paths)
    found = json.loads(lines[-1])
    assert found == json.loads(output.read_text())
    assert [(row["batch_size"], row["method"]) for row in found["results"]][6] == (3, "target")
    assert max(map(len, lines[1:-1])) <= 120
    assert "break-even" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--shape", "llama-68m", *LOOKUP], 1, "--draft needs --checkpoint"),
        (["--checkpoint", "x", *LOOKUP, "--speculate", "auto"], 2, "--speculate means nothing with --draft"),
        (["--checkpoint", "x", *LOOKUP, "--num-prompts", "3"], 2, "--num-prompts means nothing with --draft"),
        (["--checkpoint", "x", *LOOKUP, "--context", "3"], 2, "--prompt-tokens means nothing with --draft"),
        (["--checkpoint", "x", "--method", "chen"], 2, "--method means nothing with --checkpoint"),
        (["--checkpoint", "x", "--profile", "y"], 2, "--profile means nothing with --checkpoint"),
        (["--checkpoint", "x", "--speculate-k", "3"], 2, "--speculate-k means nothing with --checkpoint"),
        (["--url", "http://127.0.0.1:1/x", *LOOKUP], 2, "--draft means nothing with --url"),
        (["--checkpoint", ".", *LOOKUP, "--plot", "x.bmp"], 1, ".png"),
        (["--checkpoint", "/nowhere", *LOOKUP], 1, "/nowhere"),
    ],
)
def test_mistakes_are_told(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == status
    assert words in capsys.readouterr().err


def test_methods_without_drafts_in_a_round_leave_gaps_in_the_picture(tmp_path: Path) -> None:
    row = {"batch_size": 1, "tokens_per_second": 5.0, "tokens_per_second_quartiles": (4.0, 6.0), "acceptance": None}
    gap = {"accepted_per_draft": None, "accepted_needed": None, "same_tokens": True}
    rows = [row | gap | {"method": name, "k": k} for name, k in (("target", None), ("k = 1", 1), ("auto", None))]
    plots.plot_drafts(rows, tmp_path / "gaps.svg")
    assert (tmp_path / "gaps.svg").stat().st_size > 1000
