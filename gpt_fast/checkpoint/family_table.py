"""The model families: rows of data.

A family is a row of ``FAMILIES``: its architecture names, the values that transformers assumes for keys that its
``config.json`` leaves out, the fields of ``ModelConfig`` that are the same for all its models, the keys that its
``config.json`` has in the place of the usual ones, and its tensor names. A family that needs other mathematics needs
an operation or a field of one first (model/description.py). families.py reads ``config.json`` by a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Fields of ModelConfig and the keys of config.json that most families give them by. A row's ``keys`` go before these.
KEYS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
}

# Names of activation functions in config.json -> ours. gelu_tanh: Hendrycks & Gimpel 2016's approximation.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Family:
    """One row.

    ``names``: what a tensor is called without ``.weight``; ``{}`` is the layer, ``{e}`` the expert; several names are
    stacked into one weight. ``layouts``: of weights whose rows stand in another order (description.Layout). ``finish``
    computes fields from others, where keys alone do not say them; it gets the values of ``config.json``, defaults
    included, and the fields found.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    defaults: Mapping[str, Any]  # what transformers assumes for a missing key
    names: Mapping[str, str]
    layouts: Mapping[str, Literal["transposed", "heads", "pairs"]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    windows: Literal["none", "all", "upper", "listed"] = "none"  # layers that sliding_window applies to
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys, and the values that can be served
    finish: Callable[[Mapping[str, Any], dict[str, Any]], None] = lambda raw, fields: None


def _llama(**changes: str) -> dict[str, str]:
    """Llama's tensor names, which most families share."""
    layer, attention, mlp = "model.layers.{}.", "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    return {
        "tokens": "model.embed_tokens",
        "attention_norm": layer + "input_layernorm",
        "wqkv": f"{attention}q_proj {attention}k_proj {attention}v_proj",
        "wo": attention + "o_proj",
        "q_norm": attention + "q_norm",
        "k_norm": attention + "k_norm",
        "ffn_norm": layer + "post_attention_layernorm",
        "w13": f"{mlp}gate_proj {mlp}up_proj",
        "w2": mlp + "down_proj",
        "norm": "model.norm",
        "output": "lm_head",
    } | changes


# num_key_value_heads and head_dim: None means num_attention_heads and hidden_size / num_attention_heads.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _LLAMA | {
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
        defaults=_LLAMA,
        names=_llama(),
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        model_type="mistral",
        defaults=_MISTRAL,
        names=_llama(),
        windows="all",
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        model_type="qwen2",
        defaults=_QWEN2,
        names=_llama(),
        fields={"qkv_bias": True},
        windows="upper",
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128},
        names=_llama(),
        fields={"qk_norm": "head"},
        keys={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        windows="upper",
    ),
)

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}
