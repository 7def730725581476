"""Build an archive that TorchServe loads as it is: handler, package, configuration and, unless told otherwise, weights.

    gpt-fast archive --checkpoint DIR [--draft DIR] [--lora DIR] [--by-reference] [--format zip-store] [--output DIR]

torch-model-archiver does the packing. Around it: the package gpt_fast stays a folder (--extra-files unpacks folders),
the working place is not ``/tmp/<model name>`` (which it deletes first), and a checkpoint is copied only once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.checkpoint.files import choose_adapter_files, choose_files, copy_files, narrow, the_checkpoint
from gpt_fast.config import DRAFTS
from gpt_fast.errors import ConfigError
from gpt_fast.serve.config_text import with_keys
from gpt_fast.serve.model_yaml import NAME, STARTUP_S
from gpt_fast.serve.repository import PACKAGE, ROOT, SHIPPED
from gpt_fast.serve.settings import check, check_file, find_named, names_of

SUFFIXES = {"no-archive": "", "default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


class _Model(NamedTuple):
    """A checkpoint or an adapter that the archive comes with. ``folder``: its place in the archive. ``value``: how the
    handler's key names it. ``files``: to copy into the folder; none where ``value`` is a path outside."""

    folder: str
    value: str
    files: tuple[Path, ...] = ()


class _Taking(NamedTuple):
    """How they are taken along: :func:`build_archive` has these parameters."""

    by_reference: bool
    follow_links: bool
    say: Callable[[str], None]


def build_archive(
    checkpoint: str | Path,
    *,
    draft: str | Path | None = None,
    lora: Mapping[str, float] | None = None,
    name: str = "gpt-fast",
    version: str = "1.0",
    archive_format: str = "no-archive",
    config: str | Path | None = None,
    handler: str | Path | None = None,
    keys: Mapping[str, Any] | None = None,
    output: str | Path = "model_store",
    by_reference: bool = False,
    follow_links: bool = False,
    startup_s: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the archive and return its path; an earlier archive of the same name is replaced.

    ``checkpoint``: a folder, or a file with what belongs to it beside it. The files go into the archive's folder
    ``checkpoint``; with ``by_reference`` the archive names the absolute path instead and stays small. ``draft``: the
    same for a model that guesses tokens ahead; None: the one that ``config`` names by a relative path, if it does.
    ``lora``: the same for folders of LoRA adapters, each with its weight; they become ``lora/1``, ``lora/2`` and so on.
    ``archive_format``: "no-archive" (a folder, the fastest), "default" (.mar), "zip-store" (.mar, not compressed,
    the better one for weights) or "tgz". ``config`` and ``handler``: None means the repository's. ``keys``: of the
    handler block, in the place of those that ``config`` has. ``follow_links``: copy files of the checkpoint that are
    links out of its folder, too. ``startup_s``: the seconds that the model must have to load, at least. ``say`` is told
    what was left out.

    Raises ConfigError for what cannot be packed, for a wrong configuration (with file and line) and for a full disk."""
    _check_options(name, version, archive_format)
    config, handler, keys = Path(config or ROOT / NAME), Path(handler or ROOT / "handler.py"), keys or {}
    for what, path in (("config", config), ("handler", handler)):
        if not path.exists():
            raise ConfigError(f"{what}: {path} does not exist")
    before = check_file(config).config
    block, taking = {**(before.get("handler") or {}), **keys}, _Taking(by_reference, follow_links, say)
    sources = {"checkpoint": checkpoint, "draft": draft or _draft_of(config, block)}
    models = [_model(key, Path(path), taking) for key, path in sources.items() if path is not None]
    adapters = _adapters(lora, config, block, taking)
    named = {model.folder: model.value for model in models} | {"lora": {a.value: w for a, w in adapters.items()}}
    too_short = startup_s > before.get("startupTimeout", STARTUP_S)
    own = {"startupTimeout": startup_s} if too_short else {}
    text = with_keys(config, before, {**keys, **{key: value for key, value in named.items() if value}}, own)
    target = Path(output).resolve() / (name + SUFFIXES[archive_format])
    if target.is_dir() and any(target.iterdir()) and not (target / "MAR-INF" / "MANIFEST.json").is_file():
        raise ConfigError(f"{target} exists and is not an archive; it is left alone")
    try:
        with _beside(target) as work:
            (work / NAME).write_text(text, encoding="utf-8")
            narrow(work / NAME, [config])
            built = _pack(work, [*models, *adapters], name, version, archive_format, handler)
            _replace(target, built, work)
    except OSError as error:
        if reason := _no_room(str(error)):
            raise ConfigError(f"{target} cannot be written: {reason}") from error
        raise
    return target


def _replace(target: Path, built: Path, work: Path) -> None:
    """Give ``built`` the name ``target``. An earlier archive of this name goes to ``work``; another command may put its
    own there at any moment."""
    for turn in itertools.count():
        if target.is_dir():
            with contextlib.suppress(FileNotFoundError):
                os.replace(target, work / f"earlier-{turn}")
        try:
            return os.replace(built, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder on the file system of ``target``, so that the archive is moved, not copied; hidden from TorchServe."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(prefix=".archive-", dir=target.parent)
    try:
        yield Path(scratch.name)
    finally:
        try:
            scratch.cleanup()
        except BaseException:  # a signal may come now, too
            scratch.cleanup()
            raise


def _check_options(name: str, version: str, archive_format: str) -> None:
    if archive_format not in SUFFIXES:
        raise ConfigError(f"format: {archive_format!r} is not one of {', '.join(SUFFIXES)}")
    for what, word in (("name", name), ("version", version)):  # both are parts of the routes
        if not _NAME.fullmatch(word):
            raise ConfigError(f"{what}: {word!r} must be letters, digits, '_', '-' and '.', not starting with a sign")


def _draft_of(config: Path, block: Mapping[str, Any]) -> Path | None:
    """The draft model that the handler ``block`` of ``config`` names by a path that is not absolute. It starts at the
    file's folder, or where this command runs: there is no archive yet."""
    named = next((block[name] for name in names_of("draft") if block.get(name) is not None), None)
    if named in (None, *DRAFTS) or Path(named).expanduser().is_absolute():
        return None
    return _find(named, config, "draft", "Name the draft model with --draft DIR")


def _find(named: str, config: Path, key: str, todo: str) -> Path:
    """Where the ``named`` folder of ``key`` in ``config`` is: beside that file, or where this command runs."""
    try:
        return find_named(Path(named), config.absolute().parent, key)
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}. {todo}") from None


def _model(key: str, path: Path, taking: _Taking) -> _Model:
    """The checkpoint at ``path``, for the archive. Raises ConfigError."""
    source = _source(key, path)
    if (opened := the_checkpoint(source)).is_dir() and not (opened / "config.json").is_file():
        raise ConfigError(f"{key}: {opened} is no checkpoint: it holds no config.json")
    if taking.by_reference:
        return _Model(key, str(source))
    named = "" if source.is_dir() else source.name
    files, left_out = choose_files(source.parent if named else source, named, taking.follow_links)
    if not files:
        raise ConfigError(f"{key}: {source} holds no file that a checkpoint has, such as config.json")
    if left_out:
        taking.say(f"left out of {key}: {', '.join(left_out)}")
    return _Model(key, f"{key}/{named}".rstrip("/"), files)


def _source(key: str, path: Path) -> Path:
    """``path``, absolute and without links in the folder's path; a file that is itself a link stays in the folder it
    was named in. Raises ConfigError where nothing is there."""
    source = path.expanduser().absolute()
    source = source.resolve() if source.is_dir() else source.parent.resolve() / source.name
    if not source.exists():
        raise ConfigError(f"{key}: {source} does not exist")
    return source


def _adapters(
    lora: Mapping[str, float] | None, config: Path, block: Mapping[str, Any], taking: _Taking
) -> dict[_Model, float]:
    """The LoRA adapters of ``lora``, each with its weight; None: those that the handler ``block`` of ``config`` names,
    if one of them by a path that is not absolute. Absolute ones in there stay where they are. Raises ConfigError."""
    given = check({"handler": block}).engine.get("lora") or {} if lora is None else lora
    outside = {folder for folder in given if lora is None and Path(folder).expanduser().is_absolute()}
    if len(outside) == len(given):
        return {}
    found = {}
    for i, (folder, weight) in enumerate(given.items(), 1):
        if folder in outside:
            found[_Model("", folder)] = weight
        else:
            path = _find(folder, config, "lora", "Name the adapter with --lora DIR") if lora is None else Path(folder)
            found[_adapter(f"lora/{i}", path, taking)] = weight
    return found


def _adapter(place: str, path: Path, taking: _Taking) -> _Model:
    """The adapter at ``path``, for the folder ``place`` of the archive. Raises ConfigError."""
    source = _source("lora", path)
    files, left_out = choose_adapter_files(source, taking.follow_links)
    if taking.by_reference:
        return _Model("", str(source))
    if left_out:
        taking.say(f"left out of {place}: {', '.join(left_out)}")
    return _Model(place, place, files)


def _pack(work: Path, models: Sequence[_Model], name: str, version: str, archive_format: str, handler: Path) -> Path:
    """The finished archive, somewhere in ``work``, where the configuration lies already."""
    staging = work / "staging"
    ignored = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.so", ".*", SHIPPED.name)
    shutil.copytree(PACKAGE, staging / PACKAGE.name, ignore=ignored)
    for folder, _, _ in os.walk(staging / PACKAGE.name):
        os.chmod(folder, 0o755)  # an installed package may be read-only; an archive will be replaced
    copied = {model.folder: model.files for model in models if model.files}
    for folder, files in copied.items() if archive_format != "no-archive" else ():
        (staging / folder).mkdir(parents=True)
        for path in files:
            (staging / folder / path.name).symlink_to(path.resolve())
    built = _run_archiver(work, staging, name, version, archive_format, handler)
    if built.is_file():  # it holds what they hold
        narrow(built, [work / NAME, *(path for files in copied.values() for path in (*files, files[0].parent))])
        return built
    for folder, files in copied.items():
        copy_files(files, built / folder)
    return built


def _run_archiver(work: Path, staging: Path, name: str, version: str, archive_format: str, handler: Path) -> Path:
    if importlib.util.find_spec("model_archiver") is None:
        raise ConfigError("torch-model-archiver is not installed:  pip install 'gpt-fast-serve[serve]'")
    out, temporary = work / "out", work / "tmp"
    out.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", name, "--version", version]
    # A path with a comma would be two files to it, and one with brackets a pattern: so it runs beside them.
    command += ["--handler", str(handler.resolve()), "--config-file", str(work / NAME), "--extra-files", staging.name]
    command += ["--archive-format", archive_format, "--export-path", str(out)]
    where: dict[str, Any] = {"cwd": staging.parent, "env": {**os.environ, "TMPDIR": str(temporary)}}
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", **where)
    if done.returncode != 0:
        if reason := _no_room(done.stderr):
            raise OSError(reason)  # as when our own copies fail
        # A traceback, as a rule: its last line is what went wrong.
        last = (done.stderr.strip() or f"it ended with status {done.returncode}").splitlines()[-1]
        raise ConfigError(f"torch-model-archiver failed: {last[:300]}")
    return out / (name + SUFFIXES[archive_format])


def _no_room(message: str) -> str | None:
    """The system's words for a full disk, a used-up quota or a file that is too large, if they are in ``message``."""
    words = (os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    return next((word for word in words if word in message), None)
