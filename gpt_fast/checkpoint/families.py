"""From a Hugging Face ``config.json`` to :class:`ModelConfig`, and back.

What differs between families stands in their rows (family.py). What a checkpoint asks for and no field of
``ModelConfig`` expresses is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpt_fast.checkpoint.family import ACTIVATIONS, KEYS, Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.json_values import Values
from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.errors import CheckpointError, ConfigError, UnknownFamilyError

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


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """``raw``, the content of a ``config.json``, as ModelConfig. ``where`` names it in errors.

    Raises CheckpointError for an unknown architecture or for a value that is not supported, naming the key.
    """
    row = _family(raw, where)
    aliases = {key: raw[alias] for alias, key in row.aliases.items() if alias in raw}
    values = Values({**row.defaults, **raw, **aliases}, where + ": ")
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


def _rope(values: Values, fields: dict[str, Any]) -> None:
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


def _scaling(values: Values, rope: Values, positions: int) -> RopeScaling | None:
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


def _windows(row: Family, values: Values, num_layers: int) -> tuple[int, ...]:
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


def _sliding_layers(values: Values, num_layers: int) -> list[bool]:
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
