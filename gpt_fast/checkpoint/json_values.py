"""JSON that strangers wrote, such as a ``config.json``: read with limits, values checked by type and size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_fast.config import MAX_POSITIONS, ExpertsConfig, ModelConfig
from gpt_fast.errors import CheckpointError

# The greatest sizes that a config.json may ask for, by field: far above every model, and small enough to compute with.
# Whether the file's tensors have these sizes is checked before anything is built (Checkpoint.open).
LIMITS = {
    "vocab_size": 2**24, "dim": 2**18, "ffn_dim": 2**20, "num_layers": 2**12, "num_heads": 2**14,
    "num_kv_heads": 2**14, "head_dim": 2**14, "max_seq_len": MAX_POSITIONS, "num_experts": 2**12,
    "sliding_window": 2**31 - 1,
}  # fmt: skip
_LARGEST = 1e15  # of numbers that are no sizes: NaN and infinity, which Python's JSON knows, are not below it
_MAX_JSON = 100_000_000  # bytes
_SHOWN = 60  # characters of a wrong value

_KINDS = {f.name: str(f.type) for kind in (ExpertsConfig, ModelConfig) for f in dataclasses.fields(kind)}


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError when it is missing, not JSON, or not an object."""
    try:
        size = path.stat().st_size
        value = json.loads(path.read_text(encoding="utf-8")) if size <= _MAX_JSON else None
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as e:  # ValueError: broken JSON and broken UTF-8
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    if size > _MAX_JSON:
        raise CheckpointError(f"{path} has {size} bytes, more than {_MAX_JSON}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object")
    return value


class Values(dict[str, Any]):
    """An object of a ``config.json``. ``at``: the beginning of messages about it, file and key."""

    def __init__(self, values: Mapping[str, Any], at: str) -> None:
        super().__init__(values)
        self.at = at

    def wrong(self, said: str) -> CheckpointError:
        return CheckpointError(self.at + said)

    def inner(self, key: str) -> Values:
        """The object ``key``; an empty one where there is none."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(f"{key} must be an object, not {_shown(value)}")
        return Values(value, f"{self.at}{key}.")

    def typed(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(f"{key} must be {kind.__name__}, not {_shown(value)}")
        return value

    def size(self, key: str, field: str = "") -> int:
        """``field``: whose limit holds, if not that of ``key``."""
        return self.check_size(key, self.typed(key, int), LIMITS.get(field or key, MAX_POSITIONS))

    def check_size(self, key: str, value: int, limit: int = MAX_POSITIONS) -> int:
        if not 1 <= value <= limit:
            raise self.wrong(f"{key} must be between 1 and {limit}, not {_shown(value)}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise self.wrong(f"{key} must be a number below {_LARGEST:g}, not {_shown(value)}")
        return float(value)

    def power(self, key: str, exponent: float) -> float:
        """The value of ``key``, above 0, to the power of ``exponent``."""
        value = self.number(key)
        if value <= 0:
            raise self.wrong(f"{key} must be above 0, not {value:g}")
        return float(value**exponent)

    def choice(self, key: str, values: Mapping[Any, Any]) -> Any:
        """What ``values`` has for the value of ``key``. True is no 1 there, and False no 0."""
        given = self.get(key)
        for value, meaning in values.items():
            if value == given and isinstance(value, bool) == isinstance(given, bool):
                return meaning
        raise self.wrong(f"{key} {_shown(given)} is not supported, only {', '.join(map(repr, values))}")

    def field(self, name: str, key: str) -> Any:
        """The value of ``key``, of the type of the field ``name``."""
        kind = _KINDS[name]
        if kind == "int":
            return self.size(key, name)
        return self.number(key) if kind.startswith("float") else self.typed(key, bool)

    def factors(self, key: str) -> tuple[float, ...]:
        given = self.get(key)
        if not isinstance(given, (list, tuple)) or not all(
            isinstance(f, (int, float)) and 0 < f < _LARGEST for f in given
        ):
            raise self.wrong(f"{key} must be a list of positive numbers, not {_shown(given)}")
        return tuple(float(f) for f in given)


def _shown(value: object) -> str:
    """``value`` for a message: a file may hold numbers of thousands of digits and lists of millions."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
