"""Programs for the Triton step: the operations of a model's description as a list of launches, six for a Llama's layer.

    norm, qkv | q and k norm, rotation, cache | attention | wo, residual | norm, gate and up, SwiGLU | w2, residual

with one more where keys and values are stored otherwise than queries, and six in the place of the last two for experts
(experts.py). Small rules fuse neighbours: a norm goes into the launch that makes its input and the products that read
its output (linear.py), an activation or a cap into the product before it. Where ranks share a model, what follows a sum
of theirs is a launch by itself. Every field of an operation is honoured or refused here.

Steps are of two kinds. ``step`` computes at most MAX_TOKENS, which memory bounds; ``prompts`` any number, which
arithmetic bounds: its products and attention are divided otherwise (``many``). No bit of a row depends on the others in
either. Every shape depends on the number of tokens alone and nothing is read on the host, so a CUDA graph can hold both
(graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu.attention import Scratch, attend, scratch
from gpt_fast.kernels.gpu.experts import gather, route
from gpt_fast.kernels.gpu.fused import Following, Table, add, embed, norm, prepare_norm, rope_write
from gpt_fast.kernels.gpu.launching import MAX_TOKENS
from gpt_fast.kernels.gpu.linear import Routes, Row, Weights, linear, linear_residual, make_room, scaled
from gpt_fast.model import description as d

MAX_HEAD_DIM = 256
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # with a gate or without

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # positions and lengths [N] -> cos and sin [N, R / 2] float32


class BlockWeights(NamedTuple):
    """What the operations of one block name. matrices: several for one whose rows are stored in different formats.
    biases: of the vectors that have one. slopes: ALiBi's, [H] float32. parts: the matrices of which ranks have some
    inputs each."""

    matrices: Mapping[str, Sequence[Weights]] = {}
    vectors: Mapping[str, Tensor] = {}
    tables: Mapping[str, Table] = {}
    cache: LayerCache | None = None
    biases: Mapping[str, Tensor] = {}
    slopes: Tensor | None = None
    parts: Collection[str] = ()


class Joined(NamedTuple):
    """What ranks that share a model make of what each has computed: the sum, and of their logits those of all rows."""

    sum: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


class _Step(NamedTuple):
    """The inputs of one step, and its buffers by name: rows [N, width], a ``Row``, or ``Routes``."""

    tokens: Tensor
    positions: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    layout: StepLayout
    many: bool  # tokens of prompts
    buffers: dict[str, Any]


_Launch = tuple[Callable[[_Step], None], int]  # and how many operations it does
_Rest = Sequence[tuple[d.Op, BlockWeights]]  # the operations behind one


class GpuProgram:
    """Runs whole steps of the model ``description``.

    ``weights``: of each block; nothing is copied but vectors and biases that a constant changes. ``ropes``: one for
    each table of the description. Activations are of ``dtype``. Caches, of one shape and dtype, are written in place.
    ``joined``: all this is the share of one of several ranks. Raises UnsupportedError for what the kernels do not run.
    """

    def __init__(
        self,
        description: d.Description,
        weights: Sequence[BlockWeights],
        ropes: Sequence[Rope],
        dtype: torch.dtype,
        joined: Joined | None = None,
    ) -> None:
        self._ropes, self._tables, self._dtype, self._joined = ropes, description.ropes, dtype, joined
        self.device = next(iter(weights[-1].matrices.values()))[0].data.device
        self._scratch: dict[tuple[int, int, int], Scratch] = {}  # by the numbers of heads and their dimension
        blocks = list(zip(description.blocks, weights, strict=True))
        products = [
            (piece, _top_k(block) if piece.num_experts > 1 else 1)
            for block, w in blocks
            for matrix in w.matrices.values()
            for piece in matrix
        ]
        self._room = make_room(products, MAX_TOKENS, self.device)
        # What the buffers hold while the program is made: Tensor, Row, Routes, or queries with their Heads and cache.
        self._made: dict[str, type | tuple[d.Heads, LayerCache]] = {}
        ops = [(op, w) for block, w in blocks for op in block.ops]
        self._launches: list[Callable[[_Step], None]] = []
        done = 0
        while done < len(ops):
            op, block = ops[done]
            if type(op) not in _RULES:
                raise UnsupportedError(f"the operation {type(op).__name__}")
            run, count = _RULES[type(op)](self, op, block, ops[done + 1 :])
            self._launches.append(run)
            done += count
        self._check_rows("logits", "a model", "output")
        if not isinstance(op, d.Product) or op.add:  # whose launch is the last one
            raise UnsupportedError(f"logits of the operation {type(op).__name__}")
        self._head_input = op.x

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
        return self._logits(_Step(rows, rows, (), layout, False, {self._head_input: chosen}))

    def _run_body(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, *, many: bool) -> _Step:
        turns = (rope(positions, lengths) for rope in self._ropes)
        step = _Step(tokens, positions, [(cos.contiguous(), sin.contiguous()) for cos, sin in turns], layout, many, {})
        for run in self._launches[:-1]:
            run(step)
        return step

    def _logits(self, step: _Step) -> Tensor:
        self._launches[-1](step)
        logits: Tensor = step.buffers["logits"]
        return logits

    # The rules: each makes a launch.

    def _embed(self, op: d.Embed, w: BlockWeights, rest: _Rest) -> _Launch:
        table, (normed, following) = w.tables[op.table], _norm_of(op.out, rest)

        def run(step: _Step) -> None:
            _leave(step, op.out, normed, *embed(step.tokens, table, following, self._dtype, op.scale))

        return run, self._leaves(op.out, normed)

    def _add_positions(self, op: d.AddPositions, w: BlockWeights, rest: _Rest) -> _Launch:
        self._check_rows(op.x, "AddPositions", "x")
        table = w.tables[op.table]
        assert isinstance(table, Tensor)

        def run(step: _Step) -> None:
            step.buffers[op.x] = step.buffers[op.x] + table[step.positions + op.offset].to(self._dtype)

        return run, 1

    def _norm(self, op: d.Norm, w: BlockWeights, rest: _Rest) -> _Launch:
        self._check_rows(op.x, "Norm", "x")
        vector, bias = _shifted(w.vectors[op.weight], op.offset), w.biases.get(op.weight)
        if _waits(op):

            def prepare(step: _Step) -> None:
                step.buffers[op.out] = prepare_norm(step.buffers[op.x], vector, op.eps)

            self._made[op.out] = Row
            return prepare, 1
        if op.add:
            self._check_rows(op.add, "Norm", "add")
        normed, following = _norm_of(op.out, rest)

        def run(step: _Step) -> None:
            x, other = step.buffers[op.x], step.buffers.get(op.add)
            made = norm(x, vector, bias, op.eps, centred=op.kind == "layer", add=other, following=following)
            _leave(step, op.out, normed, *made)

        return run, self._leaves(op.out, normed)

    def _product(self, op: d.Product, w: BlockWeights, rest: _Rest) -> _Launch:
        pieces = [scaled(piece, op.scale) for piece in w.matrices[op.matrix]]
        if pieces[0].num_experts > 1:
            raise UnsupportedError(f"Product with matrix {op.matrix!r}, which is of experts")
        self._check_input(op.x, "Product")
        if op.add:
            self._check_rows(op.add, "Product", "add")
        behind = rest[0][0] if rest else None
        if not isinstance(behind, d.Activation | d.Cap) or behind.x != op.out:
            behind = None
        if behind is not None and op.add:
            raise UnsupportedError(f"Product with add {op.add!r}")
        if self._joined and op.matrix in w.parts:
            return self._product_of_ranks(op, pieces, rest)
        if len(pieces) > 1 and (op.add or behind):
            raise UnsupportedError(f"Product with matrix {op.matrix!r} in several formats and something fused to it")
        normed, following = _norm_of(op.out, rest if op.add else ())
        out, gated, activation = op.out if behind is None else behind.out, False, None
        if isinstance(behind, d.Activation):
            gated, activation = behind.gated, _kind(behind)
        cap = behind.limit if isinstance(behind, d.Cap) else None
        sizes = [piece.out_features // (2 if gated else 1) for piece in pieces]

        def run(step: _Step) -> None:
            x, residual = step.buffers[op.x], step.buffers[op.add] if op.add else None
            if residual is not None and following is not None:
                vector, eps = following
                if step.many:
                    sums = linear(x, pieces[0], residual=residual, many=True)
                    _leave(step, out, normed, sums, prepare_norm(sums, vector, eps))
                else:
                    made = linear_residual(x, pieces[0], residual, vector, eps, self._room)
                    _leave(step, out, normed, *made)
                return
            rows = x.weighted if isinstance(x, Row) else x
            dtype = torch.float32 if out == "logits" else self._dtype
            step.buffers[out] = side_by_side = rows.new_empty(rows.shape[0], sum(sizes), dtype=dtype)
            for piece, columns in zip(pieces, side_by_side.split(sizes, dim=1), strict=True):
                linear(
                    x, piece, gated=gated, activation=activation, cap=cap, residual=residual, out=columns,
                    many=step.many, room=self._room,
                )  # fmt: skip
            if out == "logits" and self._joined:
                step.buffers[out] = self._joined.logits(side_by_side)

        self._made.pop(op.out, None)  # never written where something is fused to it
        return run, self._leaves(out, normed) + (behind is not None)

    def _product_of_ranks(self, op: d.Product, pieces: Sequence[Weights], rest: _Rest) -> _Launch:
        """Each rank multiplies some of the inputs."""
        normed, following = _norm_of(op.out, rest)
        (piece,), joined = pieces, self._joined
        assert joined is not None

        def run(step: _Step) -> None:
            whole = joined.sum(linear(step.buffers[op.x], piece, many=step.many, room=self._room))
            _leave(step, op.out, normed, *add(whole, step.buffers.get(op.add), following))

        return run, self._leaves(op.out, normed)

    def _attention_heads(self, op: d.Heads, w: BlockWeights, rest: _Rest) -> _Launch:
        self._check_rows(op.x, "Heads", "x")
        if op.head_dim % 2 or op.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(f"Heads with head_dim {op.head_dim}: it must be even and at most {MAX_HEAD_DIM}")
        if op.rotary and (op.rope >= len(self._tables) or self._tables[op.rope].dim != op.rotary):
            raise UnsupportedError(f"Heads with rotary {op.rotary} and rope {op.rope}: no such table of angles")
        cache = w.cache
        assert cache is not None
        if tuple(cache.k.shape[2:]) != (op.num_kv_heads, op.head_dim):
            raise UnsupportedError(f"Heads with a cache of {tuple(cache.k.shape[2:])} numbers a token")
        sizes = [heads * op.head_dim for heads in (op.num_heads, op.num_kv_heads, op.num_kv_heads)]
        norms = [_shifted(w.vectors[name], op.norm_offset) for name in ("q_norm", "k_norm") if op.norm != "no"]
        for vector, size in zip(norms, sizes, strict=False):
            if vector.numel() != (size if op.norm == "row" else op.head_dim):
                raise UnsupportedError(f"Heads with norm {op.norm!r} of {vector.numel()} weights")
        if op.norm == "row" and self._joined:
            raise UnsupportedError("Heads with norm 'row' that ranks divide")
        q_norm, k_norm = norms if op.norm == "head" else (None, None)
        unturned = torch.empty(MAX_TOKENS, 0, device=self.device)

        def run(step: _Step) -> None:
            cos, sin = step.angles[op.rope] if op.rotary else (unturned, unturned)
            qkv = step.buffers[op.x]
            if op.norm == "row":
                for columns, vector in zip(qkv.split(sizes, dim=1), norms, strict=False):
                    norm(columns, vector, None, op.norm_eps, out=columns)
            step.buffers[op.q] = rope_write(
                qkv, cos, sin, step.layout.write_slots, cache, op.num_heads, q_norm, k_norm, op.norm_eps
            )

        if op.norm == "row":  # in place
            self._made.pop(op.x)
        for name in (op.k, op.v):  # in the cache: only Attention reads them
            self._made.pop(name, None)
        self._made[op.q] = op, cache
        return run, 1

    def _attention(self, op: d.Attention, w: BlockWeights, rest: _Rest) -> _Launch:
        found = self._made.pop(op.q, None)
        if not isinstance(found, tuple) or (found[0].k, found[0].v) != (op.k, op.v):
            raise UnsupportedError(f"Attention with q {op.q!r}, k {op.k!r}, v {op.v!r}, which no Heads made together")
        heads, cache = found
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        if shape not in self._scratch:
            self._scratch[shape] = scratch(MAX_TOKENS, *shape, self.device)
        room = self._scratch[shape]
        slopes = w.slopes if op.alibi else None
        assert not op.alibi or slopes is not None
        sinks = w.vectors[op.sinks].contiguous() if op.sinks else None
        if sinks is not None and sinks.numel() != heads.num_heads:
            raise UnsupportedError(f"Attention with sinks {op.sinks!r}, which are {sinks.numel()} numbers")

        def run(step: _Step) -> None:
            q = step.buffers[op.q]
            out = attend(q, cache, step.layout, op.window, op.scale, room, step.many, op.cap, slopes, sinks)
            step.buffers[op.out] = out.flatten(1)

        return run, self._leaves(op.out)

    def _route(self, op: d.Route, w: BlockWeights, rest: _Rest) -> _Launch:
        self._check_rows(op.x, "Route", "x")

        def run(step: _Step) -> None:
            step.buffers[op.out] = route(step.buffers[op.x], op.top_k, op.renormalize, step.layout)

        self._made[op.out] = Routes
        return run, 1

    def _experts(self, op: d.Experts, w: BlockWeights, rest: _Rest) -> _Launch:
        if self._made.get(op.routes) is not Routes:
            raise UnsupportedError(f"Experts with routes {op.routes!r}, which no Route made")
        self._check_input(op.x, "Experts")
        if op.add:
            self._check_rows(op.add, "Experts", "add")
        if len(w.matrices[op.up]) > 1 or len(w.matrices[op.down]) > 1:
            raise UnsupportedError(f"Experts with up {op.up!r} or down {op.down!r} in several formats")
        if w.matrices[op.up][0].num_experts != w.matrices[op.down][0].num_experts:
            raise UnsupportedError(f"Experts with up {op.up!r} and down {op.down!r}, which are not of the same experts")
        up, down, kind = w.matrices[op.up][0], scaled(w.matrices[op.down][0], op.scale), _kind(op)
        gate = rest[0][0] if rest else None  # of an expert that every token goes through
        if not isinstance(gate, d.Gate) or gate.add != op.out:
            gate = None
        out, behind = (op.out, rest) if gate is None else (gate.out, rest[1:])
        if gate is not None:
            self._made.pop(op.out, None)  # never written
            self._check_rows(gate.x, "Gate", "x")
            self._check_rows(gate.by, "Gate", "by")
        normed, following = _norm_of(out, behind)
        joined = self._joined if op.down in w.parts else None

        def run(step: _Step) -> None:
            b, routes = step.buffers, step.buffers[op.routes]
            options: dict[str, Any] = {"routes": routes, "many": step.many, "room": self._room}
            inner = linear(b[op.x], up, gated=op.gated, activation=kind, **options)
            made = linear(inner, down, **options)
            shared = None if gate is None else (b[gate.x], b[gate.by])
            if joined is None:
                _leave(step, out, normed, *gather(made, routes, step.layout, b.get(op.add), shared, following))
                return
            whole = joined.sum(gather(made, routes, step.layout)[0])
            if shared is not None:
                whole = whole + torch.sigmoid(shared[1]) * shared[0]
            _leave(step, out, normed, *add(whole, b.get(op.add), following))

        return run, self._leaves(out, normed) + (gate is not None)

    def _alone(self, op: d.Activation | d.Cap | d.Gate, w: BlockWeights, rest: _Rest) -> _Launch:
        before = "Experts" if isinstance(op, d.Gate) else "Product"
        raise UnsupportedError(f"{type(op).__name__} with x {op.x!r} and no {before} right before it")

    def _check_rows(self, name: str, op: str, field: str) -> None:
        if self._made.get(name) is not Tensor:
            raise UnsupportedError(f"{op} with {field} {name!r}, which no operation before it leaves in memory")

    def _check_input(self, name: str, op: str) -> None:
        """What a product reads may wait for its norm."""
        if self._made.get(name) is not Row:
            self._check_rows(name, op, "x")

    def _leaves(self, out: str, normed: str = "") -> int:
        """Note that a launch makes ``out``, and ``normed`` by a norm fused to it; gives how many operations that is."""
        self._made[out] = Tensor
        if normed:
            self._made[normed] = Row
        return 2 if normed else 1


def _leave(step: _Step, out: str, normed: str, x: Tensor, row: Row | None) -> None:
    step.buffers[out] = x
    if normed:
        step.buffers[normed] = row


def _top_k(block: d.Block) -> int:
    """How many experts a token has."""
    return next(op.top_k for op in block.ops if isinstance(op, d.Route))


def _kind(op: d.Activation | d.Experts) -> str:
    if op.kind not in ACTIVATIONS and not (op.kind == "clamped_swiglu" and op.gated):
        raise UnsupportedError(f"{type(op).__name__} with kind {op.kind!r}{'' if op.gated else ' without a gate'}")
    return op.kind


def _norm_of(x: str, rest: _Rest) -> tuple[str, Following | None]:
    """Output, and weight and eps, of the operation behind, if it is a norm of ``x`` for which rows can wait."""
    op, w = rest[0] if rest else (None, None)
    if w is None or not isinstance(op, d.Norm) or op.x != x or not _waits(op):
        return "", None
    return op.out, (_shifted(w.vectors[op.weight], op.offset), op.eps)


def _waits(op: d.Norm) -> bool:
    """Whether rows can wait for ``op`` until their product divides by the root (linear.py)."""
    return op.kind == "rms" and not op.add


def _shifted(vector: Tensor, offset: float) -> Tensor:
    return vector.float() + offset if offset else vector


_RULES: dict[type[d.Op], Callable[..., _Launch]] = {
    d.Embed: GpuProgram._embed,
    d.AddPositions: GpuProgram._add_positions,
    d.Norm: GpuProgram._norm,
    d.Product: GpuProgram._product,
    d.Heads: GpuProgram._attention_heads,
    d.Attention: GpuProgram._attention,
    d.Activation: GpuProgram._alone,
    d.Route: GpuProgram._route,
    d.Experts: GpuProgram._experts,
    d.Gate: GpuProgram._alone,
    d.Cap: GpuProgram._alone,
}
