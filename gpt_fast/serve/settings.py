"""The ``handler:`` block of model_config.yaml: what TorchServe passes on to the handler, checked key by key.

The keys are the fields of EngineConfig, those of HandlerSettings, and those of TorchServe's own gpt_fast example.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from gpt_fast.config import DRAFTS, EngineConfig, read_keys
from gpt_fast.errors import ConfigError
from gpt_fast.fields import Kind, Text, Whole, as_given, kinds_of
from gpt_fast.serve.model_yaml import ModelYaml, check_torchserve_keys, read_model_yaml, serves_continuously

BLOCK = "the handler block of model_config.yaml"

ALIASES = {"converted_ckpt_dir": "checkpoint", "draft_checkpoint_path": "draft"}
_WITHOUT_EFFECT = {"fx_graph_cache": "torch caches compiled graphs by itself"}
_WEIGHTS = ("*.safetensors", "*.pth", "*.pt", "*.bin", "*.gguf")


def names_of(key: str) -> list[str]:
    """The names that ``key`` may have in the handler block."""
    return [key, *(alias for alias, meant in ALIASES.items() if meant == key)]


def _path(value: Any, name: str) -> Path:
    return Path(Text()(value, name))


@dataclass(frozen=True)
class HandlerSettings:
    """The handler's own keys; ``engine``: the keyword arguments of ``LLM`` that were given; ``warnings``: about keys
    that are understood and change nothing."""

    checkpoint: Annotated[Path, _path] = Path("auto")
    max_new_tokens: Annotated[int | None, Whole(1, 2**24)] = None  # for requests that do not say; None: SamplingParams'
    stream: bool = True  # for requests that do not say
    max_body_bytes: Annotated[int, Whole(1, 2**28)] = 2**20
    one_piece_timeout_s: Annotated[int, Whole(1, 86_400)] = 600  # for requests that are not streamed and do not say
    profile: bool = False  # write a trace of the first request
    engine: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_ENGINE = kinds_of(EngineConfig)
_OWN: dict[str, Kind] = {k: v for k, v in kinds_of(HandlerSettings).items() if k not in ("engine", "warnings")}
KNOWN: dict[str, Kind] = {**_OWN, **_ENGINE, **dict.fromkeys(_WITHOUT_EFFECT, as_given)}
KNOWN |= {alias: KNOWN[key] for alias, key in ALIASES.items()}


def read_settings(config: Mapping[str, Any] | None, model_dir: Path) -> HandlerSettings:
    """Settings from ``config``, a whole model_config.yaml, for an archive unpacked at ``model_dir``. Raises ConfigError
    for an unknown or misplaced key, a wrong value, TorchServe's keys included, or a checkpoint that is nowhere."""
    found = check(config or {})
    engine, draft = dict(found.engine), found.engine.get("draft")
    if draft not in (None, *DRAFTS):
        engine["draft"] = str(find_named(Path(draft), model_dir, "draft"))
    if lora := found.engine.get("lora"):
        engine["lora"] = {str(find_named(Path(folder), model_dir, "lora")): weight for folder, weight in lora.items()}
    return replace(found, checkpoint=find_checkpoint(found.checkpoint, model_dir), engine=engine)


def check_file(path: Path) -> ModelYaml:
    """Read the model_config.yaml at ``path`` and check it as a worker would, before there is one. Raises ConfigError
    with the file and, where there is one, the line."""
    file = read_model_yaml(path)
    try:
        check(file.config)
    except ConfigError as error:
        line = _line_of_fault(file, str(error))
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {error}") from error
    return file


def check(config: Mapping[str, Any]) -> HandlerSettings:
    """As :func:`read_settings`, but looks for no checkpoint."""
    for key in config:
        if key in KNOWN:  # TorchServe would ignore it
            raise ConfigError(f"{key} in model_config.yaml belongs under 'handler:', indented")
    check_torchserve_keys(config)
    serves_continuously(config)
    block = config.get("handler") or {}
    for alias, key in ALIASES.items():
        if alias in block and key in block:
            raise ConfigError(f"{alias} and {key} in {BLOCK} are the same key; give one of them")
    given = {k: v for k, v in block.items() if v is not None or ALIASES.get(k, k) not in _OWN}
    read = {ALIASES.get(k, k): v for k, v in read_keys(KNOWN, given, BLOCK).items()}
    own = {k: v for k, v in read.items() if k in _OWN}
    warnings = tuple(f"{k} in {BLOCK} has no effect: {why}" for k, why in _WITHOUT_EFFECT.items() if k in block)
    return HandlerSettings(**own, engine={k: v for k, v in read.items() if k in _ENGINE}, warnings=warnings)


def _line_of_fault(file: ModelYaml, message: str) -> int | None:
    """The line of the key that is refused with ``message`` by itself; None when only several together are wrong."""
    for path in sorted(file.lines, key=len, reverse=True):  # the keys in a block before the block
        value = file.config.get(path[0])
        if len(path) == 2:
            value = {path[1]: value.get(path[1])} if isinstance(value, Mapping) else None
        try:
            check({path[0]: value})
        except ConfigError as error:
            if str(error) == message:
                return file.lines[path]
    return None


def find_checkpoint(named: Path, model_dir: Path) -> Path:
    """Where the checkpoint ``named`` is. "auto": in the archive's folder ``checkpoint`` or its root, where
    torch-model-archiver leaves the contents of a folder given as --extra-files. Raises ConfigError."""
    if str(named) != "auto":
        return find_named(named, model_dir, "checkpoint")
    for place in (model_dir / "checkpoint", model_dir):
        if place.is_dir() and any(next(place.glob(pattern), None) for pattern in _WEIGHTS):
            return place
    todo = f"build it with scripts/archive.sh --checkpoint DIR, or name one as checkpoint in {BLOCK}"
    raise ConfigError(f"the archive at {model_dir} holds no checkpoint: {todo}")


def find_named(named: Path, start: Path, key: str) -> Path:
    """The folder or file that ``key`` calls ``named``. A relative path starts at ``start``, the archive. That is also
    the worker's working directory; only the shell's $PWD, which is tried last, knows where ``torchserve --start`` was
    typed. Raises ConfigError with every place that was tried."""
    here = Path.cwd()
    places = [Path(folder) / named.expanduser() for folder in (start, here, os.environ.get("PWD", here))]
    for place in places:
        if place.exists():
            return place
    tried = ", ".join(dict.fromkeys(str(place) for place in places))
    folder = next((place.parent for place in places if (place.parent / "config.json").is_file()), None)
    hint = f". {folder} exists: name that folder to serve the Hugging Face checkpoint in it" if folder else ""
    raise ConfigError(f"{key} {str(named)!r} in {BLOCK} does not exist; tried {tried}{hint}")
