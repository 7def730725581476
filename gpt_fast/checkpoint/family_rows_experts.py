"""Rows of the families with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt_fast.checkpoint.family import LLAMA, Family, llama_names
from gpt_fast.errors import ConfigError

_QWEN = LLAMA | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN_EXPERTS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn_dim": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
}
_MIXTRAL = "model.layers.{}.block_sparse_moe."  # names of tensors begin so


def _qwen_names() -> dict[str, str]:
    mlp = "model.layers.{}.mlp."
    each, shared = mlp + "experts.{e}.", mlp + "shared_expert."
    return llama_names(
        router=mlp + "gate",
        experts_w13=f"{each}gate_proj {each}up_proj",
        experts_w2=each + "down_proj",
        shared_w13=f"{shared}gate_proj {shared}up_proj",
        shared_w2=shared + "down_proj",
        shared_gate=mlp + "shared_expert_gate",
    )


def _qwen_layers(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Which layers have experts: the last of each ``decoder_sparse_step``, without ``mlp_only_layers``."""
    step, dense = raw["decoder_sparse_step"], raw["mlp_only_layers"] or ()
    if not isinstance(step, int) or step < 1 or not isinstance(dense, (list, tuple)):
        raise ConfigError(f"decoder_sparse_step ({step}) must be at least 1, and mlp_only_layers a list of layers")
    layers = tuple((i + 1) % step == 0 and i not in dense for i in range(fields["num_layers"]))
    fields["experts"] = None if not any(layers) else replace(fields["experts"], layers=() if all(layers) else layers)


ROWS = (
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        model_type="mixtral",
        defaults=LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        names=llama_names(
            router=_MIXTRAL + "gate",
            experts_w13=f"{_MIXTRAL}experts.{{e}}.w1 {_MIXTRAL}experts.{{e}}.w3",
            experts_w2=_MIXTRAL + "experts.{e}.w2",
        ),
        experts={"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "ffn_dim": "intermediate_size"},
        aliases={"num_experts": "num_local_experts"},
        windows="all",
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        model_type="qwen2_moe",
        defaults=_QWEN
        | {
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "max_window_layers": 28,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        names=_qwen_names(),
        keys={"qkv_bias": "qkv_bias"},
        experts=_QWEN_EXPERTS | {"shared_ffn_dim": "shared_expert_intermediate_size"},
        windows="listed",
        finish=_qwen_layers,
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        model_type="qwen3_moe",
        defaults=_QWEN
        | {
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        names=_qwen_names(),
        fields={"qk_norm": "head"},
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        experts=_QWEN_EXPERTS,
        aliases={"num_local_experts": "num_experts"},
        windows="all",
        finish=_qwen_layers,
    ),
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        model_type="gpt_oss",
        defaults=LLAMA
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        names=llama_names(
            sinks="model.layers.{}.self_attn.sinks",
            router="model.layers.{}.mlp.router",
            experts_w13="model.layers.{}.mlp.experts.gate_up_proj.{e}",
            experts_w2="model.layers.{}.mlp.experts.down_proj.{e}",
        ),
        layouts={"experts_w13": "interleaved"},
        fields={"activation": "clamped_swiglu", "mlp_bias": True, "router_bias": True, "sinks": True},
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        experts={"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "ffn_dim": "intermediate_size"},
        aliases={"num_experts": "num_local_experts"},
        windows="listed",
        refused={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ),
)
