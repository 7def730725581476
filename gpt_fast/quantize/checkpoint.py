"""Quantized checkpoints: Hugging Face directories whose ``config.json`` has a ``quantization_config`` of ours.

Written tensor by tensor, a few rows at a time; read as any checkpoint is (checkpoint.py), with the tensors of scheme.py
in the place of linear weights. Tensors are stored as the family names them, so q, k and v stay apart on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt_fast.checkpoint.families import Part, parts, read_config, read_json
from gpt_fast.checkpoint.loading import build, check_weights, open_checkpoint, open_weights, progress_bar, resolve_tying
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.apply import Choose, chooser, chunk_rows, locate, swap_layers
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import QuantConfig, parse_quant_config
from gpt_fast.quantize.writer import CheckpointWriter

Report = Callable[[int], object] | None


class Source(NamedTuple):
    """A checkpoint, mapped, and what of it is quantized how, or is to be."""

    directory: Path
    config: ModelConfig
    weights: dict[str, StoredTensor]
    quant: QuantConfig

    @property
    def choose(self) -> Choose:
        return chooser(self.quant, self.config)


def open_source(directory: str | Path, quant: QuantConfig) -> Source:
    """Raises CheckpointError for a checkpoint that is damaged or quantized already, ConfigError for unfit groups."""
    directory = Path(directory)
    refuse_quantized(directory)
    config, weights = open_checkpoint(directory)
    source = Source(directory, config, weights, quant)
    wanted = quant.blocks
    if wanted is not None and all(locate(part, source.choose)[1] != wanted for part in parts(config)):
        raise ConfigError(
            f"group_size: {wanted.group_size} fits no layer of {directory}; the inputs must fill whole groups"
        )
    return source


def refuse_quantized(directory: Path) -> None:
    """Raise CheckpointError for a checkpoint that is quantized already."""
    found = read_json(directory / "config.json").get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise CheckpointError(f"{directory} is quantized already ({method}); start from the unquantized checkpoint")


def stored_parts(config: ModelConfig, choose: Choose) -> list[tuple[Part, torch.dtype | None]]:
    """Every tensor of a quantized checkpoint, and its dtype where the scheme gives it."""
    out: list[tuple[Part, torch.dtype | None]] = []
    for part in parts(config):
        part, scheme = locate(part, choose)
        if scheme is None:
            out.append((part, None))
            continue
        source, target = part.source.removesuffix("weight"), part.target.removesuffix("weight")
        for name, (dtype, shape) in scheme.tensors(*part.shape).items():
            out.append((Part(source + name, target + name, part.start, shape), dtype))
    return out


def begin_writing(
    source: Source, out: str | Path, settings: Mapping[str, Any], resume: bool = False
) -> CheckpointWriter:
    """The writer of everything that ``source`` becomes."""
    specs = {
        part.source: (dtype or source.weights[part.source].dtype, part.shape)
        for part, dtype in stored_parts(source.config, source.choose)
    }
    return CheckpointWriter(source.directory, Path(out), specs, {**source.quant.to_json(), **settings}, resume)


def finish_writing(source: Source, writer: CheckpointWriter) -> None:
    """Give the checkpoint its name and its ``config.json``."""
    tied = source.config.tie_embeddings
    writer.finish({"quantization_config": source.quant.to_json(), "tie_word_embeddings": tied})


def write_part(source: Source, writer: CheckpointWriter, part: Part, report: Report = None) -> None:
    """Write one tensor of ``source``, rounded to nearest if it is to be quantized and as it is otherwise."""
    tensor, (_, scheme) = source.weights[part.source], locate(part, source.choose)
    prefix = part.source.removesuffix("weight")
    for first, last in tensor.chunks():
        step = chunk_rows(tensor.shape[1]) if scheme else last - first
        for begin in range(first, last, step):
            rows = tensor.rows(begin, min(begin + step, last))
            if scheme is None:
                writer.write(part.source, begin, rows)
            else:
                for name, quantized in quantize_rows(rows, scheme).items():
                    writer.write(prefix + name, begin, quantized)
        tensor.release(first, last)
        if report:
            report((last - first) * tensor.row_bytes)


def quantize_checkpoint(
    directory: str | Path, out: str | Path, quant: QuantConfig, *, resume: bool = False, progress: bool = False
) -> None:
    """Write the checkpoint ``directory`` quantized by rounding to nearest as ``out``, which must not exist yet.

    Holds a few megabytes of weights at a time. Raises CheckpointError.
    """
    source = open_source(directory, quant)
    writer = begin_writing(source, out, {"method": "rtn"}, resume)
    wanted = [part for part in parts(source.config) if part.source not in writer.done]
    total = sum(source.weights[part.source].num_bytes for part in wanted)
    try:
        with progress_bar(total, progress, "quantizing") as report, torch.no_grad():
            for part in wanted:
                write_part(source, writer, part, report)
                if part.target.endswith(".w2.weight"):
                    writer.complete(part.source)
    except BaseException:
        writer.leave()
        raise
    finish_writing(source, writer)


def load_quantized(
    directory: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
    *,
    column_major: bool = False,
) -> Transformer:
    """The model of a checkpoint that ``quantize_checkpoint`` or GPTQ wrote; what is not quantized is in ``dtype``.

    Raises CheckpointError, naming files and tensors.
    """
    source = open_quantized(directory)
    model = build(source.config, dtype, device, column_major, lambda m: swap_layers(m, source.choose, device))
    wanted = [part for part, _ in stored_parts(source.config, source.choose)]
    copy_parts(model, wanted, source.weights, progress)
    return model


def open_quantized(directory: str | Path) -> Source:
    """A checkpoint that is quantized already, mapped and checked. Raises CheckpointError, naming files and tensors."""
    directory = Path(directory)
    config = read_config(directory)
    raw = read_json(directory / "config.json")["quantization_config"]
    quant = parse_quant_config(raw, str(directory / "config.json"))
    source = Source(directory, *resolve_tying(config, open_weights(directory)), quant)
    _check(stored_parts(source.config, source.choose), source.weights, str(directory))
    return source


def copy_parts(
    model: Transformer, wanted: list[Part], weights: Mapping[str, StoredTensor], progress: bool = False
) -> None:
    """Copy ``weights`` into parameters and buffers of ``model``, as ``wanted`` says."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    total = sum(weights[part.source].num_bytes for part in wanted)
    with progress_bar(total, progress, "loading weights") as report, torch.no_grad():
        for part in wanted:
            target = targets[part.target][part.start : part.start + part.shape[0]]
            weights[part.source].copy_to(target, None, report)


def _check(wanted: list[tuple[Part, torch.dtype | None]], weights: Mapping[str, StoredTensor], where: str) -> None:
    """As check_weights, and every quantized tensor must have the dtype of its scheme."""
    for part, dtype in wanted:
        found = weights.get(part.source)
        if dtype is not None and found is not None and found.dtype != dtype:
            raise CheckpointError(f"{where}: {part.source} is stored as {found.dtype}, not as {dtype}")
    quantized = {part.source for part, dtype in wanted if dtype is not None and part.source in weights}
    for part, _ in wanted:
        if part.source in quantized and weights[part.source].shape != part.shape:
            shapes = f"{list(weights[part.source].shape)}, not {list(part.shape)}"
            raise CheckpointError(f"{where} does not fit its configuration: {part.source} {shapes}")
    check_weights(
        [part for part, _ in wanted if part.source not in quantized],
        {name: t for name, t in weights.items() if name not in quantized},
        where,
    )
