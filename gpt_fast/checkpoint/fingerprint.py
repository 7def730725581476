"""A digest of a checkpoint: equal for equal files, whatever their folder is called.

It sees every byte of the weights, of ``config.json`` (where there is none, of Meta's ``params.json``) and of the
tokenizer, chat template and generation defaults, and the names of these files; of adapters every byte, and the weight
of each. It does not see licences, readmes and other files. The digest of a large file is remembered in the user's cache
folder, and taken from there while the file is the same one (device and inode) and has the same size and times; the time
of its last change (ctime) is set by the system, so a file that is written in place is read again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.files import RIGHTS, companions, is_one
from gpt_fast.checkpoint.stored import Report, progress_bar
from gpt_fast.foreign.checkpoint import ForeignCheckpoint
from gpt_fast.user_cache import private_folder, trusted

REMEMBERED_BYTES = 2**26  # files from this size on: smaller ones are read in a fraction of a second
_PIECE = 2**22  # bytes read at a time
_CONFIGS = ("config.json", "params.json")  # the first there is counts; llama2.c's files need none


def fingerprint(checkpoint: Checkpoint | ForeignCheckpoint, progress: bool = False) -> str:
    """SHA-256 of what decides the answers of ``checkpoint``, in hexadecimal. ``progress`` shows a bar on a terminal."""
    folder = checkpoint.directory
    configs = [folder / name for name in _CONFIGS if (folder / name).is_file()][:1]
    others = [] if checkpoint.alone else [*configs, *companions(folder)]
    files = sorted({*checkpoint.files, *(path for path in others if not is_one(path.name, RIGHTS))})
    with progress_bar(sum(file.stat().st_size for file in files), progress, "digest of the weights") as report:
        digests: list[tuple[str | float, ...]] = [(file.name, _file_digest(file, report)) for file in files]
        for adapter in checkpoint.adapters:
            digests.append((adapter.weight, *(_file_digest(file, report) for file in adapter.files)))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _file_digest(file: Path, report: Report) -> str:
    """SHA-256 of the content of ``file``, from the user's cache folder where it is remembered."""
    found = file.stat()
    if found.st_size < REMEMBERED_BYTES:
        return _read(file, report)
    facts = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()
    note = private_folder("digests") / f"{place}.json"
    if trusted(note) and (known := _note(note)).get("facts") == facts:
        if report:
            report(found.st_size)
        return str(known["digest"])
    digest = _read(file, report)
    note.write_text(json.dumps({"file": str(file), "facts": facts, "digest": digest}), encoding="utf-8")
    return digest


def _note(note: Path) -> dict[str, object]:
    """What ``note`` says; nothing if its writer was interrupted."""
    try:
        return dict(json.loads(note.read_text(encoding="utf-8")))
    except ValueError:
        return {}


def _read(file: Path, report: Report) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            if report:
                report(len(piece))
    return digest.hexdigest()
