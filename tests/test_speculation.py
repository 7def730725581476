"""Drafters: whatever they guess, answers are those without them; and what they guess is worth the asking."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakeModelLLM, check_idle
from test_drafts import seen
from test_engine import mixed_requests
from torch import Tensor

from gpt_fast import LLM, Completion, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.engine.speculate.lookup import LookupDrafter
from gpt_fast.engine.speculate.model import ModelDrafter
from gpt_fast.kernels.race import Draw
from gpt_fast.memory import plan_cache
from gpt_fast.model.cpu_model import CpuStep
from gpt_fast.model.steps import serve
from gpt_fast.model.transformer import Transformer

DEMO = Path(__file__).parents[1] / "model_store" / "demo"
Asked = tuple[list[int], SamplingParams]


def lookup(pages: PageAllocator, sizes: dict[str, int]) -> Drafter:
    return LookupDrafter()


def history(pages: PageAllocator, sizes: dict[str, int]) -> Drafter:
    return LookupDrafter(history=200)


class NearModel(FakeModel):
    """The fake model with other numbers here and there, and a vocabulary that ends elsewhere."""

    vocab_size = VOCAB_SIZE - 1

    def forward(self, tokens: Tensor) -> Tensor:
        noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        return (super().forward(tokens) + 0.3 * noise)[..., : self.vocab_size]


def same_model(pages: PageAllocator, sizes: dict[str, int]) -> ModelDrafter:
    return ModelDrafter(Runner(FakeModel(), **sizes), pages, VOCAB_SIZE, sizes["max_seq_len"])


def near_model(pages: PageAllocator, sizes: dict[str, int]) -> ModelDrafter:
    return ModelDrafter(Runner(NearModel(), **sizes), pages, VOCAB_SIZE, 60)


DRAFTERS = {"lookup": lookup, "history": history, "same": same_model, "near": near_model}


def ask(llm: LLM, requests: Sequence[Asked]) -> list[Any]:
    done = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert isinstance(done, list)
    return done


def accepted(done: Sequence[Any]) -> float:
    """Share of the drafts that were right."""
    return sum(d.num_accepted for d in done) / max(1, sum(d.num_drafted for d in done))


# ---- any drafter ----


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with FakeModelLLM(max_batch=1, prefix_cache=False) as llm:
        return [seen(d) for d in ask(llm, mixed_requests())]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_drafts": 9, "page_size": 4, "prefill_chunk": 7}, {"max_batch": 16, "num_pages": 13}, {"page_size": 1}],
    ids=["batch", "chunks", "preemption", "pages of one"],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_answer_changes(drafter: str, options: dict[str, Any], plain: list[Any]) -> None:
    with FakeModelLLM(drafter=DRAFTERS[drafter], **options) as llm:
        for _ in range(2):  # the second time with a full prefix cache
            done = ask(llm, mixed_requests())
            assert [seen(d) for d in done] == plain
            check_idle(llm)
        if drafter in ("same", "near"):
            share = accepted(done)
            assert share == 1.0 if drafter == "same" else 0.2 < share < 1.0


def test_always_right_gives_all_drafts_and_one_more() -> None:
    request = ([5, 6, 7], SamplingParams(max_tokens=25, temperature=1.0, seed=4, ignore_eos=True))
    with FakeModelLLM(drafter=same_model, num_drafts=5) as llm:
        deltas = list(llm.submit(*request, max_uncollected=1))
    assert [len(delta.token_ids) for delta in deltas] == [1, 6, 6, 6, 6]


def test_a_drafter_that_fails_costs_no_answer_anything(plain: list[Any]) -> None:
    class Failing(LookupDrafter):
        def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
            raise RuntimeError("no guess today")

    with FakeModelLLM(drafter=lambda *_: Failing()) as llm:
        assert [seen(d) for d in ask(llm, mixed_requests())] == plain


def test_a_draft_model_reads_no_token_behind_the_end_of_its_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt may be token ids, also those that only fill up the target's embedding table."""
    request = ([5, VOCAB_SIZE - 1, 6, VOCAB_SIZE - 1], SamplingParams(max_tokens=20, ignore_eos=True))
    with FakeModelLLM() as llm:
        plain = seen(ask(llm, [request])[0])
    with FakeModelLLM(drafter=near_model) as llm:
        (done,) = ask(llm, [request])
    assert seen(done) == plain
    assert done.num_drafted > 0
    assert all(record.levelno < logging.WARNING for record in caplog.records), "a step of the draft model failed"


def test_a_draft_model_that_fails_once_goes_on(plain: list[Any]) -> None:
    with FakeModelLLM(drafter=same_model) as llm:
        drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
        run, calls = drafter.runner.execute, []

        def execute(plan: Any) -> Tensor:
            calls.append(plan)
            if len(calls) % 7 == 0:
                raise RuntimeError("out of luck")
            return run(plan)

        drafter.runner.execute = execute
        done = ask(llm, mixed_requests())
        assert [seen(d) for d in done] == plain
        assert accepted(done) == 1.0


def test_shared_beginnings_are_computed_once() -> None:
    prompt = list(range(10, 90))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    with FakeModelLLM(drafter=same_model) as llm:
        ask(llm, [(prompt, params)])
        drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
        run, counts = drafter.runner.execute, []
        drafter.runner.execute = lambda plan: (counts.append(plan.num_tokens), run(plan))[1]
        (done,) = ask(llm, [([*prompt, 3], dataclasses.replace(params, seed=2))])
    assert max(counts) < 20
    assert done.num_accepted == done.num_drafted > 0


# ---- the demo pair ----


def demo_requests() -> list[tuple[str, SamplingParams]]:
    """Every parameter that sampling knows, mixed."""
    draw = random.Random(3)
    starts = ["Once upon a time", "Lily and Tom went to the park. Lily and Tom went", "The little dog was sad because"]
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20}, {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 1.0, "logit_bias": {260: 3.0, 300: -100.0}},
        {"temperature": 1.0, "min_tokens": 12, "logprobs": 0},
        {"temperature": 0.0, "stop": ("and", "was")}, {"temperature": 1.0, "regex": "[a-z ]{4,30}[.]"},
        {"temperature": 0.0, "bad_words": ("the", "was a")},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(260, 400))},
    ]  # fmt: skip
    return [
        (draw.choice(starts), SamplingParams(max_tokens=draw.randrange(12, 40), seed=i, **fields[i % len(fields)]))
        for i in range(4 * len(fields))
    ]


@pytest.fixture(scope="module", params=["float32", "int8"])
def demo(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[Any]]:
    options = {"dtype": "float32", "quantize": None if request.param == "float32" else "int8", "threads": 1}
    with LLM(DEMO / "target", max_batch=8, max_seq_len=128, **options) as llm:
        prompts, params = zip(*demo_requests(), strict=True)
        return options, [seen(d) for d in llm.generate(list(prompts), list(params))]


@pytest.mark.parametrize("draft", ["checkpoint", "lookup", "history", "int4"])
def test_the_demo_pair_writes_what_the_target_writes(draft: str, demo: tuple[dict[str, Any], list[Any]]) -> None:
    options, expected = demo
    name = str(DEMO / "draft") if draft == "checkpoint" else draft
    if draft == "int4" and options["quantize"]:
        options = options | {"quantize": "int8"}
    if draft == "history":
        name, options = "lookup", options | {"lookup_history": 2000}
    prompts, params = zip(*demo_requests(), strict=True)
    options = options | {"max_batch": 3, "num_pages": 20, "max_seq_len": 128, "draft": name, "speculate": "always"}
    with LLM(DEMO / "target", **options) as llm:
        for _ in range(2):
            done = llm.generate(list(prompts), list(params))
            llm.engine.scheduler.check_integrity()
            assert [seen(d) for d in done] == expected
    if draft != "lookup":
        assert accepted(done) > 0.3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_draft_model_costs_the_pages_that_were_planned(kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 100, "kv_cache_dtype": kv_cache_dtype}
    with LLM(DEMO / "target", draft=str(DEMO / "draft"), **options) as llm:
        drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
        draft = Checkpoint.open(DEMO / "draft").config
        where: dict[str, Any] = {"dtype": llm.dtype, "free": 10**10, "device_type": "cpu"}
        alone, both = (plan_cache(llm.config, llm.engine_config, draft=d, **where) for d in (None, draft))
        assert llm.engine.runner.cache_bytes == alone.num_bytes
        assert drafter.runner.cache_bytes == both.num_bytes - alone.num_bytes > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_in_one_call_are_those_of_one_call_each(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call of C++, as steps whose tokens stay on the device, and fetched one by one."""
    prompts, params = zip(*demo_requests(), strict=True)
    found = []
    for way in ("chain", "steps", "one by one"):
        options: dict[str, Any] = {"draft": str(DEMO / "draft"), "speculate": "always", "dtype": dtype, "threads": 2}
        with LLM(DEMO / "target", max_batch=5, num_pages=60, **options) as llm:
            drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
            if way == "steps":
                monkeypatch.setattr(CpuStep, "chain", None)
            if way == "one by one":
                monkeypatch.setattr(ModelDrafter, "_draws_at_once", lambda *_: False)
            drafts: list[list[tuple[int, ...]]] = []
            draft = drafter.draft
            drafter.draft = lambda wishes, draft=draft, drafts=drafts: drafts.append(draft(wishes)) or drafts[-1]
            with llm.engine.changed:  # one step takes them all in
                handles = llm.submit_all(list(zip(prompts, params, strict=True)))
            for handle in handles:
                assert list(handle)[-1].completion
            found.append(drafts)
    assert found[0] == found[1] == found[2]
    assert {len(d) for step in found[0] for d in step} == {1, 2, 3, 4}


@pytest.mark.parametrize("kernels", [True, False])
def test_a_chain_without_finite_logits_draws_nothing(kernels: bool) -> None:
    model = Transformer(ModelConfig("llama", 40, 32, 1, 2, 1, 16, 48, 64)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    served = serve(model, kernels=kernels, compile=False)
    runner = Runner(served, max_batch=2, max_seq_len=16, num_pages=9, page_size=4, prefill_chunk=8)
    plan = SequencePlan(1, (5, 6), 0, 0, (1, 2), num_logits=1, rope_len=0)
    assert runner.chain(StepPlan((plan,)), [[Draw(), Draw(0.0), Draw()]])[0] == [NO_TOKEN] * 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"draft": "stories260K_hf"}, "draft: .*has another vocabulary"),
        ({"draft": "nowhere"}, "draft: .*nowhere"),
        ({"draft": "int4", "quantize": "int4"}, "draft: int4 is the target in fewer bits"),
        ({"draft": "lookup", "speculate_k": 0}, "speculate_k"),
    ],
)
def test_drafts_that_cannot_be_are_refused(options: dict[str, Any], told: str, data_dir: Path) -> None:
    if options["draft"] == "stories260K_hf":
        options = {"draft": str(data_dir / "models" / "stories260K_hf")}
    with pytest.raises(ValueError, match=told):
        LLM(DEMO / "target", **options)


def test_a_model_in_memory_has_no_draft_model() -> None:
    with LLM(DEMO / "target", max_seq_len=64) as llm, pytest.raises(ValueError, match="built in memory"):
        LLM.from_model(llm.model, draft="int4")


@pytest.mark.parametrize("sizes", [{"max_seq_len": 18}, {"max_seq_len": 5, "page_size": 1}])
def test_drafts_are_timed_where_the_context_is_short(sizes: dict[str, Any]) -> None:
    with LLM(DEMO / "target", draft=str(DEMO / "draft"), max_batch=1, **sizes) as llm:
        done = llm.generate("Once", SamplingParams(max_tokens=2, temperature=0.0))
        assert isinstance(done, Completion)
        assert len(done.token_ids) == 2
