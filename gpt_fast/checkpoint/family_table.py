"""The model families that share Llama's shape and tensor names, and the table of all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt_fast.checkpoint.family import ACTIVATIONS, ATTENTION_BIAS, LLAMA, Family, llama_names
from gpt_fast.checkpoint.gpt_families import GPT_ROWS
from gpt_fast.config import ModelConfig
from gpt_fast.errors import ConfigError

_BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
_UNNAMED = {"bos_token_id": None, "eos_token_id": None}
_LONG = {"max_position_embeddings": 131072}
_BOTH_WAYS = {"use_bidirectional_attention": (None, False)}

_QWEN2 = LLAMA | _UNNAMED | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_GEMMA = LLAMA | {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": None, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_GEMMA2 = {key: value for key, value in _GEMMA.items() if key != "hidden_act"} | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
    "sliding_window_pattern": 2,
}  # fmt: skip
# There transformers reads attn_logit_softcapping and does not apply it.
_GEMMA3 = {key: value for key, value in _GEMMA2.items() if key != "attn_logit_softcapping"} | _LONG | {
    "vocab_size": 262208, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": None,
    "sliding_window_pattern": 6, "use_bidirectional_attention": False,
}  # fmt: skip
_OLMO = LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_GLM = LLAMA | _LONG | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True,
    "bos_token_id": None, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
_QWEN_MOE = LLAMA | _UNNAMED | {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": False,
}  # fmt: skip

_OLMO_NAMES = llama_names(
    attention_post_norm="post_attention_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
_GEMMA2_NAMES = llama_names(
    attention_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
_QWEN_MOE_NAMES = llama_names(
    router="mlp.gate",
    experts_w13="mlp.experts.{e}.gate_proj mlp.experts.{e}.up_proj",
    experts_w2="mlp.experts.{e}.down_proj",
    shared_w13="mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    shared_w2="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
_GEMMA2_KEYS = ATTENTION_BIAS | {
    "activation": "hidden_activation", "attention_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
}  # fmt: skip
_GEMMA2_POWERS = {"embedding_scale": ("hidden_size", 0.5), "attention_scale": ("query_pre_attn_scalar", -0.5)}
_EXPERTS = {"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "ffn_dim": "intermediate_size"}
_QWEN_EXPERTS = {
    "num_experts": "num_experts", "top_k": "num_experts_per_tok", "ffn_dim": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
}  # fmt: skip


def _smollm3(values: Mapping[str, Any], fields: dict[str, Any]) -> None:
    rotated, interval = values.get("no_rope_layers"), values["no_rope_layer_interval"]
    if rotated is None and isinstance(interval, int) and interval > 0:
        rotated = [(i + 1) % interval for i in range(fields["num_layers"])]
    if not isinstance(rotated, list):
        raise ConfigError("no_rope_layers must be a list with 0 for each layer without rotation")
    if values["use_sliding_window"] and values.get("layer_types") is None:
        raise ConfigError("use_sliding_window needs layer_types")
    fields["unrotated"] = tuple(not r for r in rotated) if not all(rotated) else ()


def _smollm3_keys(config: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(not still) for still in config.unrotated or (False,) * config.num_layers]}


def _qwen_moe(values: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Which layers have experts: the last of each ``decoder_sparse_step``, without ``mlp_only_layers``."""
    step, dense = values["decoder_sparse_step"], values["mlp_only_layers"] or ()
    if not isinstance(step, int) or step < 1 or not isinstance(dense, (list, tuple)):
        raise ConfigError(f"decoder_sparse_step ({step}) must be at least 1, and mlp_only_layers a list of layers")
    layers = tuple((i + 1) % step == 0 and i not in dense for i in range(fields["num_layers"]))
    fields["experts"] = None if not any(layers) else replace(fields["experts"], layers=() if all(layers) else layers)


def _qwen_moe_keys(config: ModelConfig) -> dict[str, Any]:
    routed = (config.experts is not None,) * config.num_layers
    if config.experts is not None and config.experts.layers:
        routed = config.experts.layers
    return {"mlp_only_layers": [i for i, has_experts in enumerate(routed) if not has_experts]}


_ROWS = (
    # Llama 1 to 3.2, CodeLlama, TinyLlama, open_llama and every other model that declares itself one.
    Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", LLAMA, llama_names(), keys=_BIASES),
    # Ministral is Mistral with windows in some layers; transformers takes every Mistral with layer_types for one.
    Family(
        "mistral", ("MistralForCausalLM", "MinistralForCausalLM"), "mistral",
        LLAMA | _LONG | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
        llama_names(), windows="all by default",
    ),
    Family(
        "qwen2", ("Qwen2ForCausalLM",), "qwen2", _QWEN2, llama_names(), fields={"qkv_bias": True}, windows="upper",
    ),
    Family(
        "qwen3", ("Qwen3ForCausalLM",), "qwen3", _QWEN2 | {"head_dim": 128}, llama_names(),
        fields={"qk_norm": "head"}, keys=ATTENTION_BIAS, windows="upper",
    ),
    # Phi 3, 3.5 and 4.
    Family(
        "phi3", ("Phi3ForCausalLM",), "phi3",
        LLAMA | {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
            "sliding_window": None, "eos_token_id": 32000,
        },
        llama_names(wqkv="self_attn.qkv_proj", w13="mlp.gate_up_proj"), windows="all",
    ),
    # The first files of Gemma say gelu and mean the approximation.
    Family(
        "gemma", ("GemmaForCausalLM",), "gemma", _GEMMA, llama_names(), fields={"norm_offset": 1.0},
        keys=ATTENTION_BIAS, choices={"activation": ("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"})},
        powers={"embedding_scale": ("hidden_size", 0.5)}, refused=_BOTH_WAYS,
    ),
    Family(
        "gemma2", ("Gemma2ForCausalLM",), "gemma2", _GEMMA2, _GEMMA2_NAMES,
        fields={"norm_offset": 1.0, "norms": "both"}, keys=_GEMMA2_KEYS, powers=_GEMMA2_POWERS, windows="listed",
        refused=_BOTH_WAYS,
    ),
    Family(
        "gemma3_text", ("Gemma3ForCausalLM",), "gemma3_text", _GEMMA3, _GEMMA2_NAMES,
        fields={"norm_offset": 1.0, "norms": "both", "qk_norm": "head"},
        keys=_GEMMA2_KEYS, powers=_GEMMA2_POWERS | {"local_rope_theta": ("rope_local_base_freq", 1.0)},
        windows="listed", refused=_BOTH_WAYS,
    ),
    Family(
        "olmo2", ("Olmo2ForCausalLM",), "olmo2", _OLMO, _OLMO_NAMES, fields={"norms": "after", "qk_norm": "row"},
        keys=ATTENTION_BIAS,
    ),
    Family(
        "olmo3", ("Olmo3ForCausalLM",), "olmo3",
        _OLMO | {"rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4}, _OLMO_NAMES,
        fields={"norms": "after", "qk_norm": "row", "local_rope_theta": 500000.0}, keys=ATTENTION_BIAS,
        windows="listed",
    ),
    Family(
        "granite", ("GraniteForCausalLM",), "granite",
        LLAMA | {
            "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        llama_names(),
        keys=_BIASES | {
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
        powers={"logits_scale": ("logits_scaling", -1.0)},
    ),
    Family(
        "smollm3", ("SmolLM3ForCausalLM",), "smollm3",
        LLAMA | {
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0,
            "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
            "sliding_window_pattern": 1, "no_rope_layer_interval": 4, "bos_token_id": 128000, "eos_token_id": 128001,
        },
        llama_names(), keys=_BIASES, windows="listed", finish=_smollm3, written=_smollm3_keys,
    ),
    Family(
        "glm", ("GlmForCausalLM",), "glm", _GLM, llama_names(w13="mlp.gate_up_proj"), layouts={"wqkv": "pairs"},
        keys={"qkv_bias": "attention_bias"},
    ),
    Family(
        "glm4", ("Glm4ForCausalLM",), "glm4", _GLM,
        llama_names(
            attention_post_norm="post_self_attn_layernorm", w13="mlp.gate_up_proj",
            ffn_post_norm="post_mlp_layernorm",
        ),
        layouts={"wqkv": "pairs"}, fields={"norms": "both"}, keys={"qkv_bias": "attention_bias"},
    ),
    Family(
        "mixtral", ("MixtralForCausalLM",), "mixtral",
        LLAMA | _LONG | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        llama_names(
            router="block_sparse_moe.gate", experts_w2="block_sparse_moe.experts.{e}.w2",
            experts_w13="block_sparse_moe.experts.{e}.w1 block_sparse_moe.experts.{e}.w3",
        ),
        experts=_EXPERTS, aliases={"num_experts": "num_local_experts"}, windows="all",
    ),
    Family(
        "qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2_moe",
        _QWEN_MOE | {
            "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
            "sliding_window_pattern": 2, "max_window_layers": 28, "qkv_bias": True, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
        _QWEN_MOE_NAMES, keys={"qkv_bias": "qkv_bias"},
        experts=_QWEN_EXPERTS | {"shared_ffn_dim": "shared_expert_intermediate_size"}, windows="listed",
        finish=_qwen_moe, written=_qwen_moe_keys,
    ),
    Family(
        "qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3_moe",
        _QWEN_MOE | {
            "intermediate_size": 6144, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        _QWEN_MOE_NAMES, fields={"qk_norm": "head"}, keys=ATTENTION_BIAS, experts=_QWEN_EXPERTS,
        aliases={"num_local_experts": "num_experts"}, windows="all", finish=_qwen_moe, written=_qwen_moe_keys,
    ),
    Family(
        "gpt_oss", ("GptOssForCausalLM",), "gpt_oss",
        LLAMA | _LONG | _UNNAMED | {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        },
        llama_names(
            sinks="self_attn.sinks", router="mlp.router", experts_w13="mlp.experts.gate_up_proj.{e}",
            experts_w2="mlp.experts.down_proj.{e}",
        ),
        layouts={"experts_w13": "interleaved"},
        fields={"activation": "clamped_swiglu", "mlp_bias": True, "router_bias": True, "sinks": True},
        keys=ATTENTION_BIAS, experts=_EXPERTS, aliases={"num_experts": "num_local_experts"}, windows="listed",
        refused={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {row.name: row for row in (*_ROWS, *GPT_ROWS)}
