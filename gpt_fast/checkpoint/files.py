"""Which files of a folder are a checkpoint's, and copies of them that no more people can read than the originals."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.gguf import all_parts, first_part, is_gguf

# A name of the Hub, and behind it a GGUF file of that repository.
NAME_OF_HUB = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(/(?P<file>.+\.gguf))?")
# By name, in small letters. What goes along with weights into every copy of them: tokenizer, generation, licence.
RIGHTS = ("license*", "licence*", "copying*", "notice*", "use_policy*")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "*.tiktoken")  # each of them is a tokenizer
IN_TWO_FILES = ("vocab.json", "merges.txt")  # GPT-2's is both
COMPANIONS = (
    *(*VOCABULARIES, *IN_TWO_FILES, "tokenizer*.json", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.json", "*.jinja", "generation_config.json"),
    *RIGHTS,
)
WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.index.json")
# All that a checkpoint has. Whatever else lies in the folder (notes, code, keys) is nobody's business.
PATTERNS = (*WEIGHTS, "*config.json", "params.json", "*.model", "readme*", *COMPANIONS)
SINGLE = ("model.safetensors", "pytorch_model.bin")  # Hugging Face's weights, whole; in shards they have an index
# Of a LoRA adapter, as PEFT names them.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What a training run leaves beside the weights, under endings of weights.
TRAINING = ("optimizer*", "scheduler*", "training_args*", "rng_state*")
# Mistral's own file, beside Hugging Face's with the same weights.
TWICE = ("consolidated*.safetensors",)


def the_checkpoint(path: Path) -> Path:
    """What ``path`` stands for: the directory around one of Hugging Face's files, the only ``.pth`` or GGUF model of a
    directory that has none of their weights, the first file of such a model, else ``path`` itself. Raises
    CheckpointError for a directory of several."""
    if is_gguf(path):
        return first_part(path)
    if path.is_file():
        of_hub = path.suffix in (".safetensors", ".json") or path.name.startswith("pytorch_model")
        return path.parent if of_hub else path
    if not path.is_dir() or any((path / (name + end)).is_file() for name in SINGLE for end in ("", ".index.json")):
        return path
    found = [*sorted(path.glob("*.pth")), *sorted({first_part(file) for file in path.glob("*.gguf")})]
    if len(found) > 1:
        raise CheckpointError(f"{path} holds several checkpoints, name one: {', '.join(file.name for file in found)}")
    return found[0] if found else path


def belongs(name: str) -> bool:
    """Whether a checkpoint has files of this name."""
    return is_one(name, PATTERNS) and not is_one(name, (*TRAINING, *TWICE))


def is_one(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name of a file, in small letters, fits one of ``patterns``."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def companions(folder: Path) -> list[Path]:
    """The files of ``folder`` that go along with its weights."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and is_one(path.name, COMPANIONS)]


def choose_files(folder: Path, named: str = "", follow_links: bool = False) -> tuple[tuple[Path, ...], list[str]]:
    """Sort what lies in ``folder``, an absolute path without links: the files that belong to a checkpoint, and the
    names of all that does not, folders with a slash.

    ``named``: a file that belongs to the checkpoint whatever its name; a ``.pth`` or ``.pt`` is all of its weights. A
    GGUF model, named or the only one of a folder without other weights, is all of the checkpoint. Folders are left out:
    they hold other formats of the same weights. Raises CheckpointError for a folder of several models, ConfigError for
    a link that leads nowhere or, without ``follow_links``, out of the folder; the links of the Hugging Face cache
    (``snapshots/<commit>/file`` to ``blobs/<hash>``) are followed.
    """
    others = WEIGHTS if is_one(named, ("*.pth", "*.pt")) else ()
    model = the_checkpoint(folder / named)
    whole = all_parts(model) if is_gguf(model) else []

    def known(path: Path) -> bool:
        if whole:
            return path in whole or path.name == named or is_one(path.name, (*RIGHTS, "readme*"))
        return path.name == named or (belongs(path.name) and not is_one(path.name, others))

    return _sort(folder, known, follow_links)


def choose_adapter_files(folder: Path, follow_links: bool = False) -> tuple[tuple[Path, ...], list[str]]:
    """As :func:`choose_files`, of the ``folder`` of a LoRA adapter. Raises ConfigError where it is none."""
    for names in ((ADAPTER_CONFIG,), ADAPTER_WEIGHTS):
        if not any((folder / name).is_file() for name in names):
            lacking = f"lora: {folder} has no {' or '.join(names)}"
            raise ConfigError(f"{lacking}; name the folder that PEFT's save_pretrained wrote")
    patterns = (ADAPTER_CONFIG, *ADAPTER_WEIGHTS, *RIGHTS, "readme*")
    return _sort(folder, lambda path: is_one(path.name, patterns), follow_links)


def _sort(folder: Path, known: Callable[[Path], bool], follow_links: bool) -> tuple[tuple[Path, ...], list[str]]:
    """The files of ``folder`` that are ``known``, and the names of all else. Raises ConfigError for their links."""
    files, left_out = [], []
    for path in sorted(folder.iterdir()):
        wanted = not path.is_dir() and known(path)
        if wanted and path.is_symlink():
            _check_link(path, follow_links)
        if wanted and path.is_file():  # no socket, no pipe
            files.append(path)
        else:
            left_out.append(path.name + "/" * path.is_dir())
    return tuple(files), left_out


def copy_files(files: Sequence[Path], into: Path) -> None:
    """Copy ``files`` of one folder, at least one, into the new folder ``into``.

    Files and folder get no permission for others that the originals lack.
    """
    into.mkdir(parents=True)
    for path in files:
        narrow(Path(shutil.copyfile(path, into / path.name)), [path])
    into.chmod(into.stat().st_mode & (files[0].parent.stat().st_mode | 0o700))


def narrow(path: Path, originals: Sequence[Path]) -> None:
    """Take from the file ``path`` the permissions that one of ``originals`` lacks."""
    mode = path.stat().st_mode & 0o777
    for original in originals:
        mode &= original.stat().st_mode
    path.chmod(mode)


def _check_link(path: Path, follow_links: bool) -> None:
    target = path.resolve()
    if not target.exists():
        raise ConfigError(f"{path} is a link to {target}, which does not exist")
    folder = path.parent
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if not (follow_links or in_hub_cache or target.is_relative_to(folder)):
        raise ConfigError(
            f"{path} is a link out of its folder, to {target}. If that file belongs to the checkpoint, "
            "say --follow-links (follow_links=True in Python), or put the file itself there"
        )
