"""Writes quantized checkpoints: Hugging Face directories whose ``config.json`` has a ``quantization_config`` of ours.

:func:`quantize_checkpoint` rounds to nearest (calibrate.py does better with a text). Tensors are stored as the family
names them, so q, k and v stay apart on disk. They may be written in any order and by rows.

The directory is called ``OUT.partial`` until it is whole. Its safetensors file has its final size and header from the
beginning; ``progress.json`` names the blocks that are complete, and what they were made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.saving import new_folder
from gpt_fast.checkpoint.stored import Report, progress_bar
from gpt_fast.checkpoint.weight_files import layout, write_rows
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.model.describing import parts
from gpt_fast.model.description import Part
from gpt_fast.quantize.formats import OwnFormat, RoundedFormat, beside, plain_weight
from gpt_fast.quantize.scheme import QuantConfig

_PROGRESS = "progress.json"


class CheckpointWriter:
    """Writes ``source``, quantized as ``quant`` says, to ``out``: a context that leaves it complete, or to be resumed.

    ``settings``: what else decides the result. ``rounding``: how weights become what ``quant`` says; None: to nearest.
    ``resume`` goes on with what an interrupted run with the same arguments
    left behind. ``blocks``: the parts of each block of the model by its prefix; ``done``: prefixes of blocks on disk.
    Raises CheckpointError for a ``source`` that is quantized already, when ``out`` exists, or when something is left
    behind and it is not to be resumed or does not fit; ConfigError for groups that fit no layer.
    """

    def __init__(
        self, source: Checkpoint, quant: QuantConfig, out: Path, settings: Mapping[str, Any], resume: bool,
        rounding: RoundedFormat | None = None,
    ) -> None:  # fmt: skip
        self.source, self.quant, self.out, self.form = source, quant, new_folder(out), OwnFormat(quant)
        self.rounding = rounding or RoundedFormat(quant)
        self._check_source()
        self.blocks = {
            f"{name}.": list(own) for name, own in groupby(parts(source.config), lambda p: p.target.rsplit(".", 2)[0])
        }
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.path = self.partial / "model.safetensors"
        self.made_from = {**quant.to_json(), **settings, "source": _fingerprint(source)}
        self.done: set[str] = set()
        specs = self.form.specs(source.config)
        kept = source.format.dtype
        self._specs = {n: (dtype or kept or source.tensors[n].dtype, shape) for n, (dtype, shape) in specs.items()}
        header, self._begin = layout(self._specs)
        if self.partial.exists():
            self._take_up(resume)
        else:
            self.partial.mkdir(parents=True)
        if not self.path.exists():
            with open(self.path, "wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(math.prod(s) * d.itemsize for d, s in self._specs.values()))
            self._note()
        self._file = self._opened()

    def _check_source(self) -> None:
        form, path, wanted = self.source.format, self.source.path, self.quant.blocks
        if not form.has_values:
            raise CheckpointError(f"{path} is quantized already ({form.method}); start from the unquantized checkpoint")
        schemes = [self.form.held(part, self.source.config)[1] for part in parts(self.source.config)]
        if wanted is not None and wanted not in schemes:
            raise ConfigError(
                f"group_size: {wanted.group_size} fits no layer of {path}; the inputs must fill whole groups"
            )

    def _opened(self) -> BinaryIO:
        """The file of the tensors, which no other run has until it is closed. Raises CheckpointError if one has it."""
        file = open(self.path, "r+b")  # noqa: SIM115 - closed by __exit__
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            todo = "wait for it, or choose another output directory"
            raise CheckpointError(f"another run writes {self.partial}: {todo}") from None
        except OSError:
            pass  # a file system without locks
        return file

    def _take_up(self, resume: bool) -> None:
        if self.path.exists():
            self._opened().close()
        if not resume:
            raise CheckpointError(f"{self.partial} is left from an interrupted run: go on with --resume, or delete it")
        noted = self.partial / _PROGRESS
        if not (noted.exists() and self.path.exists()):
            self.path.unlink(missing_ok=True)  # interrupted before anything was noted
            return
        left = read_json(noted)
        if left.get("made_from") != self.made_from:
            raise CheckpointError(
                f"{self.partial} was begun with other settings or another checkpoint ({left.get('made_from')}), "
                f"not with {self.made_from}; delete it, or ask for the same"
            )
        self.done = set(left["done"])

    def num_bytes(self, block: str) -> int:
        """Bytes that ``block`` has in the source."""
        return sum(self.source.tensors[part.source].num_bytes for part in self.blocks[block])

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Store ``rows`` of the tensor ``name`` from row ``start`` on."""
        dtype, shape = self._specs[name]
        assert (rows.dtype, *rows.shape[1:]) == (dtype, *shape[1:]), (name, rows.dtype, rows.shape)
        assert start + rows.shape[0] <= shape[0], (name, rows.shape)
        self._file.seek(self._begin[name] + start * math.prod(shape[1:]) * dtype.itemsize)
        write_rows(self._file, rows)

    def write_part(self, part: Part, report: Report = None) -> None:
        """Write one tensor of the source, quantized if it is to be and as it is otherwise."""
        stored, (_, scheme) = plain_weight(part, self.source.tensors), self.form.held(part, self.source.config)
        if scheme is None:
            for begin, rows in stored.pieces(report):
                self.write(part.source, begin, rows.to(self._specs[part.source][0]))
        else:
            for begin, tensors in self.rounding.pieces(stored, scheme, "cpu", report):
                for name, rows in tensors.items():
                    self.write(beside(part, name), begin, rows)

    def round_block(self, block: str, report: Report) -> None:
        """Write every part of ``block`` by :meth:`write_part`."""
        for part in self.blocks[block]:
            self.write_part(part, report)
        self.complete(block)

    def complete(self, block: str) -> None:
        """Note that all of ``block`` is on disk; a resumed run finds it in ``done``."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(block)
        self._note()

    def _note(self) -> None:
        text = json.dumps({"made_from": self.made_from, "done": sorted(self.done)})
        temporary = self.partial / (_PROGRESS + ".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.partial / _PROGRESS)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and error.filename is None:  # of a disk that is full
            error.filename = str(self.partial)
        self._file.close()
        if error is None:
            self._finish()

    def _finish(self) -> None:
        """Add ``config.json`` and the tokenizer's files, and give the directory its name."""
        tied = self.source.config.tie_embeddings
        raw = self.source.raw | {"quantization_config": self.quant.to_json(), "tie_word_embeddings": tied}
        (self.partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        self.source.save_companions(self.partial)
        (self.partial / _PROGRESS).unlink()
        if self.out.exists():
            self.out.rmdir()  # empty, as __init__ saw
        self.partial.rename(self.out)


def _fingerprint(source: Checkpoint) -> str:
    """Changes when the checkpoint does: its configuration, and its files' names, sizes and times."""
    digest = hashlib.sha256(json.dumps(source.raw).encode())
    digest.update(json.dumps(dict(source.lora)).encode() if source.lora else b"")
    for path in [*source.files, *(file for adapter in source.adapters for file in adapter.files)]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def quantize_checkpoint(
    checkpoint: Checkpoint, out: Path, quant: QuantConfig, *, resume: bool = False, progress: bool = False,
    rounding: RoundedFormat | None = None,
) -> None:  # fmt: skip
    """Write ``checkpoint`` quantized as ``out``, which must not exist yet; by ``rounding``, or to nearest.

    Holds a few megabytes of weights at a time. Raises as :class:`CheckpointWriter` does.
    """
    with CheckpointWriter(checkpoint, quant, out, {"method": "rtn"}, resume, rounding) as writer:
        left = [block for block in writer.blocks if block not in writer.done]
        with progress_bar(sum(map(writer.num_bytes, left)), progress, "quantizing") as report:
            for block in left:
                writer.round_block(block, report)
