"""A decoder-only transformer in plain torch: it runs the operations of its description, one after the other.

It knows no checkpoints, quantization, parallelism, pages or batches; those are applied from outside. ``forward`` takes
whole sequences [B, T] without a cache: training, and the reference of everything else. ``step`` takes the new tokens
[N] of one engine step with a cache (attention.py).

Legend: B sequences, T tokens, N new tokens, H query heads, K key-value heads, D head dimension, E model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast.config import ModelConfig
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.model import description as d
from gpt_fast.model.attention import Scoring, alibi_slopes, attend, attend_plain
from gpt_fast.model.describing import describe
from gpt_fast.model.experts import Linear, run_experts
from gpt_fast.model.rope import Angles, Rope, rotate

KVCache = Sequence[LayerCache]  # one for each layer
Values = dict[str, Tensor]  # the buffers of a block by name


class Context(NamedTuple):
    """What operations need beside their buffers. ``cache`` and ``layout``: None for whole sequences."""

    tokens: Tensor
    positions: Tensor
    angles: Sequence[Angles]
    cache: LayerCache | None = None
    layout: StepLayout | None = None


class Block(nn.Module):
    """One block of a description: its weights as modules and parameters by their names, and its operations.

    ``run_experts``, which cannot be compiled, and ``mean_of_row`` may be exchanged from outside.
    """

    run_experts: Callable[..., Tensor]
    mean_of_row: Callable[[Tensor], Tensor]

    def __init__(self, block: d.Block) -> None:
        super().__init__()
        self.block, self.run_experts, self.mean_of_row = block, run_experts, mean_of_row
        for table in block.tables:
            self.add_module(table.name, nn.Embedding(table.num_rows, table.dim))
        for vector in block.vectors:
            self.add_module(vector.name, _Vector(vector))
        for matrix in block.matrices:
            self.add_module(matrix.name, nn.Linear(matrix.inputs, matrix.outputs, bias=matrix.bias))
        heads = [op.num_heads for op in block.ops if isinstance(op, d.Heads)]
        alibi = any(isinstance(op, d.Attention) and op.alibi for op in block.ops)
        self.slopes: Tensor | None
        self.register_buffer("slopes", alibi_slopes(heads[0]) if alibi else None, persistent=False)

    @property
    def compiles_whole(self) -> bool:
        """Whether torch.compile takes the block in one piece: which experts run is known only when they do."""
        return not any(isinstance(op, d.Experts) for op in self.block.ops)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``x`` [..., E] -> what the last operation makes. The first block takes no notice of ``x``."""
        values = {"x": x}
        self.run(values, context)
        return values["logits" if "logits" in values else "x"]

    def run(self, values: Values, context: Context, stop: int | None = None) -> None:
        """Run the operations, or the first ``stop`` of them, on ``values``."""
        for op in self.block.ops[:stop]:
            RUN[type(op)](self, op, values, context)

    def vector(self, name: str) -> _Vector:
        """The module of the vector ``name``."""
        found = self.get_submodule(name)
        assert isinstance(found, _Vector)
        return found


class _Vector(nn.Module):
    """A parameter ``weight`` [n], and ``bias`` where the description has one."""

    def __init__(self, vector: d.Vector) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(vector.size))
        self.bias = nn.Parameter(torch.zeros(vector.size)) if vector.bias else None


def _embed(block: Block, op: d.Embed, values: Values, context: Context) -> None:
    out = block.get_submodule(op.table)(context.tokens)
    values[op.out] = out if op.scale == 1.0 else out * torch.tensor(op.scale, dtype=out.dtype)


def _add_positions(block: Block, op: d.AddPositions, values: Values, context: Context) -> None:
    values[op.x] = values[op.x] + block.get_submodule(op.table)(context.positions + op.offset)


def _norm(block: Block, op: d.Norm, values: Values, context: Context) -> None:
    vector = block.vector(op.weight)
    if op.kind == "rms":
        out = rms_norm(values[op.x], vector.weight, op.eps, op.offset)
    else:
        weight = vector.weight + op.offset if op.offset else vector.weight
        out = F.layer_norm(values[op.x], weight.shape, weight, vector.bias, op.eps)
    values[op.out] = values[op.add] + out if op.add else out


def mean_of_row(x: Tensor) -> Tensor:
    """[..., n] -> [..., 1]."""
    return x.mean(-1, keepdim=True)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, mean: Callable[[Tensor], Tensor] = mean_of_row
) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467), in float32."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(mean(x32.pow(2)) + eps)
    if offset:  # as the families do that have one: rounded once
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight


def _product(block: Block, op: d.Product, values: Values, context: Context) -> None:
    out = block.get_submodule(op.matrix)(values[op.x])
    if op.scale != 1.0:
        out = out * op.scale
    values[op.out] = values[op.add] + out if op.add else out


def _heads(block: Block, op: d.Heads, values: Values, context: Context) -> None:
    sizes = (op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim, op.num_kv_heads * op.head_dim)
    q, k, v = values[op.x].split(sizes, dim=-1)

    def normed(x: Tensor, name: str, mean: Callable[[Tensor], Tensor]) -> Tensor:
        return rms_norm(x, block.vector(name).weight, op.norm_eps, op.norm_offset, mean)

    if op.norm == "row":
        q, k = normed(q, "q_norm", block.mean_of_row), normed(k, "k_norm", block.mean_of_row)
    q, k, v = (x.unflatten(-1, (-1, op.head_dim)) for x in (q, k, v))  # [..., H or K, D]
    if op.norm == "head":
        q, k = normed(q, "q_norm", mean_of_row), normed(k, "k_norm", mean_of_row)
    if op.rotary:
        q, k = rotate(q, *context.angles[op.rope]), rotate(k, *context.angles[op.rope])
    values[op.q], values[op.k], values[op.v] = q, k, v


def _attention(block: Block, op: d.Attention, values: Values, context: Context) -> None:
    sinks = block.vector(op.sinks).weight if op.sinks else None
    scoring = Scoring(op.window, op.scale, op.cap, block.slopes if op.alibi else None, sinks)
    q, k, v = values[op.q], values[op.k], values[op.v]
    if context.layout is None or context.cache is None:
        out = attend_plain(q, k, v, scoring)
    else:
        out = attend(q, k, v, context.cache, context.layout, scoring)
    values[op.out] = out.flatten(-2)


def _activation(block: Block, op: d.Activation, values: Values, context: Context) -> None:
    values[op.out] = activate(values[op.x], op.kind, op.gated)


def activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    """``kind(x)``, or of x [..., 2 F], gate and up side by side, ``kind(gate) * up`` (Shazeer 2020, arXiv 2002.05202).

    ``clamped_swiglu``, always gated, is gpt-oss's: ``min(gate, 7) * sigmoid(1.702 min(gate, 7)) * (clip(up, 7) + 1)``.
    """
    if not gated:
        return _ACTIVATIONS[kind](x)
    gate, up = x.chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1)
    return _ACTIVATIONS[kind](gate) * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
}  # fmt: skip


def _route(block: Block, op: d.Route, values: Values, context: Context) -> None:
    scores = values[op.x].float()
    if op.renormalize:
        top, chosen = scores.topk(op.top_k, dim=-1)
        weights = top.softmax(-1)
    else:
        weights, chosen = scores.softmax(-1).topk(op.top_k, dim=-1)
    values[op.out], values[op.out + " experts"] = weights, chosen


def _experts(block: Block, op: d.Experts, values: Values, context: Context) -> None:
    up, down = (cast("Linear", block.get_submodule(name)) for name in (op.up, op.down))
    count = block.block.matrix(op.up).num_experts
    weights, chosen = values[op.routes], values[op.routes + " experts"]
    out = block.run_experts(values[op.x], weights, chosen, up, down, count, lambda x: activate(x, op.kind, op.gated))
    if op.scale != 1.0:
        out = out * op.scale
    values[op.out] = values[op.add] + out if op.add else out


def _gate(block: Block, op: d.Gate, values: Values, context: Context) -> None:
    values[op.out] = values[op.add] + torch.sigmoid(values[op.by]) * values[op.x]


def _cap(block: Block, op: d.Cap, values: Values, context: Context) -> None:
    values[op.out] = op.limit * torch.tanh(values[op.x] / op.limit)


RUN: dict[type[d.Op], Callable[..., None]] = {
    d.Embed: _embed, d.AddPositions: _add_positions, d.Norm: _norm, d.Product: _product, d.Heads: _heads,
    d.Attention: _attention, d.Activation: _activation, d.Route: _route, d.Experts: _experts, d.Gate: _gate,
    d.Cap: _cap,
}  # fmt: skip


class Transformer(nn.Module):
    """The model of ``config`` (``describing.describe``). Parameters: ``embed.*``, ``layers.<i>.*``, ``head.*``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.description = config, describe(config)
        self.embed = Block(self.description.embed)
        self.layers = nn.ModuleList(map(Block, self.description.layers))
        self.head = Block(self.description.head)
        self.ropes = nn.ModuleList(map(Rope, self.description.ropes))
        self.tie()

    def tie(self) -> None:
        """Make a tied head the embedding table."""
        if self.config.tie_embeddings:
            self.head.get_submodule("output").weight = self.table.weight

    @property
    def table(self) -> nn.Embedding:
        """The embedding table [V, E]."""
        return cast("nn.Embedding", self.embed.get_submodule("tokens"))

    @property
    def device(self) -> torch.device:
        return self.table.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of weights that are not quantized."""
        return self.head.vector("norm").weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size]; no cache, no pages. The plain reference."""
        num_tokens = tokens.shape[1]
        positions = torch.arange(num_tokens, device=tokens.device)
        context = self.context(tokens, positions, torch.full_like(positions, num_tokens))
        x = tokens
        for block in (self.embed, *self.layers, self.head):
            x = block(x, context)
        return x

    def step(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, cache: KVCache, layout: StepLayout, rows: Tensor
    ) -> Tensor:
        """One engine step: new tokens [N] at ``positions`` [N] -> logits [R, vocab_size] of the tokens in ``rows`` [R].

        ``lengths`` [N]: tokens of the sequence when this one was computed (``Rope``). ``cache`` receives the new
        keys and values where ``layout`` says.
        """
        context = self.context(tokens, positions, lengths)
        x = self.embed(tokens, context)  # [N, E]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, context._replace(cache=layer_cache, layout=layout))
        logits: Tensor = self.head(x[rows], context)
        return logits

    def context(self, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Context:
        """What every block's operations need; see :meth:`step`."""
        return Context(tokens, positions, [rope(positions, lengths) for rope in self.ropes])

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        """Bytes read to decode one token at batch 1 with ``context_len`` tokens cached: the weights that it meets, and
        the keys and values."""
        held = {
            block.block.prefix + name: weight_bytes(module)
            for block in (self.embed, *self.layers, self.head)
            for name, module in block.named_children()
        }
        return self.description.bytes_per_token(held) + context_len * self.config.kv_bytes_per_token(cache_itemsize)

    def flops_per_token(self, context_len: int) -> int:
        """Multiply-adds, counted as two, to compute one token with ``context_len`` tokens cached."""
        c = self.config
        return 2 * self.description.active_parameters + 4 * c.num_layers * c.q_dim * context_len


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and persistent buffers of ``module``, a shared one counted once."""
    seen = {t.data_ptr() or id(t): t for t in module.state_dict(keep_vars=True).values()}
    return sum(t.nbytes for t in seen.values())
