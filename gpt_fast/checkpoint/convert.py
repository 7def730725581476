"""Foreign checkpoints to Hugging Face directories: ``convert``.

Whatever ``Checkpoint.open`` takes and is not quantized: the files of meta_files.py, and Hugging Face directories
themselves (to change the dtype or to merge shards).
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.files import RIGHTS, companions, is_one
from gpt_fast.checkpoint.saving import write_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, TokenizerError
from gpt_fast.tokenizer.loading import sniff

log = logging.getLogger(__name__)


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
    opened = Checkpoint.open(source, config)
    if opened.format.method is not None:
        raise CheckpointError(f"{source} is quantized ({opened.format.method}); convert the unquantized checkpoint")
    raw = {key: value for key, value in opened.raw.items() if key != "dtype"}  # torch_dtype, for transformers 5
    raw |= {"tie_word_embeddings": opened.config.tie_embeddings}
    beside = _beside(source, tokenizer)
    if not any(name.startswith("tokenizer.") for name in beside):
        log.warning("no tokenizer beside %s and none given; %s will have none", source, out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        write_checkpoint(partial, opened.tensors, raw, dtype, progress)
        for name, path in beside.items():
            shutil.copyfile(path, partial / name)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as e:
        size = sum(t.num_bytes for t in opened.tensors.values()) / 1e9
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
