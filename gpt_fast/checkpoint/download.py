"""Checkpoints from the Hugging Face Hub: the files that are needed, and plain words when they cannot be had."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download

from gpt_fast.checkpoint.files import COMPANIONS, is_one
from gpt_fast.errors import DownloadError


def download(
    repo: str,
    revision: str | None = None,
    out_dir: str | Path | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Fetch the checkpoint ``repo`` ("owner/name") and return its directory.

    ``revision``: branch, tag or commit; None: the main branch. ``out_dir``: None means the Hub's cache, where a second
    download finds everything. ``token``: None means $HF_TOKEN or a stored login. ``endpoint``: None means $HF_ENDPOINT
    or the public Hub. An interrupted download goes on where it stopped.

    Raises DownloadError when the repository is gated, absent or holds no checkpoint, when the Hub cannot be reached,
    and when the disk is full.
    """
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(repo, revision=revision)
        files = choose([sibling.rfilename for sibling in info.siblings or []], repo)
        # The commit instead of the branch, so that the files are those of the listing.
        found = snapshot_download(
            repo, revision=info.sha, local_dir=out_dir, token=token, endpoint=endpoint, allow_patterns=files
        )
    except Exception as e:  # the library's, the system's, and its transport's, which has changed its name before
        if words := _explain(e, repo, revision, out_dir):
            raise DownloadError(words) from e
        raise
    missing = [name for name in files if not Path(found, name).is_file()]
    if missing:
        # With the Hub gone half-way the library is content with whatever the directory held before.
        raise DownloadError(
            f"{repo}: {len(missing)} files did not arrive, such as {missing[0]}; run the same command again"
        )
    return Path(found)


def find_local(named: str) -> Path | None:
    """The absolute path of the folder or file ``named``; None where that is no path but may be a repository of the Hub,
    "owner/name". Raises DownloadError for what is neither."""
    path = Path(named).expanduser()
    if path.exists():
        return path.absolute()
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", named):
        raise DownloadError(f"{named} does not exist, and is no name of the Hub, which is owner/name")
    return None


def choose(names: list[str], repo: str) -> list[str]:
    """The files of a repository that make a checkpoint. Raises DownloadError when there is none."""
    top = [name for name in names if "/" not in name]  # subfolders hold other formats of the same weights
    safe = [name for name in top if name.endswith(".safetensors")]
    weights = safe or [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    index = ".safetensors.index.json" if safe else ".bin.index.json"
    texts = [name for name in top if name.endswith(".json") or is_one(name, COMPANIONS)]
    if not weights or "config.json" not in texts:
        what = "no config.json" if weights else "no weights in .safetensors or pytorch_model*.bin files"
        raise DownloadError(f"{repo} is not a checkpoint that can be loaded: it has {what}")
    return sorted([name for name in texts if name.endswith(index) or not name.endswith(".index.json")] + weights)


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
        return f"{repo}: the Hub answered {status}; try again later. {_first_line(error)}"
    transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if transport or isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)):
        return (
            f"{repo}: the Hub cannot be reached ({_first_line(error)}); check the network, its proxy settings and "
            "HF_ENDPOINT, or copy the files by hand and give their directory"
        )
    if isinstance(error, OSError):
        where = out_dir or "the Hub's cache (HF_HOME moves it)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{repo}: no space left for it in {where}; free some or choose another place, then run this again"
        return f"{repo} cannot be written to {where}: {error}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
