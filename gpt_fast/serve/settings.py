"""The ``handler:`` block of model_config.yaml: what TorchServe passes on to the handler, checked key by key.

Every field of :class:`~gpt_fast.config.EngineConfig` is a key, beside those of :class:`HandlerSettings`. The keys of
TorchServe's own gpt_fast example are understood as well, so that its users can keep their files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from gpt_fast.config import EngineConfig, from_mapping, unknown_key
from gpt_fast.errors import ConfigError
from gpt_fast.fields import Whole, kinds_of
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


@dataclass(frozen=True)
class HandlerSettings:
    """What the handler needs to know. ``engine`` holds the keyword arguments of ``LLM`` that were given."""

    checkpoint: Path
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None  # for requests that do not say; None: SamplingParams' own default
    stream: bool = True  # for requests that do not say
    max_body_bytes: int = MIB
    one_piece_timeout_s: int = 600  # for requests that are not streamed and do not say
    warnings: tuple[str, ...] = ()  # keys that are understood and change nothing, for the log


@dataclass(frozen=True)
class _Own:
    """The handler's own keys as they may be typed; what is left out is None."""

    checkpoint: str | None = None
    max_new_tokens: Annotated[int | None, Whole(1, 2**24)] = None  # more than any model's context
    stream: bool | None = None
    max_body_bytes: Annotated[int | None, Whole(1, 256 * MIB)] = None
    one_piece_timeout_s: Annotated[int | None, Whole(1, 86_400)] = None


_OWN = kinds_of(_Own)
_ENGINE = kinds_of(EngineConfig)
KNOWN = (*_OWN, *_ENGINE, *_ALIASES, *_WITHOUT_EFFECT)


def read_settings(config: Mapping[str, Any] | None, model_dir: Path) -> HandlerSettings:
    """Settings from ``config``, a whole model_config.yaml, for an archive unpacked at ``model_dir``.

    Raises ConfigError for an unknown or misplaced key, a value of the wrong type or out of range, TorchServe's keys
    included, or a checkpoint that is nowhere.
    """
    config = config or {}
    own, engine = check(config)
    given = {name: value for name, value in vars(own).items() if value is not None}
    block = config.get("handler") or {}
    return HandlerSettings(
        **{**given, "checkpoint": find_checkpoint(own.checkpoint, model_dir)},
        engine=engine,
        warnings=tuple(f"{k} in {BLOCK} has no effect: {why}" for k, why in _WITHOUT_EFFECT.items() if k in block),
    )


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


def check(config: Mapping[str, Any]) -> tuple[_Own, dict[str, Any]]:
    """The handler's own values and the engine's from ``config``, a whole model_config.yaml, all of it checked. Raises
    ConfigError as :func:`read_settings` does. Looks for no checkpoint."""
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
    own = from_mapping(_Own, {k: v for k, v in values.items() if k in _OWN}, BLOCK)
    engine = {k: v for k, v in values.items() if k in _ENGINE}
    from_mapping(EngineConfig, engine, BLOCK)  # for its checks; LLM builds its own
    return own, engine


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


def find_checkpoint(value: str | None, model_dir: Path) -> Path:
    """Where ``checkpoint: value`` is.

    None or "auto": inside the archive, its folder ``checkpoint`` or, as torch-model-archiver leaves the contents of
    a folder given as --extra-files, its root. A relative path starts at the archive. That is also the worker's
    working directory, so the place where ``torchserve --start`` was typed is known only by the shell's $PWD, which
    is tried last. Raises ConfigError with every place that was tried.
    """
    if value is None or value == "auto":
        for place in (model_dir / "checkpoint", model_dir):
            if place.is_dir() and any(next(place.glob(pattern), None) for pattern in _WEIGHTS):
                return place
        raise ConfigError(
            f"the archive at {model_dir} holds no checkpoint: build it with scripts/archive.sh --checkpoint DIR, "
            f"or name one as checkpoint in {BLOCK}"
        )
    path = Path(value).expanduser()
    started_in = os.environ.get("PWD")
    places = [model_dir / path, Path.cwd() / path] + ([Path(started_in) / path] if started_in else [])
    for place in places:
        if place.exists():
            # The file of TorchServe's example stands for its folder, where the tokenizer is.
            return place.parent if place.name == "model.pth" else place
    tried = ", ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(f"checkpoint {value!r} in {BLOCK} does not exist; tried {tried}")
