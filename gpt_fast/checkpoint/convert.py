"""Foreign checkpoints to Hugging Face directories: ``convert``.

Reads gpt-fast's ``model.pth``, Meta's ``consolidated.00.pth``, llama2.c's ``ckpt.pt`` and ``.bin`` files, and Hugging
Face directories themselves (to change the dtype or to merge shards). The format is told by the file's content.

All of Meta's line rotate neighbouring dimensions of a head where Hugging Face rotates its halves; the rows of q and k
are reordered on the way. A ``.pth`` does not say how many heads its model has, so that a JSON file beside it, or the
caller, must.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint, check_tensors, plain_specs, resolve_tying
from gpt_fast.checkpoint.families import parse_config, read_json, to_hf_config
from gpt_fast.checkpoint.llama2c import read_bin, read_header
from gpt_fast.checkpoint.progress import progress_bar
from gpt_fast.checkpoint.safetensors_file import write_safetensors
from gpt_fast.checkpoint.stored import StoredTensor, read_torch_file, stored_tensors
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.description import parts
from gpt_fast.model.shapes import SHAPES, shape

log = logging.getLogger(__name__)

# What goes along with the weights when it lies beside them.
COMPANIONS = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
)

# Hugging Face's module within a model or layer -> Meta's.
_META_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "model.norm": "norm",
    "lm_head": "output",
}
# Buffers that some writers left in: computed here, not read.
_BUFFERS = ("freqs_cis", "freqs_cos", "freqs_sin", "rope.freqs", "causal_mask", "mask", "k_cache", "v_cache")


class Imported(NamedTuple):
    """A checkpoint under Hugging Face's names, mapped, and the ``config.json`` to go with it, dtype apart."""

    config: ModelConfig
    tensors: dict[str, StoredTensor]
    raw: dict[str, Any]


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
    imported = read_source(source, config)
    companions = _companions(source, tokenizer)
    if not any(name.startswith("tokenizer.") for name in companions):
        log.warning("no tokenizer beside %s and none given; %s will have none", source, out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        for name, path in companions.items():
            shutil.copyfile(path, partial / name)
        _write(partial, imported, dtype, progress)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as e:
        size = sum(t.num_bytes for t in imported.tensors.values()) / 1e9
        raise CheckpointError(f"{out} cannot be written: {e.strerror} (it needs up to {size:.2f} GB)") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(directory: Path, imported: Imported, dtype: torch.dtype | None, progress: bool) -> None:
    tensors = imported.tensors
    most = max(tensors.values(), key=lambda t: t.num_bytes).dtype
    raw = imported.raw | {"torch_dtype": str(dtype or most).removeprefix("torch.")}
    total = sum(t.num_bytes for t in tensors.values())
    with progress_bar(total, progress, "writing weights") as report:
        write_safetensors(directory / "model.safetensors", tensors, dtype, report)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _companions(source: Path, tokenizer: str | Path | None) -> dict[str, Path]:
    """Files to copy by the name they get. A tokenizer given takes the place of all of the source's."""
    folder = source if source.is_dir() else source.parent
    found = {name: folder / name for name in COMPANIONS if (folder / name).is_file()}
    if tokenizer is None:
        return found
    path = Path(tokenizer)
    if not path.is_file():
        raise CheckpointError(f"tokenizer {path} does not exist")
    with open(path, "rb") as file:
        start = file.read(512)
    if start.lstrip()[:1] == b"{":
        name = "tokenizer.json"
    elif start[:1] == b"\n" or _is_tiktoken(start):  # SentencePiece: field 1 of a protobuf message
        name = "tokenizer.model"
    else:
        raise CheckpointError(
            f"tokenizer {path} is neither a SentencePiece or tiktoken model nor a tokenizer.json; "
            "llama2.c's tokenizer.bin does not hold all of a tokenizer, give the tokenizer.model it was made from"
        )
    others = {n: p for n, p in found.items() if n.startswith(("LICENSE", "generation_config"))}
    return others | {name: path}


def _is_tiktoken(start: bytes) -> bool:
    """Whether ``start`` reads as tiktoken's lines of base64 and rank."""
    first = start.split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit() and first[0].isascii()


def read_source(source: Path, config: ModelConfig | str | Path | None = None) -> Imported:
    """Open whatever ``source`` is. See :func:`convert`; nothing is written."""
    if source.is_dir():
        return _read_hf(source)
    header = read_header(source)
    if header is not None:
        found, tensors = read_bin(source, header)
        return _from_meta(tensors, found, {"bos_token_id": 1, "eos_token_id": 2}, source)
    with open(source, "rb") as file:
        start = file.read(4)
    if start != b"PK\x03\x04" and start[:1] != b"\x80":
        raise CheckpointError(f"{source} is no checkpoint known here: not llama2.c's .bin and not a torch file")
    return _read_torch(source, config)


def _read_hf(source: Path) -> Imported:
    opened = Checkpoint.open(source)
    if opened.format.method is not None:
        raise CheckpointError(f"{source} is quantized ({opened.format.method}); convert the unquantized checkpoint")
    # transformers 5 calls torch_dtype dtype
    raw = {key: value for key, value in opened.raw.items() if key != "dtype"}
    return Imported(opened.config, opened.tensors, raw | {"tie_word_embeddings": opened.config.tie_embeddings})


def _read_torch(source: Path, config: ModelConfig | str | Path | None) -> Imported:
    """A file of torch.save: a state dict, or llama2.c's training checkpoint around one."""
    values, mapped = read_torch_file(source)
    facts: Mapping[str, Any] | None = None
    if isinstance(values.get("model"), dict) and isinstance(values.get("model_args"), dict):
        values, facts = values["model"], values["model_args"]  # the optimizer's state stays behind
    elif isinstance(values.get("model"), dict):
        values = values["model"]
    state = stored_tensors({name.removeprefix("_orig_mod."): value for name, value in values.items()}, source, mapped)
    state = {name: t for name, t in state.items() if name.rsplit(".", 1)[-1] not in _BUFFERS and name not in _BUFFERS}
    _refuse_foreign(state, source)
    if facts is not None and config is None:
        extra = {"bos_token_id": 1, "eos_token_id": 2}
        return _from_meta(state, _config_from_facts(facts, state, str(source)), extra, source)
    found, extra = _find_config(source, state, config)
    return _from_meta(state, found, extra, source)


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
    if config is None:
        beside = [source.with_name(name) for name in ("config.json", "params.json")]
        path = next((path for path in beside if path.is_file()), None)
        if path is None:
            raise CheckpointError(
                f"{source} does not say how many heads its model has, and neither config.json nor params.json lies "
                f"beside it; name one, or one of these shapes: {', '.join(SHAPES)}"
            )
    else:
        path = Path(config)
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
    if facts.get("use_scaled_rope") and "rope_scaling_factor" not in facts:
        raise CheckpointError(
            f"{where}: use_scaled_rope without rope_scaling_factor: Llama 3.1 means 8 and Llama 3.2 means 32; "
            "add it, or give Hugging Face's config.json"
        )
    vocab_size, dim = state["tok_embeddings.weight"].shape
    if facts.get("dim", dim) != dim or dim % num_heads:
        raise CheckpointError(
            f"{where}: dim {facts.get('dim')} and n_heads {num_heads} do not fit the tensors, {dim} wide"
        )
    head_dim = dim // num_heads
    fused = state.get("layers.0.attention.wqkv.weight")
    kv_rows = (fused.shape[0] - dim) // 2 if fused else state["layers.0.attention.wk.weight"].shape[0]
    num_kv_heads = facts.get("n_kv_heads") or kv_rows // head_dim
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": state["layers.0.feed_forward.w1.weight"].shape[0],
        "num_hidden_layers": 1 + max(int(n.split(".")[1]) for n in state if n.startswith("layers.")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": facts.get("max_seq_len", 2048),  # Meta's files leave it out; Llama 1 had this
        "rms_norm_eps": facts.get("norm_eps", 1e-5),
        "rope_theta": facts.get("rope_theta", 10000.0),
        "tie_word_embeddings": "output.weight" not in state,
    }
    if facts.get("use_scaled_rope"):
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": facts["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": facts.get("rope_high_freq_factor", 4.0),
            "original_max_position_embeddings": 8192,
        }
        raw["max_position_embeddings"] = facts.get("max_seq_len", 131072)
    return parse_config(raw, where)


def _from_meta(state: Mapping[str, StoredTensor], config: ModelConfig, extra: dict[str, Any], source: Path) -> Imported:
    """Rename Meta's tensors to Hugging Face's, split a fused wqkv, and put q and k into the halves' order."""
    state = {name: t for name, t in state.items() if name.rsplit(".", 1)[0] not in _BUFFERS}
    for name in [name for name in state if name.endswith(".attention.wqkv.weight")]:
        fused = state.pop(name)
        sizes = {"wq": config.q_dim, "wk": config.kv_dim, "wv": config.kv_dim}
        if fused.num_rows != sum(sizes.values()):
            raise CheckpointError(f"{source}: {name} has {fused.num_rows} rows, not {sum(sizes.values())}")
        start = 0
        for piece, rows in sizes.items():
            state[name.replace("wqkv", piece)] = fused.part(start, rows)
            start += rows
    untied = replace(config, tie_embeddings=False)
    renamed: dict[str, StoredTensor] = {}
    for part in parts(untied):
        name = _meta_name(part.source)
        if name in state:
            tensor = state.pop(name)
            turned = part.source.endswith(("q_proj.weight", "k_proj.weight")) and tensor.num_rows == part.shape[0]
            renamed[part.source] = tensor.picked(_halves(tensor.num_rows, config.head_dim)) if turned else tensor
    # These formats write a tied head out: one that equals the embeddings is taken for it.
    config, tensors = resolve_tying(replace(config, tie_embeddings=True), renamed)
    check_tensors(plain_specs(config), tensors | state, str(source))
    return Imported(config, tensors, to_hf_config(config, "") | extra)


def _halves(num_rows: int, head_dim: int) -> torch.Tensor:
    """The rows, int64 [num_rows], of heads whose rotary pairs are neighbours (2i, 2i + 1), as (i, i + D / 2)."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _meta_name(source: str) -> str:
    module, suffix = source.rsplit(".", 1)
    if module in _META_NAMES:
        return f"{_META_NAMES[module]}.{suffix}"
    _, _, layer, inner = module.split(".", 3)
    return f"layers.{layer}.{_META_NAMES.get(inner, inner)}.{suffix}"
