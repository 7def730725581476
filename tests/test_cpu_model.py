"""Whole models on the C++ kernels against the same in plain torch: packing, steps, the engine, what is chosen."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import check_idle
from programs import needs_cpp, random_weights
from torch import Tensor
from torch._dynamo.utils import counters

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.family_table import FAMILIES, Family
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import ConfigError, EngineError, UnsupportedError
from gpt_fast.kernels.race import Draw
from gpt_fast.model.building import random_model
from gpt_fast.model.cpu_model import CpuModel, pack_model
from gpt_fast.model.describing import describe
from gpt_fast.model.shapes import shape
from gpt_fast.model.steps import serve
from gpt_fast.model.transformer import Block, Transformer
from gpt_fast.placement import choose_placement
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.scheme import quant_config

pytestmark = [needs_cpp, pytest.mark.usefixtures("one_thread")]

TINY = dataclasses.replace(
    shape("tinyllama-1.1b"),
    num_layers=2,
    dim=64,
    ffn_dim=172,  # not a multiple of 32: the last block of activations is not full
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=259,
    max_seq_len=256,
)
MODES = ("float32", "bfloat16", "int8", "int4")
NUM_PARAMETERS = describe(TINY).num_parameters

# A family with a name for every weight that a description can have.
_SLOTS = (
    "tokens positions embedding_norm norm output attention_norm attention_post_norm ffn_norm ffn_post_norm wo q_norm "
    "k_norm sinks w13 w2 router experts_w13 experts_w2 shared_w13 shared_w2 shared_gate"
)
_NAMES = {slot: f"{slot}.{{}}.{{e}}" for slot in _SLOTS.split()} | {"wqkv": "wq.{} wk.{} wv.{}"}
EVERY_NAME = Family("every name", ("EveryNameForCausalLM",), "every_name", {}, _NAMES)

_BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)
_EXPERTS = ExpertsConfig(num_experts=6, top_k=2, ffn_dim=40)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": _BIASES,
    "tied": {"tie_embeddings": True, "head_bias": True},
    "layer norms": {"norm": "layer", "norms": "both", "norm_eps": 1e-3, "residual_scale": 0.3},
    "norms after": {"norms": "after", "qk_norm": "row", "activation": "gelu_tanh", "head_dim": 20},
    "gemma": {
        "norms": "both", "norm_offset": 1.0, "embedding_scale": 8.0, "attention_cap": 5.0, "logits_cap": 3.0,
        "attention_scale": 0.2, "activation": "gelu_tanh", "windows": (7, 0), "tie_embeddings": True,
        "local_rope_theta": 100.0, "qk_norm": "head",
    },
    "gpt2": {
        "norm": "layer", "gated": False, "activation": "gelu_tanh", "learned_positions": 2, "rotary_dim": 0,
        "tie_embeddings": True, **_BIASES,
    },
    "bloom": {
        "norm": "layer", "gated": False, "activation": "gelu", "alibi": True, "rotary_dim": 0, "embedding_norm": True,
        "num_kv_heads": 4, **_BIASES,
    },
    "falcon": {"norm": "layer", "gated": False, "activation": "relu", "parallel": "one norm", "num_kv_heads": 1},
    "neox": {
        "norm": "layer", "gated": False, "activation": "gelu", "parallel": "two norms", "rotary_dim": 8, **_BIASES,
    },
    "parallel and norms after": {"norms": "both", "parallel": "two norms", "logits_scale": 0.5, "embedding_norm": True},
    "odd heads": {"head_dim": 5, "rotary_dim": 0, "num_heads": 6, "num_kv_heads": 3, "windows": (3, 9)},
    "unrotated": {"unrotated": (False, True), "head_dim": 12, "rotary_dim": 4, "num_kv_heads": 1},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 16, attention_factor=1.2), "residual_scale": 0.5},
    "experts": {"experts": _EXPERTS},
    "gpt-oss": {
        "experts": dataclasses.replace(_EXPERTS, top_k=4), "sinks": True, "activation": "clamped_swiglu",
        "windows": (6, 0), "router_bias": True, **_BIASES,
    },
    "qwen moe": {
        "experts": dataclasses.replace(_EXPERTS, renormalize=False, shared_ffn_dim=72), "qkv_bias": True,
    },
    "experts in one layer": {
        "experts": dataclasses.replace(_EXPERTS, layers=(False, True), shared_ffn_dim=24), "norms": "both",
        "qk_norm": "head", "residual_scale": 0.5,
    },
    "parallel experts": {"experts": _EXPERTS, "parallel": "one norm", "norm": "layer"},
    "experts after norms": {"experts": dataclasses.replace(_EXPERTS, top_k=6), "norms": "after"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def every_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, EVERY_NAME.name, EVERY_NAME)


def config_of(name: str) -> ModelConfig:
    return dataclasses.replace(TINY, family=EVERY_NAME.name, **MODELS[name])


def model_of(mode: str, config: ModelConfig = TINY) -> Transformer:
    """A model of random weights; quantized ones round activations as the kernels do."""
    model = Transformer(config).eval().requires_grad_(False)
    random_weights(model)
    if mode.startswith("int"):
        quantize_model(model, quant_config(mode))
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.rounded = True
    return model.bfloat16() if mode == "bfloat16" else model


# Together every operation that a block can have.
COMPILED = {"gemma": 0, "neox": 0, "qwen moe": 1, "gpt-oss": 1}


@pytest.mark.parametrize("name", COMPILED)
@torch.inference_mode()
def test_blocks_compile_whole_but_for_experts(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By torch.compile, without a break of the graph where there are no experts, and with the same logits.

    The graphs run in plain torch: what inductor makes of them takes many seconds, and parity tests look at it.
    """
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path))
    monkeypatch.setattr(Block, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    config = dataclasses.replace(config_of(name), num_layers=1, windows=(7,))
    model = model_of("float32", config)
    tokens = torch.arange(24)[None] * 13 % 259
    expected = model(tokens)[0]
    runner = Runner(
        serve(model, kernels=False), max_batch=1, max_seq_len=32, num_pages=9, page_size=4, prefill_chunk=16
    )
    breaks = counters["graph_break"].total()
    runner.warm_up()
    assert runner.path == "compiled"
    assert bool(counters["graph_break"].total() > breaks) == bool(COMPILED[name])
    compiled = counters["stats"]["unique_graphs"]
    plans = [
        StepPlan((SequencePlan(0, tuple(tokens[0, :13].tolist()), 0, 0, (1, 2, 3, 4), 13, 24),)),
        StepPlan((SequencePlan(0, tuple(tokens[0, 13:23].tolist()), 13, 4, (5, 6), 10, 24),)),
        StepPlan((SequencePlan(0, (int(tokens[0, 23]),), 23, 6, (), 1, 24),)),
    ]
    torch.testing.assert_close(
        torch.cat([runner.execute(plan).clone() for plan in plans]), expected, atol=1e-4, rtol=1e-4
    )
    assert counters["stats"]["unique_graphs"] == compiled, "compiled again"


def logits_of(runner: Runner, plans: list[StepPlan]) -> list[Tensor]:
    return [runner.execute(plan).clone() for plan in plans]


CASES = [
    (name, mode) for name in MODELS for mode in MODES if mode != "bfloat16" or name in ("gemma", "gpt-oss", "gpt2")
]


@pytest.mark.parametrize(("name", "mode"), CASES)
@torch.inference_mode()
def test_a_whole_model_equals_plain_torch(name: str, mode: str) -> None:
    """All at once; and in steps, in chunks and in company, the same to the bit, whatever the number of threads."""
    model = model_of(mode, config_of(name))
    tokens = torch.arange(2 * 37).view(2, 37) * 13 % 259
    expected = model(tokens).float()
    packed = CpuModel(copy.deepcopy(model))
    found = packed.forward(tokens)
    if mode == "float32":
        torch.testing.assert_close(found, expected, atol=5e-5 * float(expected.std()), rtol=1e-5)
    else:
        difference = ((found - expected).abs() / expected.std()).amax(-1)
        if mode == "bfloat16":
            assert difference.mean() < 0.1
        else:
            # Where the last bit of a sum differs, an activation can round to the next integer; then the logits of that
            # token and later ones move a little. Those before it agree.
            assert difference.mean() < 0.1
            assert (difference < 1e-4).float().mean() > 0.25
    assert packed.bytes_per_token(10, 4.0) > 0
    runner = Runner(packed, max_batch=3, max_seq_len=48, num_pages=21, page_size=4, prefill_chunk=64)
    got: list[list[Tensor]] = [[], []]
    for threads, parts in (
        (1, [(0, 20), (0, 9)]),
        (2, [(20, 21), (9, 10)]),
        (2, [(21, 37), (10, 11)]),
        (1, [(11, 37)]),
    ):
        torch.set_num_threads(threads)
        plans = []
        for slot, (begin, end) in zip((0, 1) if len(parts) == 2 else (1,), parts, strict=True):
            pages = tuple(range(1 + 10 * slot + -(-begin // 4), 1 + 10 * slot + -(-end // 4)))
            chosen = tuple(tokens[slot, begin:end].tolist())
            plans.append(SequencePlan(slot, chosen, begin, -(-begin // 4), pages, end - begin, 37))
        out = runner.execute(StepPlan(tuple(plans)))
        for plan in plans:
            got[plan.slot].append(out[: plan.num_logits].clone())
            out = out[plan.num_logits :]
    for slot in range(2):
        assert torch.equal(torch.cat(got[slot]), found[slot])


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "int8", "int4"])
def test_a_rows_logits_are_the_same_bits_in_any_company_chunk_and_number_of_threads(mode: str) -> None:
    runner = Runner(
        CpuModel(model_of(mode)), max_batch=4, max_seq_len=128, num_pages=33, page_size=16, prefill_chunk=64
    )
    prompt = tuple(i * 11 % 259 for i in range(70))

    def one(start: int, end: int, slot: int, logits: int) -> SequencePlan:
        pages = tuple(range(1 + 8 * slot, 9 + 8 * slot))
        return SequencePlan(slot, prompt[start:end], start, 0, pages, logits, 70)

    alone = logits_of(runner, [StepPlan((one(0, 70, 0, 70),))])[0]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        by_one = [runner.execute(StepPlan((one(i, i + 1, 1, 1),))) for i in range(70)]
        assert torch.equal(torch.cat(by_one), alone)
        parts = []
        for start, end in ((0, 7), (7, 40), (40, 69), (69, 70)):
            other = (one(0, 3 * end % 50 + 1, 0, 1), one(0, 1, 3, 1))
            plan = StepPlan((other[0], one(start, end, 1, end - start), other[1]))
            parts.append(runner.execute(plan)[1 : 1 + end - start])
        assert torch.equal(torch.cat(parts), alone)


def test_quantized_while_loading_equals_the_quantized_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(random_model(TINY, torch.float32), tmp_path / "a")
    with LLM(tmp_path / "a", quantize="int4", max_seq_len=100) as llm:
        assert llm.engine.runner.path == "kernels"
        assert isinstance(llm.model, CpuModel)
        read = llm.model.bytes_per_token(0, 4)
    plain = Checkpoint.open(tmp_path / "a").build(torch.float32).bytes_per_token(0, 4)
    assert read < 0.3 * plain


@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"quantize": ("int4", 128)}, {"device": "meta"}])
def test_what_the_kernels_do_not_know_runs_in_plain_torch(change: dict[str, Any]) -> None:
    model = random_model(TINY, change.get("dtype", torch.float32))
    if "quantize" in change:  # groups of 128 would fill 172 inputs up to 256
        quantize_model(model, dataclasses.replace(quant_config(*change["quantize"]), exceptions=None))
    if "device" in change:
        model = model.to("meta")
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError):
        CpuModel(model)
    assert pack_model(model) is None
    assert [type(module) for module in model.modules()] == before, "weights were taken"
    if "device" not in change:
        assert not isinstance(serve(model), CpuModel)
        with LLM.from_model(model, compile=False, max_seq_len=64) as llm:
            assert llm.engine.runner.path == "eager"
            assert len(llm.generate([3, 1, 4], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_weights_stored_in_bfloat16_stay_so_and_others_are_widened() -> None:
    assert choose_placement(NUM_PARAMETERS, torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert choose_placement(NUM_PARAMETERS, torch.float16, device="cpu").dtype == torch.float32
    assert choose_placement(NUM_PARAMETERS, torch.bfloat16, device="cpu", dtype="float32").dtype == torch.float32
    plain = choose_placement(NUM_PARAMETERS, torch.float32, device="cpu", kernels=False, dtype="float32")
    assert (plain.kernels, plain.column_major) == (False, True)
    assert choose_placement(NUM_PARAMETERS, torch.float32, device="cpu").column_major is False


@pytest.mark.parametrize("fast", [True, False], ids=["a CPU with bfloat16", "one without"])
def test_plain_torch_narrows_no_weights_by_itself(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a CPU that computes faster with bfloat16."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    for stored in (torch.float32, torch.float16):
        assert choose_placement(NUM_PARAMETERS, stored, device="cpu", kernels=False).dtype == torch.float32
    wanted = torch.bfloat16 if fast else torch.float32
    assert choose_placement(NUM_PARAMETERS, torch.bfloat16, device="cpu", kernels=False).dtype == wanted


def test_a_cache_that_the_kernels_do_not_have_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(random_model(TINY, torch.float32), tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_dtype": "float16", "compile": False}
    told = "kv_cache_dtype: the C.. kernels have no cache of float16; take bfloat16 or int8, or set kernels: false"
    with LLM(tmp_path, **options, kernels=False) as llm:
        assert llm.engine.runner.cache[0].k.dtype == torch.float16
    with pytest.raises(ConfigError, match=told):
        LLM.from_model(random_model(TINY, torch.float32), kv_cache_dtype="float16", compile=False)
    monkeypatch.setattr(Checkpoint, "build", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=told):
        LLM(tmp_path, **options)


def test_a_cache_of_integers_is_smaller_and_nearly_as_good() -> None:
    model = random_model(TINY, torch.float32)
    prompt = [i * 31 % 259 for i in range(100)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    found, sizes, paths = {}, {}, {}
    for kernels_on in (False, True):
        for kind in ("auto", "int8"):
            options: dict[str, Any] = {"max_seq_len": 128, "kv_cache_dtype": kind, "compile": False}
            with LLM.from_model(copy.deepcopy(model), kernels=kernels_on, **options) as llm:
                paths[kernels_on] = llm.engine.runner.path
                sizes[kind] = llm.engine.runner.cache_bytes
                scored = llm.generate(prompt, params).prompt_logprobs
                assert scored is not None
                found[kernels_on, kind] = torch.tensor([entry.logprob for entry in scored[1:]])
    assert paths == {False: "eager", True: "kernels"}
    assert sizes["int8"] == sizes["auto"] * (16 + 4) / (16 * 4)
    for kernels_on in (False, True):
        assert (found[kernels_on, "int8"] - found[kernels_on, "auto"]).abs().max() < 0.02
        assert not torch.equal(found[kernels_on, "int8"], found[kernels_on, "auto"])


MANY_WAYS = [
    SamplingParams(max_tokens=30, temperature=0.0),
    SamplingParams(max_tokens=25, temperature=1.0, seed=1),
    SamplingParams(max_tokens=20, temperature=1.3, top_k=9, seed=2),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, min_p=0.01, seed=3),
    SamplingParams(max_tokens=9, temperature=1.0, seed=4, logprobs=2),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, frequency_penalty=0.5, min_tokens=5),
]


def test_tokens_drawn_in_one_call_with_the_step_are_those_that_the_host_samples(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where that call fails, or cannot draw: the step is computed again."""
    prompts = [[i * 31 % 259 for i in range(3 + 7 * n)] for n in range(len(MANY_WAYS))]
    drawn = []

    def answers(llm: LLM) -> list[tuple[Any, ...]]:
        return [(done.token_ids, done.text, done.finish_reason) for done in llm.generate(prompts, MANY_WAYS)]

    with LLM.from_model(random_model(TINY, torch.float32), max_seq_len=128) as llm:
        runner, draw = llm.engine.runner, llm.engine.runner.draw
        monkeypatch.setattr(runner, "runs_ahead", False)
        monkeypatch.setattr(runner, "draws_at_once", False)
        expected = answers(llm)
        monkeypatch.setattr(runner, "draws_at_once", True)

        def failing_now_and_then(plan: StepPlan, draws: Any) -> list[int]:
            drawn.append(draw(plan, draws))
            if len(drawn) % 5 == 0:
                raise RuntimeError("out of luck")
            return [-1, *drawn[-1][1:]] if len(drawn) % 7 == 0 else drawn[-1]

        monkeypatch.setattr(runner, "draw", failing_now_and_then)
        assert answers(llm) == expected
        assert len(drawn) > 10  # of about 30 steps; others had a part for the host
        assert any(len(tokens) == 4 for tokens in drawn)
        assert caplog.text.count("a step failed; it is computed again") == len(drawn) // 5
        monkeypatch.setattr(runner, "draw", draw)
        assert answers(llm) == expected


class Beginnings:
    """Stands for a runner's ``begin``: some steps are left out before they start, and now and then it fails."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.begin = runner, runner.begin
        self.calls: list[int] = []  # rows of each step
        self.behind = self.shrunk = 0

    def __call__(self, plan: StepPlan, draws: Sequence[Draw], before: Any = None, index: Sequence[int] = ()) -> Any:
        self.calls.append(len(draws))
        self.behind += before is not None
        self.shrunk += before is not None and len(index) < len(before.tokens)
        if len(self.calls) % 11 == 0:
            raise RuntimeError("out of luck")
        drawing = self.begin(plan, draws, before, index)
        if len(self.calls) % 7 == 0:
            self.runner.hold()
        return drawing


def test_steps_that_begin_ahead_draw_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they are held, or fail: then they are computed again. A request that comes later has its own answer,
    and one that is cancelled costs nobody anything."""
    ways = [*MANY_WAYS, SamplingParams(max_tokens=40, temperature=1.0, seed=6), SamplingParams(max_tokens=40, seed=7)]
    prompts = [[i * 31 % 259 for i in range(3 + 7 * n)] for n in range(len(ways))]

    def answers(llm: LLM) -> list[tuple[Any, ...]]:
        handles = []
        for prompt, way in zip(prompts, ways, strict=True):
            handles.append(llm.submit(prompt, way))
            time.sleep(0.002)
        llm.submit(prompts[3], SamplingParams(max_tokens=60, ignore_eos=True)).cancel()
        for handle in handles:
            list(handle)
        found = [handle.completion for handle in handles]
        return [(done.token_ids, done.text, done.finish_reason) for done in found if done is not None]

    with LLM.from_model(random_model(TINY, torch.float32), max_seq_len=128, page_size=1, num_pages=500) as llm:
        runner = llm.engine.runner
        monkeypatch.setattr(runner, "runs_ahead", False)
        expected = answers(llm)
        monkeypatch.setattr(runner, "runs_ahead", True)
        beginnings = Beginnings(runner)
        monkeypatch.setattr(runner, "begin", beginnings)
        for _ in range(4):
            assert answers(llm) == expected
        assert beginnings.behind > 40
        assert beginnings.shrunk > 0, "a request ended, and the step behind went on without it"
        assert len(set(beginnings.calls)) > 1
        assert caplog.text.count("a step ahead failed; it is computed again") == len(beginnings.calls) // 11
        check_idle(llm)
        running = llm.submit(prompts[0], SamplingParams(max_tokens=100, ignore_eos=True))
    with pytest.raises(EngineError):  # closed with a step on its way
        list(running)


def test_whether_steps_begin_ahead_is_a_question_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ahead in ((1, False), (2, True)):
        monkeypatch.setattr("gpt_fast.loading.num_cores", lambda cores=cores: cores)
        with LLM.from_model(random_model(TINY, torch.float32), max_seq_len=64, threads=1) as llm:
            assert llm.engine.runner.runs_ahead is ahead
