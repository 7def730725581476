"""Writes Hugging Face directories: tensors, or a model in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpt_fast.checkpoint.families import to_hf_config
from gpt_fast.checkpoint.stacked import stacked
from gpt_fast.checkpoint.stored import StoredTensor, progress_bar
from gpt_fast.checkpoint.weight_files import write_safetensors
from gpt_fast.errors import CheckpointError
from gpt_fast.model.describing import parts
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.formats import row_order


def new_folder(named: str | Path) -> Path:
    """The path without links of the folder ``named`` that is to be made; an empty one may be there, which is replaced.
    Raises CheckpointError where that could not be, so that nobody hears of it after the work."""
    out = Path(named).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{named} exists and is not empty; choose another output directory")
    for what, holds in (("the current folder", out == Path.cwd()), ("a mount point", out.is_mount())):
        if holds:
            raise CheckpointError(f"{named} is {what}, which cannot be replaced; name a new folder in it")
    return out


def write_checkpoint(
    directory: Path, tensors: Mapping[str, StoredTensor], raw: Mapping[str, Any], dtype: torch.dtype | None, bar: bool
) -> None:
    """Write ``tensors``, in ``dtype`` or as stored, and ``raw`` with their dtype into ``directory``, which may exist.

    ``bar``: show progress, when stderr is a terminal. Raises OSError when a file cannot be written.
    """
    largest = max(tensors.values(), key=lambda tensor: tensor.num_bytes)
    text = json.dumps({**raw, "torch_dtype": str(dtype or largest.dtype).removeprefix("torch.")}, indent=2)
    directory.mkdir(parents=True, exist_ok=True)
    with progress_bar(sum(t.num_bytes for t in tensors.values()), bar, "writing weights") as report:
        write_safetensors(directory / "model.safetensors", tensors, dtype, report)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def save_checkpoint(
    model: Transformer, directory: str | Path, dtype: torch.dtype | None = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Write ``model`` as a Hugging Face directory: ``config.json`` and ``model.safetensors``, in ``dtype`` or as held.

    ``extra`` goes into ``config.json`` as well, such as ``eos_token_id``. Raises CheckpointError for weights that are
    not plain (quantized), OSError when a file cannot be written.
    """
    parameters = dict(model.named_parameters())
    tensors: dict[str, StoredTensor] = {}
    for part in parts(model.config):
        if part.target not in parameters:
            raise CheckpointError(f"{part.target} is not a plain weight; only unquantized models can be saved so")
        rows = parameters[part.target][part.start : part.start + part.shape[0]]
        stored = StoredTensor(rows.detach())
        if part.layout.kind == "transposed":
            stored = stored.transposed()
        elif part.layout.kind != "plain":
            stored = stored.picked(row_order(part.layout, part.shape[0]).argsort())
        tensors[part.source] = stored
    raw = to_hf_config(model.config, "") | dict(extra or {})
    write_checkpoint(Path(directory), stacked(tensors), raw, dtype, bar=False)
