"""Writes GGUF files with llama.cpp's Python library, as its converter would write them.

The library has no encoder for the encodings in blocks of 256. Those of Q4_K, Q5_K and Q6_K here are plain: least and
greatest value. Blocks of others are made at random.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint

Type = gguf.GGMLQuantizationType

# What a file of the type ``Q4_K`` has where the inputs do not fill blocks of 256, as in llama.cpp.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Where the float16 of a block stand, and what they are in blocks that are made at random.
_STEPS = {
    "Q2_K": {80: 0.002, 82: 0.003}, "Q3_K": {108: 0.0005}, "IQ4_NL": {0: 0.0003}, "IQ4_XS": {0: 0.00002}, "MXFP4": {},
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate.": "ffn_gate_inp.", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "transformer.h": "blk", "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_AFTER = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
_AFTER |= {"post_feedforward_layernorm": "post_ffw_norm"}  # in Gemma 2 and 3
_EXPERT = re.compile(r"(?P<layer>blk\.\d+)\..*\.?experts\.\d+\.(?P<part>\w+)\.weight")
_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def encode(values: np.ndarray, kind: str) -> tuple[np.ndarray, Type]:
    """``values`` float32 [n, K] in the encoding ``kind``, or what stands in for it, and which that is."""
    if values.shape[-1] % 256 and kind in _NARROW:
        kind = _NARROW[kind]
    if kind in _STEPS:
        return _random_blocks(values, kind), Type[kind]
    own = {"Q4_K": lambda v: _with_minimum(v, 4), "Q5_K": lambda v: _with_minimum(v, 5), "Q6_K": _six_bits}
    return own.get(kind, lambda v: gguf.quants.quantize(v, Type[kind]))(values), Type[kind]


def _random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of as many values as ``values``, and of the size of weights."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    for at, step in _STEPS[kind].items():
        raw[:, at : at + 2] = np.frombuffer(np.float16(step).tobytes(), np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 118 + raw[:, 0] % 4
    return raw.reshape(len(values), -1)


def _halves(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(values.astype(np.float16).tobytes(), np.uint8).reshape(len(values), -1)


def _with_minimum(values: np.ndarray, bits: int) -> np.ndarray:
    groups, most = values.reshape(-1, 8, 32), 2**bits - 1
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    step, least = (high - low) / most, -low
    d, dmin = (
        np.maximum(x.max(-1, keepdims=True) / 63, 1e-7).astype(np.float16).astype(np.float32) for x in (step, least)
    )
    s, m = (np.clip(np.round(x / y), 0, 63).astype(np.uint8) for x, y in ((step, d), (least, dmin)))
    real = np.maximum(d * s, 1e-12)[..., None]
    codes = np.clip(np.round((groups + (dmin * m)[..., None]) / real), 0, most).astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    fours = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(len(codes), 128)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little").reshape(len(codes), 32)
    parts = [_halves(d), _halves(dmin), *packed, *([fifth] if bits == 5 else []), fours]
    return np.concatenate(parts, axis=1).reshape(len(values), -1)


def _six_bits(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    step = np.abs(groups).max(-1) / 31
    d = np.maximum(step.max(-1, keepdims=True) / 127, 1e-7).astype(np.float16).astype(np.float32)
    s = np.clip(np.round(step / d), -128, 127).astype(np.int8)
    codes = np.clip(np.round(groups / np.maximum(d * s, 1e-12)[..., None]), -32, 31).astype(np.int8) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(len(codes), 128)
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4)).astype(np.uint8).reshape(len(codes), 64)
    return np.concatenate([low, high, s.view(np.uint8), _halves(d)], axis=1).reshape(len(values), -1)


def gguf_name(name: str, after: bool) -> str:
    """llama.cpp's name of a tensor of Hugging Face's; ``after``: norms stand behind attention and feed-forward too."""
    for theirs, ours in {**_NAMES, **(_AFTER if after else {})}.items():
        name = name.replace(theirs, ours)
    return name


def gguf_values(name: str, values: np.ndarray, arch: str, raw: Mapping[str, Any]) -> np.ndarray:
    """What llama.cpp's converter makes of the values of a tensor."""
    kv_heads = raw.get("num_key_value_heads") or raw.get("num_attention_heads")
    for part, heads in (("q_proj", raw.get("num_attention_heads")), ("k_proj", kv_heads)):
        if arch == "llama" and part in name:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values.T if arch == "gpt2" and ".c_" in name and values.ndim == 2 else values


def write_model(
    source: Path,
    out: Path,
    kind: str = "F32",
    arch: str = "llama",
    *,
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    vectors: Mapping[str, Sequence[float]] | None = None,
    template: str = "",
    tensors_a_file: int = 0,
) -> Path:
    """The Hugging Face checkpoint ``source`` as the GGUF file ``out``: matrices in the encoding ``kind``, those whose
    name contains a key of ``kinds`` in its value; norms and biases in F32. ``metadata``: more keys, behind ``arch``.
    ``vectors``: more tensors. ``template``: of chats. ``tensors_a_file``: in files of so many; 0: in one."""
    checkpoint = Checkpoint.open(source)
    writer, raw = gguf.GGUFWriter(out, arch, split_max_tensors=tensors_a_file), checkpoint.raw
    _add_config(writer, checkpoint, arch, metadata or {})
    if (source / "tokenizer.model").exists():
        add_sentencepiece(writer, source / "tokenizer.model")
    if template:
        writer.add_chat_template(template)
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in checkpoint.tensors.items():
        values = tensor.whole().float().numpy()
        values = np.ascontiguousarray(gguf_values(name, values, arch, raw))
        short = gguf_name(name, after=arch in ("gemma2", "gemma3"))
        if expert := _EXPERT.fullmatch(short):
            experts.setdefault(f"{expert['layer']}.ffn_{_EXPERTS[expert['part']]}_exps.weight", []).append(values)
        else:
            _add(writer, short, values, kind, kinds or {})
    for name, each in experts.items():
        _add(writer, name, np.stack(each), kind, kinds or {})
    for name, numbers in (vectors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    close(writer)
    return out


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, kinds: Mapping[str, str]) -> None:
    plain = values.ndim < 2 or "gate_inp" in name or "position_embd" in name
    kind = next((found for part, found in kinds.items() if part in name), kind)
    data, found = encode(values.reshape(-1, values.shape[-1]), "F32" if plain else kind)
    writer.add_tensor(name, data.reshape(*values.shape[:-1], -1), raw_dtype=found)


def _add_config(writer: gguf.GGUFWriter, checkpoint: Checkpoint, arch: str, extra: Mapping[str, Any]) -> None:
    c, raw = checkpoint.config, checkpoint.raw
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(raw.get("intermediate_size") or c.ffn_dim)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_eps(c.norm_eps) if c.norm == "layer" else writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_count(c.rotary)
    if any(c.windows):
        writer.add_sliding_window(max(c.windows))
    for cap, add in ((c.attention_cap, "add_attn_logit_softcapping"), (c.logits_cap, "add_final_logit_softcapping")):
        if cap:
            getattr(writer, add)(cap)
    if c.experts is not None:
        writer.add_expert_count(c.experts.num_experts)
        writer.add_expert_used_count(c.experts.top_k)
        writer.add_expert_feed_forward_length(c.experts.ffn_dim)
    adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    for key, value in extra.items():
        adds[type(value)](f"{arch}.{key}", value)


def add_sentencepiece(
    writer: gguf.GGUFWriter, model: Path, controls: Sequence[str] = (), user_defined: Sequence[str] = ()
) -> None:
    """The pieces of a SentencePiece model, and more of them that are ``controls`` or ``user_defined``; these may be
    some of the model's, too."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(sp.vocab_size())
    kinds = ((sp.is_unknown, 2), (sp.is_control, 3), (sp.is_unused, 5), (sp.is_byte, 6))
    writer.add_tokenizer_model("llama")
    pieces = [sp.id_to_piece(i) for i in ids]
    types = [4 if pieces[i] in user_defined else next((kind for test, kind in kinds if test(i)), 1) for i in ids]
    more = [(token, 3) for token in controls] + [(token, 4) for token in user_defined if token not in pieces]
    writer.add_token_list([*pieces, *(token for token, _ in more)])
    writer.add_token_scores([*(sp.get_score(i) for i in ids), *(-1000.0 for _ in more)])
    writer.add_token_types([*types, *(kind for _, kind in more)])
    writer.add_bos_token_id(sp.bos_id())
    writer.add_eos_token_id(sp.eos_id())
    writer.add_unk_token_id(sp.unk_id())


def write_byte_pairs(
    out: Path, tokens: Sequence[str], merges: Sequence[str], pre: str, types: Sequence[int], **ids: int
) -> Path:
    """A file with a vocabulary of byte pairs and one small tensor. ``ids``: bos, eos ..."""
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_merges(list(merges))
    writer.add_token_types(list(types))
    for name, id in ids.items():
        getattr(writer, f"add_{name}_token_id")(id)
    close(writer)
    return out


def close(writer: gguf.GGUFWriter) -> None:
    """Write what the file holds."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file as the library reads them, float32."""
    out = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        out[tensor.name] = torch.from_numpy(values).reshape(tuple(tensor.shape.tolist()[::-1]))
    return out


def write_dequantized(source: Path, path: Path, out: Path) -> Path:
    """The GGUF file ``path``, made of ``source``, as ``out``: the same file with the library's values in F32."""
    writer = gguf.GGUFWriter(out, "llama")
    _add_config(writer, Checkpoint.open(source), "llama", {})
    if (source / "tokenizer.model").exists():
        add_sentencepiece(writer, source / "tokenizer.model")
    for name, values in dequantized(path).items():
        writer.add_tensor(name, values.numpy())
    close(writer)
    return out
