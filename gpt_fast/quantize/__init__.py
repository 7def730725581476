"""Quantized weights: int8, int4 (round to nearest, GPTQ) and fp8, applied from outside the model.

scheme.py says what is quantized and how it is stored; :func:`load_model` here is the door for everything that loads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gpt_fast.checkpoint.families import read_json
from gpt_fast.checkpoint.loading import build, fill, open_checkpoint, warn_not_finite
from gpt_fast.checkpoint.loading import load_model as load_unquantized
from gpt_fast.errors import ConfigError
from gpt_fast.memory import check_weights
from gpt_fast.model.transformer import Transformer, weight_bytes
from gpt_fast.quantize.apply import Choose, chooser, locate, quantize_model, row_writer, swap_layers
from gpt_fast.quantize.checkpoint import load_quantized, open_quantized, quantize_checkpoint
from gpt_fast.quantize.scheme import METHOD, MODES, QuantConfig, Scheme, parse_quant_config, quant_config

__all__ = [
    "MODES",
    "QuantConfig",
    "Scheme",
    "check_device",
    "check_memory",
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
    method = _method(directory, quantize)
    if method == METHOD:
        model = load_quantized(directory, dtype, device, progress, column_major=column_major)
    elif method is not None:
        from gpt_fast.quantize.hub import load_hub

        model = load_hub(directory, dtype, device, progress, column_major=column_major)
    elif quantize is None:
        model = load_unquantized(directory, dtype, device, progress, column_major=column_major)
    else:
        config, weights = open_checkpoint(directory)
        choose = chooser(quant_config(quantize), config)
        model = build(config, dtype, device, column_major, lambda m: swap_layers(m, choose, device))
        place = lambda part: locate(part, choose)[0]  # noqa: E731
        fill(model, config, weights, progress=progress, place=place, store=row_writer(model))
    warn_not_finite(model, str(directory))
    return model


def outline(directory: str | Path, dtype: torch.dtype, quantize: str | None = None) -> Transformer:
    """The model that :func:`load_model` would load, on the meta device: shapes, dtypes and sizes, no weights.

    Raises as that does, and first checks the sizes in ``config.json`` against the tensors in the file.
    """
    directory = Path(directory)
    method = _method(directory, quantize)
    choose: Choose = lambda module: None  # noqa: E731
    if method == METHOD:
        source = open_quantized(directory)
        config, choose = source.config, source.choose
    elif method is not None:
        from gpt_fast.quantize.hub import open_hub

        found = open_hub(directory)
        config, choose = found.config, found.choose
    else:
        config, _ = open_checkpoint(directory)
        choose = chooser(quant_config(quantize), config) if quantize is not None else choose
    return build(config, dtype, "meta", swap=lambda m: swap_layers(m, choose, "meta"))


def check_memory(directory: str | Path, dtype: torch.dtype, device: torch.device, quantize: str | None = None) -> int:
    """Bytes of the weights that :func:`load_model` would load. Raises as that does, and ConfigError if they do not fit.

    Nothing of that size is allocated.
    """
    num_bytes = weight_bytes(outline(directory, dtype, quantize))
    check_weights(num_bytes, device)
    return num_bytes


def _method(directory: Path, quantize: str | None) -> str | None:
    """``quantization_method``. Raises ConfigError when ``quantize`` asks for another one."""
    method = quantization_method(directory)
    if method is not None and quantize is not None:
        raise ConfigError(f"quantize: {directory} is quantized already ({method}); leave quantize out")
    return method


def quantization_method(directory: str | Path) -> str | None:
    """``quant_method`` of a checkpoint's ``config.json``; None for one that is not quantized."""
    found = read_json(Path(directory) / "config.json").get("quantization_config")
    return str(found.get("quant_method") if isinstance(found, dict) else found) if found else None


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
