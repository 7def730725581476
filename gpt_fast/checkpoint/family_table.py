"""The model families: rows of data, and which tensor of a checkpoint fills which weight of which parameter.

A family is a row of ``FAMILIES``: its architecture names, the values that transformers assumes for keys its
``config.json`` leaves out, which parts of the block it uses, and its tensor names. Families differ by data alone;
one that needs other mathematics needs a field of ``ModelConfig`` first. families.py reads ``config.json`` by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gpt_fast.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """One row. ``qkv_bias`` and its like are a constant or the ``config.json`` key that decides."""

    name: str
    architectures: tuple[str, ...]
    model_type: str
    defaults: Mapping[str, Any]  # what transformers assumes for a missing key
    names: Mapping[str, str]  # module of Transformer -> tensors stacked into it; {} is the layer
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Literal["none", "all", "upper"] = "none"  # layers that sliding_window applies to


_LLAMA_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wqkv": "model.layers.{}.self_attn.q_proj model.layers.{}.self_attn.k_proj "
    "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w13": "model.layers.{}.mlp.gate_proj model.layers.{}.mlp.up_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "output": "lm_head",
}

# num_key_value_heads and head_dim: None means num_attention_heads and hidden_size / num_attention_heads.
_LLAMA_DEFAULTS = {
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
_MISTRAL_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS = {
    **_LLAMA_DEFAULTS,
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

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        Family(
            # Llama 1 to 3.2, CodeLlama, TinyLlama, open_llama and every other model that declares itself one.
            name="llama",
            architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
            model_type="llama",
            defaults=_LLAMA_DEFAULTS,
            names=_LLAMA_NAMES,
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family(
            name="mistral",
            architectures=("MistralForCausalLM",),
            model_type="mistral",
            defaults=_MISTRAL_DEFAULTS,
            names=_LLAMA_NAMES,
            windows="all",
        ),
        Family(
            name="qwen2",
            architectures=("Qwen2ForCausalLM",),
            model_type="qwen2",
            defaults=_QWEN2_DEFAULTS,
            names=_LLAMA_NAMES,
            qkv_bias=True,
            windows="upper",
        ),
        Family(
            name="qwen3",
            architectures=("Qwen3ForCausalLM",),
            model_type="qwen3",
            defaults={**_QWEN2_DEFAULTS, "head_dim": 128},
            names=_LLAMA_NAMES,
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=True,
            windows="upper",
        ),
    )
}


class Part(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter it fills: ``target[start : start + shape[0]]``."""

    source: str  # name in the checkpoint
    target: str  # name of the parameter of Transformer
    start: int
    shape: tuple[int, ...]


def parts(config: ModelConfig) -> list[Part]:
    """Every tensor that a checkpoint of ``config`` holds, in the model's order. A tied head is not among them."""
    row, c, out = FAMILIES[config.family], config, []

    def add(module: str, layer: int, *shapes: tuple[int, ...], suffix: str = ".weight") -> None:
        names = row.names[module].split()
        if len(names) == 1 and len(shapes) > 1:  # a family that stores them stacked already
            shapes = ((sum(s[0] for s in shapes), *shapes[0][1:]),)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            out.append(Part(name.format(layer) + suffix, module.format(layer) + suffix, start, shape))
            start += shape[0]

    add("tok_embeddings", 0, (c.vocab_size, c.dim))
    for i in range(c.num_layers):
        add("layers.{}.attention_norm", i, (c.dim,))
        add("layers.{}.attention.wqkv", i, (c.q_dim, c.dim), (c.kv_dim, c.dim), (c.kv_dim, c.dim))
        add("layers.{}.attention.wo", i, (c.dim, c.q_dim))
        if c.qkv_bias:
            add("layers.{}.attention.wqkv", i, (c.q_dim,), (c.kv_dim,), (c.kv_dim,), suffix=".bias")
        if c.out_bias:
            add("layers.{}.attention.wo", i, (c.dim,), suffix=".bias")
        if c.qk_norm:
            add("layers.{}.attention.q_norm", i, (c.head_dim,))
            add("layers.{}.attention.k_norm", i, (c.head_dim,))
        add("layers.{}.ffn_norm", i, (c.dim,))
        add("layers.{}.feed_forward.w13", i, (c.ffn_dim, c.dim), (c.ffn_dim, c.dim))
        add("layers.{}.feed_forward.w2", i, (c.dim, c.ffn_dim))
        if c.mlp_bias:
            add("layers.{}.feed_forward.w13", i, (c.ffn_dim,), (c.ffn_dim,), suffix=".bias")
            add("layers.{}.feed_forward.w2", i, (c.dim,), suffix=".bias")
    add("norm", 0, (c.dim,))
    if not c.tie_embeddings:
        add("output", 0, (c.vocab_size, c.dim))
    return out
