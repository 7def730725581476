"""The model families that go back to GPT: layer norms, plain feed-forward layers, fused or biased products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt_fast.checkpoint.family import Family, in_layer, llama_names
from gpt_fast.errors import ConfigError

_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN = {"norm": "layer", "gated": False}  # a feed-forward layer without a gate


def _same_width(values: Mapping[str, Any], fields: dict[str, Any]) -> None:
    width = values["word_embed_proj_dim"]
    if width not in (None, fields["dim"]):
        raise ConfigError(f"word_embed_proj_dim {width!r} is not supported, only hidden_size ({fields['dim']})")


_GPT = {
    "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "add_cross_attention": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_GPT2 = Family(
    "gpt2", ("GPT2LMHeadModel",), "gpt2", _GPT | {"scale_attn_by_inverse_layer_idx": False},
    {
        "tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "output": "lm_head",
    } | in_layer(
        "transformer.h.{}.", attention_norm="ln_1", wqkv="attn.c_attn", wo="attn.c_proj", ffn_norm="ln_2",
        w13="mlp.c_fc", w2="mlp.c_proj",
    ),
    prefix="transformer.",
    layouts=dict.fromkeys(("wqkv", "wo", "w13", "w2"), "transposed"),
    fields=_PLAIN | _BIASES | {"learned_positions": 0, "rotary_dim": 0},
    keys={
        "dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "ffn_dim": "n_inner",
        "max_seq_len": "n_positions", "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
    },
    choices={"attention_scale": ("scale_attn_weights", {True: None, False: 1.0})},
    refused={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
)  # fmt: skip

# StarCoder and SantaCoder.
_GPT_BIGCODE = replace(
    _GPT2, name="gpt_bigcode", architectures=("GPTBigCodeForCausalLM",), model_type="gpt_bigcode",
    defaults=_GPT | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    layouts={"wqkv": "heads"},
    choices={**_GPT2.choices, "num_kv_heads": ("multi_query", {True: 1, False: None})},
    refused={"add_cross_attention": (False,)},
)  # fmt: skip

# Pythia and GPT-NeoX-20B. Old spellings are those of every checkpoint from before transformers 5.
_GPT_NEOX = Family(
    "gpt_neox", ("GPTNeoXForCausalLM",), "gpt_neox",
    {
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
        "use_parallel_residual": True, "attention_bias": True, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
    },
    {"tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "output": "embed_out"} | in_layer(
        "gpt_neox.layers.{}.", attention_norm="input_layernorm", wqkv="attention.query_key_value",
        wo="attention.dense", ffn_norm="post_attention_layernorm", w13="mlp.dense_h_to_4h", w2="mlp.dense_4h_to_h",
    ),
    layouts={"wqkv": "heads"},
    fields=_PLAIN | {"mlp_bias": True},
    keys={"norm_eps": "layer_norm_eps", "qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    choices={"parallel": ("use_parallel_residual", {True: "two norms", False: "no"})},
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
)  # fmt: skip

# Pre-norm models alone: OPT 350M norms behind its sublayers and projects its embeddings.
_OPT = Family(
    "opt", ("OPTForCausalLM",), "opt",
    {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "activation_function": "relu",
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
        "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True, "bos_token_id": 2,
        "eos_token_id": 2,
    },
    {
        "tokens": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm", "output": "lm_head",
    } | in_layer(
        "model.decoder.layers.{}.", attention_norm="self_attn_layer_norm",
        wqkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj", wo="self_attn.out_proj",
        ffn_norm="final_layer_norm", w13="fc1", w2="fc2",
    ),
    prefix="model.",
    fields=_PLAIN | {"learned_positions": 2, "rotary_dim": 0, "norm_eps": 1e-5},
    keys={"ffn_dim": "ffn_dim", "activation": "activation_function"} | dict.fromkeys(_BIASES, "enable_bias"),
    refused={
        "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    finish=_same_width,
)  # fmt: skip

_BLOOM = Family(
    "bloom", ("BloomForCausalLM",), "bloom",
    {
        "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "seq_length": 2048,
        "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    {
        "tokens": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f", "output": "lm_head",
    } | in_layer(
        "transformer.h.{}.", attention_norm="input_layernorm", wqkv="self_attention.query_key_value",
        wo="self_attention.dense", ffn_norm="post_attention_layernorm", w13="mlp.dense_h_to_4h",
        w2="mlp.dense_4h_to_h",
    ),
    prefix="transformer.",
    layouts={"wqkv": "heads"},
    fields=_PLAIN | _BIASES | {"embedding_norm": True, "alibi": True, "rotary_dim": 0, "activation": "gelu_tanh"},
    keys={
        "num_layers": "n_layer", "num_heads": "n_head", "max_seq_len": "seq_length", "norm_eps": "layer_norm_epsilon",
    },
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    refused={"apply_residual_connection_post_layernorm": (False,)},
)  # fmt: skip

_PHI = Family(
    "phi", ("PhiForCausalLM",), "phi",
    {
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "gelu_new",
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "qk_layernorm": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    llama_names(wo="self_attn.dense", w13="mlp.fc1", w2="mlp.fc2") | {"norm": "model.final_layernorm"},
    fields=_PLAIN | _BIASES | {"head_bias": True, "parallel": "one norm"},
    keys={"norm_eps": "layer_norm_eps"},
    refused={"qk_layernorm": (False,)},
)  # fmt: skip

_STARCODER2 = Family(
    "starcoder2", ("Starcoder2ForCausalLM",), "starcoder2",
    {
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": None, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "rope_theta": 10000.0, "sliding_window": None,
        "use_bias": True, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
    },
    llama_names(w13="mlp.c_fc", w2="mlp.c_proj"),
    fields=_PLAIN,
    keys={"norm_eps": "norm_epsilon"} | dict.fromkeys(_BIASES, "use_bias"),
    windows="all",
)  # fmt: skip

_STABLELM = Family(
    "stablelm", ("StableLmForCausalLM",), "stablelm",
    {
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
        "qk_layernorm": False, "use_parallel_residual": False, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    llama_names(),
    fields={"norm": "layer"},
    keys={"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias"},
    choices={"parallel": ("use_parallel_residual", {True: "one norm", False: "no"})},
    refused={"qk_layernorm": (False,)},
)  # fmt: skip

# Falcon 7B. With alibi, transformers rounds what it adds to scores to bfloat16.
_FALCON = Family(
    "falcon", ("FalconForCausalLM",), "falcon",
    {
        "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "num_kv_heads": None, "ffn_hidden_size": None, "activation": "gelu", "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0, "alibi": False, "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None, "multi_query": True, "parallel_attn": True, "bias": False,
        "tie_word_embeddings": True, "bos_token_id": 11, "eos_token_id": 11,
    },
    _BLOOM.names,
    layouts={"wqkv": "heads"},
    fields=_PLAIN,
    keys={
        "ffn_dim": "ffn_hidden_size", "activation": "activation", "norm_eps": "layer_norm_epsilon",
    } | dict.fromkeys(_BIASES, "bias"),
    choices={
        "num_kv_heads": ("multi_query", {True: 1, False: None}),
        "parallel": ("parallel_attn", {True: "one norm", False: "no"}),
    },
    aliases={"n_embed": "hidden_size"},
    refused={"alibi": (False,), "new_decoder_architecture": (False,), "num_ln_in_parallel_attn": (None, 1)},
)  # fmt: skip
# Falcon 11B has one norm in a layer, 40B and 180B two.
_FALCON_11B = replace(
    _FALCON, name="falcon-11b", fields=_PLAIN | {"parallel": "one norm"},
    keys={**_FALCON.keys, "num_kv_heads": "num_kv_heads"},
    choices={},
    when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (1,)},
    refused={"alibi": (False,), "parallel_attn": (True,)},
)  # fmt: skip
_FALCON_40B = replace(
    _FALCON_11B, name="falcon-40b", fields=_PLAIN | {"parallel": "two norms"},
    names={**_FALCON.names, **in_layer("transformer.h.{}.", attention_norm="ln_attn", ffn_norm="ln_mlp")},
    when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (None, 2)},
)  # fmt: skip

GPT_ROWS = (
    _GPT2, _GPT_BIGCODE, _GPT_NEOX, _OPT, _BLOOM, _PHI, _STARCODER2, _STABLELM, _FALCON_40B, _FALCON_11B, _FALCON,
)  # fmt: skip
