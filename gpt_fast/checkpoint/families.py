"""From a Hugging Face ``config.json`` and ``generation_config.json`` to :class:`ModelConfig` and defaults, and back.

What differs between families stands in their rows (family.py). What a checkpoint asks for and no field of
``ModelConfig`` expresses is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.checkpoint.family import ACTIVATIONS, KEYS, Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.config import MAX_POSITIONS, ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.errors import CheckpointError, ConfigError, RequestError, UnknownFamilyError
from gpt_fast.params import SamplingParams

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
_MAY_BE_NULL = ("num_kv_heads", "head_dim", "ffn_dim", "attention_cap", "logits_cap")

# What rope_scaling has for each kind beside its factor, and those fields of RopeScaling that have other names.
_ORIGINAL = "original_max_position_embeddings"
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": (_ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (_ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": (_ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}
_SCALING_FIELDS = {_ORIGINAL: "original_max_seq_len", "short_factor": "short", "long_factor": "long"}

# In every family: keys, and the values that can be served. If not is_causal, tokens see later ones.
_REFUSED: dict[str, tuple[Any, ...]] = {"is_causal": (None, True)}

# What quantize/ reads, and checkpoint/stacked.py.
QUANT_METHODS = ("gpt_fast", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4")


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


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """``raw``, the content of a ``config.json``, as ModelConfig. ``where`` names it in errors.

    Raises CheckpointError for an unknown architecture or for a value that is not supported, naming the key.
    """
    row = _family(raw, where)
    aliases = {key: raw[alias] for alias, key in row.aliases.items() if alias in raw}
    values = _Values({**row.defaults, **raw, **aliases}, where + ": ")
    if values.get("rope_parameters") is None and "rope_parameters" in row.defaults:  # null, too, means the family's
        values["rope_parameters"] = row.defaults["rope_parameters"]
    if values.get("quantization_config"):
        method = values.inner("quantization_config").get("quant_method", "an unnamed method")
        if method not in QUANT_METHODS:
            known = ", ".join(QUANT_METHODS) + "; use the unquantized checkpoint"
            raise values.wrong(f"quantization_config ({method}) is not supported, only {known}")
    for key, served in {**_REFUSED, **row.refused}.items():
        values.choice(key, dict.fromkeys(served))
    fields = dict(row.fields)
    fields |= {name: values.choice(*choice) for name, choice in _choices(row).items()}
    for name, key in _keys(row).items():
        if values.get(key) is not None or name not in _MAY_BE_NULL:
            fields[name] = values.field(name, key)
    fields |= {name: values.power(*power) for name, power in row.powers.items()}
    if row.experts:
        fields["experts"] = ExpertsConfig(**{name: values.field(name, key) for name, key in row.experts.items()})
    fields["num_kv_heads"] = fields.get("num_kv_heads") or fields["num_heads"]
    fields["head_dim"] = fields.get("head_dim") or fields["dim"] // fields["num_heads"]
    fields["ffn_dim"] = fields.get("ffn_dim") or 4 * fields["dim"]
    if fields.get("rotary_dim") != 0:
        _rope(values, fields)
    fields["windows"] = _windows(row, values, fields["num_layers"])
    try:
        row.finish(values, fields)
        return ModelConfig(family=row.name, **fields)
    except ConfigError as e:
        raise values.wrong(str(e)) from None


def _family(raw: Mapping[str, Any], where: str) -> Family:
    """The row for ``architectures``, or for ``model_type`` where a checkpoint names no architecture."""
    names, model_type = raw.get("architectures") or [], raw.get("model_type")
    names = names if isinstance(names, list) else [names]
    for row in FAMILIES.values():
        meant = all(raw.get(key, row.defaults.get(key)) in values for key, values in row.when.items())
        if meant and (any(n in row.architectures for n in names) or (not names and model_type == row.model_type)):
            return row
    known = ", ".join(dict.fromkeys(row.architectures[0] for row in FAMILIES.values()))
    asked = (
        f"architecture {', '.join(map(str, names))}" if names else f"model_type {model_type!r} without architectures"
    )
    raise UnknownFamilyError(f"{where}: {asked} is not supported; known: {known}")


def _choices(row: Family) -> dict[str, tuple[str, Mapping[Any, Any]]]:
    """Fields that the value of a key chooses: the row's own, and the activation."""
    usual = {"activation": (row.keys.get("activation", KEYS["activation"]), ACTIVATIONS)}
    return {name: choice for name, choice in {**usual, **row.choices}.items() if name not in row.fields}


def _keys(row: Family) -> dict[str, str]:
    """The other fields of ModelConfig and the keys that give them."""
    said = {*row.fields, *row.powers, *_choices(row)}
    return {n: key for n, key in {**KEYS, **row.keys}.items() if n not in said and key in row.defaults}


class _Values(dict[str, Any]):
    """An object of a ``config.json``. ``at``: the beginning of messages about it, file and key."""

    def __init__(self, values: Mapping[str, Any], at: str) -> None:
        super().__init__(values)
        self.at = at

    def wrong(self, said: str) -> CheckpointError:
        return CheckpointError(self.at + said)

    def inner(self, key: str) -> _Values:
        """The object ``key``; an empty one where there is none."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(f"{key} must be an object, not {_shown(value)}")
        return _Values(value, f"{self.at}{key}.")

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


def _rope(values: _Values, fields: dict[str, Any]) -> None:
    """The rotary fields, from ``rope_scaling`` and ``rope_theta`` or from transformers 5's ``rope_parameters``."""
    rope = values.inner("rope_scaling" if values.get("rope_scaling") else "rope_parameters")
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if set(nested) - {"full_attention", "sliding_attention"} or (nested and "full_attention" not in nested):
        raise rope.wrong(f"{nested[0]}: rotary settings by layer type are not supported")
    if nested:
        local = rope.inner("sliding_attention")
        if local.get("rope_type", "default") != "default":
            raise local.wrong("rope_type must be default")
        fields["local_rope_theta"] = local.power("rope_theta", 1.0)
        rope = rope.inner("full_attention")
    theta = fields["rope_theta"] = (values if rope.get("rope_theta") is None else rope).power("rope_theta", 1.0)
    scaling = fields["rope_scaling"] = _scaling(values, rope, fields["max_seq_len"])
    if scaling is not None and scaling.type == "yarn" and theta <= 1:
        raise values.wrong(f"rope_theta must be above 1 with yarn, not {theta:g}")
    if scaling is not None and scaling.type in ("dynamic", "yarn"):
        # For the first the key holds the length before stretching; for the second files have the one or the other.
        longest = max(fields["max_seq_len"], int(scaling.original_max_seq_len * scaling.factor))
        fields["max_seq_len"] = values.check_size("max_position_embeddings times factor", longest)
    holder = rope if "partial_rotary_factor" in rope else values
    if holder.get("partial_rotary_factor") is not None and "rotary_dim" not in fields:
        share = holder.number("partial_rotary_factor")
        if not 0 <= share <= 1:
            raise holder.wrong(f"partial_rotary_factor {share:g} is not between 0 and 1")
        fields["rotary_dim"] = None if share == 1 else int(fields["head_dim"] * share)


def _scaling(values: _Values, rope: _Values, positions: int) -> RopeScaling | None:
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "su":  # the name in Phi-3's first files
        kind = "longrope"
    if kind not in tuple(_SCALING_KEYS):
        raise rope.wrong(f"rope_type {kind!r} is not supported, only default, {', '.join(_SCALING_KEYS)}")
    holder = values if values.get(_ORIGINAL) else rope
    original = holder.check_size(_ORIGINAL, int(holder.number(_ORIGINAL)) if holder.get(_ORIGINAL) else positions)
    factor = max(1.0, positions / original)
    if rope.get("factor") is not None or kind != "longrope":
        factor = rope.number("factor")
    if factor < 1:
        raise rope.wrong(f"factor must be at least 1, not {factor:g}")
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, factor, positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not high > low > 0:
            raise rope.wrong(f"high_freq_factor ({high:g}) must exceed low_freq_factor ({low:g})")
        return RopeScaling("llama3", factor, original, low, high)
    attention = rope.number("attention_factor") if rope.get("attention_factor") is not None else None
    if kind == "yarn":
        betas = (("beta_fast", 32.0), ("beta_slow", 1.0))
        fast, slow = (rope.power(name, 1.0) if rope.get(name) else usual for name, usual in betas)
        if attention is None:
            given = [rope.number(n) for n in ("mscale", "mscale_all_dim") if rope.get(n)]
            scales = [0.1 * m * math.log(factor) + 1 for m in (given if len(given) == 2 else (1.0, 0.0))]
            attention = scales[0] / scales[1]
        truncate = bool(rope.get("truncate", True))
        return RopeScaling("yarn", factor, original, 1.0, 4.0, fast, slow, truncate, attention)
    if attention is None:
        if original == 1:
            raise rope.wrong(f"attention_factor is missing, and does not follow from {_ORIGINAL} 1")
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = rope.factors("short_factor"), rope.factors("long_factor")
    return RopeScaling("longrope", factor, original, attention_factor=attention, short=short, long=long)


def _windows(row: Family, values: _Values, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none; () when no layer has one."""
    if row.windows == "none":
        return ()
    on = "use_sliding_window" not in row.defaults or values.typed("use_sliding_window", bool)
    window = values.size("sliding_window") if on and values.get("sliding_window") is not None else 0
    if values.get("layer_types") is not None and row.windows != "all":
        sliding = _sliding_layers(values, num_layers)
        if any(sliding) and not window:
            raise values.wrong("layer_types has sliding_attention, but no sliding_window is in use")
    elif row.windows == "listed":
        every = values.size("sliding_window_pattern")  # every such layer sees everything
        last = values.typed("max_window_layers", int) if "max_window_layers" in row.defaults else num_layers
        sliding = [(i + 1) % every > 0 and i < last for i in range(num_layers)]
    else:
        first = values.typed("max_window_layers", int) if row.windows == "upper" else 0
        sliding = [i >= first for i in range(num_layers)]
    return tuple(window * s for s in sliding) if window and any(sliding) else ()


def _sliding_layers(values: _Values, num_layers: int) -> list[bool]:
    kinds, known = values["layer_types"], ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise values.wrong(f"layer_types must list one type for each of the {num_layers} layers")
    for kind in kinds:
        if kind not in known:
            raise values.wrong(f"layer_types: {kind!r} is not supported, only {', '.join(known)}")
    return [kind == "sliding_attention" for kind in kinds]


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The inverse of :func:`parse_config`: a ``config.json`` that transformers 4 and 5 both read.

    ``dtype`` is torch's name without the module, such as ``bfloat16``. Raises CheckpointError when the family
    cannot express ``config``.
    """
    row = FAMILIES[config.family]
    raw: dict[str, Any] = {"architectures": [row.architectures[0]], "model_type": row.model_type, "torch_dtype": dtype}
    raw |= {key: values[0] for key, values in row.when.items()}
    for name, (key, exponent) in row.powers.items():
        value = round((getattr(config, name) or 1.0) ** (1 / exponent), 9)
        raw[key] = int(value) if value.is_integer() else value  # of Gemma transformers takes int alone
    for name, key in _keys(row).items():
        value = getattr(config, name)
        raw[key] = None if name in _MAY_BE_NULL and not value else value
    for name, (key, values) in _choices(row).items():
        spelled = {meaning: value for value, meaning in values.items()}
        raw[key] = spelled.get(getattr(config, name), spelled.get(None))
    if config.experts is not None:
        raw |= {key: getattr(config.experts, name) for name, key in row.experts.items()}
    if config.rotary:
        raw |= _rope_keys(config, row)
    if row.windows != "none":
        raw["sliding_window"] = max(config.windows, default=0) or None
    if "use_sliding_window" in row.defaults:
        raw["use_sliding_window"] = bool(config.windows)
    if row.windows in ("upper", "listed") or (row.windows == "all by default" and not all(config.windows)):
        kinds = ("full_attention", "sliding_attention")
        raw["layer_types"] = [kinds[config.window(i) > 0] for i in range(config.num_layers)]
    raw |= row.written(config)
    raw |= {alias: raw[key] for alias, key in row.aliases.items() if key in raw}
    if parse_config(raw) != config:
        raise CheckpointError(f"family {row.name} cannot express this model: {config}")
    return raw


def _rope_keys(config: ModelConfig, row: Family) -> dict[str, Any]:
    """The inverse of :func:`_rope`."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if config.rotary_dim is not None or "partial_rotary_factor" in row.defaults:
        raw["partial_rotary_factor"] = config.rotary / config.head_dim
    if scaling is None:
        if "rope_parameters" in row.defaults:  # which have a scaling
            raw["rope_scaling"] = {"rope_type": "default"}
        return raw
    others = {key: getattr(scaling, _SCALING_FIELDS.get(key, key)) for key in _SCALING_KEYS[scaling.type]}
    raw["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor} | others
    if _ORIGINAL in row.defaults:
        raw[_ORIGINAL] = scaling.original_max_seq_len
    if scaling.type == "dynamic":
        raw["max_position_embeddings"] = scaling.original_max_seq_len
    return raw


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generation, for requests that leave it open."""

    eos_token_ids: tuple[int, ...]  # any of them ends a completion
    bos_token_id: int | None
    sampling: SamplingParams  # fields the checkpoint does not set are None


def read_generation_defaults(
    directory: Path | None, raw: Mapping[str, Any], usual: Mapping[str, Any]
) -> GenerationDefaults:
    """From ``generation_config.json`` of ``directory`` where both exist, else from ``raw``, its ``config.json``.

    Token ids missing from the first are taken from the second, then from ``usual``, the family's. Sampling defaults
    count only with ``do_sample`` true, and then an unwritten temperature is 1.0, as in transformers; unlike there
    an unwritten top_k stays off. ``repetition_penalty`` counts always, as there. Raises CheckpointError for a value of
    the wrong type.
    """
    path = (directory or Path()) / "generation_config.json"
    generation = read_json(path) if directory is not None and path.exists() else {}
    where, chosen = (str(path), generation) if generation else (str(path.with_name("config.json")), raw)
    said = {**usual, **raw, **{key: value for key, value in generation.items() if value is not None}}
    eos, bos = (_token_ids(key, said.get(key), where) for key in ("eos_token_id", "bos_token_id"))
    return GenerationDefaults(eos, bos[0] if bos else None, _sampling(chosen, where))


def _token_ids(key: str, value: object, where: str) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(i for i in ids if i >= 0)  # -1 is an old way to write none


def _sampling(raw: Mapping[str, Any], where: str) -> SamplingParams:
    drawn = ("temperature", "top_k", "top_p", "min_p") if raw.get("do_sample") else ()
    given = {key: raw[key] for key in (*drawn, "repetition_penalty") if raw.get(key) is not None}
    try:
        return SamplingParams(**({"temperature": 1.0} if drawn else {}) | given)
    except RequestError as e:
        raise CheckpointError(f"{where}: {e.message}") from None
