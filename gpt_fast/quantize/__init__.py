"""Quantized weights: int8, int4 (round to nearest, GPTQ) and fp8, applied from outside the model.

scheme.py says what is quantized and how it is stored; :func:`load_model` here is the door for everything that loads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gpt_fast.checkpoint import build, fill, open_weights, resolve_tying
from gpt_fast.checkpoint import load_model as load_unquantized
from gpt_fast.config import ConfigError
from gpt_fast.families import read_config, read_json
from gpt_fast.model import Transformer
from gpt_fast.quantize.apply import chooser, locate, quantize_model, row_writer, swap_layers
from gpt_fast.quantize.checkpoint import load_quantized, quantize_checkpoint
from gpt_fast.quantize.scheme import METHOD, MODES, QuantConfig, Scheme, parse_quant_config, quant_config

__all__ = [
    "MODES",
    "QuantConfig",
    "Scheme",
    "check_device",
    "load_model",
    "outline",
    "quant_config",
    "quantization_method",
    "quantize_checkpoint",
    "quantize_model",
]


def load_model(
    directory: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
    *,
    column_major: bool = False,
    quantize: str | None = None,
) -> Transformer:
    """``checkpoint.load_model`` for checkpoints of every kind, quantized or to be quantized while loading.

    ``quantize``: a mode of ``quant_config``; each weight is rounded as it is read, so that the whole model is never
    held unquantized. Raises CheckpointError, and ConfigError for ``quantize`` with a quantized checkpoint.
    """
    directory = Path(directory)
    method = quantization_method(directory)
    if method is not None and quantize is not None:
        raise ConfigError(f"quantize: {directory} is quantized already ({method}); leave quantize out")
    if method == METHOD:
        return load_quantized(directory, dtype, device, progress, column_major=column_major)
    if method is not None:
        from gpt_fast.quantize.hub import load_hub

        return load_hub(directory, dtype, device, progress, column_major=column_major)
    if quantize is None:
        return load_unquantized(directory, dtype, device, progress, column_major=column_major)
    quant = quant_config(quantize)
    config, weights = resolve_tying(read_config(directory), open_weights(directory))
    choose = chooser(quant, config)
    model = build(config, dtype, device, column_major, lambda m: swap_layers(m, choose, device))
    place = lambda part: locate(part, choose)[0]  # noqa: E731
    fill(model, config, weights, str(directory), progress=progress, place=place, store=row_writer(model))
    return model


def outline(directory: str | Path, dtype: torch.dtype) -> Transformer:
    """The model of a checkpoint on the meta device: shapes, dtypes and sizes, no weights. Raises CheckpointError."""
    directory = Path(directory)
    raw = read_json(directory / "config.json").get("quantization_config")
    config, _ = resolve_tying(read_config(directory), open_weights(directory))
    if not raw:
        return build(config, dtype, "meta")
    if raw["quant_method"] == METHOD:
        quant = parse_quant_config(raw, str(directory / "config.json"))
    else:
        from gpt_fast.quantize.hub import parse_format

        group_size = parse_format(raw, str(directory / "config.json")).group_size
        quant = QuantConfig(Scheme("int4", group_size if group_size > 0 else config.dim), None)
    choose = chooser(quant, config)
    return build(config, dtype, "meta", swap=lambda m: swap_layers(m, choose, "meta"))


def quantization_method(directory: str | Path) -> str | None:
    """``quant_method`` of a checkpoint's ``config.json``; None for one that is not quantized."""
    found = read_json(Path(directory) / "config.json").get("quantization_config")
    return str(found["quant_method"]) if found else None


def check_device(directory: str | Path | None, quantize: str | None, device: torch.device) -> None:
    """Raise ConfigError when ``device`` cannot multiply with the weights of ``directory``, or with mode ``quantize``.

    fp8 needs CUDA with compute capability 8.9, or ROCm. Elsewhere int8 has the same size and a smaller error.
    """
    quant = quant_config(quantize) if quantize is not None else None
    if quant is None and directory is not None and quantization_method(directory) == METHOD:
        where = Path(directory) / "config.json"
        quant = parse_quant_config(read_json(where)["quantization_config"], str(where))
    if quant is None or "fp8" not in [scheme.kind for scheme in (quant.blocks, quant.head) if scheme]:
        return
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 9)):
        return
    raise ConfigError(f"quantize: fp8 is not supported on {device}, which cannot multiply in it; use int8")
