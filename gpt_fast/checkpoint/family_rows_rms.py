"""Rows of dense families whose blocks are Llama's with other norms, scales, caps, windows or rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.checkpoint.family import LLAMA, Family, llama_names
from gpt_fast.errors import ConfigError

_GEMMA = LLAMA | {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA2 = {key: value for key, value in _GEMMA.items() if key != "hidden_act"} | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": None,
}
_LAYER = "model.layers.{}."
_BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GEMMA2_NAMES = llama_names(
    attention_post_norm=_LAYER + "post_attention_layernorm",
    ffn_norm=_LAYER + "pre_feedforward_layernorm",
    ffn_post_norm=_LAYER + "post_feedforward_layernorm",
)
_GEMMA2_KEYS = _BIASES | {
    "activation": "hidden_activation",
    "attention_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
}


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = raw[key]
    if not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{key} must be a number above 0, not {value!r}")
    return float(value)


def _gemma(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    fields["embedding_scale"] = fields["dim"] ** 0.5
    if fields["activation"] == "gelu":  # in the first files, and means the approximation
        fields["activation"] = "gelu_tanh"


def _gemma2(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    fields["embedding_scale"] = fields["dim"] ** 0.5
    fields["attention_scale"] = _positive(raw, "query_pre_attn_scalar") ** -0.5


ROWS = (
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        model_type="gemma",
        defaults=_GEMMA
        | {
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bidirectional_attention": None,
        },
        names=llama_names(),
        fields={"norm_offset": 1.0},
        keys=_BIASES,
        refused={"use_bidirectional_attention": (None, False)},
        finish=_gemma,
    ),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        model_type="gemma2",
        defaults=_GEMMA2,
        names=_GEMMA2_NAMES,
        fields={"norm_offset": 1.0, "norms": "both"},
        keys=_GEMMA2_KEYS,
        windows="listed",
        refused={"use_bidirectional_attention": (None, False)},
        finish=_gemma2,
    ),
    Family(
        name="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        model_type="gemma3_text",
        defaults=_GEMMA2
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
        names=_GEMMA2_NAMES,
        fields={"norm_offset": 1.0, "norms": "both", "qk_norm": "head"},
        keys=_GEMMA2_KEYS | {"local_rope_theta": "rope_local_base_freq"},
        windows="listed",
        refused={"use_bidirectional_attention": (None, False)},
        finish=_gemma2,
    ),
)
