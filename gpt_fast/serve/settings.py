"""The ``handler:`` block of model_config.yaml: what TorchServe passes on to the handler, checked key by key.

The keys are the fields of EngineConfig, those of HandlerSettings, and those of TorchServe's own gpt_fast example.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from gpt_fast.config import EngineConfig, from_mapping, unknown_key
from gpt_fast.errors import ConfigError
from gpt_fast.fields import Text, Whole, kinds_of
from gpt_fast.serve.model_yaml import ModelYaml, check_torchserve_keys, read_model_yaml, serves_continuously

BLOCK = "the handler block of model_config.yaml"
MIB = 1024 * 1024

_ALIASES = {"converted_ckpt_dir": "checkpoint"}
_ALONE = "there is no speculative decoding yet, the target decodes alone"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("draft", "draft_checkpoint_path", "speculate_k"), _ALONE),
    "fx_graph_cache": "torch caches compiled graphs by itself",
    "profile": "nothing is profiled",
}
_WEIGHTS = ("*.safetensors", "*.pth", "*.pt", "*.bin")


def _path(value: Any, name: str) -> Path:
    return Path(Text()(value, name))


@dataclass(frozen=True)
class HandlerSettings:
    """The handler's own keys; ``engine``: the keyword arguments of ``LLM`` that were given; ``warnings``: about keys
    that are understood and change nothing."""

    checkpoint: Annotated[Path, _path] = Path("auto")
    max_new_tokens: Annotated[int | None, Whole(1, 2**24)] = None  # for requests that do not say; None: SamplingParams'
    stream: bool = True  # for requests that do not say
    max_body_bytes: Annotated[int, Whole(1, 256 * MIB)] = MIB
    one_piece_timeout_s: Annotated[int, Whole(1, 86_400)] = 600  # for requests that are not streamed and do not say
    engine: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_OWN = kinds_of(HandlerSettings).keys() - {"engine", "warnings"}
_ENGINE = kinds_of(EngineConfig)
KNOWN = (*_OWN, *_ENGINE, *_ALIASES, *_WITHOUT_EFFECT)


def read_settings(config: Mapping[str, Any] | None, model_dir: Path) -> HandlerSettings:
    """Settings from ``config``, a whole model_config.yaml, for an archive unpacked at ``model_dir``. Raises ConfigError
    for an unknown or misplaced key, a wrong value, TorchServe's keys included, or a checkpoint that is nowhere."""
    config = config or {}
    found = check(config)
    block = config.get("handler") or {}
    warnings = tuple(f"{k} in {BLOCK} has no effect: {why}" for k, why in _WITHOUT_EFFECT.items() if k in block)
    return replace(found, checkpoint=find_checkpoint(found.checkpoint, model_dir), warnings=warnings)


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
    block = config.get("handler")
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise ConfigError(f"handler in model_config.yaml must be a block of keys, not {block!r}")
    for key in block:
        if key not in KNOWN:
            raise ConfigError(unknown_key(str(key), KNOWN, BLOCK))
    values = dict(block)
    for alias, name in _ALIASES.items():
        if alias in values:
            if name in values:
                raise ConfigError(f"{alias} and {name} in {BLOCK} are the same key; give one of them")
            values[name] = values.pop(alias)
    own = from_mapping(HandlerSettings, {k: v for k, v in values.items() if k in _OWN and v is not None}, BLOCK)
    engine = {k: v for k, v in values.items() if k in _ENGINE}
    from_mapping(EngineConfig, engine, BLOCK)  # for its checks; LLM builds its own
    return replace(own, engine=engine)


def _line_of_fault(file: ModelYaml, message: str) -> int | None:
    """The line of the key that is refused with ``message`` by itself; None when only several together are wrong."""
    for key, value in file.config.items():
        inside = value if isinstance(value, Mapping) else ()
        alone = {(str(key), str(inner)): {key: {inner: value[inner]}} for inner in inside}
        for path, part in alone.items() if inside else [((str(key),), {key: value})]:
            try:
                check(part)
            except ConfigError as error:
                if str(error) == message:
                    return file.lines.get(path)
    return None


def find_checkpoint(named: Path, model_dir: Path) -> Path:
    """Where ``checkpoint: value`` is.

    None or "auto": inside the archive, its folder ``checkpoint`` or, as torch-model-archiver leaves the contents of
    a folder given as --extra-files, its root. A relative path starts at the archive. That is also the worker's
    working directory, so the place where ``torchserve --start`` was typed is known only by the shell's $PWD, which
    is tried last. Raises ConfigError with every place that was tried."""
    if str(named) == "auto":
        for place in (model_dir / "checkpoint", model_dir):
            if place.is_dir() and any(next(place.glob(pattern), None) for pattern in _WEIGHTS):
                return place
        todo = f"build it with scripts/archive.sh --checkpoint DIR, or name one as checkpoint in {BLOCK}"
        raise ConfigError(f"the archive at {model_dir} holds no checkpoint: {todo}")
    path = named.expanduser()
    started_in = os.environ.get("PWD")
    places = [model_dir / path, Path.cwd() / path] + ([Path(started_in) / path] if started_in else [])
    for place in places:
        if place.exists():
            # The file of TorchServe's example stands for its folder, where the tokenizer is.
            return place.parent if place.name == "model.pth" else place
    tried = ", ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(f"checkpoint {str(named)!r} in {BLOCK} does not exist; tried {tried}")
