"""The user's own folder for what is made once: kernel libraries, and what torch.compile has made.

Files loaded from there run as code. So its folders are made for their owner alone, and a file is used only if nobody
else could have written it.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """``$GPT_FAST_CACHE``, else ``$XDG_CACHE_HOME/gpt_fast``, else ``~/.cache/gpt_fast``."""
    if os.environ.get("GPT_FAST_CACHE"):
        return Path(os.environ["GPT_FAST_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_fast"


def why_untrusted(path: Path) -> str | None:
    """Why somebody else could have written ``path``, a file or folder; None if nobody could. It and the folder around
    it must be this user's or root's, and nobody else may write either."""
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to somebody else"
        if status.st_mode & _OTHERS_WRITE and not (place.is_dir() and status.st_mode & stat.S_ISVTX):
            return f"others may write {place} (chmod go-w)"
    return None


def trusted(file: Path) -> bool:
    """Whether ``file`` is there and nobody else can have written it; a warning says why it is not used."""
    if not file.exists():
        return False
    why = why_untrusted(file)
    if why is not None:
        log.warning("%s is not used: %s", file, why)
    return why is None


def private_folder(name: str) -> Path:
    """The folder ``name`` in :func:`cache_dir`, made if need be, for this user alone. One that others could write in is
    emptied. If it cannot be made, or others hold the folder around it, a temporary one replaces it until this process
    ends, after one warning."""
    try:
        folder = cache_dir() / name
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What $GPT_FAST_CACHE names may hold other things; the rest is this package's own.
        for place in [folder] if os.environ.get("GPT_FAST_CACHE") else [folder.parent, folder]:
            _make_private(place)
        why = why_untrusted(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        why = str(error)
    if why is None:
        return folder
    folder = Path(_temporary(why).name) / name
    folder.mkdir(exist_ok=True)
    return folder


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.getuid() and status.st_mode & _OTHERS_WRITE:
        log.warning("%s is emptied, because others could write in it", folder)
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)


@functools.cache
def _temporary(why: str) -> tempfile.TemporaryDirectory[str]:
    log.warning("what is built is not kept for the next start: %s", why)
    return tempfile.TemporaryDirectory(prefix="gpt-fast-")  # for its owner alone; removed at exit
