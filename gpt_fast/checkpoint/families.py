"""From a Hugging Face ``config.json`` and ``generation_config.json`` to :class:`ModelConfig` and defaults, and back.

What differs between families stands in their rows (family.py). What a checkpoint asks for and no field of
``ModelConfig`` expresses is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.checkpoint.family import ACTIVATIONS, KEYS, Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.config import MAX_POSITIONS, ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.errors import CheckpointError, ConfigError, RequestError
from gpt_fast.params import SamplingParams

# The greatest sizes that a config.json may ask for: far above every model, and small enough to compute with. Whether
# the file's tensors have these sizes is checked before anything is built (Checkpoint.open).
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
    "num_local_experts": 2**12,
    "num_experts": 2**12,
}
_LARGEST = 1e15  # of numbers that are no sizes: NaN and infinity, which Python's JSON knows, are not below it
_MAX_JSON = 100_000_000  # bytes
_SHOWN = 60  # characters of a wrong value

_KINDS = {f.name: str(f.type) for kind in (ExpertsConfig, ModelConfig) for f in dataclasses.fields(kind)}

QUANT_METHODS = ("gpt_fast", "gptq", "awq", "mxfp4")  # that quantize/ reads, and checkpoint/stacked.py


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
    raw = get.raw
    if raw.get("quantization_config"):
        method = get.mapping("quantization_config").get("quant_method", "an unnamed method")
        if method not in QUANT_METHODS:
            raise CheckpointError(
                f"{where}: quantization_config ({method}) is not supported, only {', '.join(QUANT_METHODS)}; "
                "use the unquantized checkpoint"
            )
    for key, served in row.refused.items():
        if get.value(key) not in served:
            raise CheckpointError(f"{where}: {key} {get.value(key)!r} is not supported, only {_listed(served)}")
    fields = dict(row.fields) | {name: get.choice(*choice) for name, choice in row.choices.items()}
    keys = {**KEYS, **row.keys}
    for name, key in keys.items():
        if name not in fields and key:
            fields[name] = get.field(name, key)
    if row.experts:
        fields["experts"] = ExpertsConfig(**{name: get.typed(name, key) for name, key in row.experts.items()})
    heads, dim = fields["num_heads"], fields["dim"]
    fields["num_kv_heads"] = fields.get("num_kv_heads") or heads
    fields["head_dim"] = fields.get("head_dim") or dim // heads
    fields["ffn_dim"] = fields.get("ffn_dim") or 4 * dim
    _rope(get, fields)
    scaling = fields.get("rope_scaling")
    if scaling is not None and scaling.type == "dynamic":  # the key holds the length before stretching
        stretched = int(fields["max_seq_len"] * scaling.factor)
        fields["max_seq_len"] = get.check_size("max_position_embeddings times factor", stretched)
    fields["windows"] = _windows(row, get, fields["num_layers"])
    try:
        row.finish({**row.defaults, **raw}, fields)
        return ModelConfig(family=row.name, **fields)
    except ConfigError as e:
        raise CheckpointError(f"{where}: {e}") from None


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(repr, values))


def _family(raw: Mapping[str, Any], where: str) -> Family:
    """The row for ``architectures``, or for ``model_type`` where a checkpoint names no architecture."""
    names = raw.get("architectures") or []
    model_type = raw.get("model_type")
    for row in FAMILIES.values():
        meant = all(raw.get(key, row.defaults.get(key)) in values for key, values in row.when.items())
        if meant and (any(n in row.architectures for n in names) or (not names and model_type == row.model_type)):
            return row
    known = ", ".join(dict.fromkeys(row.architectures[0] for row in FAMILIES.values()))
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
        aliases = {key: raw[alias] for alias, key in row.aliases.items() if alias in raw}
        self.row, self.raw, self.where = row, {**raw, **aliases}, where

    def value(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.row.defaults.get(key)

    def __call__(self, key: str, kind: type) -> Any:
        value = self.value(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where}: {key} must be {kind.__name__}, not {_shown(value)}")
        return value

    def size(self, key: str, usual: str = "") -> int:
        """``usual``: the key that most families have for it."""
        return self.check_size(key, self(key, int), usual)

    def check_size(self, key: str, value: int, usual: str = "") -> int:
        limit = LIMITS.get(usual or key, MAX_POSITIONS)
        if not 1 <= value <= limit:
            raise CheckpointError(f"{self.where}: {key} must be between 1 and {limit}, not {_shown(value)}")
        return value

    def field(self, name: str, key: str) -> Any:
        """The field ``name`` of ModelConfig by ``key``; None for sizes that follow from others."""
        if self.value(key) is None and name in ("num_kv_heads", "head_dim", "ffn_dim"):
            return None
        if name == "activation":
            given = self(key, str)
            if given not in ACTIVATIONS:
                known = _listed(list(ACTIVATIONS))
                raise CheckpointError(f"{self.where}: {key} {given!r} is not supported, only {known}")
            return ACTIVATIONS[given]
        if self.value(key) is None and name in ("attention_cap", "logits_cap"):
            return 0.0
        return self.typed(name, key)

    def typed(self, name: str, key: str) -> Any:
        """The value of ``key``, of the type of the field ``name``."""
        kind = _KINDS[name]
        if kind == "int":
            return self.size(key, KEYS.get(name, key))
        return self.number(key) if kind.startswith("float") else self(key, bool)

    def choice(self, key: str, values: Mapping[Any, Any]) -> Any:
        """What ``values`` has for the value of ``key``."""
        given = self.value(key)
        for value, meaning in values.items():
            if value == given and type(value) is type(given):
                return meaning
        raise CheckpointError(f"{self.where}: {key} {_shown(given)} is not supported, only {_listed(list(values))}")

    def number(self, key: str, source: Mapping[str, Any] | None = None, inside: str = "") -> float:
        value = self.value(key) if source is None else source.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise CheckpointError(
                f"{self.where}: {inside}{key} must be a number below {_LARGEST:g}, not {_shown(value)}"
            )
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.value(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} must be an object, not {_shown(value)}")
        return value


def _rope(get: _Reader, fields: dict[str, Any]) -> None:
    """The rotary fields, from ``rope_scaling`` and ``rope_theta`` or from transformers 5's ``rope_parameters``."""
    if fields.get("rotary_dim") == 0:
        return
    key = "rope_scaling" if get.raw.get("rope_scaling") else "rope_parameters"
    rope, inside = get.mapping(key), key + "."
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if set(nested) - {"full_attention", "sliding_attention"} or (nested and "full_attention" not in nested):
        raise CheckpointError(f"{get.where}: {inside}{nested[0]}: rotary settings by layer type are not supported")
    if nested:
        local = rope.get("sliding_attention", {})
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(f"{get.where}: {inside}sliding_attention must have rope_type default")
        fields["local_rope_theta"] = get.number("rope_theta", local, inside + "sliding_attention.")
        rope, inside = rope["full_attention"], inside + "full_attention."
    theta = get.number("rope_theta", rope, inside) if rope.get("rope_theta") is not None else None
    fields["rope_theta"] = get.number("rope_theta") if theta is None else theta
    fields["rope_scaling"] = _scaling(get, rope, inside)
    share = rope.get("partial_rotary_factor", get.value("partial_rotary_factor"))
    if share is not None and "rotary_dim" not in fields:
        share = get.number("partial_rotary_factor", {"partial_rotary_factor": share}, inside)
        if not 0 <= share <= 1:
            raise CheckpointError(f"{get.where}: partial_rotary_factor {share:g} is not between 0 and 1")
        fields["rotary_dim"] = None if share == 1 else int(fields["head_dim"] * share)


def _scaling(get: _Reader, rope: Mapping[str, Any], inside: str) -> RopeScaling | None:
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "su":  # the name in Phi-3's first files
        kind = "longrope"
    known = ("linear", "dynamic", "llama3", "yarn", "longrope")
    if kind not in known:
        raise CheckpointError(
            f"{get.where}: {inside}rope_type {kind!r} is not supported, only default, {', '.join(known)}"
        )
    positions = get.size(get.row.keys.get("max_seq_len", "max_position_embeddings"))
    original = get.value("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original is not None:
        original = int(get.number("original_max_position_embeddings", {"original_max_position_embeddings": original}))
    original = get.check_size("original_max_position_embeddings", original or positions)
    factor = max(1.0, positions / original)
    if rope.get("factor") is not None or kind != "longrope":
        factor = get.number("factor", rope, inside)
    if factor < 1:
        raise CheckpointError(f"{get.where}: {inside}factor must be at least 1, not {factor:g}")
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, factor, positions)
    if kind == "llama3":
        low, high = get.number("low_freq_factor", rope, inside), get.number("high_freq_factor", rope, inside)
        if not high > low > 0:
            raise CheckpointError(
                f"{get.where}: {inside}high_freq_factor ({high:g}) must exceed low_freq_factor ({low:g})"
            )
        return RopeScaling("llama3", factor, original, low, high)
    given = rope.get("attention_factor")
    attention = None if given is None else get.number("attention_factor", rope, inside)
    if kind == "yarn":
        beta = [get.number(n, rope, inside) if rope.get(n) else d for n, d in (("beta_fast", 32.0), ("beta_slow", 1.0))]
        scales = [0.1 * m * math.log(factor) + 1 for m in (rope.get("mscale"), rope.get("mscale_all_dim")) if m]
        usual = scales[0] / scales[1] if len(scales) == 2 else 0.1 * math.log(factor) + 1
        truncate = bool(rope.get("truncate", True))
        attention = usual if attention is None else attention
        return RopeScaling("yarn", factor, original, 1.0, 4.0, beta[0], beta[1], truncate, attention)
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_factors(get, rope, inside + name, name) for name in ("short_factor", "long_factor"))
    return RopeScaling("longrope", factor, original, attention_factor=attention, short=short, long=long)


def _factors(get: _Reader, rope: Mapping[str, Any], where: str, key: str) -> tuple[float, ...]:
    """longrope's divisors, one for each pair of dimensions that rotate."""
    given = rope.get(key)
    if not isinstance(given, list) or not all(isinstance(f, (int, float)) and 0 < f < _LARGEST for f in given):
        raise CheckpointError(f"{get.where}: {where} must be a list of positive numbers, not {_shown(given)}")
    return tuple(float(f) for f in given)


def _windows(row: Family, get: _Reader, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none; () when no layer has one."""
    if row.windows == "none":
        return ()
    on = "use_sliding_window" not in row.defaults or get("use_sliding_window", bool)
    window = get.size("sliding_window") if on and get.value("sliding_window") is not None else 0
    kinds = get.value("layer_types")
    if kinds is not None and row.windows != "all":
        sliding = _sliding_layers(kinds, num_layers, get.where)
        if any(sliding) and not window:
            raise CheckpointError(f"{get.where}: layer_types has sliding_attention, but no sliding_window is in use")
    elif row.windows == "listed":
        every = get.size("sliding_window_pattern")  # every such layer sees everything
        last = get("max_window_layers", int) if "max_window_layers" in row.defaults else num_layers
        sliding = [(i + 1) % every > 0 and i < last for i in range(num_layers)]
    else:
        first = 0 if row.windows == "all" else get("max_window_layers", int)
        sliding = [i >= first for i in range(num_layers)]
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
    row = FAMILIES[config.family]
    raw: dict[str, Any] = {"architectures": [row.architectures[0]], "model_type": row.model_type, "torch_dtype": dtype}
    raw |= {key: values[0] for key, values in row.when.items()}
    fixed = {*row.fields, *row.choices}
    keys = {name: key for name, key in {**KEYS, **row.keys}.items() if key and name not in fixed}
    raw |= {key: getattr(config, name) for name, key in keys.items()}
    if "activation" in keys:
        raw[keys["activation"]] = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation)
    for name, (key, values) in row.choices.items():
        spelled = {meaning: value for value, meaning in values.items()}
        raw[key] = spelled.get(getattr(config, name), spelled.get(None))
    if config.experts is not None:
        raw |= {key: getattr(config.experts, name) for name, key in row.experts.items()}
    if config.rotary:
        raw |= _rope_keys(config)
    if row.windows != "none":
        raw["sliding_window"] = max(config.windows, default=0) or None
    if row.windows == "upper":
        raw["use_sliding_window"] = bool(config.windows)
        raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows] or None
    aliases = {key: alias for alias, key in row.aliases.items()}
    raw = {aliases.get(key, key): value for key, value in raw.items()}
    if parse_config(raw) != config:
        raise CheckpointError(f"family {row.name} cannot express this model: {config}")
    return raw


# What a kind of scaling needs beside its factor, and keys of rope_scaling whose names differ from the fields'.
_SCALING_FIELDS = {
    "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_seq_len", "attention_factor", "short", "long"),
}
_SCALING_KEYS = {
    "original_max_seq_len": "original_max_position_embeddings",
    "short": "short_factor",
    "long": "long_factor",
}


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`_rope`."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    scaling, row = config.rope_scaling, FAMILIES[config.family]
    if config.rotary_dim is not None or "partial_rotary_factor" in row.defaults:
        raw["partial_rotary_factor"] = config.rotary / config.head_dim
    if scaling is None:
        return raw
    raw["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor}
    for name in _SCALING_FIELDS.get(scaling.type, ()):
        value = getattr(scaling, name)
        raw["rope_scaling"][_SCALING_KEYS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if "original_max_position_embeddings" in row.defaults:
        raw["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.type in ("linear", "dynamic"):
        raw["max_position_embeddings"] = scaling.original_max_seq_len
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
