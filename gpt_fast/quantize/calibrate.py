"""GPTQ over a checkpoint: calibration text through the model, block by block.

Within a block the layers are taken in the order they run. Every layer sees the inputs that those before it, quantized,
make, and is fitted to the outputs of the unquantized model (as Li et al. 2025, arXiv 2504.02692, do within GPTQ; here
the weights are corrected before), so that errors do not add up from block to block.

In memory are one block in float32, twice, and the hidden states of the calibration tokens, at most four times (128
sequences of 512 tokens of a 2048-wide model: 0.5 GB each). A finished block is on disk; a resumed run reads it from
there and goes on with its outputs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import progress_bar
from gpt_fast.checkpoint.weight_files import read_safetensors
from gpt_fast.config import ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.model.building import NoDraws
from gpt_fast.model.description import Block as DescribedBlock
from gpt_fast.model.description import Part, Product, describe, parts
from gpt_fast.model.rope import Rope
from gpt_fast.model.transformer import Block, Context
from gpt_fast.quantize.apply import quantize_layers, quantized_part, swap_layers
from gpt_fast.quantize.formats import OwnFormat, plain_weight
from gpt_fast.quantize.gptq import Hessian, gptq
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split
from gpt_fast.quantize.writer import (
    CheckpointWriter,
    Source,
    begin_writing,
    finish_writing,
    source_of,
    write_part,
)

NUM_SEQUENCES = 128
LENGTH = 512  # tokens
_BATCH = 4  # sequences

Schemes = Mapping[str, Scheme | Split | None]  # by the linear layer's name in a block


def quantize_with_text(
    checkpoint: Checkpoint,
    out: str | Path,
    quant: QuantConfig,
    tokens: Tensor,
    *,
    resume: bool = False,
    progress: bool = False,
) -> None:
    """Write ``checkpoint`` as ``out`` with blocks in int4 by GPTQ, the head rounded to nearest.

    ``tokens``: calibration sequences, int64 [S, T] (``calibration_tokens``). Raises CheckpointError or ConfigError.
    """
    if quant.blocks is None or quant.blocks.kind != "int4":
        raise ConfigError("GPTQ is for int4")
    source = source_of(checkpoint, quant)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    writer = begin_writing(source, out, {"method": "gptq", "tokens": digest}, resume)
    total = sum(tensor.num_bytes for tensor in source.checkpoint.tensors.values())
    try:
        with progress_bar(total, progress, "quantizing") as report, torch.inference_mode():
            for part in parts(source.config):
                if not part.target.startswith("layers.") and part.source not in writer.done:
                    write_part(source, writer, part, report)
                    writer.complete(part.source)
            _quantize_blocks(source, writer, tokens, report)
    except BaseException:
        writer.leave()
        raise
    finish_writing(source, writer)


def calibration_tokens(
    documents: Sequence[str],
    encode: Callable[[str], list[int]],
    config: ModelConfig,
    num_sequences: int = NUM_SEQUENCES,
    length: int = LENGTH,
) -> Tensor:
    """Sequences for calibration, int64 [S, T], evenly spaced over the documents, which follow each other.

    Each begins with a document, as what a model reads does, or T or more tokens inside a long one. T is at most the
    model's context. Raises ConfigError when there is not enough text for one.
    """
    length = min(length, config.max_seq_len)
    stream: list[int] = []
    starts: list[int] = []
    for tokens in map(encode, documents):
        starts += range(len(stream), len(stream) + max(1, len(tokens)), length)
        stream += tokens
    starts = [start for start in starts if start + length <= len(stream)]
    if not starts:
        raise ConfigError(f"the calibration text has {len(stream)} tokens; at least {length} are needed")
    chosen = torch.linspace(0, len(starts) - 1, min(num_sequences, len(starts))).round().long().tolist()
    return torch.tensor([stream[starts[i] : starts[i] + length] for i in chosen])


def _quantize_blocks(
    source: Source, writer: CheckpointWriter, tokens: Tensor, report: Callable[[int], object] | None
) -> None:
    config = source.config
    description = describe(config)
    positions = torch.arange(tokens.shape[1])
    angles = [Rope(table)(positions, torch.full_like(positions, tokens.shape[1])) for table in description.ropes]
    context = Context(tokens, positions, angles)
    x = _embed(source, context)
    exact = x.clone()
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        own = [part for part in parts(config) if part.target.startswith(prefix)]
        block = _read_block(source, description.layers[index], own)
        if prefix in writer.done:
            exact = torch.cat([block(b, context) for b in exact.split(_BATCH)])
            _take_from_disk(block, source, writer, prefix)
        else:
            exact = quantize_block(block, x, exact, context, _schemes(source, block))
            _write_block(block, source, writer, prefix)
            for part in own:
                if quantized_part(part, source.scheme_of)[1] is None:
                    write_part(source, writer, part)
            writer.complete(prefix)
        for begin in range(0, len(x), _BATCH):
            x[begin : begin + _BATCH] = block(x[begin : begin + _BATCH], context)
        if report:
            report(sum(source.checkpoint.tensors[part.source].num_bytes for part in own))


def quantize_block(block: Block, x: Tensor, exact: Tensor, context: Context, schemes: Schemes) -> Tensor:
    """Replace the linear layers of ``block`` by quantized ones: int4 by GPTQ, others and experts by rounding.

    ``x`` [S, T, E] are the inputs that quantized blocks before this one make, ``exact`` those of the unquantized model,
    which are returned as this block, unquantized, changes them.
    """
    reference = copy.deepcopy(block)
    for index, op in enumerate(block.block.ops):
        if isinstance(op, Product) and schemes[op.matrix] is not None:
            hessian = Hessian(block.block.matrix(op.matrix).inputs)
            for inputs, exact_inputs in zip(x.split(_BATCH), exact.split(_BATCH), strict=True):
                seen, wanted = ({"x": inputs}, {"x": exact_inputs})
                block.run(seen, context, index)
                reference.run(wanted, context, index)
                hessian.add(seen[op.x], wanted[op.x])
            _fit(block, op.matrix, hessian, schemes)
    if any(m.num_experts for m in block.block.matrices):
        quantize_layers(block, {m.name: schemes[m.name] for m in block.block.matrices if m.num_experts}.get)
    return torch.cat([reference(b, context) for b in exact.split(_BATCH)])


def _fit(block: Block, name: str, hessian: Hessian, schemes: Schemes) -> None:
    """Put a quantized layer in the place of ``name``, fitted to its inputs."""
    linear = block.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    weight = hessian.corrected(linear.weight)
    swap_layers(block, {name: schemes[name]}.get, "cpu")
    layer = block.get_submodule(name)
    assert isinstance(layer, QuantizedLinear | SplitLinear)
    for piece in layer.pieces():
        rows, weight = weight[: piece.out_features], weight[piece.out_features :]
        if piece.scheme.kind == "int4":
            quantized = gptq(rows, hessian.mean(), piece.scheme.group_size)
        else:
            quantized = quantize_rows(rows, piece.scheme)
        for key, tensor in quantized.items():
            piece.get_buffer(key).copy_(tensor)


def _embed(source: Source, context: Context) -> Tensor:
    """Hidden states before the first layer, float32 [S, T, E]."""
    embed = describe(source.config).embed
    block = _read_block(source, embed, [p for p in parts(source.config) if p.target.startswith(embed.prefix)])
    out: Tensor = block(torch.empty(0), context)
    return out


def _read_block(source: Source, described: DescribedBlock, own: Sequence[Part]) -> Block:
    """A block of the unquantized model in float32."""
    with NoDraws():
        block = Block(described)
    parameters = dict(block.named_parameters())
    for part in own:
        target = parameters[part.target.removeprefix(described.prefix)]
        plain_weight(part, source.checkpoint.tensors).copy_to(target[part.start : part.start + part.shape[0]])
    return block.requires_grad_(False)


def _schemes(source: Source, block: Block) -> Schemes:
    return {m.name: source.scheme_of(block.block.prefix + m.name) for m in block.block.matrices}


def _quantized_layers(block: Block, source: Source, prefix: str) -> Iterator[tuple[QuantizedLinear, Part]]:
    """The quantized layers of ``block`` with the parts that they are made of."""
    for part in parts(source.config):
        part, scheme = quantized_part(part, source.scheme_of)
        if scheme is not None and part.target.startswith(prefix):
            layer = block.get_submodule(part.target.removeprefix(prefix).removesuffix(".weight"))
            assert isinstance(layer, QuantizedLinear)
            yield layer, part


def _write_block(block: Block, source: Source, writer: CheckpointWriter, prefix: str) -> None:
    for layer, part in _quantized_layers(block, source, prefix):
        for name, buffer in layer.named_buffers():
            rows = buffer[part.start : part.start + part.shape[0]]
            writer.write(part.source.removesuffix("weight") + name, 0, rows)


def _take_from_disk(block: Block, source: Source, writer: CheckpointWriter, prefix: str) -> None:
    """Replace the linear layers of ``block`` by what an earlier run has made of them."""
    stored = read_safetensors(writer.path)
    swap_layers(block, _schemes(source, block).get, "cpu")
    for layer, part in _quantized_layers(block, source, prefix):
        OwnFormat(source.quant).fill(layer, part, stored, Cut(), None)
