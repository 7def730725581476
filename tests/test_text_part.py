"""Checkpoints that also read images: their text models have the logits that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.text_part import text_config
from gpt_fast.foreign.checkpoint import open_checkpoint

TEXT: dict[str, Any] = families_table.SHAPE | {"head_dim": 16, "pad_token_id": 0}
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "embed_dim": 32,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 500.0}}
# model_type: the text model's family, its changes, those of the whole
AROUND: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 16}, {"mm_tokens_per_image": 4}),
    "idefics3": ("llama", {"model_type": "llama"}, {}),
    "internvl": ("qwen2", {"model_type": "qwen2"}, {}),
    "llava": ("llama", {"model_type": "llama"}, {}),
    "llava_next": ("mistral", {"model_type": "mistral"}, {}),
    "llava_onevision": ("qwen2", {"model_type": "qwen2"}, {}),
    "mistral3": ("mistral", {"model_type": "mistral", "sliding_window": None}, {}),
    "qwen2_vl": ("qwen2", SECTIONS, {}),
    "qwen2_5_vl": ("qwen2", SECTIONS, {"tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3", SECTIONS, {}),
    "smolvlm": ("llama", {"model_type": "llama"}, {"tie_word_embeddings": True}),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a tiny checkpoint, and the model that it was made of."""

    def of(name: str) -> tuple[Path, Any]:
        _, text, whole = AROUND[name]
        usual = AutoConfig.for_model(name)
        kinds = {part: getattr(usual, part).model_type for part in ("text_config", "vision_config")}
        text = TEXT | {"model_type": kinds["text_config"]} | text
        images = IMAGES | {"model_type": kinds["vision_config"]}
        config = AutoConfig.for_model(name, text_config=text, vision_config=images, **whole)
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return folder, model

    return of


@torch.no_grad()
def assert_same_logits(folder: Path, theirs: Any, family: str) -> None:
    opened = open_checkpoint(folder)
    assert isinstance(opened, Checkpoint)
    assert opened.config.family == family
    ours = opened.build(torch.float32)
    for prompt in families_table.prompts(4):
        tokens = torch.tensor([prompt])
        expected = theirs(input_ids=tokens, use_cache=False).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", AROUND)
def test_the_text_model_has_the_logits_of_transformers(
    name: str, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, theirs = saved(name)
    assert_same_logits(folder, theirs, AROUND[name][0])
    assert "images are not read; this is its text model alone" in caplog.text
    convert(folder, tmp_path / "out")
    assert not any("vis" in tensor for tensor in load_file(tmp_path / "out" / "model.safetensors"))
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same_logits(tmp_path / "out", alone, AROUND[name][0])


def test_the_first_files_of_qwen2_vl_have_no_text_config(saved: Any) -> None:
    folder, theirs = saved("qwen2_vl")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config") | {"model_type": "qwen2_vl", "rope_theta": 500.0}
    del text["rope_parameters"]
    path.write_text(json.dumps(text | raw | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}))
    assert_same_logits(folder, theirs, "qwen2")


def test_what_only_the_whole_says_is_the_text_models() -> None:
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {}}
    assert text_config(raw) == {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "eos_token_id": [1, 106],
    }  # fmt: skip
    for unknown in ({"text_config": {"model_type": "gemma4_text"}}, {"architectures": ["LlamaForCausalLM"]}):
        assert text_config(raw | unknown) is None


@pytest.mark.parametrize("said", ["type", "rope_type"])
def test_a_stretched_context_stays_one(said: str) -> None:
    """Qwen's card of Qwen2.5-VL proposes it for long texts."""
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    found = text_config(raw | {"rope_scaling": {said: "yarn", "mrope_section": [16, 24, 24], **yarn}})
    assert found is not None
    assert found["rope_scaling"] == yarn | {"rope_type": "yarn"}
