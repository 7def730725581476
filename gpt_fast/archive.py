"""Build an archive that TorchServe loads as it is: handler, package, configuration and, unless told otherwise, weights.

    gpt-fast archive --checkpoint DIR [--by-reference] [--format no-archive] [--output model_store]

torch-model-archiver does the packing. This module gives it what it cannot do itself: the package gpt_fast in a
folder of its own (--extra-files unpacks folders), a working place that is not ``/tmp/<model name>`` (which the
archiver deletes first), and a checkpoint that is copied once, not three times, when nothing is compressed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from gpt_fast.config import ConfigError

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
SUFFIXES = {"no-archive": "", "default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_KEY = re.compile(r"^(\s+)(?:checkpoint|converted_ckpt_dir)\s*:.*$")


def build_archive(
    checkpoint: str | Path,
    *,
    name: str = "gpt-fast",
    version: str = "1.0",
    archive_format: str = "no-archive",
    config: str | Path = ROOT / "model_config.yaml",
    handler: str | Path = ROOT / "handler.py",
    output: str | Path = "model_store",
    by_reference: bool = False,
) -> Path:
    """Write the archive and return its path; an earlier archive of the same name is replaced.

    ``checkpoint``: a folder, or a file that stands for the folder around it. Its files go into the archive's folder
    ``checkpoint``; with ``by_reference`` the archive names the absolute path instead and stays small.
    ``archive_format``: "no-archive" (a folder, the fastest), "default" (.mar), "zip-store" (.mar, not compressed,
    the better one for weights) or "tgz".

    Raises ConfigError for what cannot be packed, CalledProcessError when torch-model-archiver fails.
    """
    source, config, handler = Path(checkpoint).expanduser().resolve(), Path(config), Path(handler)
    if archive_format not in SUFFIXES:
        raise ConfigError(f"format: {archive_format!r} is not one of {', '.join(SUFFIXES)}")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r} must be letters, digits, '_', '-' and '.', not starting with a sign")
    for what, path in (("checkpoint", source), ("config", config), ("handler", handler)):
        if not path.exists():
            raise ConfigError(f"{what}: {path} does not exist")
    folder = source if source.is_dir() else source.parent
    inside = "checkpoint" if source.is_dir() else f"checkpoint/{source.name}"
    target = Path(output).resolve() / (name + SUFFIXES[archive_format])
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the file system of the output, so that the finished archive is moved, not copied; hidden from TorchServe.
    with tempfile.TemporaryDirectory(prefix=".archive-", dir=target.parent) as scratch:
        work = Path(scratch)
        staging = work / "staging"
        _stage_package(staging)
        text = set_checkpoint(config.read_text(encoding="utf-8"), str(source) if by_reference else inside)
        (work / "model_config.yaml").write_text(text, encoding="utf-8")
        if not by_reference and archive_format != "no-archive":
            _link_files(folder, staging / "checkpoint")
        built = _run_archiver(work, staging, name, version, archive_format, handler)
        if not by_reference and archive_format == "no-archive":
            _copy_files(folder, built / "checkpoint")
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(built, target)
    return target


def set_checkpoint(yaml_text: str, value: str) -> str:
    """``yaml_text`` with ``checkpoint: value`` in its handler block, every other line and comment as it was."""
    lines = yaml_text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"^handler\s*:", line)]
    if not starts:
        return "\n".join([*lines, "handler:", f"    checkpoint: {json.dumps(value)}"]) + "\n"
    start = starts[0]
    indent = "    "
    for i in range(start + 1, len(lines)):
        line = lines[i]
        if line.strip() and not line.lstrip().startswith("#"):
            if not line[0].isspace():
                break
            indent = re.match(r"\s*", line)[0]  # type: ignore[index]  # matches everywhere
            if found := _KEY.match(line):
                lines[i] = f"{found[1]}checkpoint: {json.dumps(value)}"
                return "\n".join(lines) + "\n"
    lines.insert(start + 1, f"{indent}checkpoint: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _check_replaceable(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()) and not (target / "MAR-INF" / "MANIFEST.json").is_file():
        raise ConfigError(f"{target} exists and is not an archive; it is left alone")


def _stage_package(staging: Path) -> None:
    shutil.copytree(
        PACKAGE, staging / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.so", ".*")
    )


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint, links (as in the Hugging Face cache) followed; folders in it are other formats."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]


def _link_files(folder: Path, into: Path) -> None:
    into.mkdir()
    for path in _files(folder):
        (into / path.name).symlink_to(path.resolve())


def _copy_files(folder: Path, into: Path) -> None:
    into.mkdir()
    for path in _files(folder):
        shutil.copyfile(path, into / path.name)


def _run_archiver(work: Path, staging: Path, name: str, version: str, archive_format: str, handler: Path) -> Path:
    script = Path(sysconfig.get_path("scripts")) / "torch-model-archiver"
    program = str(script) if script.exists() else shutil.which("torch-model-archiver")
    if program is None:
        raise ConfigError("torch-model-archiver is not installed: pip install torch-model-archiver==0.12.0")
    out, temporary = work / "out", work / "tmp"
    out.mkdir()
    temporary.mkdir()
    command = [program, "--model-name", name, "--version", version, "--handler", str(handler.resolve())]
    command += ["--config-file", str(work / "model_config.yaml"), "--extra-files", str(staging)]
    command += ["--archive-format", archive_format, "--export-path", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "TMPDIR": str(temporary)})
    return out / (name + SUFFIXES[archive_format])
