"""The model families that go back to GPT: layer norms, plain feed-forward layers, fused or biased products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt_fast.checkpoint.family import Family, llama_names
from gpt_fast.errors import ConfigError

# What families share whose heads are neither grouped nor of a size that a key gives.
_ONE_SIZE = {"num_kv_heads": "", "head_dim": ""}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN = {"norm": "layer", "gated": False}  # a feed-forward layer without a gate


def _same_width(raw: Mapping[str, Any], fields: dict[str, Any]) -> None:
    width = raw["word_embed_proj_dim"]
    if width not in (None, fields["dim"]):
        raise ConfigError(f"word_embed_proj_dim {width!r} is not supported, only hidden_size ({fields['dim']})")


_GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    defaults={
        "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True,
        "bos_token_id": 50256, "eos_token_id": 50256,
    },
    names={
        "tokens": "transformer.wte", "positions": "transformer.wpe",
        "attention_norm": "transformer.h.{}.ln_1",
        "wqkv": "transformer.h.{}.attn.c_attn",
        "wo": "transformer.h.{}.attn.c_proj",
        "ffn_norm": "transformer.h.{}.ln_2",
        "w13": "transformer.h.{}.mlp.c_fc",
        "w2": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f", "output": "lm_head",
    },
    prefix="transformer.",
    layouts=dict.fromkeys(("wqkv", "wo", "w13", "w2"), "transposed"),
    fields=_PLAIN | _BIASES | {"learned_positions": 0, "rotary_dim": 0},
    keys=_ONE_SIZE
    | {
        "dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "ffn_dim": "n_inner",
        "max_seq_len": "n_positions", "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
    },
    choices={"attention_scale": ("scale_attn_weights", {True: None, False: 1.0})},
    refused={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
)  # fmt: skip

# StarCoder and SantaCoder.
_GPT_BIGCODE = replace(
    _GPT2,
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    model_type="gpt_bigcode",
    defaults={
        **{key: value for key, value in _GPT2.defaults.items() if key != "scale_attn_by_inverse_layer_idx"},
        "activation_function": "gelu_pytorch_tanh", "multi_query": True,
    },
    layouts={"wqkv": "heads"},
    choices={**_GPT2.choices, "num_kv_heads": ("multi_query", {True: 1, False: None})},
    refused={"add_cross_attention": (False,)},
)  # fmt: skip

# Pythia and GPT-NeoX-20B. Old spellings are those of every checkpoint from before transformers 5.
_GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_type="gpt_neox",
    defaults={
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
        "use_parallel_residual": True, "attention_bias": True, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
    },
    names={
        "tokens": "gpt_neox.embed_in",
        "attention_norm": "gpt_neox.layers.{}.input_layernorm",
        "wqkv": "gpt_neox.layers.{}.attention.query_key_value",
        "wo": "gpt_neox.layers.{}.attention.dense",
        "ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "w13": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "w2": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm", "output": "embed_out",
    },
    layouts={"wqkv": "heads"},
    fields=_PLAIN | {"mlp_bias": True},
    keys=_ONE_SIZE | {"norm_eps": "layer_norm_eps", "qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    choices={"parallel": ("use_parallel_residual", {True: "two norms", False: "no"})},
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
)  # fmt: skip

# Pre-norm models alone: OPT 350M norms behind its sublayers and projects its embeddings.
_OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_type="opt",
    defaults={
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "activation_function": "relu",
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
        "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True, "bos_token_id": 2,
        "eos_token_id": 2,
    },
    names={
        "tokens": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions",
        "attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
        "wqkv": " ".join("model.decoder.layers.{}.self_attn." + name for name in ("q_proj", "k_proj", "v_proj")),
        "wo": "model.decoder.layers.{}.self_attn.out_proj",
        "ffn_norm": "model.decoder.layers.{}.final_layer_norm",
        "w13": "model.decoder.layers.{}.fc1",
        "w2": "model.decoder.layers.{}.fc2",
        "norm": "model.decoder.final_layer_norm", "output": "lm_head",
    },
    prefix="model.",
    fields=_PLAIN | {"learned_positions": 2, "rotary_dim": 0, "norm_eps": 1e-5},
    keys=_ONE_SIZE
    | {"ffn_dim": "ffn_dim", "activation": "activation_function"}
    | dict.fromkeys(_BIASES, "enable_bias"),
    refused={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    finish=_same_width,
)  # fmt: skip

_BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_type="bloom",
    defaults={
        "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "seq_length": 2048,
        "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    names={
        "tokens": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm",
        "attention_norm": "transformer.h.{}.input_layernorm",
        "wqkv": "transformer.h.{}.self_attention.query_key_value",
        "wo": "transformer.h.{}.self_attention.dense",
        "ffn_norm": "transformer.h.{}.post_attention_layernorm",
        "w13": "transformer.h.{}.mlp.dense_h_to_4h",
        "w2": "transformer.h.{}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f", "output": "lm_head",
    },
    prefix="transformer.",
    layouts={"wqkv": "heads"},
    fields=_PLAIN | _BIASES | {"embedding_norm": True, "alibi": True, "rotary_dim": 0, "activation": "gelu_tanh"},
    keys=_ONE_SIZE
    | {
        "num_layers": "n_layer", "num_heads": "n_head", "ffn_dim": "", "max_seq_len": "seq_length",
        "norm_eps": "layer_norm_epsilon",
    },
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    refused={"apply_residual_connection_post_layernorm": (False,)},
)  # fmt: skip

_PHI = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_type="phi",
    defaults={
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "gelu_new",
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "qk_layernorm": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    names=llama_names(
        wo="model.layers.{}.self_attn.dense",
        w13="model.layers.{}.mlp.fc1",
        w2="model.layers.{}.mlp.fc2",
        norm="model.final_layernorm",
    ),
    fields=_PLAIN | _BIASES | {"head_bias": True, "parallel": "one norm"},
    keys={"norm_eps": "layer_norm_eps"},
    refused={"qk_layernorm": (False,)},
)  # fmt: skip

_STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    defaults={
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "rope_theta": 10000.0, "sliding_window": None,
        "use_bias": True, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
    },
    names=llama_names(w13="model.layers.{}.mlp.c_fc", w2="model.layers.{}.mlp.c_proj"),
    fields=_PLAIN,
    keys={"norm_eps": "norm_epsilon"} | dict.fromkeys(_BIASES, "use_bias"),
    windows="all",
)  # fmt: skip

_STABLELM = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    model_type="stablelm",
    defaults={
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
        "qk_layernorm": False, "use_parallel_residual": False, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    names=llama_names(),
    fields={"norm": "layer"},
    keys={"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias", "head_dim": ""},
    choices={"parallel": ("use_parallel_residual", {True: "one norm", False: "no"})},
    refused={"qk_layernorm": (False,)},
)  # fmt: skip

# Falcon 7B. With alibi, transformers rounds what it adds to scores to bfloat16.
_FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    model_type="falcon",
    defaults={
        "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "num_kv_heads": None, "ffn_hidden_size": None, "activation": "gelu", "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0, "alibi": False, "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None, "multi_query": True, "parallel_attn": True, "bias": False,
        "tie_word_embeddings": True, "bos_token_id": 11, "eos_token_id": 11,
    },
    names=_BLOOM.names,
    layouts={"wqkv": "heads"},
    fields=_PLAIN,
    keys={"head_dim": "", "ffn_dim": "ffn_hidden_size", "activation": "activation", "norm_eps": "layer_norm_epsilon"}
    | dict.fromkeys(_BIASES, "bias"),
    choices={
        "num_kv_heads": ("multi_query", {True: 1, False: None}),
        "parallel": ("parallel_attn", {True: "one norm", False: "no"}),
    },
    aliases={"n_embed": "hidden_size"},
    refused={"alibi": (False,), "new_decoder_architecture": (False,), "num_ln_in_parallel_attn": (None, 1)},
)  # fmt: skip
# Falcon 11B has one norm in a layer, 40B and 180B two.
_FALCON_11B = replace(
    _FALCON,
    name="falcon-11b",
    fields=_PLAIN | {"parallel": "one norm"},
    keys={**_FALCON.keys, "num_kv_heads": "num_kv_heads"},
    choices={},
    when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (1,)},
    refused={"alibi": (False,), "parallel_attn": (True,)},
)  # fmt: skip
_FALCON_40B = replace(
    _FALCON_11B,
    name="falcon-40b",
    names={**_FALCON.names, "attention_norm": "transformer.h.{}.ln_attn", "ffn_norm": "transformer.h.{}.ln_mlp"},
    fields=_PLAIN | {"parallel": "two norms"},
    when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (None, 2)},
)  # fmt: skip

GPT_ROWS = (
    _GPT2,
    _GPT_BIGCODE,
    _GPT_NEOX,
    _OPT,
    _BLOOM,
    _PHI,
    _STARCODER2,
    _STABLELM,
    _FALCON_40B,
    _FALCON_11B,
    _FALCON,
)
