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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.families import Part, parts
from gpt_fast.checkpoint.progress import progress_bar
from gpt_fast.checkpoint.safetensors_file import read_safetensors
from gpt_fast.checkpoint.shard import Cut
from gpt_fast.config import ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.model.transformer import Block, Rope
from gpt_fast.quantize.apply import quantized_part, swap_layers
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
    x = _embed(source, tokens)
    exact = x.clone()
    positions = torch.arange(tokens.shape[1])
    cos, sin = Rope(config)(positions, torch.full_like(positions, tokens.shape[1]))
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        own = [part for part in parts(config) if part.target.startswith(prefix)]
        block = _read_block(source, index, own)
        if prefix in writer.done:
            exact = torch.cat([block(b, cos, sin) for b in exact.split(_BATCH)])
            _take_from_disk(block, source, writer, prefix)
        else:
            exact = quantize_block(block, x, exact, cos, sin, _schemes(source, prefix))
            _write_block(block, source, writer, prefix)
            for part in own:
                if len(part.shape) == 1:
                    write_part(source, writer, part)
            writer.complete(prefix)
        for begin in range(0, len(x), _BATCH):
            x[begin : begin + _BATCH] = block(x[begin : begin + _BATCH], cos, sin)
        if report:
            report(sum(source.checkpoint.tensors[part.source].num_bytes for part in own))


def quantize_block(block: Block, x: Tensor, exact: Tensor, cos: Tensor, sin: Tensor, schemes: Schemes) -> Tensor:
    """Replace the linear layers of ``block`` by quantized ones: int4 by GPTQ, others by rounding to nearest.

    ``x`` [S, T, E] are the inputs that quantized blocks before this one make, ``exact`` those of the unquantized model,
    which are returned as this block, unquantized, changes them.
    """
    reference = copy.deepcopy(block)
    for stage in STAGES:
        linear = block.get_submodule(stage.linear)
        assert isinstance(linear, nn.Linear)
        hessian = Hessian(linear.in_features)
        for inputs, exact_inputs in zip(x.split(_BATCH), exact.split(_BATCH), strict=True):
            hessian.add(stage.inputs(block, inputs, cos, sin), stage.inputs(reference, exact_inputs, cos, sin))
        weight = hessian.corrected(linear.weight)
        swap_layers(block, {stage.linear: schemes[stage.linear]}.get, "cpu")
        layer = block.get_submodule(stage.linear)
        assert isinstance(layer, QuantizedLinear | SplitLinear)
        for piece in layer.pieces():
            rows, weight = weight[: piece.out_features], weight[piece.out_features :]
            if piece.scheme.kind == "int4":
                quantized = gptq(rows, hessian.mean(), piece.scheme.group_size)
            else:
                quantized = quantize_rows(rows, piece.scheme)
            for key, tensor in quantized.items():
                piece.get_buffer(key).copy_(tensor)
        if stage.linear.endswith("wo"):
            x, exact = _after(block, x, cos, sin), _after(reference, exact, cos, sin)
    return torch.cat([b + reference.feed_forward(reference.ffn_norm(b)) for b in exact.split(_BATCH)])


class Stage(NamedTuple):
    """A linear layer of a block and how to compute its inputs from those of the block, or of the half it is in."""

    linear: str
    inputs: Callable[[Block, Tensor, Tensor, Tensor], Tensor]


def _into_wo(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wo, block.attention.wo = block.attention.wo, nn.Identity()  # type: ignore[assignment]
    out: Tensor = block.attention(block.attention_norm(x), cos, sin, None, None)
    block.attention.wo = wo
    return out


def _into_w2(block: Block, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    w2, block.feed_forward.w2 = block.feed_forward.w2, nn.Identity()  # type: ignore[assignment]
    out: Tensor = block.feed_forward(block.ffn_norm(h))
    block.feed_forward.w2 = w2
    return out


def _after(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([b + block.attention(block.attention_norm(b), cos, sin, None, None) for b in x.split(_BATCH)])


STAGES = (
    Stage("attention.wqkv", lambda block, x, cos, sin: block.attention_norm(x)),
    Stage("attention.wo", _into_wo),
    Stage("feed_forward.w13", lambda block, h, cos, sin: block.ffn_norm(h)),
    Stage("feed_forward.w2", _into_w2),
)


def _embed(source: Source, tokens: Tensor) -> Tensor:
    """Hidden states before the first block, float32 [S, T, E]."""
    part = parts(source.config)[0]
    assert part.target == "tok_embeddings.weight"
    table = plain_weight(part, source.checkpoint.tensors)
    out = table.rows(0, table.num_rows)[tokens].float()
    table.release(0, table.num_rows)
    return out


def _read_block(source: Source, index: int, own: Sequence[Part]) -> Block:
    """Block ``index`` of the unquantized model in float32."""
    with torch.device("meta"):
        block = Block(source.config, index)
    block.to_empty(device="cpu")
    parameters = dict(block.named_parameters())
    for part in own:
        target = parameters[part.target.removeprefix(f"layers.{index}.")]
        plain_weight(part, source.checkpoint.tensors).copy_to(target[part.start : part.start + part.shape[0]])
    return block.float()


def _schemes(source: Source, prefix: str) -> Schemes:
    return {stage.linear: source.scheme_of(prefix + stage.linear) for stage in STAGES}


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
    swap_layers(block, _schemes(source, prefix).get, "cpu")
    for layer, part in _quantized_layers(block, source, prefix):
        OwnFormat(source.quant).fill(layer, part, stored, Cut(), None)
