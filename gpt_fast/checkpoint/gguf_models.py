"""Models in GGUF files: :func:`read_gguf` makes of them what a Hugging Face folder would be.

One row of ``ARCHITECTURES`` says which family (family_table.py) an architecture of llama.cpp is, and what differs. The
rest is general: keys of the metadata by the field of ModelConfig that they give, and names of tensors by the place that
the family's table has for them. llama.cpp's converter changes some values, which is undone here: Llama's rows of
queries and keys stand in pairs that rotate together, Gemma's norms have 1 added, experts are stacked, GPT-2's matrices
are transposed, and Llama 3's scaled rotation is a tensor of divisors.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt_fast.checkpoint.families import parse_config
from gpt_fast.checkpoint.family import KEYS, Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.gguf_tensors import open_tensors
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig, RopeScaling
from gpt_fast.errors import CheckpointError
from gpt_fast.gguf import Header, read_header
from gpt_fast.model.description import Layout, RopeTable
from gpt_fast.model.rope import inverse_frequencies
from gpt_fast.quantize.formats import row_order
from gpt_fast.tokenizer.gguf_vocabulary import end_ids, token_id

State = dict[str, StoredTensor]


class Architecture(NamedTuple):
    """``family``: of family_table.py. ``fields``: of ModelConfig and ExpertsConfig, by other keys than the usual ones.
    ``names``: of tensors in other places than the usual ones. ``raw``: what config.json says of all such models.
    ``pairs``: rows of queries and keys stand in pairs. ``norm_offset``: was added to the weights of norms."""

    family: str
    fields: Mapping[str, str] = {}
    names: Mapping[str, str] = {}
    raw: Mapping[str, Any] = {}
    pairs: bool = False
    norm_offset: float = 0.0


_EXPERTS = {"num_experts": "expert_count", "top_k": "expert_used_count"}
_WHOLE = {"wqkv": "attn_qkv", "w13": "ffn_up"}  # where the family stores one matrix

# By general.architecture. Llama's with experts is Mixtral.
ARCHITECTURES = {
    "llama": Architecture("llama", pairs=True),
    "llama with experts": Architecture("mixtral", _EXPERTS | {"ffn_dim": "feed_forward_length"}, pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe", _EXPERTS | {"experts ffn_dim": "expert_feed_forward_length"}, raw={"norm_topk_prob": True}
    ),
    "phi3": Architecture("phi3", names=_WHOLE),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0),
    "gpt2": Architecture("gpt2", names=_WHOLE),
}

# Fields of ModelConfig and the keys that give them, behind the architecture's name; those that every file has.
_REQUIRED = {
    "dim": "embedding_length", "ffn_dim": "feed_forward_length", "num_layers": "block_count",
    "num_heads": "attention.head_count", "max_seq_len": "context_length",
}  # fmt: skip
_OPTIONAL = {
    "num_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping",
    "local_rope_theta": "rope.freq_base_swa",
}  # fmt: skip
_NORM_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")

# Names of tensors by their place in a family's table, behind ``blk.{layer}.``; {e} is the expert.
_ENDS = {"tokens": "token_embd", "positions": "position_embd", "norm": "output_norm", "output": "output"}
_NAMES = {
    "attention_norm": "attn_norm", "wqkv": "attn_q attn_k attn_v", "wo": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attention_post_norm": "post_attention_norm", "ffn_norm": "ffn_norm",
    "w13": "ffn_gate ffn_up", "w2": "ffn_down", "ffn_post_norm": "post_ffw_norm", "router": "ffn_gate_inp",
    "experts_w13": "ffn_gate_exps.{e} ffn_up_exps.{e}", "experts_w2": "ffn_down_exps.{e}",
}  # fmt: skip
_TENSOR = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>[a-z_0-9]+?)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)", re.ASCII
)
_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# Layers of the models of Gemma 2 and 3 that divide scores by the width of a head as if there were no head_dim.
_WIDE_QUERIES = {"gemma2": 46, "gemma3": 62}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufModel(NamedTuple):
    """``raw``: what a ``config.json`` of the model says. ``tensors``: by Hugging Face's names."""

    files: list[Path]
    raw: dict[str, Any]
    config: ModelConfig
    tensors: State


def read_gguf(path: Path) -> GgufModel:
    """Map the model in ``path``, the first of its files. Raises CheckpointError for a damaged file, for metadata that
    are missing or not supported, and for encodings that are not read (naming the tensor)."""
    header = read_header(path)
    facts = _Facts(header, path)
    row = facts.row
    state = open_tensors(header.tensors)
    divisors = {name: state.pop(name) for name in _DIVISORS if name in state}
    raw = _raw(facts, header, divisors)
    config = parse_config(raw, str(path))
    return GgufModel(header.files, raw, config, _hub_tensors(state, config, row))


class _Facts:
    """The metadata of ``path``, whose keys begin with the name of the architecture. ``row``: of the architecture."""

    def __init__(self, header: Header, path: Path) -> None:
        self.metadata, self.path = header.metadata, path
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: its metadata lack general.architecture")
        self.name = name
        named = f"{name} with experts" if name == "llama" and self.get("expert_count") else name
        if named not in ARCHITECTURES:
            known = ", ".join(known for known in ARCHITECTURES if " " not in known)
            raise CheckpointError(f"{path}: general.architecture {name!r:.60} is not supported, only {known}")
        self.row = ARCHITECTURES[named]

    def get(self, key: str) -> Any:
        """The value of ``key``, None where there is none. A float has seven digits: it was stored in four bytes."""
        value = self.metadata.get(f"{self.name}.{key}")
        if isinstance(value, array) and len(set(value)) == 1:  # a value for each layer
            value = value[0]
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def number(self, key: str) -> Any:
        """The number ``key``, None where there is none. Raises CheckpointError for what is no number."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise CheckpointError(f"{self.path}: {self.name}.{key} must be a number, not {value!r:.40}")
        return value

    def need(self, key: str) -> Any:
        """The number ``key``. Raises CheckpointError where there is none."""
        value = self.number(key)
        if value is None:
            raise CheckpointError(f"{self.path}: its metadata lack {self.name}.{key}")
        return value


def _raw(facts: _Facts, header: Header, divisors: State) -> dict[str, Any]:
    """The ``config.json`` of the model: its architecture's defaults where the metadata say nothing."""
    row, family, tensors = facts.row, FAMILIES[facts.row.family], header.tensors
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{facts.path} has no token_embd.weight, the table of embeddings")
    raw: dict[str, Any] = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    raw |= {"vocab_size": table.shape[0], "tie_word_embeddings": "output.weight" not in tensors}
    for name, key in {**_REQUIRED, **row.fields}.items():
        raw[_hub_key(family, name)] = facts.need(key)
    for name, key in _OPTIONAL.items():  # llama.cpp passes over those that an architecture has no use for, too
        if facts.get(key) is not None or name in ("num_kv_heads", "head_dim"):
            raw[_hub_key(family, name)] = facts.number(key)
    raw[_hub_key(family, "norm_eps")] = facts.need(next((k for k in _NORM_EPS if facts.get(k)), _NORM_EPS[0]))
    raw |= {"rope_theta": facts.number("rope.freq_base"), **_windows(facts)}
    raw |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    raw |= {**_query_scale(facts), **row.raw}
    listed = ("layer_types",) if family.windows == "listed" else ()
    known = {*family.defaults, "architectures", "model_type", *listed}
    raw = {k: v for k, v in raw.items() if k in known and not (v is None and k == "rope_theta")}
    if "rope_theta" in known:
        raw |= _rope(facts, raw, divisors)
    if facts.get("attention.causal") is False:
        raw["is_causal"] = False
    bos, ends = token_id(header.metadata, "bos"), end_ids(header.metadata)
    return raw | {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def _hub_key(family: Family, name: str) -> str:
    """The key of config.json for the field ``name`` of ModelConfig or ExpertsConfig, "" where the family has none."""
    if name in ("num_experts", "top_k") or name.startswith("experts "):
        return family.experts[name.removeprefix("experts ")]
    same = {field: key for field, (key, power) in family.powers.items() if power == 1}
    return {**KEYS, **family.keys, **same}.get(name, "")


def _windows(facts: _Facts) -> dict[str, Any]:
    """The sliding window, and which layers have it where the file says so: by their period, or a number for each."""
    window, key = facts.number("attention.sliding_window"), "attention.sliding_window_pattern"
    if window is None and facts.name == "gemma2":  # whose first files lack the key
        return {}
    pattern = facts.metadata.get(f"{facts.name}.{key}") if window else None  # 0: none, as for Phi-4
    out: dict[str, Any] = {"sliding_window": window or None}
    if isinstance(pattern, array):
        kinds = ("full_attention", "sliding_attention")
        return out | {"layer_types": [kinds[number != 0] for number in pattern]}
    return out if pattern is None else out | {"sliding_window_pattern": facts.number(key)}


def _query_scale(facts: _Facts) -> dict[str, Any]:
    """What the square of scores' divisor is in Gemma 2 and 3."""
    heads, dim = facts.need("attention.head_count"), facts.need("embedding_length")
    width = facts.number("attention.key_length")
    if width is None or _WIDE_QUERIES.get(facts.name) == facts.get("block_count"):
        width = dim // max(1, heads)
    return {"query_pre_attn_scalar": width}


def _rope(facts: _Facts, raw: Mapping[str, Any], divisors: State) -> dict[str, Any]:
    """Keys of the rotation: what part of a head rotates, and how it is scaled."""
    positions = facts.need("context_length")
    head_dim = raw.get("head_dim") or facts.need("embedding_length") // max(1, facts.need("attention.head_count"))
    rotary = facts.number("rope.dimension_count") or head_dim
    out: dict[str, Any] = {"partial_rotary_factor": rotary / max(1, head_dim)} if rotary != head_dim else {}
    original, factor = facts.number("rope.scaling.original_context_length"), facts.number("rope.scaling.factor")
    kind = facts.get("rope.scaling.type")
    if factor is None and kind in (None, "linear"):
        factor = facts.number("rope.scale_linear")  # the factor's name in files of 2023, which have no type
    if kind is None and factor:
        kind = "linear"
    if kind in ("linear", "yarn") and factor and factor != 1.0:
        out["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            out["rope_scaling"] |= {"original_max_position_embeddings": original or positions} | _yarn(facts)
    elif kind not in (None, "none", "linear", "yarn", "longrope"):
        raise CheckpointError(f"{facts.path}: {facts.name}.rope.scaling.type {kind!r:.40} is not supported")
    short, long = (_numbers(divisors.get(f"rope_factors_{name}.weight")) for name in ("short", "long"))
    if short and long:
        attention, original = facts.number("rope.scaling.attn_factor"), original or positions
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if attention is not None:
            scaling["attention_factor"] = attention
        out |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if factors := _numbers(divisors.get("rope_freqs.weight")):
        out["rope_scaling"] = _divided(factors, raw.get("rope_theta", 10000.0), positions)
    return out


def _yarn(facts: _Facts) -> dict[str, float]:
    """Where yarn's interpolation begins and ends, as far as the file says so. Raises CheckpointError."""
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):  # no key of config.json means them
        if (value := facts.number(key)) not in (None, 1.0, -1.0):  # -1: not given
            raise CheckpointError(f"{facts.path}: {facts.name}.{key} {value:g} is not supported, only 1")
    given = {name: facts.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {name: value for name, value in given.items() if value is not None}


def _numbers(tensor: StoredTensor | None) -> list[float]:
    """The numbers in a vector of divisors; none where there is no such vector."""
    if tensor is None or len(tensor.shape) != 1:
        return []
    return [float(f"{number:.7g}") for number in tensor.whole().tolist()]


def _divided(factors: list[float], theta: float, positions: int) -> dict[str, Any]:
    """The scaling whose frequencies are divided by ``factors``: Llama 3's where its formula gives them."""
    table = RopeTable(2 * len(factors), theta)
    scaling = RopeScaling("llama3", max(factors), 8192, 1.0, 4.0)
    by_formula = inverse_frequencies(table) / inverse_frequencies(table._replace(scaling=scaling))
    if math.isfinite(max(factors)) and torch.allclose(by_formula, torch.tensor(factors), rtol=1e-4):
        return {"rope_type": "llama3", "factor": max(factors)} | _LLAMA3
    same = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": positions} | same


def _hub_tensors(state: State, config: ModelConfig, row: Architecture) -> State:
    """``state`` by Hugging Face's names, values and rows as there. What has no such name keeps its own."""
    family = FAMILIES[row.family]
    usual = {**_ENDS, **_NAMES, **row.names}
    hub_names = {
        ours: (slot, i, theirs)
        for slot, hub in family.names.items()
        if slot in usual
        for i, (ours, theirs) in enumerate(zip(usual[slot].split(), hub.split(), strict=True))
    }
    out: State = {}
    for name, tensor in state.items():
        found = _TENSOR.fullmatch(name)
        known = hub_names.get(found["name"] + (".{e}" if found["expert"] else "")) if found else None
        if found is None or known is None or (found["layer"] is None) != ("{}" not in known[2]):
            out[name] = tensor
            continue
        slot, i, hub = known
        hub = hub.replace("{}", found["layer"] or "").replace("{e}", found["expert"] or "")
        out[f"{hub}.{found['kind']}"] = _as_in_hub(tensor, slot, i, config, row)
    return out


def _as_in_hub(tensor: StoredTensor, slot: str, index: int, config: ModelConfig, row: Architecture) -> StoredTensor:
    """The ``index``-th tensor of the place ``slot`` as Hugging Face's checkpoints have it."""
    if row.norm_offset and slot.endswith("norm"):
        return StoredTensor(tensor.whole().float() - row.norm_offset)
    if row.pairs and slot == "wqkv" and tensor.num_rows == (config.q_dim, config.kv_dim, -1)[index]:
        pairs = Layout("pairs", head_dim=config.head_dim, pairs=config.head_dim)
        return tensor.picked(row_order(pairs, tensor.num_rows))
    if FAMILIES[row.family].layouts.get(slot) == "transposed" and len(tensor.shape) == 2:
        return tensor.transposed()
    return tensor
