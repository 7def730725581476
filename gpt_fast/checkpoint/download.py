"""Checkpoints from the Hugging Face Hub: the files that are needed, and plain words when they cannot be had."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache

from gpt_fast.checkpoint.files import ADAPTER_WEIGHTS, COMPANIONS, NAME_OF_HUB, RIGHTS, SINGLE, belongs, is_one
from gpt_fast.errors import CheckpointError, DownloadError, first_line, some
from gpt_fast.gguf import all_parts, first_part

log = logging.getLogger(__name__)


def download(
    repo: str,
    file: str | None = None,
    *,
    revision: str | None = None,
    out_dir: str | Path | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Fetch the checkpoint ``repo`` ("owner/name") and return its directory; or its GGUF model ``file``, by any of its
    parts, and return that file, the first of several.

    ``revision``: branch, tag or commit; None: the main branch. ``out_dir``: None means the Hub's cache, where a second
    download finds everything, also while the Hub cannot be reached. ``token``: None means $HF_TOKEN or a stored login.
    ``endpoint``: None means $HF_ENDPOINT or the public Hub. An interrupted download keeps the files
    that are whole, and fetches the others anew.

    Raises DownloadError when the repository is gated, absent or holds no checkpoint or no such file, when the Hub
    cannot be reached, and when the disk is full.
    """
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or []]
        files = choose(names, repo) if file is None else choose_gguf(names, repo, file)
        # The commit instead of the branch, so that the files are those of the listing.
        found = snapshot_download(
            repo, revision=info.sha, local_dir=out_dir, token=token, endpoint=endpoint, allow_patterns=files
        )
    except Exception as e:  # the library's, the system's, and its transport's, which has changed its name before
        if out_dir is None and _is_unreachable(e) and (kept := _cached(repo, file, revision)):
            log.warning("%s: the Hub cannot be reached (%s); what its cache holds is taken", repo, first_line(e))
            return kept
        if words := _explain(e, repo, revision, out_dir):
            raise DownloadError(words) from e
        raise
    missing = [name for name in files if not Path(found, name).is_file()]
    if missing:
        # With the Hub gone half-way the library is content with whatever the directory held before.
        raise DownloadError(
            f"{repo}: {len(missing)} files did not arrive, such as {missing[0]}; run the same command again"
        )
    if out_dir is None and revision != info.sha:
        _note_commit(Path(found), revision or "main")
    return Path(found) if file is None else Path(found, files[0])


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """For a program that does nothing else meanwhile: Ctrl-C, SIGTERM and SIGHUP end the process.

    The library's threads go on to the ends of their files, however large these are, and Python would wait for them.
    What they have of those the library never takes up again: it is removed, where the system says what is open."""

    def end(number: int, _: object) -> None:
        for opened in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(OSError):
                if (file := os.readlink(opened)).endswith(".incomplete"):
                    os.unlink(file)
        os.write(2, b"\ninterrupted: the same command keeps the files that are whole, and fetches the others\n")
        os._exit(128 + number)

    hearing = threading.current_thread() is threading.main_thread()
    asked = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in asked} if hearing else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find(named: str) -> Path:
    """The absolute path of the folder or file ``named``, or else of the repository of the Hub, "owner/name", or of a
    GGUF file in one, "owner/name/file.gguf", which is fetched. Raises DownloadError."""
    if path := _here(named):
        return path
    of_hub = NAME_OF_HUB.fullmatch(named)
    return download(of_hub["repo"], of_hub["file"]) if of_hub else download(named)


def find_local(named: str) -> Path | None:
    """The absolute path of the folder or file ``named``; None where that is no path but may be a repository of the Hub
    or a file of one, as in :func:`find`. Raises DownloadError for what is neither. (The Hub's oldest names, such as
    gpt2, have no owner; here a single word is more often a folder's name that is spelled wrong.)"""
    path = _here(named)
    if path is None and not NAME_OF_HUB.fullmatch(named):
        raise DownloadError(f"{named} does not exist, and is no name of the Hub: owner/name, or owner/name/file.gguf")
    return path


def _here(named: str) -> Path | None:
    path = Path(named).expanduser()
    return path.absolute() if path.exists() else None


def choose(names: list[str], repo: str) -> list[str]:
    """The files of a repository that make a checkpoint. Raises DownloadError when there is none."""
    top = [name for name in names if "/" not in name]  # subfolders hold other formats of the same weights
    safe = [name for name in top if name.endswith(".safetensors") and belongs(name) and name not in ADAPTER_WEIGHTS]
    safe = [SINGLE[0]] if SINGLE[0] in safe else safe  # else shards, which may have any names: their index has them
    weights = safe or [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    index = ".safetensors.index.json" if safe else ".bin.index.json"
    texts = [name for name in top if name.endswith(".json") or is_one(name, COMPANIONS)]
    if not weights or "config.json" not in texts:
        what = "no config.json" if weights else "no weights in .safetensors or pytorch_model*.bin files"
        models = _models(names)
        todo = f"; of its GGUF files name one, such as {some(models)}" if models else ""
        raise DownloadError(f"{repo} is not a checkpoint that can be loaded: it has {what}{todo}")
    return sorted([name for name in texts if name.endswith(index) or not name.endswith(".index.json")] + weights)


def choose_gguf(names: list[str], repo: str, file: str) -> list[str]:
    """The files of a repository that make its GGUF model ``file``, the first part first, and its licences. Raises
    DownloadError when there is none."""
    parts = [part.as_posix() for part in all_parts(first_part(Path(file)))]
    if not file.endswith(".gguf"):
        raise DownloadError(f"{file} is no GGUF file; without it the whole checkpoint {repo} is fetched")
    if missing := [part for part in parts if part not in names]:
        models = _models(names)
        known = f"it has {some(models)}" if models else "it has no GGUF file"
        raise DownloadError(f"{repo} has no file {missing[0]}; {known}")
    return parts + sorted(name for name in names if "/" not in name and is_one(name, RIGHTS))


def _models(names: list[str]) -> list[str]:
    """The GGUF models among the files of a repository, by their first parts."""
    return sorted({first_part(Path(name)).as_posix() for name in names if name.endswith(".gguf")})


def _explain(error: Exception, repo: str, revision: str | None, out_dir: str | Path | None) -> str | None:
    """What went wrong and what to do; None for what nobody foresaw. The most particular kind first: they inherit."""
    # fmt: off
    known: dict[type[Exception], str] = {
        errors.GatedRepoError:
            f"{repo} is gated: accept its licence on the model's page of the Hub, then set HF_TOKEN to an access token "
            "of that account (or run `hf auth login`) and try again",
        errors.RevisionNotFoundError: f"{repo} has no revision {revision!r}; leave it out for the main branch",
        errors.RepositoryNotFoundError:
            f"{repo} does not exist on the Hub, or is private: check the spelling (owner/name), or set HF_TOKEN to a "
            "token that may read it",
        errors.HFValidationError: f"{repo!r} is not the name of a repository, which is owner/name: {error}",
        errors.OfflineModeIsEnabled: f"{repo} cannot be fetched: HF_HUB_OFFLINE is set",
    }
    # fmt: on
    for kind, words in known.items():
        if isinstance(error, kind):
            return words
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else "an error"
        if status == 401:
            return f"{repo}: the Hub refuses the access token (401); check HF_TOKEN, or unset it for public models"
        return f"{repo}: the Hub answered {status}; try again later. {first_line(error)}"
    if _is_unreachable(error):
        return (
            f"{repo}: the Hub cannot be reached ({first_line(error)}); check the network, its proxy settings and "
            "HF_ENDPOINT, or copy the files by hand and give their directory"
        )
    if isinstance(error, OSError) and error.errno is None:  # the library's own, about what has come
        return f"{repo}: {first_line(error)}; run the same command again"
    if isinstance(error, OSError):
        where = out_dir or "the Hub's cache (HF_HOME moves it)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{repo}: no space left for it in {where}; free some or choose another place, then run this again"
        return f"{repo} cannot be written to {where}: {error}"
    return None


def _is_unreachable(error: Exception) -> bool:
    """Whether the Hub did not answer, or has a fault itself."""
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return bool(error.response.status_code >= 500)
    # The second also stands for redirections without an end.
    transport = any(kind.__name__ in ("TransportError", "TooManyRedirects") for kind in type(error).__mro__)
    silent = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
    return transport or isinstance(error, silent)


def _cached(repo: str, file: str | None, revision: str | None) -> Path | None:
    """What :func:`download` would return, where the Hub's cache has all the weights of it."""
    from gpt_fast.checkpoint.weight_files import weight_files  # here, because torch takes a second

    first = "config.json" if file is None else first_part(Path(file)).as_posix()
    found = try_to_load_from_cache(repo, first, revision=revision)
    if not isinstance(found, str):
        return None
    if file is not None:
        return Path(found) if all(part.is_file() for part in all_parts(Path(found))) else None
    try:
        weight_files(Path(found).parent)
    except CheckpointError:
        return None
    return Path(found).parent


def _note_commit(snapshot: Path, revision: str) -> None:
    """Write into the Hub's cache which commit ``revision`` is: for a commit alone the library writes nothing."""
    note = snapshot.parent.parent / "refs" / revision
    with contextlib.suppress(OSError):  # a cache that is full of files and read-only is a good one
        if not note.is_file() or note.read_text() != snapshot.name:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(snapshot.name)
