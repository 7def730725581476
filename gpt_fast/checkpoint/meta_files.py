"""Checkpoints in one file with the tensor names of Meta's own Llama code: :func:`read_meta_file`.

gpt-fast's ``model.pth``, ``model_int8.pth`` and ``model_int4.g32.pth``, Mixtral's too, Meta's ``consolidated.00.pth``,
llama2.c's ``ckpt.pt`` and ``.bin``. The content of a file decides, not its name.

All of them rotate neighbouring dimensions of a head where Hugging Face rotates its halves; the rows of q and k are
reordered on the way. A ``.pth`` does not say how many heads its model has; a JSON file beside it or the caller must.

gpt-fast's int8 is a linear layer ``X`` with ``X.weight`` int8 [N, K] and ``X.scales`` bfloat16 [N]: the int8 of this
project with its scales in float32. Its experts are stacked: ``cond_ffn.w1`` [experts, N, K], ``cond_ffn.scales1``
[experts, N]. Its int4 is tinygemm's (quantize/tinygemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.checkpoint.families import parse_config, to_hf_config
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.llama2c import read_bin, read_header
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.checkpoint.weight_files import read_torch_file
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.describing import parts
from gpt_fast.model.description import Layout
from gpt_fast.model.shapes import SHAPES, shape
from gpt_fast.quantize.formats import Format, OwnFormat, row_order
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.tinygemm import GRIDS, TinygemmFormat, unpacked

# Parts of Hugging Face's names -> Meta's.
# fmt: off
_META_NAMES = {
    "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
# fmt: on
# Tensors of a linear layer: Meta's endings -> ours.
_ENDINGS = {".weight": ".weight", ".scales": ".scale", GRIDS: GRIDS}
# Buffers that some writers left in: computed here, not read.
_BUFFERS = ("freqs_cis", "freqs_cos", "freqs_sin", "rope.freqs", "mask", "k_cache", "v_cache")
_STACKED = ".cond_ffn."  # gpt-fast's experts

State = dict[str, StoredTensor]  # mapped, by name


class MetaFile(NamedTuple):
    """``raw``: what a ``config.json`` of the model says. ``config``: the same, with a head that may be tied: these
    files write it out. ``tensors``: by Hugging Face's names, rows in their order. ``form``: how weights are held."""

    raw: dict[str, Any]
    config: ModelConfig
    tensors: State
    form: Format


def refuse_config(config: object, path: Path) -> None:
    """Raise CheckpointError if a ``config`` is given for a ``path`` that needs none."""
    if config is not None:
        raise CheckpointError(f"config: {path} says by itself what its model is; leave it out")


def read_meta_file(path: Path, config: ModelConfig | str | Path | None = None) -> MetaFile:
    """Map the file ``path``. ``config`` says what a ``.pth`` leaves out: a ModelConfig, the name of a shape, or a path
    to Hugging Face's config.json or Meta's params.json; None: such a file beside ``path``.

    Raises CheckpointError for another kind of file, a damaged one, and one whose configuration is not known."""
    header = read_header(path)
    if header is None:
        values, facts = read_torch_file(path)
        state = {name.removeprefix("_orig_mod."): tensor for name, tensor in values.items()}
        _refuse_foreign(state, path)
    else:
        state, facts = read_bin(path, header)
        refuse_config(config, path)
    state = {name: t for name, t in state.items() if not name.removesuffix(".weight").endswith(_BUFFERS)}
    if isinstance(facts, dict) and config is None:
        where, raw = str(path), _raw_from_facts(facts, state, str(path)) | {"bos_token_id": 1, "eos_token_id": 2}
    else:
        where, raw = _find_raw(path, state, config)
    found = replace(parse_config(raw, where), tie_embeddings=True)
    _split_experts(state)
    form = Format()
    if any(name.endswith(GRIDS) for name in state):
        state, group_size = unpacked(state, str(path))
        tensors = _hub_tensors(state, found, path)
        form = TinygemmFormat(group_size, tensors)
    else:
        tensors = _hub_tensors(state, found, path)
        if any(name.endswith(".scale") for name in tensors):
            form = OwnFormat(quant_config("int8"))
    return MetaFile(raw, found, tensors, form)


def _refuse_foreign(state: Mapping[str, StoredTensor], source: Path) -> None:
    """Name what a state dict is when it is not one of Meta's line."""
    names = list(state)
    if any(name.endswith(".qweight") for name in names):
        raise CheckpointError(f"{source} is quantized by others; give the directory with its config.json")
    if any(name.startswith(("model.layers.", "model.embed_tokens")) for name in names):
        raise CheckpointError(f"{source} has Hugging Face's tensor names; give the directory with its config.json")
    first = ("layers.0.feed_forward.w1.weight", "layers.0.block_sparse_moe.gate.weight")
    if "tok_embeddings.weight" not in names or not any(name in names for name in first):
        shown = ", ".join(names[:3])
        raise CheckpointError(f"{source} holds no checkpoint of gpt-fast, Meta or llama2.c; it begins with {shown}")
    if list(source.parent.glob("consolidated.01.*")) and source.name.startswith("consolidated."):
        raise CheckpointError(f"{source} is one of several pieces; give the Hugging Face checkpoint instead")


def _find_raw(source: Path, state: State, config: ModelConfig | str | Path | None) -> tuple[str, dict[str, Any]]:
    """The ``config.json`` that the caller or a file beside ``source`` gives, and where it is from. Token ids that
    neither names are left to the tokenizer."""
    unknown = {"bos_token_id": None, "eos_token_id": None}
    if isinstance(config, ModelConfig):
        return str(source), to_hf_config(config, "") | unknown
    beside = (source.with_name("config.json"), source.with_name("params.json"))
    path = next((p for p in beside if p.is_file()), None) if config is None else Path(config)
    if path is None:
        raise CheckpointError(
            f"{source} does not say how many heads its model has: put the config.json of its Hugging Face repository, "
            "or Meta's params.json, beside it. gpt-fast convert --config also takes such a file, or one of these "
            f"shapes: {', '.join(SHAPES)}"
        )
    if not path.is_file():
        try:
            return str(source), to_hf_config(shape(str(config)), "") | unknown
        except ConfigError as e:
            raise CheckpointError(f"{config} is not a file; {e}") from None
    raw = read_json(path)
    if "architectures" in raw or "model_type" in raw:
        return str(path), {key: value for key, value in raw.items() if key != "quantization_config"}
    return str(path), _raw_from_facts(raw, state, str(path)) | unknown


def _raw_from_facts(facts: Mapping[str, Any], state: State, where: str) -> dict[str, Any]:
    """From Meta's ``params.json`` or llama2.c's ``model_args``; sizes come from the tensors themselves."""
    if "layers.0.feed_forward.w1.weight" not in state:
        raise CheckpointError(f"{where}: a mixture of experts needs Hugging Face's config.json beside it")
    num_heads = facts.get("n_heads")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise CheckpointError(f"{where} must give n_heads, the number of query heads, not {num_heads!r}")
    if len(state["tok_embeddings.weight"].shape) != 2:
        raise CheckpointError(f"{where}: tok_embeddings.weight is no matrix")
    vocab_size, dim = state["tok_embeddings.weight"].shape
    if facts.get("dim", dim) != dim or dim % num_heads:
        raise CheckpointError(
            f"{where}: dim {facts.get('dim', dim)} and n_heads {num_heads} do not fit the tensors, {dim} wide"
        )
    fused, keys = (state.get(f"layers.0.attention.{name}.weight") for name in ("wqkv", "wk"))
    kv_rows = (fused.num_rows - dim) // 2 if fused else keys.num_rows if keys else dim
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": state["layers.0.feed_forward.w1.weight"].shape[0],
        "num_hidden_layers": len({name.split(".")[1] for name in state if name.startswith("layers.")}),
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts.get("n_kv_heads") or kv_rows // (dim // num_heads),
        "max_position_embeddings": facts.get("max_seq_len", 2048),  # Meta's files leave it out; Llama 1 had this
        "rms_norm_eps": facts.get("norm_eps", 1e-5),
        "rope_theta": facts.get("rope_theta", 10000.0),
    }
    if facts.get("use_scaled_rope"):
        if "rope_scaling_factor" not in facts:
            raise CheckpointError(
                f"{where}: use_scaled_rope without rope_scaling_factor: Llama 3.1 means 8 and Llama 3.2 means 32; "
                "add it, or give Hugging Face's config.json"
            )
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": facts["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": facts.get("rope_high_freq_factor", 4.0),
            "original_max_position_embeddings": 8192,
        }
        raw["max_position_embeddings"] = facts.get("max_seq_len", 131072)
    return raw


def _split_experts(state: State) -> None:
    """Split gpt-fast's stacked experts into tensors for each expert."""
    for name in [name for name in state if _STACKED in name and len(state[name].shape) > 1]:
        stack, (layer, _, kind) = state.pop(name), name.partition(_STACKED)
        ending = ".scales" if kind.startswith("scales") else ".weight"
        for i in range(stack.num_rows):
            own = StoredTensor(stack.rows(i, i + 1)[0], mapped=stack.mapped)
            state[f"{layer}.experts.{i}.w{kind[-1]}{ending}"] = own


def _hub_tensors(state: State, config: ModelConfig, source: Path) -> State:
    """Rename Meta's tensors to Hugging Face's, split a fused wqkv, and put q and k into the halves' order. What has no
    such name keeps its own."""
    state = _split_heads(state, config, source)
    pairs = Layout("pairs", head_dim=config.head_dim, pairs=config.head_dim)  # of neighbours, of a whole head
    renamed: State = {}
    for part in parts(replace(config, tie_embeddings=False)):
        ours = meta = part.source.removesuffix(".weight")
        for hub, name in _META_NAMES.items():
            meta = meta.replace(hub, name)
        for theirs, ending in _ENDINGS.items():
            tensor = state.pop(meta + theirs, None)
            if tensor is None:
                continue
            if ours.endswith(("q_proj", "k_proj")) and tensor.num_rows == part.shape[0]:
                tensor = tensor.picked(row_order(pairs, tensor.num_rows))
            if ending == ".scale" and tensor.dtype.is_floating_point:
                tensor = StoredTensor(tensor.whole().float())
            renamed[ours + ending] = tensor
    return renamed | state


def _split_heads(state: State, config: ModelConfig, source: Path) -> State:
    """``state`` with wq, wk and wv in the place of a fused wqkv."""
    out: State = {}
    sizes = {"wq": config.q_dim, "wk": config.kv_dim, "wv": config.kv_dim}
    for name, tensor in state.items():
        layer, fused, ending = name.partition(".wqkv.")
        if not fused:
            out[name] = tensor
            continue
        if tensor.num_rows != sum(sizes.values()):
            raise CheckpointError(f"{source}: {name} has {tensor.num_rows} rows, not {sum(sizes.values())}")
        start = 0
        for piece, rows in sizes.items():
            out[f"{layer}.{piece}.{ending}"] = tensor.part(start, rows)
            start += rows
    return out
