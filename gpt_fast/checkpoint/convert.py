"""Foreign checkpoints to Hugging Face directories: ``convert``.

Reads gpt-fast's ``model.pth``, Meta's ``consolidated.00.pth``, llama2.c's ``ckpt.pt`` and ``.bin`` files, and Hugging
Face directories themselves (to change the dtype or to merge shards). The content of a file decides, not its name.

All of Meta's line rotate neighbouring dimensions of a head where Hugging Face rotates its halves; the rows of q and k
are reordered on the way. A ``.pth`` does not say how many heads its model has; a JSON file beside it or the caller
must.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint, check_tensors, resolve_tying
from gpt_fast.checkpoint.families import parse_config, read_json, to_hf_config
from gpt_fast.checkpoint.files import RIGHTS, companions, is_one
from gpt_fast.checkpoint.llama2c import read_bin, read_header
from gpt_fast.checkpoint.saving import write_checkpoint
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.checkpoint.weight_files import read_torch_file
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError, TokenizerError
from gpt_fast.model.description import Layout, parts
from gpt_fast.model.shapes import SHAPES, shape
from gpt_fast.quantize.formats import row_order
from gpt_fast.tokenizer.loading import sniff

log = logging.getLogger(__name__)

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
# Buffers that some writers left in: computed here, not read.
_BUFFERS = ("freqs_cis", "freqs_cos", "freqs_sin", "rope.freqs", "mask", "k_cache", "v_cache")

Imported = tuple[dict[str, StoredTensor], dict[str, Any]]  # mapped, by Hugging Face's names, and their config.json


def convert(
    source: str | Path,
    out_dir: str | Path,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    *,
    config: ModelConfig | str | Path | None = None,
    progress: bool = False,
) -> None:
    """Write the checkpoint ``source`` as a Hugging Face directory ``out_dir``, which must not exist yet.

    ``tokenizer``: a tokenizer.model or tokenizer.json to go with it; None: those beside ``source``. ``dtype``: None
    keeps the stored one. ``config`` says what a ``.pth`` leaves out: a ModelConfig, the name of a shape, or a path to
    Hugging Face's config.json or Meta's params.json; None: such a file beside ``source``.

    ``out_dir`` appears when it is whole. Raises CheckpointError, naming the file, for whatever cannot be converted.
    """
    source, out = Path(source), Path(out_dir)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another output directory")
    tensors, raw = _read_source(source, config)
    beside = _beside(source, tokenizer)
    if not any(name.startswith("tokenizer.") for name in beside):
        log.warning("no tokenizer beside %s and none given; %s will have none", source, out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        write_checkpoint(partial, tensors, raw, dtype, progress)
        for name, path in beside.items():
            shutil.copyfile(path, partial / name)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as e:
        size = sum(t.num_bytes for t in tensors.values()) / 1e9
        raise CheckpointError(f"{out} cannot be written: {e.strerror} (it needs up to {size:.2f} GB)") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beside(source: Path, tokenizer: str | Path | None) -> dict[str, Path]:
    """Files to copy by the name they get. A tokenizer given takes the place of all of the source's."""
    found = {path.name: path for path in companions(source if source.is_dir() else source.parent)}
    if tokenizer is None:
        return found
    path = Path(tokenizer)
    if not path.is_file():
        raise CheckpointError(f"tokenizer {path} does not exist")
    with open(path, "rb") as file:
        start = file.read(4096)
    try:
        name = "tokenizer.json" if sniff(start, str(path)) == "json" else "tokenizer.model"
    except TokenizerError as e:
        hint = "llama2.c's tokenizer.bin does not hold all of a tokenizer, give the tokenizer.model it was made from"
        raise CheckpointError(f"tokenizer {e}; {hint}") from None
    return {n: p for n, p in found.items() if is_one(n, (*RIGHTS, "generation_config.json"))} | {name: path}


def _read_source(source: Path, config: ModelConfig | str | Path | None) -> Imported:
    """The tensors of whatever ``source`` is, and their ``config.json`` without a dtype. See :func:`convert`."""
    if source.is_dir():
        opened = Checkpoint.open(source)
        if opened.format.method is not None:
            raise CheckpointError(f"{source} is quantized ({opened.format.method}); convert the unquantized checkpoint")
        raw = {key: value for key, value in opened.raw.items() if key != "dtype"}  # torch_dtype, for transformers 5
        return opened.tensors, raw | {"tie_word_embeddings": opened.config.tie_embeddings}
    header = read_header(source)
    if header is None:
        values, facts = read_torch_file(source)
        state = {name.removeprefix("_orig_mod."): tensor for name, tensor in values.items()}
        _refuse_foreign(state, source)
    else:
        state, facts = read_bin(source, header)
        config = None  # the file says all
    if isinstance(facts, dict) and config is None:
        found, ids = _config_from_facts(facts, state, str(source)), {"bos_token_id": 1, "eos_token_id": 2}
    else:
        found, ids = _find_config(source, state, config)
    return _from_meta(state, found, ids, source)


def _refuse_foreign(state: Mapping[str, StoredTensor], source: Path) -> None:
    """Name what a state dict is when it is not one of Meta's line in plain weights."""
    names = list(state)
    if any(name.endswith((".scales", ".scales_and_zeros", ".qweight")) for name in names):
        raise CheckpointError(f"{source} is quantized; convert the unquantized checkpoint and quantize that")
    if any("block_sparse_moe" in name for name in names):
        raise CheckpointError(f"{source} is a mixture of experts, which is not supported")
    if any(name.startswith(("model.layers.", "model.embed_tokens")) for name in names):
        raise CheckpointError(f"{source} has Hugging Face's tensor names; give the directory with its config.json")
    if "tok_embeddings.weight" not in names or "layers.0.feed_forward.w1.weight" not in names:
        shown = ", ".join(names[:3])
        raise CheckpointError(f"{source} holds no checkpoint of gpt-fast, Meta or llama2.c; it begins with {shown}")
    if list(source.parent.glob("consolidated.01.*")) and source.name.startswith("consolidated."):
        raise CheckpointError(f"{source} is one of several pieces; convert the Hugging Face checkpoint instead")


def _find_config(
    source: Path, state: Mapping[str, StoredTensor], config: ModelConfig | str | Path | None
) -> tuple[ModelConfig, dict[str, Any]]:
    """The configuration that the caller or a file beside ``source`` gives, and token ids where it names them."""
    unknown = {"bos_token_id": None, "eos_token_id": None}  # left to the tokenizer
    if isinstance(config, ModelConfig):
        return config, unknown
    beside = (source.with_name("config.json"), source.with_name("params.json"))
    path = next((p for p in beside if p.is_file()), None) if config is None else Path(config)
    if path is None:
        raise CheckpointError(
            f"{source} does not say how many heads its model has, and neither config.json nor params.json lies "
            f"beside it; name one, or one of these shapes: {', '.join(SHAPES)}"
        )
    if not path.is_file():
        try:
            return shape(str(config)), unknown
        except ConfigError as e:
            raise CheckpointError(f"{config} is not a file; {e}") from None
    raw = read_json(path)
    if "architectures" in raw or "model_type" in raw:
        return parse_config(raw, str(path)), {key: raw[key] for key in unknown if key in raw}
    return _config_from_facts(raw, state, str(path)), unknown


def _config_from_facts(facts: Mapping[str, Any], state: Mapping[str, StoredTensor], where: str) -> ModelConfig:
    """From Meta's ``params.json`` or llama2.c's ``model_args``; sizes come from the tensors themselves."""
    num_heads = facts.get("n_heads")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise CheckpointError(f"{where} must give n_heads, the number of query heads, not {num_heads!r}")
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
        "num_hidden_layers": 1 + max(int(n.split(".")[1]) for n in state if n.startswith("layers.")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts.get("n_kv_heads") or kv_rows // (dim // num_heads),
        "max_position_embeddings": facts.get("max_seq_len", 2048),  # Meta's files leave it out; Llama 1 had this
        "rms_norm_eps": facts.get("norm_eps", 1e-5),
        "rope_theta": facts.get("rope_theta", 10000.0),
        "tie_word_embeddings": "output.weight" not in state,
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
    return parse_config(raw, where)


def _from_meta(state: Mapping[str, StoredTensor], config: ModelConfig, ids: dict[str, Any], source: Path) -> Imported:
    """Rename Meta's tensors to Hugging Face's, split a fused wqkv, and put q and k into the halves' order."""
    state = {name: t for name, t in state.items() if not name.removesuffix(".weight").endswith(_BUFFERS)}
    for name in [name for name in state if name.endswith(".attention.wqkv.weight")]:
        fused, start = state.pop(name), 0
        sizes = {"wq": config.q_dim, "wk": config.kv_dim, "wv": config.kv_dim}
        if fused.num_rows != sum(sizes.values()):
            raise CheckpointError(f"{source}: {name} has {fused.num_rows} rows, not {sum(sizes.values())}")
        for piece, rows in sizes.items():
            state[name.replace("wqkv", piece)] = fused.part(start, rows)
            start += rows
    pairs = Layout("pairs", head_dim=config.head_dim, pairs=config.head_dim)  # of neighbours, of a whole head
    renamed: dict[str, StoredTensor] = {}
    for part in parts(replace(config, tie_embeddings=False)):
        name = part.source
        for ours, metas in _META_NAMES.items():
            name = name.replace(ours, metas)
        if name in state:
            tensor = state.pop(name)
            turned = part.source.endswith(("q_proj.weight", "k_proj.weight")) and tensor.num_rows == part.shape[0]
            renamed[part.source] = tensor.picked(row_order(pairs, tensor.num_rows)) if turned else tensor
    # These formats write a tied head out: one that equals the embeddings is taken for it.
    config, tensors = resolve_tying(replace(config, tie_embeddings=True), renamed)
    check_tensors({part.source: (None, part.stored_shape) for part in parts(config)}, tensors | state, str(source))
    return tensors, to_hf_config(config, "") | ids
