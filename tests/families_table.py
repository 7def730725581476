"""One tiny random transformers model for every family and every feature of it that changes the mathematics.

Shared by the tests that compare with transformers: ``FAMILIES[name]()`` gives the same weights each time. Weights
are drawn larger than transformers would, so that attention is not uniform and greedy tokens do not tie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

SLIDING_FIRST = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "attention_factor": 1.2,
}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 24,
    "sliding_window": 8,
    "rope_parameters": YARN | {"rope_theta": 5000.0, "truncate": False},
}


def make(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A seeded causal model of ``<name>Config`` in float32 with ``changes`` to SHAPE."""
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in parameter_name or "ln_" in parameter_name
            parameter.copy_(1 + 0.1 * noise if is_norm else 0.15 * noise)
    return model.eval()


FAMILIES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": functools.partial(make, "Llama"),
    "llama-multi-head": functools.partial(make, "Llama", num_key_value_heads=4),
    "llama-theta": functools.partial(make, "Llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama-linear": functools.partial(
        make, "Llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    # prompts of the tests are up to 100 tokens long: beyond this one's 32 positions the base grows with the length
    "llama-dynamic": functools.partial(
        make,
        "Llama",
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    ),
    "llama3": functools.partial(make, "Llama", rope_parameters=LLAMA3_ROPE),
    "llama-tied": functools.partial(make, "Llama", tie_word_embeddings=True),
    "llama-head-dim": functools.partial(make, "Llama", head_dim=24),
    "llama-biases": functools.partial(make, "Llama", attention_bias=True, mlp_bias=True),
    "mistral": functools.partial(make, "Mistral", sliding_window=8),
    "mistral-full": functools.partial(make, "Mistral", sliding_window=None, head_dim=32),
    "ministral": functools.partial(make, "Ministral", head_dim=16, sliding_window=8, layer_types=SLIDING_FIRST),
    "mixtral": functools.partial(make, "Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral-windows": functools.partial(make, "Mixtral", num_local_experts=4, sliding_window=8, num_key_value_heads=1),
    "qwen2": functools.partial(make, "Qwen2"),
    "qwen2-tied": functools.partial(make, "Qwen2", tie_word_embeddings=True),
    "qwen2-windows": functools.partial(make, "Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": functools.partial(make, "Qwen3", head_dim=32),
    "qwen3-biases": functools.partial(make, "Qwen3", head_dim=16, attention_bias=True),
    "qwen3-windows": functools.partial(
        make, "Qwen3", head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "qwen2-moe": functools.partial(make, "Qwen2Moe", **QWEN_EXPERTS, shared_expert_intermediate_size=40),
    "qwen2-moe-windows": functools.partial(
        make,
        "Qwen2Moe",
        **QWEN_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True},
        shared_expert_intermediate_size=56,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "qwen3-moe": functools.partial(make, "Qwen3Moe", **QWEN_EXPERTS, head_dim=32, decoder_sparse_step=2),
    "qwen3-moe-windows": functools.partial(
        make,
        "Qwen3Moe",
        **QWEN_EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 1},
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "gemma": functools.partial(make, "Gemma", head_dim=24, num_key_value_heads=1),
    "gemma2": functools.partial(
        make, "Gemma2", head_dim=32, sliding_window=8, query_pre_attn_scalar=20, attn_logit_softcapping=2.0
    ),
    # transformers does not apply this cap
    "gemma3": functools.partial(
        make, "Gemma3Text", head_dim=24, sliding_window=8, layer_types=SLIDING_FIRST, attn_logit_softcapping=1.0
    ),
    "gemma3-linear": functools.partial(
        make,
        "Gemma3Text",
        head_dim=16,
        sliding_window=8,
        layer_types=SLIDING_FIRST,
        tie_word_embeddings=False,
        final_logit_softcapping=5.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        },
    ),
    "olmo2": functools.partial(make, "Olmo2"),
    "olmo2-biases": functools.partial(make, "Olmo2", attention_bias=True, num_key_value_heads=1),
    "olmo3": functools.partial(make, "Olmo3", sliding_window=8, layer_types=SLIDING_FIRST),
    "olmo3-yarn": functools.partial(
        make,
        "Olmo3",
        sliding_window=8,
        layer_types=SLIDING_FIRST,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": YARN | {"rope_theta": 10000.0},
        },
    ),
    "granite": functools.partial(
        make,
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.1,
        logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    "granite-biases": functools.partial(make, "Granite", attention_multiplier=0.3, attention_bias=True, mlp_bias=True),
    "smollm3": functools.partial(make, "SmolLM3", no_rope_layer_interval=2, pad_token_id=0),
    "smollm3-windows": functools.partial(
        make,
        "SmolLM3",
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=8,
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=0,
    ),
    "gpt-oss": functools.partial(make, "GptOss", **GPT_OSS),
    "gpt-oss-plain": functools.partial(
        make, "GptOss", **GPT_OSS | {"attention_bias": False, "num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE}
    ),
    "glm": functools.partial(make, "Glm", head_dim=24, pad_token_id=0),
    "glm4": functools.partial(make, "Glm4", head_dim=32, num_key_value_heads=1, pad_token_id=0),
    "glm4-turning": functools.partial(
        make,
        "Glm4",
        head_dim=16,
        pad_token_id=0,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
    "gpt2": functools.partial(make, "GPT2", max_position_embeddings=256),
    "gpt2-odd-heads": functools.partial(
        make,
        "GPT2",
        max_position_embeddings=256,
        hidden_size=35,
        num_attention_heads=7,
        n_inner=75,
        scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
    "gpt-neox": functools.partial(make, "GPTNeoX"),
    "gpt-neox-serial": functools.partial(
        make,
        "GPTNeoX",
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_size=60,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.3},
    ),
    "opt": functools.partial(make, "OPT", max_position_embeddings=256, ffn_dim=144),
    "opt-no-biases": functools.partial(
        make,
        "OPT",
        max_position_embeddings=256,
        ffn_dim=100,
        enable_bias=False,
        activation_function="gelu",
        tie_word_embeddings=False,
        hidden_size=33,
        num_attention_heads=3,
    ),
    "bloom": functools.partial(make, "Bloom"),
    # heads that are no power of two have slopes of two series
    "bloom-odd-heads": functools.partial(
        make, "Bloom", hidden_size=66, num_attention_heads=6, tie_word_embeddings=False
    ),
    "phi": functools.partial(make, "Phi", partial_rotary_factor=0.25),
    "phi-one-key": functools.partial(
        make, "Phi", num_key_value_heads=1, hidden_size=60, num_attention_heads=3, tie_word_embeddings=True
    ),
    "starcoder2": functools.partial(make, "Starcoder2", sliding_window=8),
    "starcoder2-no-biases": functools.partial(
        make, "Starcoder2", use_bias=False, tie_word_embeddings=False, num_key_value_heads=1
    ),
    "stablelm": functools.partial(make, "StableLm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm-parallel": functools.partial(make, "StableLm", use_parallel_residual=True, num_key_value_heads=4),
    "phi3": functools.partial(make, "Phi3", sliding_window=8, pad_token_id=0),
    # as phi-4-mini; the tests' prompts begin on both sides of the original length, and answers cross it
    "phi3-longrope": functools.partial(
        make,
        "Phi3",
        pad_token_id=0,
        hidden_size=80,
        tie_word_embeddings=True,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.6,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.9],
            "long_factor": [1.0, 1.5, 2.2, 3.1, 5.0, 9.0],
        },
    ),
    "falcon": functools.partial(make, "Falcon", ffn_hidden_size=144),
    "falcon-serial": functools.partial(
        make, "Falcon", multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False
    ),
    "falcon-11b": functools.partial(
        make, "Falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=2
    ),
    "falcon-40b": functools.partial(make, "Falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "gpt-bigcode": functools.partial(make, "GPTBigCode", max_position_embeddings=256),
    "gpt-bigcode-multi-head": functools.partial(
        make, "GPTBigCode", max_position_embeddings=256, multi_query=False, tie_word_embeddings=False
    ),
}


def prompts(count: int = 10, longest: int = 100, seed: int = 1) -> list[list[int]]:
    """``count`` random prompts of varied lengths, from 1 to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + round(i * (longest - 1) / (count - 1)) for i in range(count)]
    return [torch.randint(3, SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
