"""Programs for the Triton step: the operations of a model's description as a list of launches, six for a Llama's layer.

    norm, qkv | q and k norm, rotation, cache | attention | wo, residual | norm, gate and up, SwiGLU | w2, residual

with one more where keys and values are stored otherwise than queries. Small rules fuse neighbours: a norm goes into the
launch that makes its input and the products that read its output (linear.py), a gate into the product before it.
Every field of an operation is honoured or refused here.

For steps of at most 16 new tokens: decoding, verifying, the end of a prompt. Longer steps are bound by arithmetic, not
by memory, and belong to plain torch. Every shape depends on the number of tokens alone and nothing is read on the host,
so a CUDA graph can hold a step (graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.gpu.attention import Scratch, attend, scratch
from gpt_fast.kernels.gpu.fused import embed, prepare_norm, rope_write
from gpt_fast.kernels.gpu.linear import MAX_ROWS, Row, Weights, launch, linear, linear_residual, scaled
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
    """The inputs of one step, and its buffers by name: rows, and rows that wait for their norm."""

    tokens: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    write_slots: Tensor
    rows: dict[str, Tensor]
    waiting: dict[str, Row]


Launch = Callable[[_Step], None]
_Following = tuple[d.Op, BlockWeights] | None


class GpuProgram:
    """Runs whole steps of at most 16 new tokens of the model ``description``.

    ``weights``: of each block; nothing is copied but vectors and biases that a constant changes. ``ropes``: one for
    each table of the description. Activations are of ``dtype``. Caches, of one shape and dtype, are written in place.
    ``one_launch``: see ``attention.attend``. Raises UnsupportedError for what the kernels do not run.
    """

    def __init__(
        self,
        description: d.Description,
        weights: Sequence[BlockWeights],
        ropes: Sequence[Rope],
        dtype: torch.dtype,
        one_launch: bool = True,
    ) -> None:
        self._ropes, self._tables, self._dtype, self._one_launch = ropes, description.ropes, dtype, one_launch
        self.device = weights[0].tables[next(iter(weights[0].tables))].device
        ops = [(op, w) for block, w in zip(description.blocks, weights, strict=True) for op in block.ops]
        self._rows: set[str] = set()  # names of buffers, while the program is made
        self._waiting: set[str] = set()
        self._heads: dict[str, tuple[d.Heads, LayerCache]] = {}  # by the name of the queries
        self._scratch: dict[int, Scratch] = {}  # by the number of heads
        self._launches: list[Launch] = []
        position = 0
        while position < len(ops):
            op, block = ops[position]
            following = ops[position + 1] if position + 1 < len(ops) else None
            if type(op) not in _RULES:
                raise UnsupportedError(f"the operation {type(op).__name__}")
            position += _RULES[type(op)](self, op, block, following)
        self._read_rows("logits", "a model", "output")

    @staticmethod
    def takes(num_tokens: int) -> bool:
        """Whether :meth:`step` runs ``num_tokens`` new tokens."""
        return 1 <= num_tokens <= MAX_ROWS

    def step(
        self,
        tokens: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        lengths: Tensor,  # [N] int64: see Transformer.step
        query_start: Tensor,  # the fields of StepLayout
        context_len: Tensor,
        page_table: Tensor,
        write_slots: Tensor,
    ) -> Tensor:
        """Logits [N, V] float32 of all new tokens; their keys and values go into the cache.

        Tokens past ``query_start[-1]`` only pad: they must write to page 0, and their logits mean nothing. Raises
        ValueError for more than 16 tokens.
        """
        if not self.takes(tokens.shape[0]):
            raise ValueError(f"{tokens.shape[0]} new tokens; a step here takes 1 to {MAX_ROWS}")
        turns = (rope(positions, lengths) for rope in self._ropes)
        angles = [(cos.contiguous(), sin.contiguous()) for cos, sin in turns]
        step = _Step(tokens, angles, query_start, context_len, page_table, write_slots, {}, {})
        for run in self._launches:
            run(step)
        return step.rows["logits"]

    # The rules: each adds a launch and says how many operations it does.

    def _embed(self, op: d.Embed, w: BlockWeights, following: _Following) -> int:
        norm = _norm_of(op.out, following)
        if norm is None:
            raise UnsupportedError(f"Embed with out {op.out!r}, which no Norm reads next")
        table, (out, vector, eps) = w.tables[op.table], norm

        def run(step: _Step) -> None:
            step.rows[op.out], step.waiting[out] = embed(step.tokens, table, vector, eps, self._dtype, op.scale)

        self._made_rows(op.out)
        self._made_waiting(out)
        self._launches.append(run)
        return 2

    def _norm(self, op: d.Norm, w: BlockWeights, following: _Following) -> int:
        x = self._read_rows(op.x, "Norm", "x")
        vector = _norm_vector(op, w)

        def run(step: _Step) -> None:
            step.waiting[op.out] = prepare_norm(step.rows[x], vector, op.eps)

        self._made_waiting(op.out)
        self._launches.append(run)
        return 1

    def _product(self, op: d.Product, w: BlockWeights, following: _Following) -> int:
        pieces = [scaled(piece, op.scale) for piece in w.matrices[op.matrix]]
        whole, waiting = pieces[0], op.x in self._waiting
        if not waiting:
            self._read_rows(op.x, "Product", "x")
        if op.add:
            self._read_rows(op.add, "Product", "add")
        if len(pieces) > 1 and op.add:
            raise UnsupportedError(f"Product with add {op.add!r} and a matrix in several formats")
        if following is not None and isinstance(following[0], d.Activation) and following[0].x == op.out:
            return self._gated_product(op, pieces, waiting, following[0])
        norm = _norm_of(op.out, following) if op.add else None
        out_dtype = torch.float32 if op.out == "logits" else self._dtype

        def run(step: _Step) -> None:
            x = step.waiting[op.x] if waiting else step.rows[op.x]
            residual = step.rows[op.add] if op.add else None
            if residual is not None and norm is not None:
                out, vector, eps = norm
                step.rows[op.out], step.waiting[out] = linear_residual(x, whole, residual, vector, eps)
            elif len(pieces) == 1:
                step.rows[op.out] = linear(x, whole, residual=residual, out_dtype=out_dtype)
            else:
                step.rows[op.out] = _side_by_side(x, pieces, out_dtype)

        self._made_rows(op.out)
        if norm is not None:
            self._made_waiting(norm[0])
        self._launches.append(run)
        return 1 if norm is None else 2

    def _gated_product(self, op: d.Product, pieces: Sequence[Weights], waiting: bool, activation: d.Activation) -> int:
        _only(activation, kind="silu", gated=True)
        _only(op, add="")
        if len(pieces) > 1:
            raise UnsupportedError("Activation of a matrix in several formats")

        def run(step: _Step) -> None:
            x = step.waiting[op.x] if waiting else step.rows[op.x]
            step.rows[activation.out] = linear(x, pieces[0], gated=True)

        self._rows.discard(op.out)  # it is never written
        self._waiting.discard(op.out)
        self._made_rows(activation.out)
        self._launches.append(run)
        return 2

    def _attention_heads(self, op: d.Heads, w: BlockWeights, following: _Following) -> int:
        x, cache = self._read_rows(op.x, "Heads", "x"), w.cache
        if op.norm == "row":
            _only(op, norm="head")
        if op.head_dim % 2 or op.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(f"Heads with head_dim {op.head_dim}: it must be even and at most {MAX_HEAD_DIM}")
        if op.rotary and (op.rope >= len(self._tables) or self._tables[op.rope].dim != op.rotary):
            raise UnsupportedError(f"Heads with rotary {op.rotary} and rope {op.rope}: no such table of angles")
        assert cache is not None
        if tuple(cache.k.shape[2:]) != (op.num_kv_heads, op.head_dim):
            raise UnsupportedError(f"Heads with a cache of {tuple(cache.k.shape[2:])} numbers a token")
        q_norm, k_norm = (
            _shifted(w.vectors[name], op.norm_offset) if op.norm == "head" else None for name in ("q_norm", "k_norm")
        )
        unturned = torch.empty(MAX_ROWS, 0, device=self.device)

        def run(step: _Step) -> None:
            cos, sin = step.angles[op.rope] if op.rotary else (unturned, unturned)
            step.rows[op.q] = rope_write(
                step.rows[x], cos, sin, step.write_slots, cache, op.num_heads, q_norm, k_norm, op.norm_eps
            )  # fmt: skip

        self._heads[op.q] = op, cache
        self._rows -= {op.q, op.k, op.v}  # of three dimensions, or in the cache: only Attention reads them
        self._launches.append(run)
        return 1

    def _attention(self, op: d.Attention, w: BlockWeights, following: _Following) -> int:
        _only(op, cap=0.0, alibi=False, sinks="")
        heads, cache = self._heads.pop(op.q, (None, None))
        if heads is None or cache is None or (heads.k, heads.v) != (op.k, op.v):
            raise UnsupportedError(f"Attention with q {op.q!r}, k {op.k!r}, v {op.v!r}, which no Heads made together")
        if heads.num_heads not in self._scratch:
            shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
            self._scratch[heads.num_heads] = scratch(MAX_ROWS, *shape, self.device)
        room = self._scratch[heads.num_heads]

        def run(step: _Step) -> None:
            out = attend(
                step.rows[op.q], cache, step.query_start, step.context_len, step.page_table, op.window, op.scale, room,
                self._one_launch,
            )  # fmt: skip
            step.rows[op.out] = out.flatten(1)

        self._made_rows(op.out)
        self._launches.append(run)
        return 1

    def _activation(self, op: d.Activation, w: BlockWeights, following: _Following) -> int:
        raise UnsupportedError(f"Activation with x {op.x!r}, which is not the Product before it")

    # What the rules use.

    def _read_rows(self, name: str, op: str, field: str) -> str:
        if name not in self._rows:
            raise UnsupportedError(f"{op} with {field} {name!r}, which no operation before it leaves in memory")
        return name

    def _made_rows(self, name: str) -> None:
        self._rows.add(name)
        self._waiting.discard(name)

    def _made_waiting(self, name: str) -> None:
        self._waiting.add(name)
        self._rows.discard(name)


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


def _side_by_side(x: Tensor | Row, pieces: Sequence[Weights], dtype: torch.dtype) -> Tensor:
    """The outputs of ``pieces`` in one row."""
    rows, sizes = x.weighted if isinstance(x, Row) else x, [w.out_features for w in pieces]
    out = rows.new_empty(rows.shape[0], sum(sizes), dtype=dtype)
    for w, columns in zip(pieces, out.split(sizes, dim=1), strict=True):
        launch(x, w, columns)
    return out


_RULES: dict[type[d.Op], Callable[..., int]] = {
    d.Embed: GpuProgram._embed,
    d.Norm: GpuProgram._norm,
    d.Product: GpuProgram._product,
    d.Heads: GpuProgram._attention_heads,
    d.Attention: GpuProgram._attention,
    d.Activation: GpuProgram._activation,
}
