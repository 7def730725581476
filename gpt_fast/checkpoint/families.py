"""From a Hugging Face ``config.json`` and ``generation_config.json`` to :class:`ModelConfig` and defaults, and back.

What differs between families stands in the rows of family_table.py. What a checkpoint asks for and no field of
``ModelConfig`` expresses is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.checkpoint.family_table import FAMILIES, Family, Part, parts
from gpt_fast.config import MAX_POSITIONS, ModelConfig, RopeScaling
from gpt_fast.errors import CheckpointError, ConfigError, RequestError
from gpt_fast.params import SamplingParams

# The greatest sizes that a config.json may ask for: far above every model, and small enough to compute with. Whether
# the file's tensors have these sizes is checked before anything is built (checkpoint.open_checkpoint).
LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": MAX_POSITIONS,
    "sliding_window": 2**31 - 1,
}
_LARGEST = 1e15  # of numbers that are no sizes: NaN and infinity, which Python's JSON knows, are not below it
_MAX_JSON = 100_000_000  # bytes
_SHOWN = 60  # characters of a wrong value

QUANT_METHODS = ("gpt_fast", "gptq", "awq")  # that quantize/ reads

__all__ = [
    "FAMILIES",
    "QUANT_METHODS",
    "CheckpointError",
    "Family",
    "GenerationDefaults",
    "Part",
    "parse_config",
    "parts",
    "read_config",
    "read_generation_defaults",
    "read_json",
    "to_hf_config",
]


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError when it is missing, not JSON, or not an object."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than {_MAX_JSON}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as e:  # ValueError: broken JSON and broken UTF-8
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object")
    return value


def read_config(directory: str | Path) -> ModelConfig:
    """The model of a Hugging Face directory, from its ``config.json``.

    Raises CheckpointError for an unknown architecture or for a value that is not supported, naming the key.
    """
    path = Path(directory) / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """``raw``, the content of a ``config.json``, as ModelConfig. ``where`` names it in errors."""
    row = _family(raw, where)
    get = _Reader(row, raw, where)
    if raw.get("quantization_config"):
        method = get.mapping("quantization_config").get("quant_method", "an unnamed method")
        if method not in QUANT_METHODS:
            raise CheckpointError(
                f"{where}: quantization_config ({method}) is not supported, only {', '.join(QUANT_METHODS)}; "
                "use the unquantized checkpoint"
            )
    if get("hidden_act", str) not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    dim, num_heads = get.size("hidden_size"), get.size("num_attention_heads")
    theta, scaling = _rope(get)
    max_positions = get.size("max_position_embeddings")
    if scaling is not None and scaling.type == "dynamic":
        # The key holds the length before stretching.
        max_positions = get.check_size("max_position_embeddings times factor", int(max_positions * scaling.factor))
    try:
        return ModelConfig(
            family=row.name,
            vocab_size=get.size("vocab_size"),
            dim=dim,
            num_layers=get.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if get.value("num_key_value_heads") is None else get.size("num_key_value_heads"),
            head_dim=dim // num_heads if get.value("head_dim") is None else get.size("head_dim"),
            ffn_dim=get.size("intermediate_size"),
            max_seq_len=max_positions,
            norm_eps=get.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=get("tie_word_embeddings", bool),
            qkv_bias=get.flag(row.qkv_bias),
            out_bias=get.flag(row.out_bias),
            mlp_bias=get.flag(row.mlp_bias),
            qk_norm=row.qk_norm,
            windows=_windows(row, get),
        )
    except ConfigError as e:
        raise CheckpointError(f"{where}: {e}") from None


def _family(raw: Mapping[str, Any], where: str) -> Family:
    """The row for ``architectures``, or for ``model_type`` where a checkpoint names no architecture."""
    names = raw.get("architectures") or []
    model_type = raw.get("model_type")
    for row in FAMILIES.values():
        if any(name in row.architectures for name in names) or (not names and model_type == row.model_type):
            return row
    known = ", ".join(row.architectures[0] for row in FAMILIES.values())
    asked = (
        f"architecture {', '.join(map(str, names))}" if names else f"model_type {model_type!r} without architectures"
    )
    raise CheckpointError(f"{where}: {asked} is not supported; known: {known}")


def _shown(value: object) -> str:
    """``value`` for a message: a file may hold numbers of thousands of digits and lists of millions."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


class _Reader:
    """Typed access to a ``config.json`` with its family's defaults; every error names the key."""

    def __init__(self, row: Family, raw: Mapping[str, Any], where: str) -> None:
        self.row, self.raw, self.where = row, raw, where

    def value(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.row.defaults.get(key)

    def __call__(self, key: str, kind: type) -> Any:
        value = self.value(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where}: {key} must be {kind.__name__}, not {_shown(value)}")
        return value

    def size(self, key: str) -> int:
        return self.check_size(key, self(key, int))

    def check_size(self, key: str, value: int) -> int:
        limit = LIMITS.get(key, MAX_POSITIONS)
        if not 1 <= value <= limit:
            raise CheckpointError(f"{self.where}: {key} must be between 1 and {limit}, not {_shown(value)}")
        return value

    def number(self, key: str, source: Mapping[str, Any] | None = None, inside: str = "") -> float:
        value = self.value(key) if source is None else source.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise CheckpointError(
                f"{self.where}: {inside}{key} must be a number below {_LARGEST:g}, not {_shown(value)}"
            )
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} must be an object, not {_shown(value)}")
        return value

    def flag(self, switch: bool | str) -> bool:
        return switch if isinstance(switch, bool) else bool(self(switch, bool))


def _rope(get: _Reader) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_scaling`` and ``rope_theta`` or from transformers 5's ``rope_parameters``."""
    key = "rope_scaling" if get.raw.get("rope_scaling") else "rope_parameters"
    rope, inside = get.mapping(key), key + "."
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(f"{get.where}: {inside}{nested[0]}: rotary settings by layer type are not supported")
    theta = get.number("rope_theta", rope, inside) if rope.get("rope_theta") is not None else get.number("rope_theta")
    for partial in (rope.get("partial_rotary_factor"), get.raw.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise CheckpointError(f"{get.where}: partial_rotary_factor {partial!r} is not supported, only 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise CheckpointError(
            f"{get.where}: {inside}rope_type {kind!r} is not supported, only default, linear, dynamic, llama3"
        )
    factor = get.number("factor", rope, inside)
    if factor < 1:
        raise CheckpointError(f"{get.where}: {inside}factor must be at least 1, not {factor:g}")
    max_positions = get.size("max_position_embeddings")
    if kind != "llama3":
        return theta, RopeScaling(kind, factor, max_positions)
    original = get.raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original is not None:
        original = int(get.number("original_max_position_embeddings", {"original_max_position_embeddings": original}))
    original = get.check_size("original_max_position_embeddings", original or max_positions)
    low, high = get.number("low_freq_factor", rope, inside), get.number("high_freq_factor", rope, inside)
    if not high > low > 0:
        raise CheckpointError(f"{get.where}: {inside}high_freq_factor ({high:g}) must exceed low_freq_factor ({low:g})")
    return theta, RopeScaling("llama3", factor, original, low, high)


def _windows(row: Family, get: _Reader) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none; () when no layer has one."""
    num_layers = get.size("num_hidden_layers")
    if row.windows == "none":
        return ()
    on = row.windows == "all" or get("use_sliding_window", bool)
    window = get.size("sliding_window") if on and get.value("sliding_window") is not None else 0
    first = 0 if row.windows == "all" else get("max_window_layers", int)
    kinds = get.raw.get("layer_types")
    if kinds is None or row.windows == "all":
        sliding = [i >= first for i in range(num_layers)]
    else:
        sliding = _sliding_layers(kinds, num_layers, get.where)
        if any(sliding) and not window:
            raise CheckpointError(f"{get.where}: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window * s for s in sliding) if window and any(sliding) else ()


def _sliding_layers(kinds: object, num_layers: int, where: str) -> list[bool]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{where}: layer_types must list one type for each of the {num_layers} layers")
    for kind in kinds:
        if kind not in known:
            raise CheckpointError(f"{where}: layer_types: {kind!r} is not supported, only {', '.join(known)}")
    return [kind == "sliding_attention" for kind in kinds]


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The inverse of :func:`parse_config`: a ``config.json`` that transformers 4 and 5 both read.

    ``dtype`` is torch's name without the module, such as ``bfloat16``. Raises CheckpointError when the family
    cannot express ``config``.
    """
    row, scaling = FAMILIES[config.family], config.rope_scaling
    raw: dict[str, Any] = {
        "architectures": [row.architectures[0]],
        "model_type": row.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    }
    for switch, value in ((row.qkv_bias, config.qkv_bias), (row.mlp_bias, config.mlp_bias)):
        if isinstance(switch, str):
            raw[switch] = value
    if scaling is not None:
        raw["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            raw["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        else:
            raw["max_position_embeddings"] = scaling.original_max_seq_len
    if row.windows != "none":
        raw["sliding_window"] = max(config.windows, default=0) or None
    if row.windows == "upper":
        raw["use_sliding_window"] = bool(config.windows)
        raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows] or None
    if parse_config(raw) != config:
        raise CheckpointError(f"family {row.name} cannot express this model: {config}")
    return raw


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generation, for requests that leave it open."""

    eos_token_ids: tuple[int, ...]  # any of them ends a completion
    bos_token_id: int | None
    sampling: SamplingParams  # fields the checkpoint does not set are None


def read_generation_defaults(directory: Path, raw: Mapping[str, Any]) -> GenerationDefaults:
    """From ``generation_config.json`` of ``directory`` where it exists, else from ``raw``, its ``config.json``.

    Token ids missing from the first are taken from the second, then from the family's defaults. Sampling defaults
    count only with ``do_sample`` true, and then an unwritten temperature is 1.0, as in transformers; unlike there
    an unwritten top_k stays off. Raises CheckpointError for a value of the wrong type.
    """
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    where, chosen = (str(path), generation) if generation else (str(directory / "config.json"), raw)
    defaults = _family(raw, str(directory / "config.json")).defaults
    found: dict[str, tuple[int, ...]] = {}
    for key in ("eos_token_id", "bos_token_id"):
        value = generation.get(key)
        value = raw.get(key, defaults.get(key)) if value is None else value
        found[key] = _token_ids(key, value, where)
    bos = found["bos_token_id"]
    return GenerationDefaults(found["eos_token_id"], bos[0] if bos else None, _sampling(chosen, where))


def _token_ids(key: str, value: object, where: str) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(i for i in ids if i >= 0)  # -1 is an old way to write none


def _sampling(raw: Mapping[str, Any], where: str) -> SamplingParams:
    if not raw.get("do_sample"):
        return SamplingParams()
    given = {k: raw[k] for k in ("temperature", "top_k", "top_p", "min_p") if raw.get(k) is not None}
    try:
        return SamplingParams(**({"temperature": 1.0} | given))
    except RequestError as e:
        raise CheckpointError(f"{where}: {e.message}") from None
