"""Whole models on the C++ kernels against the same in plain torch: packing, steps, the engine, what is chosen."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_fast.model.packed import PackedLinear, pack_model, takes_model
from torch import Tensor

from gpt_fast import LLM, SamplingParams, kernels
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.model.building import random_model
from gpt_fast.model.shapes import shape
from gpt_fast.placement import choose_placement
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.scheme import quant_config

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler and a CPU with AVX2")

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


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(mode: str, config: ModelConfig = TINY) -> Any:
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    model = random_model(config, dtype)
    if mode.startswith("int"):
        quantize_model(model, quant_config(mode))
    return model


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_packing_changes_no_answer(mode: str, tied: bool) -> None:
    model = model_of(mode, dataclasses.replace(TINY, tie_embeddings=tied, qkv_bias=tied))
    packed = copy.deepcopy(model)
    assert pack_model(packed)
    assert pack_model(packed)  # a second time: nothing to do
    tokens = torch.arange(30).view(2, 15) * 7
    assert torch.equal(packed.tok_embeddings(tokens), model.tok_embeddings(tokens))
    expected, found = model(tokens).float(), packed(tokens).float()
    # The integer products round activations to 8 bits, which plain torch does not.
    tolerance = {"float32": 1e-5, "bfloat16": 0.02}.get(mode, 0.03) * expected.std()
    assert (found - expected).abs().max() < 5 * tolerance
    assert found.argmax(-1).eq(expected.argmax(-1)).float().mean() > (0.99 if mode == "float32" else 0.8)


def logits_of(runner: Runner, plans: list[StepPlan]) -> list[Tensor]:
    return [runner.execute(plan).clone() for plan in plans]


@pytest.mark.parametrize("mode", ["int8", "int4"])  # int4: keys and values in int8 beside queries
@torch.inference_mode()
def test_a_whole_step_gives_what_its_layers_give_alone(mode: str) -> None:
    model = model_of(mode, dataclasses.replace(TINY, qkv_bias=True, norm_eps=1e-5))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.uniform_(-1, 1)
    pack_model(model)
    tokens = torch.arange(40) * 11 % 259
    served = ServedTransformer(model)
    runner = Runner(served, max_batch=1, max_seq_len=64, num_pages=9, page_size=16, prefill_chunk=64)
    found = runner.execute(StepPlan((SequencePlan(0, tuple(tokens.tolist()), 0, 0, tuple(range(1, 5)), 40, 40),)))
    expected = model(tokens[None])[0].float()
    # The last bit of a number can decide how an activation is rounded to 8 bits: then a token's logits move a little.
    difference = (found - expected).abs()
    assert difference.mean() < 1e-3 * expected.std()
    assert difference.max() < 0.1 * expected.std()


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "int8", "int4"])
def test_a_rows_logits_are_the_same_bits_in_any_company_chunk_and_number_of_threads(mode: str) -> None:
    model = model_of(mode)
    pack_model(model)
    served = ServedTransformer(model)
    runner = Runner(served, max_batch=4, max_seq_len=128, num_pages=33, page_size=16, prefill_chunk=64)
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
        assert isinstance(llm.model.output, PackedLinear)
        assert llm.model.output.kind == "int8"
        read = llm.model.bytes_per_token(0, 4)
    plain = Checkpoint.open(tmp_path / "a").build(torch.float32).bytes_per_token(0, 4)
    assert read < 0.3 * plain


@pytest.mark.parametrize(
    "change", [{"head_dim": 12}, {"dtype": torch.float16}, {"quantize": ("int4", 128)}, {"device": "meta"}]
)
def test_what_the_kernels_do_not_know_runs_in_plain_torch(change: dict[str, Any]) -> None:
    config = dataclasses.replace(TINY, head_dim=change.get("head_dim", 16))
    model = random_model(config, change.get("dtype", torch.float32))
    if "quantize" in change:  # groups of 128 would fill 172 inputs up to 256
        quantize_model(model, dataclasses.replace(quant_config(*change["quantize"]), exceptions=None))
    if "device" in change:
        model = model.to("meta")
    assert not takes_model(model)
    assert not pack_model(model)
    if "device" not in change:
        with LLM.from_model(model, compile=False, max_seq_len=64) as llm:
            assert llm.engine.runner.path == "eager"
            assert len(llm.generate([3, 1, 4], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_weights_stored_in_bfloat16_stay_so_and_others_are_widened() -> None:
    assert choose_placement(TINY, torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert choose_placement(TINY, torch.float16, device="cpu").dtype == torch.float32
    assert choose_placement(TINY, torch.bfloat16, device="cpu", dtype="float32").dtype == torch.float32
    plain = choose_placement(TINY, torch.float32, device="cpu", kernels=False, dtype="float32")
    assert (plain.kernels, plain.column_major) == (False, True)
    assert choose_placement(TINY, torch.float32, device="cpu").column_major is False


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
