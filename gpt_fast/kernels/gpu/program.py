"""Programs for the Triton step: the operations of a model's description as a list of launches, six for a Llama's layer.

    norm, qkv | q and k norm, rotation, cache | attention | wo, residual | norm, gate and up, SwiGLU | w2, residual

with one more where keys and values are stored otherwise than queries. Small rules fuse neighbours: a norm goes into the
launch that makes its input and the products that read its output (linear.py), a gate into the product before it.
Every field of an operation is honoured or refused here.

Steps are of two kinds. ``step`` computes at most MAX_TOKENS, which memory bounds; ``prompts`` any number, which
arithmetic bounds: its products and attention are divided otherwise (``many``). No bit of a row depends on the others in
either. Every shape depends on the number of tokens alone and nothing is read on the host, so a CUDA graph can hold both
(graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu.attention import Scratch, attend, scratch
from gpt_fast.kernels.gpu.fused import embed, prepare_norm, rope_write
from gpt_fast.kernels.gpu.launching import MAX_TOKENS
from gpt_fast.kernels.gpu.linear import Row, Weights, linear, linear_residual, make_room, scaled, tiling
from gpt_fast.model import description as d

MAX_HEAD_DIM = 256

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # positions and lengths [N] -> cos and sin [N, R / 2] float32


class BlockWeights(NamedTuple):
    """What the operations of one block name. matrices: several for one whose rows are stored in different formats."""

    matrices: Mapping[str, Sequence[Weights]] = {}
    vectors: Mapping[str, Tensor] = {}
    tables: Mapping[str, Tensor] = {}
    cache: LayerCache | None = None


class _Step(NamedTuple):
    """The inputs of one step, and its buffers by name: rows [N, width], or a ``Row``."""

    tokens: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    layout: StepLayout
    many: bool  # tokens of prompts
    buffers: dict[str, Any]


_Launch = tuple[Callable[[_Step], None], int]  # and how many operations it does
_Following = tuple[d.Op, BlockWeights] | None


class GpuProgram:
    """Runs whole steps of the model ``description``.

    ``weights``: of each block; nothing is copied but vectors and biases that a constant changes. ``ropes``: one for
    each table of the description. Activations are of ``dtype``. Caches, of one shape and dtype, are written in place.
    Raises UnsupportedError for what the kernels do not run.
    """

    def __init__(
        self, description: d.Description, weights: Sequence[BlockWeights], ropes: Sequence[Rope], dtype: torch.dtype
    ) -> None:
        self._ropes, self._tables, self._dtype = ropes, description.ropes, dtype
        self.device = next(iter(weights[0].tables.values())).device
        self._scratch: dict[tuple[int, int, int], Scratch] = {}  # by the numbers of heads and their dimension
        pieces = [piece for w in weights for matrix in w.matrices.values() for piece in matrix]
        products = [(piece.out_features, tiling(piece).splits) for piece in pieces]
        self._room = make_room(products, MAX_TOKENS, self.device)
        # What the buffers hold while the program is made: Tensor, Row, or queries with their Heads and cache.
        self._made: dict[str, type | tuple[d.Heads, LayerCache]] = {}
        ops = [(op, w) for block, w in zip(description.blocks, weights, strict=True) for op in block.ops]
        self._launches: list[Callable[[_Step], None]] = []
        done = 0
        while done < len(ops):
            op, block = ops[done]
            if type(op) not in _RULES:
                raise UnsupportedError(f"the operation {type(op).__name__}")
            run, count = _RULES[type(op)](self, op, block, ops[done + 1] if done + 1 < len(ops) else None)
            self._launches.append(run)
            done += count
        self._check_rows("logits", "a model", "output")
        head = ops[-1][0]  # whose launch is the last one
        if not isinstance(head, d.Product) or head.add:
            raise UnsupportedError(f"logits of the operation {type(head).__name__}")
        self._head_input = head.x

    def step(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout) -> Tensor:
        """Logits [N, V] float32 of all new tokens; their keys and values go into the cache.

        ``tokens``, ``positions``, ``lengths``: [N] int64 as for ``Transformer.step``. Tokens past
        ``layout.query_start[-1]`` only pad: they must write to page 0, and their logits mean nothing. Raises ValueError
        for more than MAX_TOKENS.
        """
        if not 1 <= tokens.shape[0] <= MAX_TOKENS:
            raise ValueError(f"{tokens.shape[0]} new tokens; a step here takes 1 to {MAX_TOKENS}")
        return self._logits(self._run_body(tokens, positions, lengths, layout, many=False))

    def prompts(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout) -> Tensor | Row:
        """The same for any number of tokens of prompts, up to what ``head`` makes logits of."""
        found: Tensor | Row = self._run_body(tokens, positions, lengths, layout, many=True).buffers[self._head_input]
        return found

    def head(self, found: Tensor | Row, rows: Tensor) -> Tensor:
        """Logits [R, V] float32 of the tokens ``rows`` [R] int64 of what ``prompts`` found."""
        if isinstance(found, Row):
            chosen: Tensor | Row = Row(found.weighted[rows], found.squares[rows], found.eps)
        else:
            chosen = found[rows]
        layout = StepLayout(rows, rows, rows, rows)  # not read
        return self._logits(_Step(rows, (), layout, False, {self._head_input: chosen}))

    def _run_body(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, *, many: bool) -> _Step:
        turns = (rope(positions, lengths) for rope in self._ropes)
        step = _Step(tokens, [(cos.contiguous(), sin.contiguous()) for cos, sin in turns], layout, many, {})
        for run in self._launches[:-1]:
            run(step)
        return step

    def _logits(self, step: _Step) -> Tensor:
        self._launches[-1](step)
        logits: Tensor = step.buffers["logits"]
        return logits

    # The rules: each makes a launch.

    def _embed(self, op: d.Embed, w: BlockWeights, following: _Following) -> _Launch:
        norm = _norm_of(op.out, following)
        if norm is None:
            raise UnsupportedError(f"Embed with out {op.out!r}, which no Norm reads next")
        table, (normed, vector, eps) = w.tables[op.table], norm

        def run(step: _Step) -> None:
            x, row = embed(step.tokens, table, vector, eps, self._dtype, op.scale)
            step.buffers.update({op.out: x, normed: row})

        self._made |= {op.out: Tensor, normed: Row}
        return run, 2

    def _norm(self, op: d.Norm, w: BlockWeights, following: _Following) -> _Launch:
        self._check_rows(op.x, "Norm", "x")
        vector = _norm_vector(op, w)

        def run(step: _Step) -> None:
            step.buffers[op.out] = prepare_norm(step.buffers[op.x], vector, op.eps)

        self._made[op.out] = Row
        return run, 1

    def _product(self, op: d.Product, w: BlockWeights, following: _Following) -> _Launch:
        pieces = [scaled(piece, op.scale) for piece in w.matrices[op.matrix]]
        if self._made.get(op.x) is not Row:
            self._check_rows(op.x, "Product", "x")
        if op.add:
            self._check_rows(op.add, "Product", "add")
        gate = following[0] if following and isinstance(following[0], d.Activation) else None
        gate = gate if gate and gate.x == op.out else None
        if gate is not None:
            _only(gate, kind="silu", gated=True)
            _only(op, add="")
        if len(pieces) > 1 and (op.add or gate):
            raise UnsupportedError(f"Product with matrix {op.matrix!r} in several formats and something fused to it")
        norm = _norm_of(op.out, following) if op.add else None
        out = gate.out if gate else op.out
        sizes = [piece.out_features // (2 if gate else 1) for piece in pieces]

        def run(step: _Step) -> None:
            x, residual = step.buffers[op.x], step.buffers[op.add] if op.add else None
            if residual is not None and norm is not None:
                normed, vector, eps = norm
                if step.many:
                    step.buffers[out] = sums = linear(x, pieces[0], residual=residual, many=True)
                    step.buffers[normed] = prepare_norm(sums, vector, eps)
                else:
                    step.buffers[out], step.buffers[normed] = linear_residual(
                        x, pieces[0], residual, vector, eps, self._room
                    )
                return
            rows = x.weighted if isinstance(x, Row) else x
            dtype = torch.float32 if out == "logits" else self._dtype
            step.buffers[out] = side_by_side = rows.new_empty(rows.shape[0], sum(sizes), dtype=dtype)
            for piece, columns in zip(pieces, side_by_side.split(sizes, dim=1), strict=True):
                linear(
                    x, piece, gated=gate is not None, residual=residual, out=columns, many=step.many, room=self._room
                )

        self._made.pop(op.out, None)  # never written where a gate is behind it
        self._made[out] = Tensor
        if norm is not None:
            self._made[norm[0]] = Row
        return run, 1 if gate is None and norm is None else 2

    def _attention_heads(self, op: d.Heads, w: BlockWeights, following: _Following) -> _Launch:
        self._check_rows(op.x, "Heads", "x")
        if op.norm == "row":
            _only(op, norm="head")
        if op.head_dim % 2 or op.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(f"Heads with head_dim {op.head_dim}: it must be even and at most {MAX_HEAD_DIM}")
        if op.rotary and (op.rope >= len(self._tables) or self._tables[op.rope].dim != op.rotary):
            raise UnsupportedError(f"Heads with rotary {op.rotary} and rope {op.rope}: no such table of angles")
        cache = w.cache
        assert cache is not None
        if tuple(cache.k.shape[2:]) != (op.num_kv_heads, op.head_dim):
            raise UnsupportedError(f"Heads with a cache of {tuple(cache.k.shape[2:])} numbers a token")
        q_norm, k_norm = (
            _shifted(w.vectors[name], op.norm_offset) if op.norm == "head" else None for name in ("q_norm", "k_norm")
        )
        unturned = torch.empty(MAX_TOKENS, 0, device=self.device)

        def run(step: _Step) -> None:
            cos, sin = step.angles[op.rope] if op.rotary else (unturned, unturned)
            step.buffers[op.q] = rope_write(
                step.buffers[op.x], cos, sin, step.layout.write_slots, cache, op.num_heads, q_norm, k_norm, op.norm_eps
            )  # fmt: skip

        for name in (op.k, op.v):  # in the cache: only Attention reads them
            self._made.pop(name, None)
        self._made[op.q] = op, cache
        return run, 1

    def _attention(self, op: d.Attention, w: BlockWeights, following: _Following) -> _Launch:
        _only(op, cap=0.0, alibi=False, sinks="")
        found = self._made.pop(op.q, None)
        if not isinstance(found, tuple) or (found[0].k, found[0].v) != (op.k, op.v):
            raise UnsupportedError(f"Attention with q {op.q!r}, k {op.k!r}, v {op.v!r}, which no Heads made together")
        heads, cache = found
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        if shape not in self._scratch:
            self._scratch[shape] = scratch(MAX_TOKENS, *shape, self.device)
        room = self._scratch[shape]

        def run(step: _Step) -> None:
            out = attend(step.buffers[op.q], cache, step.layout, op.window, op.scale, room, step.many)
            step.buffers[op.out] = out.flatten(1)

        self._made[op.out] = Tensor
        return run, 1

    def _activation(self, op: d.Activation, w: BlockWeights, following: _Following) -> _Launch:
        raise UnsupportedError(f"Activation with x {op.x!r}, which is not the Product before it")

    def _check_rows(self, name: str, op: str, field: str) -> None:
        if self._made.get(name) is not Tensor:
            raise UnsupportedError(f"{op} with {field} {name!r}, which no operation before it leaves in memory")


def _only(op: d.Op, **known: object) -> None:
    """Raise UnsupportedError where a field of ``op`` has another value than the only one that the kernels take."""
    for field, value in known.items():
        if getattr(op, field) != value:
            raise UnsupportedError(f"{type(op).__name__} with {field} {getattr(op, field)!r}")


def _norm_of(x: str, following: _Following) -> tuple[str, Tensor, float] | None:
    """Output, weight and eps of the operation behind, if it is the norm of ``x``."""
    if following is None:
        return None
    norm, w = following
    if not isinstance(norm, d.Norm) or norm.x != x:
        return None
    return norm.out, _norm_vector(norm, w), norm.eps


def _norm_vector(op: d.Norm, w: BlockWeights) -> Tensor:
    _only(op, kind="rms", add="")
    return _shifted(w.vectors[op.weight], op.offset)


def _shifted(vector: Tensor, offset: float) -> Tensor:
    return vector.float() + offset if offset else vector


_RULES: dict[type[d.Op], Callable[..., _Launch]] = {
    d.Embed: GpuProgram._embed,
    d.Norm: GpuProgram._norm,
    d.Product: GpuProgram._product,
    d.Heads: GpuProgram._attention_heads,
    d.Attention: GpuProgram._attention,
    d.Activation: GpuProgram._activation,
}
