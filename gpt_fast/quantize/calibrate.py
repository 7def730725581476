"""GPTQ over a checkpoint: calibration text through the model, block by block.

Within a block the layers are taken in the order they run. Every layer sees the inputs that the quantized layers before
it make, and is fitted to the outputs of the unquantized model, so that errors do not add up from block to block. Li et
al. 2025 (arXiv 2504.02692) do so within GPTQ; here the weights are corrected before.

In memory are one block in float32, twice, and the hidden states of the calibration tokens, at most four times (128
sequences of 512 tokens of a 2048-wide model: 0.5 GB each). A finished block is on disk; a resumed run reads it from
there and goes on with its outputs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import Report, progress_bar
from gpt_fast.checkpoint.weight_files import read_safetensors
from gpt_fast.errors import ConfigError
from gpt_fast.model import description as d
from gpt_fast.model.building import NoDraws
from gpt_fast.model.describing import describe
from gpt_fast.model.rope import Rope
from gpt_fast.model.transformer import Block, Context
from gpt_fast.quantize.apply import SchemeOf, swap_layers
from gpt_fast.quantize.formats import Format, Tensors, beside
from gpt_fast.quantize.gptq import Hessian, gptq
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import QuantConfig
from gpt_fast.quantize.writer import CheckpointWriter

_BATCH = 4  # sequences


def quantize_with_text(
    source: Checkpoint, out: Path, quant: QuantConfig, tokens: Tensor, *, resume: bool = False, progress: bool = False
) -> None:
    """Write ``source`` as ``out`` with blocks in int4 by GPTQ, the head rounded to nearest.

    ``tokens``: calibration sequences, int64 [S, T] (``calibration_tokens``). Raises ConfigError for another mode, and
    as ``CheckpointWriter`` does.
    """
    if quant.blocks is None or quant.blocks.kind != "int4":
        raise ConfigError("GPTQ is for int4")
    settings = {"method": "gptq", "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]}
    with CheckpointWriter(source, quant, out, settings, resume) as writer:
        total = sum(map(writer.num_bytes, writer.blocks))
        with progress_bar(total, progress, "quantizing") as report, torch.inference_mode():
            for block in ("embed.", "head."):
                if block not in writer.done:
                    writer.round_block(block, report)
            _quantize_blocks(writer, tokens, report)


def calibration_tokens(
    documents: Sequence[str], encode: Callable[[str], list[int]], length: int, num_sequences: int = 128
) -> Tensor:
    """Sequences for calibration, int64 [S, T], evenly spaced over the documents, which follow each other.

    Each begins with a document, like the texts that a model reads, or T or more tokens inside a long one. T is
    ``length``. Raises ConfigError when there is not enough text for one.
    """
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


def _quantize_blocks(writer: CheckpointWriter, tokens: Tensor, report: Report) -> None:
    config, quant, source = writer.source.config, writer.quant, writer.source.tensors
    description = describe(config)
    positions = torch.arange(tokens.shape[1])
    angles = [Rope(table)(positions, torch.full_like(positions, tokens.shape[1])) for table in description.ropes]
    context = Context(tokens, positions, angles)
    x: Tensor = _read_block(writer, description.embed, Format(), source)(torch.empty(0), context)  # float32 [S, T, E]
    exact = x.clone()
    for described in description.layers:
        block = _read_block(writer, described, Format(), source)
        if described.prefix in writer.done:
            exact = _outputs(block, exact, context)
            block = _read_block(writer, described, writer.form, read_safetensors(writer.path))
        else:
            schemes = {m.name: quant.scheme(described.prefix + m.name, config) for m in described.matrices}
            exact = quantize_block(block, x, exact, context, schemes.get)
            _write_block(writer, block)
        x = _outputs(block, x, context)
        if report:
            report(writer.num_bytes(described.prefix))


def _outputs(block: Block, x: Tensor, context: Context) -> Tensor:
    return torch.cat([block(batch, context) for batch in x.split(_BATCH)])


def quantize_block(block: Block, x: Tensor, exact: Tensor, context: Context, scheme_of: SchemeOf) -> Tensor:
    """Replace the linear layers of ``block`` by quantized ones: int4 by GPTQ, others and experts by rounding.

    ``x`` [S, T, E] are the inputs that quantized blocks before this one make, ``exact`` those of the unquantized model,
    which are returned as this block, unquantized, changes them. ``scheme_of`` takes the layers' names in the block.
    """
    reference = copy.deepcopy(block)
    for index, op in enumerate(block.block.ops):
        if isinstance(op, d.Product) and scheme_of(op.matrix) is not None:
            hessian = Hessian(block.block.matrix(op.matrix).inputs)
            for inputs, exact_inputs in zip(x.split(_BATCH), exact.split(_BATCH), strict=True):
                seen, wanted = ({"x": inputs}, {"x": exact_inputs})
                block.run(seen, context, index)
                reference.run(wanted, context, index)
                hessian.add(seen[op.x], wanted[op.x])
            _fit(block, op.matrix, hessian, scheme_of)
    swap_layers(block, scheme_of, "cpu", rounded=True)  # experts, which are all that is left
    return _outputs(reference, exact, context)


def _fit(block: Block, name: str, hessian: Hessian, scheme_of: SchemeOf) -> None:
    """Put a quantized layer in the place of ``name``, fitted to its inputs."""
    linear = block.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    weight = hessian.corrected(linear.weight)
    swap_layers(block, {name: scheme_of(name)}.get, "cpu")
    layer = block.get_submodule(name)
    assert isinstance(layer, QuantizedLinear | SplitLinear)
    sizes = [piece.out_features for piece in layer.pieces()]
    for piece, rows in zip(layer.pieces(), weight.split(sizes), strict=True):
        int4 = piece.scheme.kind == "int4"
        made = gptq(rows, hessian.mean(), piece.scheme.group_size) if int4 else quantize_rows(rows, piece.scheme)
        piece.store(0, made)


def _read_block(writer: CheckpointWriter, described: d.Block, form: Format, tensors: Tensors) -> Block:
    """A block as ``form`` has it in ``tensors``; what is not quantized is float32."""
    prefix, config = described.prefix, writer.source.config
    with NoDraws():
        block = Block(described)
    swap_layers(block, lambda name: form.scheme(prefix + name, config), "cpu")
    for part in writer.blocks[prefix]:
        held, _ = form.held(part, config)
        form.load(block, held._replace(target=held.target.removeprefix(prefix)), tensors, Cut())
    return block.requires_grad_(False)


def _write_block(writer: CheckpointWriter, block: Block) -> None:
    prefix = block.block.prefix
    for part in writer.blocks[prefix]:
        held, scheme = writer.form.held(part, writer.source.config)
        if scheme is None:
            writer.write_part(part)
        else:
            layer = block.get_submodule(held.target.removeprefix(prefix).removesuffix(".weight"))
            for name, buffer in layer.named_buffers():
                writer.write(beside(part, name), 0, buffer[held.start : held.start + held.shape[0]])
    writer.complete(prefix)
