"""The model families that share Llama's shape and tensor names, and the table of all families."""

from __future__ import annotations

from gpt_fast.checkpoint import family_rows_experts, family_rows_rms
from gpt_fast.checkpoint.family import LLAMA, Family, llama_names
from gpt_fast.checkpoint.gpt_families import GPT_ROWS

_MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}

_ROWS = (
    # Llama 1 to 3.2, CodeLlama, TinyLlama, open_llama and every other model that declares itself one.
    Family(
        name="llama",
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
        model_type="llama",
        defaults=LLAMA,
        names=llama_names(),
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        model_type="mistral",
        defaults=_MISTRAL,
        names=llama_names(),
        windows="all",
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        model_type="qwen2",
        defaults=_QWEN2,
        names=llama_names(),
        fields={"qkv_bias": True},
        windows="upper",
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128},
        names=llama_names(),
        fields={"qk_norm": "head"},
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        windows="upper",
    ),
    # Phi 3, 3.5 and 4.
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        model_type="phi3",
        defaults=LLAMA
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        names=llama_names(
            wqkv="model.layers.{}.self_attn.qkv_proj",
            w13="model.layers.{}.mlp.gate_up_proj",
        ),
        windows="all",
    ),
)

FAMILIES: dict[str, Family] = {
    row.name: row for row in (*_ROWS, *GPT_ROWS, *family_rows_experts.ROWS, *family_rows_rms.ROWS)
}
