"""Takes the text model out of a checkpoint whose model also reads images.

Such a ``config.json`` describes it under ``text_config`` (the first ones of Qwen2-VL beside ``vision_config``), and the
files of weights hold the tensors of all parts. Without images the text model is all that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.stored import StoredTensor

# Architectures that put images in the place of tokens and leave the text model as it is.
_AROUND = (
    "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration",
)  # fmt: skip
# The model_type of a text model, its family (family_table.py), and which defaults differ from that family's.
_QWEN2_VL = "qwen2", {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
    "rope_theta": 1e6,
}  # fmt: skip
_TEXTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")},
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000, "rope_theta": 500000.0}),
}
# What stands beside text_config and concerns the whole model.
_OF_ALL = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
# Beginnings of its tensors' names in such files, and what stands there in a checkpoint of a text model.
_NAMES = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    "model.text_model.": "model.", "lm_head.": "lm_head.",
    **{name: name for name in ("model.embed_tokens.", "model.layers.", "model.norm.")},
}  # fmt: skip


def text_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``config.json`` of the text model inside the one that ``raw`` describes; None if there is none known here."""
    names, inner = raw.get("architectures"), raw.get("text_config")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _AROUND:
        return None
    if not isinstance(inner, dict):
        inner = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}
    kind = inner.get("model_type", "gemma3_text" if names[0].startswith("Gemma3") else None)
    if not isinstance(kind, str) or kind not in _TEXTS:
        return None
    family, usual = _TEXTS[kind]
    said = {key: raw[key] for key in _OF_ALL if raw.get(key) is not None}
    text = {**usual, **said, **{key: value for key, value in inner.items() if value is not None or key not in said}}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _without_places_in_images(text[key])
    row = FAMILIES[family]
    return text | {"architectures": [row.architectures[0]], "model_type": row.model_type}


def _without_places_in_images(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of text, where all of the places that ``mrope_section`` tells apart are one."""
    if "mrope_section" not in rope:
        return dict(rope)
    kind = rope.get("rope_type", rope.get("type", "mrope"))
    kept = {name: value for name, value in rope.items() if not name.startswith(("mrope", "type"))}
    return kept | {"rope_type": "default" if kind == "mrope" else kind}


def text_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of the text model, under the names that they have in a checkpoint of a text model."""
    out = {}
    for name, tensor in tensors.items():
        for begin, own in _NAMES.items():
            if name.startswith(begin):
                out[own + name.removeprefix(begin)] = tensor
                break
    return out
