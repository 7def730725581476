"""Build an archive that TorchServe loads as it is: handler, package, configuration and, unless told otherwise, weights.

    gpt-fast archive --checkpoint DIR [--by-reference] [--format no-archive] [--output model_store]

torch-model-archiver does the packing. Around it: the package gpt_fast stays a folder (--extra-files unpacks folders),
the working place is not ``/tmp/<model name>`` (which it deletes first), and a checkpoint is copied only once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpt_fast.checkpoint.files import choose_files, copy_files, narrow
from gpt_fast.errors import ConfigError
from gpt_fast.serve.model_yaml import NAME, parse_model_yaml
from gpt_fast.serve.settings import check_file

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
SHIPPED = {"config": ROOT / NAME, "handler": ROOT / "handler.py"}  # an installed package has neither
SUFFIXES = {"no-archive": "", "default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_KEY = re.compile(r"\s+(?:checkpoint|converted_ckpt_dir)\s*:")


def build_archive(
    checkpoint: str | Path,
    *,
    name: str = "gpt-fast",
    version: str = "1.0",
    archive_format: str = "no-archive",
    config: str | Path | None = None,
    handler: str | Path | None = None,
    output: str | Path = "model_store",
    by_reference: bool = False,
    follow_links: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the archive and return its path; an earlier archive of the same name is replaced.

    ``checkpoint``: a folder, or a file that stands for the folder around it. Its files go into the archive's folder
    ``checkpoint``; with ``by_reference`` the archive names the absolute path instead and stays small.
    ``archive_format``: "no-archive" (a folder, the fastest), "default" (.mar), "zip-store" (.mar, not compressed,
    the better one for weights) or "tgz". ``config`` and ``handler``: None means the repository's. ``follow_links``:
    copy files of the checkpoint that are links out of its folder, too. ``say`` is told what was left out.

    Raises ConfigError for what cannot be packed, for a wrong configuration (with file and line) and for a full disk."""
    _check_options(name, archive_format, {"config": config, "handler": handler})
    source = _absolute(checkpoint)
    config, handler = Path(config or SHIPPED["config"]), Path(handler or SHIPPED["handler"])
    for what, path in (("checkpoint", source), ("config", config), ("handler", handler)):
        if not path.exists():
            raise ConfigError(f"{what}: {path} does not exist")
    where, files = str(source), tuple[Path, ...]()
    if not by_reference:
        named = "" if source.is_dir() else source.name
        where = f"checkpoint/{named}".rstrip("/")
        files, left_out = choose_files(source.parent if named else source, named, follow_links)
        if not files:
            raise ConfigError(f"checkpoint: {source} holds no file that a checkpoint has, such as config.json")
        if left_out:
            say(f"left out, no part of a checkpoint: {', '.join(left_out)}")
    text = _config_with(config, where)
    target = Path(output).resolve() / (name + SUFFIXES[archive_format])
    if target.is_dir() and any(target.iterdir()) and not (target / "MAR-INF" / "MANIFEST.json").is_file():
        raise ConfigError(f"{target} exists and is not an archive; it is left alone")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the file system of the output, so that the finished archive is moved, not copied; hidden from TorchServe.
        with tempfile.TemporaryDirectory(prefix=".archive-", dir=target.parent) as scratch:
            work = Path(scratch)
            (work / NAME).write_text(text, encoding="utf-8")
            narrow(work / NAME, [config])
            built = _pack(work, files, name, version, archive_format, handler)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(built, target)
    except OSError as error:
        if reason := _no_room(str(error)):
            raise ConfigError(f"{target} cannot be written: {reason}") from error
        raise
    return target


def _check_options(name: str, archive_format: str, files: Mapping[str, object]) -> None:
    if archive_format not in SUFFIXES:
        raise ConfigError(f"format: {archive_format!r} is not one of {', '.join(SUFFIXES)}")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r} must be letters, digits, '_', '-' and '.', not starting with a sign")
    missing = [what for what, given in files.items() if given is None and not SHIPPED[what].is_file()]
    if missing:
        names, flags = " and ".join(SHIPPED[w].name for w in missing), " and ".join(f"--{w} FILE" for w in missing)
        otherwise = "or run scripts/archive.sh in a checkout of the repository, which has them"
        raise ConfigError(f"the installed package comes without {names}. Give {flags}, {otherwise}")


def set_checkpoint(yaml_text: str, value: str) -> str:
    """``yaml_text`` with ``checkpoint: value`` in its handler block, every other line and comment as it was."""
    lines = yaml_text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r"handler\s*:", line)), len(lines))
    if start == len(lines):
        lines.append("handler:")
    indent, place = "    ", slice(start + 1, start + 1)
    for i in range(start + 1, len(lines)):
        line = lines[i]
        if line.strip() and not line.lstrip().startswith("#"):
            if not line[0].isspace():
                break
            indent = line[: len(line) - len(line.lstrip())]
            if _KEY.match(line):
                place = slice(i, i + 1)
                break
    lines[place] = [f"{indent}checkpoint: {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


def _absolute(checkpoint: str | Path) -> Path:
    """Without links in the folder's path; a file that is itself a link stays in the folder it was named in."""
    path = Path(checkpoint).expanduser().absolute()
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def _config_with(config: Path, checkpoint: str) -> str:
    """The text of the file ``config``, checked, with ``checkpoint`` in it."""
    before = check_file(config).config
    text = set_checkpoint(config.read_text(encoding="utf-8"), checkpoint)
    block = {k: v for k, v in (before.get("handler") or {}).items() if k not in ("checkpoint", "converted_ckpt_dir")}
    wanted = {**before, "handler": {**block, "checkpoint": checkpoint}}
    with contextlib.suppress(ConfigError):
        if parse_model_yaml(text, str(config)).config == wanted:
            return text
    raise ConfigError(f"{config}: write the handler block with one key a line, indented, so that checkpoint fits in")


def _pack(work: Path, files: Sequence[Path], name: str, version: str, archive_format: str, handler: Path) -> Path:
    """The finished archive, somewhere in ``work``, where the configuration lies already."""
    staging = work / "staging"
    ignored = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.so", ".*")
    shutil.copytree(PACKAGE, staging / PACKAGE.name, ignore=ignored)
    if files and archive_format != "no-archive":
        (staging / "checkpoint").mkdir()
        for path in files:
            (staging / "checkpoint" / path.name).symlink_to(path.resolve())
    built = _run_archiver(work, staging, name, version, archive_format, handler)
    if built.is_file():
        narrow(built, [work / NAME, *files, *(path.parent for path in files[:1])])  # it holds what they hold
    elif files:
        copy_files(files, built / "checkpoint")
    return built


def _run_archiver(work: Path, staging: Path, name: str, version: str, archive_format: str, handler: Path) -> Path:
    script = Path(sysconfig.get_path("scripts")) / "torch-model-archiver"
    program = str(script) if script.exists() else shutil.which("torch-model-archiver")
    if program is None:
        raise ConfigError("torch-model-archiver is not installed: pip install torch-model-archiver==0.12.0")
    out, temporary = work / "out", work / "tmp"
    out.mkdir()
    temporary.mkdir()
    command = [program, "--model-name", name, "--version", version, "--handler", str(handler.resolve())]
    command += ["--config-file", str(work / NAME), "--extra-files", str(staging)]
    command += ["--archive-format", archive_format, "--export-path", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, errors="replace")
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
