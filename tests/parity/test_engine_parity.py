"""The engine against its references: transformers token by token for every family, llama2.c's golden text, and the
engine's own answers alone, together, compiled and eager."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import families_table
import pytest
import torch
from torch._dynamo.utils import counters

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.engine.runner import Runner
from gpt_fast.kernels.cpu.library import available
from gpt_fast.model.building import random_model
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.model.shapes import shape
from gpt_fast.model.steps import serve
from gpt_fast.quantize.linear import QuantizedLinear

PATHS: dict[str, dict[str, bool]] = {
    "eager": {"kernels": False, "compile": False},
    "compiled": {"kernels": False},
    **({"kernels": {}} if available() else {}),
}
# A compilation takes seconds. These have, together, everything that a block can have.
COMPILED = ("llama", "llama-dynamic", "llama-biases", "mixtral", "qwen2-windows", "qwen3-windows")
CASES = [(name, path) for name in families_table.FAMILIES for path in PATHS if path != "compiled" or name in COMPILED]
QUANTIZED = ("qwen2", "gpt2", "gpt-neox", "opt", "bloom", "phi", "phi3", "falcon", "starcoder2", "stablelm")
GREEDY_64 = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def greedy_after(name: str, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What transformers chooses after each prompt and after every token of its answer but the last. It equals the
    answers if and only if they are its own greedy ones."""
    theirs = families_table.FAMILIES[name]()
    rope = getattr(theirs.config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        return greedy_by_transformers(name)
    chosen = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = theirs(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        chosen.append(logits.argmax(-1).tolist())
    return chosen


@functools.cache
def greedy_by_transformers(name: str) -> list[list[int]]:
    """64 greedy tokens for each prompt, one at a time with its own cache: for models whose rotation depends on how long
    a sequence is, so that one pass over all of it gives something else.

    As transformers' ``generate`` does, a longrope model's cache is computed anew where its sequence becomes long.
    """
    answers = []
    for prompt in families_table.prompts():
        # A fresh model each time: with dynamic rotary scaling transformers' module remembers the longest sequence
        # that it has seen, so its answers depend on what it was asked before.
        theirs = families_table.FAMILIES[name]()
        tokens, past, answer = torch.tensor([prompt]), None, list[int]()
        longrope = theirs.config.rope_parameters["rope_type"] == "longrope"
        switch = theirs.config.original_max_position_embeddings if longrope else 10**9
        for _ in range(64):
            if len(prompt) + len(answer) == switch + 1:
                tokens, past = torch.tensor([prompt + answer]), None
            out = theirs(tokens, past_key_values=past, use_cache=True)
            past, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
            answer.append(int(tokens))
        answers.append(answer)
    return answers


@pytest.mark.parametrize(("name", "path"), CASES)
def test_same_greedy_tokens_as_transformers(name: str, path: str, tmp_path: Path) -> None:
    families_table.FAMILIES[name]().save_pretrained(tmp_path)
    prompts = families_table.prompts()
    sizes = {"max_seq_len": 256, "prefill_chunk": 48, "max_batch": 4}
    with LLM(tmp_path, dtype="float32", prefix_cache=False, **sizes, **PATHS[path]) as llm:
        assert llm.engine.runner.path == path
        together = [list(c.token_ids) for c in llm.generate(prompts, GREEDY_64)]
        alone = [list(llm.generate([prompt], GREEDY_64)[0].token_ids) for prompt in prompts[:8:2]]
    assert {len(answer) for answer in together} == {64}
    assert together == greedy_after(name, prompts, together)
    assert alone == together[:8:2]


@pytest.mark.skipif(not available(), reason="needs a C++ compiler and a CPU that the kernels know")
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("name", QUANTIZED)
@torch.inference_mode()
def test_quantized_steps_equal_their_twin(name: str, mode: str, tmp_path: Path) -> None:
    families_table.FAMILIES[name]().save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    twin = checkpoint.build(torch.float32, quantize=mode)
    for module in twin.modules():
        if isinstance(module, QuantizedLinear):
            module.rounded = True
    tokens = torch.randint(261, (12, 8), generator=torch.Generator().manual_seed(0))
    expected, found = twin(tokens), CpuModel(checkpoint.build(torch.float32, quantize=mode)).forward(tokens)
    # The last bit of a sum can decide how an activation is rounded to 8 bits: then the logits of this token and of
    # those after it move a little, as all would move if the kernels rounded otherwise. Most sequences meet none.
    difference = (found - expected).abs() / expected.std()
    assert difference.median() < 1e-5
    assert difference.max() < 0.2


@pytest.mark.parametrize("path", ["eager", "kernels"])
def test_golden_text(data_dir: Path, path: str) -> None:
    golden = (data_dir / "golden" / "stories260K_greedy_200steps.txt").read_text()
    with LLM(data_dir / "models" / "stories260K_hf", dtype="float32", **PATHS.get(path, {})) as llm:
        completion = llm.generate("", SamplingParams(max_tokens=200, temperature=0.0))
    assert completion.text == golden
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("name", ["stories260K", "llama2xs_280K"])
def test_numpy_reference(data_dir: Path, name: str) -> None:
    reference = json.loads((data_dir / "golden" / "llama2c_numpy_reference.json").read_text())[name]
    with LLM(data_dir / "models" / f"{name}_hf", dtype="float32", compile=False) as llm:
        expected = reference["greedy_from_bos"]["tokens"][1:]
        completion = llm.generate("", SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True))
    assert list(completion.token_ids) == expected[: len(completion.token_ids)]
    assert len(completion.token_ids) >= 199


def test_nothing_compiles_after_warm_up(tmp_path: Path) -> None:
    families_table.FAMILIES["llama"]().save_pretrained(tmp_path)
    with LLM(tmp_path, dtype="float32", max_seq_len=128, max_batch=3, prefill_chunk=32, kernels=False) as llm:
        compiled = counters["stats"]["unique_graphs"]
        assert compiled > 0
        torch._logging.set_logs(recompiles=True)
        for length in range(1, 100, 5):  # twenty prompt lengths, in and over the chunk, alone and in company
            llm.generate([3] * length, SamplingParams(max_tokens=5, ignore_eos=True))
        llm.generate([[3] * n for n in (1, 40, 17, 80, 2)], SamplingParams(max_tokens=9, ignore_eos=True, top_p=0.9))
        assert counters["stats"]["unique_graphs"] == compiled


def test_other_models_of_the_process_leave_room_to_compile() -> None:
    """Dynamo counts compiled variants by code object, and every model's blocks share one: they must not run out."""
    config = dataclasses.replace(
        shape("tinyllama-1.1b"), num_layers=1, dim=32, ffn_dim=64, num_heads=2, num_kv_heads=2, head_dim=16
    )
    runner = Runner(
        serve(random_model(config, torch.float32), kernels=False),
        max_batch=1,
        max_seq_len=32,
        num_pages=3,
        page_size=16,
        prefill_chunk=16,
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        runner.warm_up()
    assert runner.path != "eager"
