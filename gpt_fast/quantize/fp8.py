"""Checkpoints of 8-bit floats with ``quant_method: fp8``: Qwen's and DeepSeek's, and those of transformers and AutoFP8.

For a linear layer ``X`` of N outputs and K inputs, ``value = weight * scale``:

======================  =============================================================================================
``X.weight``            float8_e4m3fn [N, K]
``X.weight_scale_inv``  a scale for each block of ``weight_block_size`` outputs and inputs, in spite of its name
``X.weight_scale``      in place of that: one scale for the whole weight
``X.input_scale``       of static activations: not needed
======================  =============================================================================================

They are read as plain weights of 16 bits. The tensors say which layers are stored so, not the lists of names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.errors import CheckpointError
from gpt_fast.model.description import Part
from gpt_fast.quantize.compressed import ScaledTensor
from gpt_fast.quantize.formats import Tensors, beside

METHOD = "fp8"
_SCALES = ("weight_scale_inv", "weight_scale")
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "activation_scale_inv")


def read_fp8(raw: Mapping[str, Any], where: str, wanted: Sequence[Part], tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint whose ``quantization_config`` is ``raw``, with weights in the place of codes and
    scales. Raises CheckpointError for sizes of blocks and scales that make no sense."""
    block = raw.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(_size(n) for n in block)):
        raise CheckpointError(f"{where}: quantization_config.weight_block_size must be two sizes, not {block!r:.60}")
    out = dict(tensors)
    for part in wanted:
        codes = tensors.get(part.source)
        if codes is None or codes.dtype != torch.float8_e4m3fn or codes.shape != part.stored_shape:
            continue  # check_tensors says what is wrong with it
        name = next((beside(part, scale) for scale in _SCALES if beside(part, scale) in tensors), None)
        if name is None:
            lacking = beside(part, _SCALES[0])
            raise CheckpointError(f"{where}: {part.source} is stored as 8-bit floats, and {lacking} is missing")
        scale = tensors[name].whole()
        (n, k), one = codes.shape, scale.numel() == 1
        rows, columns = (n, k) if one or block is None else block
        if not one and tuple(scale.shape) != (-(-n // rows), -(-k // columns)):
            given = f"{list(scale.shape)} for a weight {[n, k]} in blocks of {block}"
            raise CheckpointError(f"{where}: {name} is {given}")
        out[part.source] = ScaledTensor(codes, (n, k), scale.view(1, 1) if one else scale, (rows, columns))
        for end in (*_SCALES, *_OF_ACTIVATIONS):
            out.pop(beside(part, end), None)
    return out


def _size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
