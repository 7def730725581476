"""A model in memory to a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpt_fast.checkpoint.families import to_hf_config
from gpt_fast.checkpoint.safetensors_file import write_safetensors
from gpt_fast.checkpoint.stacked import stacked
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.errors import CheckpointError
from gpt_fast.model.description import parts
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.formats import row_order


def save_checkpoint(
    model: Transformer,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
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
    directory, kind = Path(directory), dtype or next(iter(tensors.values())).dtype
    raw = to_hf_config(model.config, str(kind).removeprefix("torch.")) | dict(extra or {})
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", stacked(tensors), dtype)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
