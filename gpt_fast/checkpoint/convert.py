"""Foreign checkpoints to Hugging Face directories: ``convert``.

Whatever ``Checkpoint.open`` takes and is not quantized: the files of meta_files.py, and Hugging Face directories
themselves (to change the dtype or to merge shards). GGUF files may be quantized: their weights become the formats of
this project (quantize/gguf.py), or with a ``dtype`` plain ones.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.files import IN_TWO_FILES, VOCABULARIES, is_one
from gpt_fast.checkpoint.saving import new_folder, write_checkpoint
from gpt_fast.checkpoint.stacked import stacked
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.quantize.gguf import GgufFormat
from gpt_fast.quantize.writer import quantize_checkpoint

log = logging.getLogger(__name__)


def convert(
    source: str | Path,
    out_dir: str | Path,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    *,
    config: ModelConfig | str | Path | None = None,
    lora: Mapping[str, float] | None = None,
    progress: bool = False,
) -> None:
    """Write the checkpoint ``source`` as a Hugging Face directory ``out_dir``, which must not exist yet.

    ``tokenizer``: a tokenizer.model or tokenizer.json to go with it; None: those beside ``source`` or in it. ``dtype``:
    None keeps the stored one, and quantized weights quantized. ``config`` says what a ``.pth`` leaves out: a
    ModelConfig, the name of a shape, or a path to Hugging Face's config.json or Meta's params.json; None: such a file
    beside ``source``.

    ``lora``: adapters that are added, see ``EngineConfig``.

    ``out_dir`` appears when it is whole. Raises CheckpointError, naming the file, for whatever cannot be converted.
    """
    source = Path(source)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    out = new_folder(out_dir)
    opened = Checkpoint.open(source, config).with_adapters(lora)
    if not opened.format.has_values:
        raise CheckpointError(f"{source} is quantized ({opened.format.method}); convert the unquantized checkpoint")
    if tokenizer is not None:
        opened.vocabulary = Path(tokenizer)
    beside = opened.companions().keys()
    if not any(is_one(name, VOCABULARIES) for name in beside) and not beside >= {*IN_TWO_FILES}:
        log.warning("no tokenizer beside %s and none given; %s will have none", source, out)
    # Written are torch_dtype, which transformers 5 reads too, and values.
    raw = {key: value for key, value in opened.raw.items() if key not in ("dtype", "quantization_config")}
    raw |= {"tie_word_embeddings": opened.config.tie_embeddings}
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if isinstance(opened.format, GgufFormat) and opened.format.quant is not None and dtype is None:
            quantize_checkpoint(opened, partial, opened.format.quant, rounding=opened.format, progress=progress)
        else:
            write_checkpoint(partial, stacked(opened.tensors), raw, dtype, progress)
            opened.save_companions(partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as e:
        size = sum(t.num_bytes for t in opened.tensors.values()) / 1e9
        raise CheckpointError(f"{out} cannot be written: {e.strerror} (it needs up to {size:.2f} GB)") from e
    finally:
        for left in (partial, partial.with_name(partial.name + ".partial")):  # the second: of quantize_checkpoint
            shutil.rmtree(left, ignore_errors=True)
