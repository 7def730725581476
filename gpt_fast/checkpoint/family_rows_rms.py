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
_OLMO = LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_GLM = LLAMA | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}
_LAYER = "model.layers.{}."
_OLMO_NAMES = llama_names(
    attention_post_norm=_LAYER + "post_attention_layernorm",
    ffn_post_norm=_LAYER + "post_feedforward_layernorm",
)
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


def _olmo3(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    fields.setdefault("local_rope_theta", 500000.0)


def _granite(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    fields["logits_scale"] = 1.0 / _positive(raw, "logits_scaling")


def _smollm3(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    rotated, interval = raw.get("no_rope_layers"), raw["no_rope_layer_interval"]
    if rotated is None and isinstance(interval, int) and interval > 0:
        rotated = [(i + 1) % interval for i in range(fields["num_layers"])]
    if not isinstance(rotated, list):
        raise ConfigError("no_rope_layers must be a list with 0 for each layer without rotation")
    if raw["use_sliding_window"] and raw.get("layer_types") is None:
        raise ConfigError("use_sliding_window needs layer_types")
    fields["unrotated"] = tuple(not r for r in rotated) if not all(rotated) else ()


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
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        model_type="olmo2",
        defaults=_OLMO,
        names=_OLMO_NAMES,
        fields={"norms": "after", "qk_norm": "row"},
        keys=_BIASES,
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        model_type="olmo3",
        defaults=_OLMO | {"rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        names=_OLMO_NAMES,
        fields={"norms": "after", "qk_norm": "row"},
        keys=_BIASES,
        windows="listed",
        finish=_olmo3,
    ),
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        model_type="granite",
        defaults=LLAMA
        | {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        names=llama_names(),
        keys=_BIASES
        | {
            "mlp_bias": "mlp_bias",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
        finish=_granite,
    ),
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        model_type="smollm3",
        defaults=LLAMA
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "sliding_window_pattern": 1,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        names=llama_names(),
        keys=_BIASES | {"mlp_bias": "mlp_bias"},
        windows="listed",
        finish=_smollm3,
    ),
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        model_type="glm",
        defaults=_GLM,
        names=llama_names(w13="model.layers.{}.mlp.gate_up_proj"),
        layouts={"wqkv": "pairs"},
        keys={"qkv_bias": "attention_bias"},
    ),
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        model_type="glm4",
        defaults=_GLM,
        names=llama_names(
            attention_post_norm=_LAYER + "post_self_attn_layernorm",
            w13="model.layers.{}.mlp.gate_up_proj",
            ffn_post_norm=_LAYER + "post_mlp_layernorm",
        ),
        layouts={"wqkv": "pairs"},
        fields={"norms": "both"},
        keys={"qkv_bias": "attention_bias"},
    ),
)
