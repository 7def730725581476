"""Writes quantized checkpoints: Hugging Face directories whose ``config.json`` has a ``quantization_config`` of ours.

:func:`quantize_checkpoint` rounds to nearest (calibrate.py does better with a text). Tensors are stored as the family
names them, so q, k and v stay apart on disk, in any order and by rows, in a directory that can be resumed.

The directory is called ``OUT.partial`` until it is whole. Its safetensors file has its final size and header from the
beginning; ``progress.json`` names the parts that are complete, and what they were made from.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.families import read_json
from gpt_fast.checkpoint.files import companions
from gpt_fast.checkpoint.stored import Report, progress_bar
from gpt_fast.checkpoint.weight_files import Specs, layout, write_rows
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.description import Part, parts
from gpt_fast.quantize.apply import chunk_rows, quantized_part
from gpt_fast.quantize.formats import OwnFormat, plain_weight
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split

_PROGRESS = "progress.json"


class CheckpointWriter:
    """Writes ``specs`` into ``out``, made from the checkpoint ``source`` with ``settings``.

    ``resume`` goes on with what an interrupted run with the same ``source`` and ``settings`` left behind.
    Raises CheckpointError when ``out`` exists, or when there is something left and it is not to be resumed or does not
    fit.
    """

    def __init__(
        self, source: Checkpoint, out: Path, specs: Specs, settings: Mapping[str, Any], resume: bool = False
    ) -> None:
        self.source, self.out = source, out
        self.partial = out.with_name(out.name + ".partial")
        self.made_from = {**settings, "source": _fingerprint(source)}
        self.done: set[str] = set()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out} exists and is not empty; choose another output directory")
        self.path = self.partial / "model.safetensors"
        header, self._begin = layout(specs)
        self._specs = specs
        if self.partial.exists():
            self._take_up(resume)
        else:
            self.partial.mkdir(parents=True)
        if not self.path.exists():
            with open(self.path, "wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(math.prod(s) * d.itemsize for d, s in specs.values()))
            self._note()
        self._file = open(self.path, "r+b")  # noqa: SIM115 - closed by finish or leave

    def _take_up(self, resume: bool) -> None:
        if not resume:
            raise CheckpointError(f"{self.partial} is left from an interrupted run: resume it, or delete it")
        if not self.path.exists():
            return  # interrupted before anything was written
        left = read_json(self.partial / _PROGRESS)
        if left.get("made_from") != self.made_from:
            raise CheckpointError(
                f"{self.partial} was begun with other settings or another checkpoint ({left.get('made_from')}), "
                f"not with {self.made_from}; delete it, or ask for the same"
            )
        self.done = set(left["done"])

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Store ``rows`` of the tensor ``name`` from row ``start`` on."""
        dtype, shape = self._specs[name]
        assert rows.dtype == dtype, (name, rows.dtype)
        assert tuple(rows.shape[1:]) == shape[1:], (name, rows.shape)
        assert start + rows.shape[0] <= shape[0], (name, rows.shape)
        self._file.seek(self._begin[name] + start * math.prod(shape[1:]) * dtype.itemsize)
        write_rows(self._file, rows)

    def complete(self, part: str) -> None:
        """Note that everything of ``part`` is on disk; a resumed run finds it in ``done``."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(part)
        self._note()

    def _note(self) -> None:
        text = json.dumps({"made_from": self.made_from, "done": sorted(self.done)})
        temporary = self.partial / (_PROGRESS + ".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.partial / _PROGRESS)

    def leave(self) -> None:
        """Close the file; what is done stays for another run."""
        self._file.close()

    def finish(self, changes: Mapping[str, Any]) -> None:
        """Add ``config.json``, which is the source's with ``changes``, the tokenizer's files, and give it its name."""
        self._file.close()
        raw = self.source.raw | dict(changes)
        (self.partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for path in companions(self.source.directory):
            shutil.copyfile(path, self.partial / path.name)
        (self.partial / _PROGRESS).unlink()
        if self.out.exists():
            self.out.rmdir()  # empty, as __init__ saw
        self.partial.rename(self.out)


def _fingerprint(source: Checkpoint) -> str:
    """Changes when the checkpoint does: its configuration, and its files' names, sizes and times."""
    digest = hashlib.sha256(json.dumps(source.raw).encode())
    for path in source.files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


class Source(NamedTuple):
    """An unquantized checkpoint and how it is to be quantized."""

    checkpoint: Checkpoint
    quant: QuantConfig

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def scheme_of(self, module: str) -> Scheme | Split | None:
        """How the linear layer ``module`` is to be stored."""
        return self.quant.scheme(module, self.config)


def source_of(checkpoint: Checkpoint, quant: QuantConfig) -> Source:
    """Raises CheckpointError for a checkpoint that is quantized already, ConfigError for groups that fit no layer."""
    directory = checkpoint.directory
    if checkpoint.format.method is not None:
        raise CheckpointError(
            f"{directory} is quantized already ({checkpoint.format.method}); start from the unquantized checkpoint"
        )
    source, wanted = Source(checkpoint, quant), quant.blocks
    schemes = [quantized_part(part, source.scheme_of)[1] for part in parts(source.config)]
    if wanted is not None and wanted not in schemes:
        raise ConfigError(
            f"group_size: {wanted.group_size} fits no layer of {directory}; the inputs must fill whole groups"
        )
    return source


def begin_writing(
    source: Source, out: str | Path, settings: Mapping[str, Any], resume: bool = False
) -> CheckpointWriter:
    """The writer of everything that ``source`` becomes."""
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for part in parts(source.config):
        wanted = OwnFormat(source.quant).tensors(*quantized_part(part, source.scheme_of))
        for name, (dtype, shape) in wanted.items():
            specs[name] = (dtype or source.checkpoint.tensors[name].dtype, shape)
    return CheckpointWriter(source.checkpoint, Path(out), specs, {**source.quant.to_json(), **settings}, resume)


def finish_writing(source: Source, writer: CheckpointWriter) -> None:
    """Give the checkpoint its name and its ``config.json``."""
    tied = source.config.tie_embeddings
    writer.finish({"quantization_config": source.quant.to_json(), "tie_word_embeddings": tied})


def write_part(source: Source, writer: CheckpointWriter, part: Part, report: Report = None) -> None:
    """Write one tensor of ``source``, rounded to nearest if it is to be quantized and as it is otherwise."""
    tensor, (_, scheme) = plain_weight(part, source.checkpoint.tensors), quantized_part(part, source.scheme_of)
    prefix = part.source.removesuffix("weight")
    for begin, rows in tensor.pieces(report, chunk_rows(tensor.shape[1]) if scheme else None):
        if scheme is None:
            writer.write(part.source, begin, rows)
        else:
            for name, quantized in quantize_rows(rows, scheme).items():
                writer.write(prefix + name, begin, quantized)


def quantize_checkpoint(
    checkpoint: Checkpoint, out: str | Path, quant: QuantConfig, *, resume: bool = False, progress: bool = False
) -> None:
    """Write ``checkpoint`` quantized by rounding to nearest as ``out``, which must not exist yet.

    Holds a few megabytes of weights at a time. Raises CheckpointError.
    """
    source = source_of(checkpoint, quant)
    writer = begin_writing(source, out, {"method": "rtn"}, resume)
    blocks: dict[str, list[Part]] = {}  # by the beginning of their parameters' names
    for part in parts(source.config):
        blocks.setdefault(part.target.rpartition(".")[0].rpartition(".")[0], []).append(part)
    wanted = {name: own for name, own in blocks.items() if name not in writer.done}
    total = sum(source.checkpoint.tensors[part.source].num_bytes for own in wanted.values() for part in own)
    try:
        with progress_bar(total, progress, "quantizing") as report, torch.no_grad():
            for name, own in wanted.items():
                for part in own:
                    write_part(source, writer, part, report)
                writer.complete(name)
    except BaseException:
        writer.leave()
        raise
    finish_writing(source, writer)
