"""Draft checkpoints as they are found: weights in one pytorch_model.bin, without a tokenizer, of another vocabulary."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families_table
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gpt_fast import LLM, SamplingParams
from gpt_fast.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "model_store" / "demo" / "target"
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_seq_len": 64, "max_batch": 1, "threads": 1}
ASKED = ("Once upon a time", SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True))


def write_draft(folder: Path, vocab_size: int | None = None, tokenizer: bool = False, **config: Any) -> Path:
    """The demo's draft as llama-68m comes: one file that torch.save wrote, with the buffers that old versions of
    transformers saved. ``vocab_size``: rows of the embedding, cut off or filled up at the end."""
    source = ROOT / "model_store" / "demo" / "draft"
    folder.mkdir()
    facts = json.loads((source / "config.json").read_text()) | config
    weights = load_file(source / "model.safetensors")
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
            rows = weights[name]
            filled = torch.cat([rows, rows.new_zeros(max(0, vocab_size - len(rows)), rows.shape[1])])
            weights[name] = filled[:vocab_size].clone()
    for layer in range(facts["num_hidden_layers"]):
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(facts))
    if tokenizer:
        for name in ("tokenizer.model", "tokenizer_config.json"):
            shutil.copy(source / name, folder)
    return folder


def tokens_in(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def plain() -> Any:
    with LLM(TARGET, **OPTIONS) as llm:
        return llm.generate(*ASKED)


@pytest.mark.parametrize("tokenizer", [True, False], ids=["with a tokenizer", "without"])
def test_one_pytorch_file_drafts(tokenizer: bool, plain: Any, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tokenizer=tokenizer)
    with LLM(TARGET, draft=str(draft), speculate="always", **OPTIONS) as llm:  # auto would go by measured times
        done = llm.generate(*ASKED)
    assert (done.text, done.token_ids) == (plain.text, plain.token_ids)
    assert 0 < done.num_accepted < done.num_drafted


@pytest.mark.parametrize("more", [-1, 5], ids=["fewer rows", "more rows"])
def test_an_embedding_that_ends_elsewhere_drafts(more: int, plain: Any, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", vocab_size=tokens_in(TARGET) + more, tokenizer=True)
    with LLM(TARGET, draft=str(draft), **OPTIONS) as llm:
        done = llm.generate(*ASKED)
    assert done.token_ids == plain.token_ids
    assert done.num_accepted > 0


def test_the_handler_loads_it_by_the_key_of_torchserves_example(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_draft(tmp_path / "draft")
    settings = {"checkpoint": str(TARGET), "draft_checkpoint_path": "draft/pytorch_model.bin", "speculate_k": 3}
    config = yaml.safe_load(yaml.safe_dump({"handler": {**settings, **OPTIONS}}))
    facts = {"model_dir": str(tmp_path), "gpu_id": None}
    monkeypatch.setenv("LOCAL_RANK", "1")  # which reports no metrics
    pytest.importorskip("ts", reason="torchserve is not installed")
    handler: Any = importlib.import_module("handler").GPTFastHandler()
    handler.initialize(SimpleNamespace(system_properties=facts, model_yaml_config=config, model_name="m"))
    with handler.llm as llm:
        assert llm.engine_config.draft == str(draft / "pytorch_model.bin")
        done = llm.generate(*ASKED)
    assert done.text == plain.text
    assert done.num_accepted > 0


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain torch"])
def test_a_table_of_positions_that_ends_before_a_step_does_drafts(kernels: bool, tmp_path: Path) -> None:
    families_table.FAMILIES["llama"]().save_pretrained(tmp_path / "target")
    families_table.make("GPT2", max_position_embeddings=20).save_pretrained(tmp_path / "draft")
    options = OPTIONS | {"kernels": kernels, "compile": False, "draft": str(tmp_path / "draft"), "speculate": "always"}
    with LLM(tmp_path / "target", **options) as llm:
        short, long = llm.generate([[5, 6, 7], list(range(3, 33))], SamplingParams(max_tokens=24, ignore_eos=True))
    assert len(short.token_ids) == len(long.token_ids) == 24
    assert short.num_drafted > 0
    assert long.num_drafted == 0


def refusal(kind: type[ValueError], draft: Path) -> str:
    with pytest.raises(kind) as caught:
        LLM(TARGET, draft=str(draft), **OPTIONS)
    message = str(caught.value)
    assert str(draft) in message
    return message


@pytest.mark.parametrize("more", [-100, 64])
def test_without_tokenizers_sizes_must_agree(more: int, tmp_path: Path) -> None:
    size = tokens_in(TARGET)
    message = refusal(ConfigError, write_draft(tmp_path / "draft", vocab_size=size + more))
    assert message.startswith("draft: ")
    assert f"{size + more} tokens, not {size}" in message
    assert message.endswith(f"put the tokenizer's files into {tmp_path / 'draft'}")


def test_a_tokenizer_of_another_size_is_refused(data_dir: Path) -> None:
    message = refusal(ConfigError, data_dir / "models" / "stories260K_hf")
    assert "has another vocabulary" in message
    assert "512 tokens, not" in message


def test_other_tokens_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tokenizer=True)
    raw = (draft / "tokenizer.model").read_bytes()
    at = raw.index("▁Lily".encode())
    (draft / "tokenizer.model").write_bytes(raw[:at] + "▁Lola".encode() + raw[at + len("▁Lily".encode()) :])
    message = refusal(ConfigError, draft)
    assert "b' Lola' there and b' Lily' here" in message


def test_a_draft_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft")
    weights = torch.load(draft / "pytorch_model.bin", weights_only=True)
    del weights["model.layers.0.mlp.up_proj.weight"]
    torch.save(weights, draft / "pytorch_model.bin")
    assert "model.layers.0.mlp.up_proj.weight" in refusal(CheckpointError, draft)
    (draft / "pytorch_model.bin").unlink()
    assert refusal(CheckpointError, draft).startswith("draft: ")
