"""The ``handler:`` block of model_config.yaml: what TorchServe passes on to the handler, checked key by key.

Every field of :class:`~gpt_fast.config.EngineConfig` is a key, beside those of :class:`HandlerSettings`. The keys of
TorchServe's own gpt_fast example are understood as well, so that its users can keep their files.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt_fast.config import ConfigError, EngineConfig, at_least, from_mapping, unknown_key

BLOCK = "the handler block of model_config.yaml"
MIB = 1024 * 1024

_ENGINE = tuple(f.name for f in dataclasses.fields(EngineConfig))
_OWN = ("checkpoint", "max_new_tokens", "stream", "max_body_bytes", "one_piece_timeout_s")
_ALIASES = {"converted_ckpt_dir": "checkpoint"}
_WITHOUT_EFFECT = {
    "draft": "there is no speculative decoding yet, the target decodes alone",
    "draft_checkpoint_path": "there is no speculative decoding yet, the target decodes alone",
    "speculate_k": "there is no speculative decoding yet, the target decodes alone",
    "fx_graph_cache": "torch caches compiled graphs by itself",
    "profile": "nothing is profiled",
}
KNOWN = (*_OWN, *_ENGINE, *_ALIASES, *_WITHOUT_EFFECT)
_WEIGHTS = ("*.safetensors", "*.pth", "*.pt", "*.bin")


@dataclass(frozen=True)
class HandlerSettings:
    """What the handler needs to know. ``engine`` holds the keyword arguments of ``LLM`` that were given."""

    checkpoint: Path
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None  # for requests that do not say; None: SamplingParams' own default
    stream: bool = True  # for requests that do not say
    max_body_bytes: int = MIB
    one_piece_timeout_s: float = 600.0  # for requests that are not streamed and do not say
    warnings: tuple[str, ...] = ()  # keys that are understood and change nothing, for the log


@dataclass(frozen=True)
class _Own:
    """The handler's own keys as they may be typed; what is left out is None."""

    checkpoint: str | None = None
    max_new_tokens: int | None = None
    stream: bool | None = None
    max_body_bytes: int | None = None
    one_piece_timeout_s: float | None = None


def read_settings(config: Mapping[str, Any] | None, model_dir: Path) -> HandlerSettings:
    """Settings from ``config``, a whole model_config.yaml, for an archive unpacked at ``model_dir``.

    Raises ConfigError for an unknown or misplaced key, a value of the wrong type, or a checkpoint that is nowhere.
    """
    config = config or {}
    block = config.get("handler")
    if block is None:
        block = {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"handler in model_config.yaml must be a block of keys, not {block!r}")
    _check_outside(config)
    for key in block:
        if key not in KNOWN:
            raise ConfigError(unknown_key(str(key), list(KNOWN), BLOCK))
    values = dict(block)
    for alias, name in _ALIASES.items():
        if alias in values:
            if name in values:
                raise ConfigError(f"{alias} and {name} in {BLOCK} are the same key; give one of them")
            values[name] = values.pop(alias)
    own = from_mapping(_Own, {k: v for k, v in values.items() if k in _OWN}, BLOCK)
    engine = {k: v for k, v in values.items() if k in _ENGINE}
    from_mapping(EngineConfig, engine, BLOCK)  # for its checks; LLM builds its own
    for name in ("max_new_tokens", "max_body_bytes"):
        if getattr(own, name) is not None:
            at_least(name, getattr(own, name), 1)
    given = {f.name: getattr(own, f.name) for f in dataclasses.fields(own) if getattr(own, f.name) is not None}
    return HandlerSettings(
        **{**given, "checkpoint": find_checkpoint(own.checkpoint, model_dir)},
        engine=engine,
        warnings=tuple(f"{k} in {BLOCK} has no effect: {why}" for k, why in _WITHOUT_EFFECT.items() if k in block),
    )


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


def _check_outside(config: Mapping[str, Any]) -> None:
    """TorchServe ignores keys it does not know, so one of ours that slipped out of the block would be lost."""
    for key in config:
        if key in KNOWN:
            raise ConfigError(f"{key} in model_config.yaml belongs under 'handler:', indented")
        close = difflib.get_close_matches(str(key), ("handler",), n=1, cutoff=0.8)
        if key != "handler" and close:
            raise ConfigError(f"unknown key {key!r} in model_config.yaml; did you mean 'handler'?")
