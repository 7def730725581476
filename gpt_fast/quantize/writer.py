"""A quantized checkpoint being written: tensors in any order and by rows, in a directory that can be resumed.

The directory is called ``OUT.partial`` until it is whole. Its safetensors file has its final size and header from the
beginning; ``progress.json`` names the parts that are complete, and what they were made from.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast.checkpoint.convert import COMPANIONS
from gpt_fast.checkpoint.families import read_json
from gpt_fast.checkpoint.loading import weight_files
from gpt_fast.checkpoint.safetensors_file import CODES
from gpt_fast.errors import CheckpointError

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor by name
_PROGRESS = "progress.json"


class CheckpointWriter:
    """Writes ``specs`` into ``out``, made from the Hugging Face directory ``source`` with ``settings``.

    ``resume`` goes on with what an interrupted run with the same ``source`` and ``settings`` left behind.
    Raises CheckpointError when ``out`` exists, or when there is something left and it is not to be resumed or does not
    fit.
    """

    def __init__(
        self, source: Path, out: Path, specs: Specs, settings: Mapping[str, Any], resume: bool = False
    ) -> None:
        self.source, self.out = source, out
        self.partial = out.with_name(out.name + ".partial")
        self.made_from = {**settings, "source": _fingerprint(source)}
        self.done: set[str] = set()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out} exists and is not empty; choose another output directory")
        self.path = self.partial / "model.safetensors"
        header, self._begin = _layout(specs)
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
        self._offset = len(header)
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
        rows = rows.contiguous()
        size = rows.numel() * rows.element_size()
        self._file.seek(self._offset + self._begin[name] + start * math.prod(shape[1:]) * dtype.itemsize)
        self._file.write((ctypes.c_char * size).from_address(rows.data_ptr()))

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
        raw = read_json(self.source / "config.json") | dict(changes)
        (self.partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        companions = [self.source / name for name in COMPANIONS] + list(self.source.glob("*.tiktoken"))
        for path in companions:
            if path.is_file():
                shutil.copyfile(path, self.partial / path.name)
        (self.partial / _PROGRESS).unlink()
        if self.out.exists():
            self.out.rmdir()  # empty, as __init__ saw
        self.partial.rename(self.out)


def _layout(specs: Specs) -> tuple[bytes, dict[str, int]]:
    """The file's header, and where each tensor begins in its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin: dict[str, int] = {}
    end = 0
    # Widest dtypes first, so that every tensor is aligned to its own.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        begin[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begin


def _fingerprint(source: Path) -> str:
    """Changes when the checkpoint does: its configuration, and its files' names, sizes and times."""
    digest = hashlib.sha256((source / "config.json").read_bytes())
    for path in weight_files(source):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
