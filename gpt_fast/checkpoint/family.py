"""What a family of models is: a row of data.

The rows stand in family_table.py and gpt_families.py; families.py reads and writes ``config.json`` by them. A family
that needs other mathematics needs an operation or a field of one first (model/description.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpt_fast.config import ModelConfig

# Fields of ModelConfig and the keys of config.json that most families give them by. A row's ``keys`` go before these.
KEYS = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "ffn_dim": "intermediate_size", "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "activation": "hidden_act", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}

# Names of activation functions in config.json -> ours, of which the last name is written. gelu_tanh: Hendrycks &
# Gimpel 2016's approximation.
ACTIVATIONS = {
    "swish": "silu", "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row.

    ``names``: what a tensor is called without ``.weight``; ``{}`` is the layer, ``{e}`` the expert; several names are
    stacked into one weight. ``prefix``: the beginning of the names that some files leave out. ``layouts``: of weights
    whose rows stand in another order (description.Layout). ``fields``: of ModelConfig, the same for all models of the
    family. ``keys``: of ``config.json``, for fields whose key is not the usual one, "" for none. ``experts``: fields of
    ExpertsConfig, and their keys. ``choices``: fields by a key whose value chooses the field's, as
    ``{field: (key, {value: field's value})}``; None is the field's default. ``powers``: fields that are a power of a
    key's value, as ``{field: (key, exponent)}``. ``aliases``: other spellings of keys. ``when``: keys, and the values
    with which the row is meant, for architectures with several rows: the first that fits is taken. ``finish`` computes
    fields from others, where keys alone do not say them, or raises ConfigError; it gets the values of ``config.json``,
    defaults included, and the fields found. ``written`` gives the keys that it reads.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    defaults: Mapping[str, Any]  # what transformers assumes for a missing key
    names: Mapping[str, str]
    layouts: Mapping[str, Literal["transposed", "heads", "pairs", "interleaved"]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, Mapping[Any, Any]]] = field(default_factory=dict)
    powers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefix: str = ""
    # Layers that sliding_window applies to. What layer_types lists goes before it, but for "all".
    windows: Literal["none", "all", "all by default", "upper", "listed"] = "none"
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys, and the values that can be served
    finish: Callable[[Mapping[str, Any], dict[str, Any]], None] = lambda values, fields: None
    written: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}


def in_layer(layer: str, **names: str) -> dict[str, str]:
    """``names`` of tensors, behind ``layer``, with which all of them begin."""
    return {weight: " ".join(layer + name for name in given.split()) for weight, given in names.items()}


def llama_names(**changes: str) -> dict[str, str]:
    """Llama's tensor names, which most families share; ``changes``: other ones inside a layer."""
    layer = {
        "attention_norm": "input_layernorm", "wqkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "wo": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm", "w13": "mlp.gate_proj mlp.up_proj", "w2": "mlp.down_proj",
    }  # fmt: skip
    ends = {"tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    return ends | in_layer("model.layers.{}.", **layer | changes)


# num_key_value_heads and head_dim: None means num_attention_heads and hidden_size / num_attention_heads.
LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
