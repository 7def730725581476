"""Operations of a model's description as the structs that ``src/program.h`` reads, each with its weights.

Every field of an operation is translated or refused here.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpt_fast.config import VocabShare
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, check_cache, holds_whole_groups, padded
from gpt_fast.kernels.cpu import structs
from gpt_fast.kernels.cpu.library import CACHE_FORMATS, FORMATS, rounding
from gpt_fast.model import description as d
from gpt_fast.model.attention import alibi_slopes

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swiglu": 4}

_PART = "part"  # what a rank makes of outputs that all ranks make together
_READ = ("x", "add", "routes", "by", "q", "k", "v")  # fields that name buffers which an operation reads
_MAX_BUFFERS = 64  # program.h


class PackedWeights(NamedTuple):
    """One matrix as the kernels stream it: ``kind`` is a key of FORMATS, ``data`` packed (packing.py)."""

    kind: str
    data: Tensor
    out_features: int
    in_features: int  # with what fills up int4's last group
    scale: Tensor | None = None  # int8, and int4's row_scale: [N] float32
    group_size: int = 0  # int4
    bias: Tensor | None = None  # [N]
    parts: int = 1  # of the inputs, each summed by itself (linear.h)


class Weights(NamedTuple):
    """What the operations of one block name.

    matrices: of one matrix several packed ones where parts of it are stored otherwise, or one for each expert.
    vectors: weight, and bias or None. tables: float32 or bfloat16 [V, E], or the matrix of a head that shares it.
    splits: what ranks divide of each matrix and table.
    """

    matrices: Mapping[str, Sequence[PackedWeights]]
    vectors: Mapping[str, tuple[Tensor, Tensor | None]] = {}
    tables: Mapping[str, Tensor | PackedWeights] = {}
    cache: LayerCache | None = None
    splits: Mapping[str, d.Split] = {}


class Ranks(Protocol):
    """The processes that share a model with this one (parallel/ranks.py)."""

    rank: int
    count: int

    @property
    def struct(self) -> Structure:
        """``Ranks`` of ranks.h, which stays where it is."""

    def check(self) -> None:
        """Raises RankError where another rank has not taken part in the last step."""


def check(ops: Sequence[d.Op]) -> None:
    """Raise UnsupportedError for an operation that the program does not run, before any weight is packed."""
    for op in ops:
        if type(op) not in _TRANSLATE:
            raise UnsupportedError(f"the operation {type(op).__name__}")
        if isinstance(op, (d.Activation, d.Experts)):
            _kind(op)


def _kind(op: d.Activation | d.Experts) -> int:
    if op.kind not in ACTIVATIONS or (op.kind == "clamped_swiglu" and not op.gated):
        raise UnsupportedError(f"the activation {op.kind}{'' if op.gated else ' without a gate'}")
    return ACTIVATIONS[op.kind]


class Translation:
    """``blocks``, operations in order and what they name, as one program, ``struct``. The other arguments as of
    ``Program``. Keeps all tensors alive that the program reads. Raises UnsupportedError.

    ``width``: columns of the output. ``halves``: of each rope table that is used, columns of its angles. ``in_place``:
    the output is the buffer that the caller fills.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Sequence[d.Op], Weights]],
        output: str,
        *,
        rows_before: int | None,
        input: tuple[str, int] | None,
        ranks: Ranks | None,
        vocab_size: int,
    ) -> None:
        self._ranks, self._vocab_size = ranks, vocab_size
        self._kept: list[object] = [] if ranks is None else [ranks]
        self._ops: list[Structure] = []
        self._buffers = b = _Buffers(output, input)
        self._widest = [1, 1]  # of the rows that are rounded in each place
        self._rounded = _Rounding()
        self._heads: dict[tuple[str, str, str], Structure] = {}  # of the block, by the names of q, k and v
        self.halves: dict[int, int] = {}
        caches = [weights.cache for _, weights in blocks if weights.cache is not None]
        k_cache = check_cache(caches) if caches else None
        for i, (ops, weights) in enumerate(blocks):
            if i == rows_before:
                self._keep_wanted_rows()
            self._block(ops, weights)
        if len(b.widths) > _MAX_BUFFERS:
            raise UnsupportedError(f"{len(b.widths)} buffers, more than {_MAX_BUFFERS}")
        self.width, self.in_place = b.widths[b.output], input is not None and b.output == 0
        widths, slots, slot_widths = (self._array(ctypes.c_int64, n) for n in (b.widths, b.slots, b.slot_widths))
        self.struct = structs.Program(
            ops=self._array(structs.Op, self._ops), num_ops=len(self._ops), widths=widths, slots=slots,
            num_buffers=len(b.widths), slot_widths=slot_widths, num_slots=len(b.slot_widths),
            widest=self._widest[0], widest_activated=self._widest[1],
            input=-1 if input is None else 0, output=b.output,
            cache_format=0 if k_cache is None else CACHE_FORMATS[k_cache.dtype],
            page_size=1 if k_cache is None else k_cache.shape[1],
            ranks=None if ranks is None else ctypes.addressof(ranks.struct),
        )  # fmt: skip

    def _keep_wanted_rows(self) -> None:
        x, width = self._buffers["x"], self._buffers.width("x")
        self._ops.append(structs.Op(code=len(_TRANSLATE), x=x, out=self._buffers.new("x", width), width=width))
        self._rounded = _Rounding()  # rows stand elsewhere now

    def _block(self, ops: Sequence[d.Op], weights: Weights) -> None:
        check(ops)
        self._heads.clear()
        for i, op in enumerate(ops):
            done = self._begun(op)
            _TRANSLATE[type(op)](self, op, done, weights)
            self._ops.append(done)
            read = {getattr(later, name, "") for later in ops[i + 1 :] for name in _READ} | {"x"}
            if i and isinstance(op, d.Activation) and (op.x == op.out or op.x not in read):
                self._ops[-2].activated = self._goes_on(self._ops[-2], done)
            after = ops[i + 1] if i + 1 < len(ops) else None
            if isinstance(op, d.Product) and isinstance(after, d.Activation):
                read.add(op.x)  # so that the activation, which may be made meanwhile, is not written there
            self._buffers.free(read)

    def _goes_on(self, product: Structure, activation: Structure) -> bool:
        """Whether C++ may make ``activation`` while it still reads the inputs of ``product`` (activated.h)."""
        plain = product.num_pieces == 1 and not product.shared and product.add < 0 and product.out == activation.x
        slots = self._buffers.slots
        return plain and product.place != activation.place and slots[product.x] != slots[activation.out]

    def _begun(self, op: d.Op) -> Structure:
        """The struct of ``op`` with its code, the buffers that it reads, and its numbers that C++ calls the same."""
        done: Structure = structs.Op(code=list(_TRANSLATE).index(type(op)), add=-1)
        for name, value in vars(op).items():
            if name in ("x", "add", "routes") and value:
                setattr(done, name, self._buffers[value])
                if name == "x":
                    done.width = self._buffers.width(value)
            elif hasattr(done, name) and not isinstance(value, str):
                setattr(done, name, value)
        return done

    # The translators: each completes the struct of one operation.

    def _embed(self, op: d.Embed, done: Structure, w: Weights) -> None:
        self._read_table(done, w.tables[op.table])
        done.out = done.part = self._make(op.out, done.width)
        if self._ranks is not None and w.splits.get(op.table) == "rows":
            done.shared = 1
            share = VocabShare.of(self._vocab_size, self._ranks.rank, self._ranks.count)
            done.num_rows, done.first_row, done.own_row = share

    def _add_positions(self, op: d.AddPositions, done: Structure, w: Weights) -> None:
        self._read_table(done, w.tables[op.table])
        done.position_offset = op.offset
        done.x = self._make(op.x, done.width)

    def _read_table(self, done: Structure, table: Tensor | PackedWeights) -> None:
        if isinstance(table, PackedWeights):
            data, done.num_rows, done.width, packed = table.data, table.out_features, table.in_features, True
        else:
            data, (done.num_rows, done.width), packed = table, table.shape, False
        if data.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(f"an embedding table of {data.dtype}")
        done.table = structs.Embedding(self._pointer(data), data.dtype == torch.bfloat16, packed)

    def _norm(self, op: d.Norm, done: Structure, w: Weights) -> None:
        weight, bias = w.vectors[op.weight]
        done.kind, done.weight, done.bias = op.kind == "layer", self._floats(weight, op.offset), self._floats(bias)
        done.out = self._make(op.out, done.width, rounds=done)

    def _product(self, op: d.Product, done: Structure, w: Weights) -> None:
        pieces = w.matrices[op.matrix]
        total = sum(piece.out_features for piece in pieces)
        split = "whole" if self._ranks is None else w.splits[op.matrix]
        if split == "columns" and len(pieces) > 1:
            raise UnsupportedError(f"{op.matrix} in several pieces, whose sums ranks share")
        done.pieces = self._linears(pieces, total, op.scale, raw=split == "columns")
        done.num_pieces = len(pieces)
        if how := functools.reduce(operator.or_, (rounding(piece.kind) for piece in pieces)):
            self._rounded.needed(done, how)
            self._widest[done.place] = max(self._widest[done.place], done.width)
        if split == "columns":
            done.shared, done.part = 1, self._buffers.new(_PART, total)
        elif split == "rows" and op.out == self._buffers.output_name:
            done.shared, done.part = 2, self._buffers.new(_PART, total)
            total = self._vocab_size
        done.out = self._make(op.out, total, apart=done.x)

    def _attention_heads(self, op: d.Heads, done: Structure, w: Weights) -> None:
        if self._heads:
            raise UnsupportedError("two operations of one block that cache keys and values")
        cache = w.cache
        assert cache is not None
        done.padded_dim, done.eps, done.norm_rows = padded(op.head_dim), op.norm_eps, op.norm == "row"
        if cache.k.dtype not in CACHE_FORMATS:
            raise UnsupportedError(f"a KV cache of {cache.k.dtype}")
        if tuple(cache.k.shape[2:]) != (op.num_kv_heads, done.padded_dim):
            raise UnsupportedError(f"a KV cache of {tuple(cache.k.shape[2:])} a token for heads of {op.head_dim}")
        if not all(holds_whole_groups(t) for t in cache if t is not None):
            raise ValueError("the memory of a cache ends within a group of tokens: use LayerCache.zeros")
        pointers = (None if t is None else self._pointer(t) for t in cache)
        done.k_cache, done.v_cache, done.k_scale, done.v_scale = pointers
        if op.norm != "no":
            norms = (self._floats(w.vectors[name][0], op.norm_offset) for name in ("q_norm", "k_norm"))
            done.q_norm, done.k_norm = norms
        if op.rotary and self.halves.setdefault(op.rope, op.rotary // 2) != op.rotary // 2:
            raise UnsupportedError(f"heads that rotate by {op.rotary} dimensions of a narrower or wider rope table")
        self._rounded.made(done.x, None)  # it is written as well
        made = done.x
        if done.padded_dim != op.head_dim:
            made = done.out = self._make(op.q, (op.num_heads + 2 * op.num_kv_heads) * done.padded_dim)
        self._buffers.names |= dict.fromkeys((op.q, op.k, op.v), made)
        self._heads[op.q, op.k, op.v] = done

    def _attention(self, op: d.Attention, done: Structure, w: Weights) -> None:
        heads = self._heads.get((op.q, op.k, op.v))
        if heads is None:
            raise UnsupportedError(f"attention of {op.q}, {op.k}, {op.v}, which do not come from one operation")
        for name in ("num_heads", "num_kv_heads", "head_dim", "padded_dim", "k_cache", "v_cache", "k_scale", "v_scale"):
            setattr(done, name, getattr(heads, name))
        done.x = self._buffers[op.q]
        ranks = () if self._ranks is None else (self._ranks.rank, self._ranks.count)
        done.slopes = self._floats(alibi_slopes(heads.num_heads, *ranks)) if op.alibi else None
        done.sinks = self._floats(w.vectors[op.sinks][0]) if op.sinks else None
        done.out = self._make(op.out, heads.num_heads * heads.head_dim, apart=done.x)

    def _activation(self, op: d.Activation, done: Structure, w: Weights) -> None:
        done.kind, done.width, done.place = _kind(op), done.width // (1 + op.gated), 1
        done.out = self._make(op.out, done.width, rounds=done)

    def _route(self, op: d.Route, done: Structure, w: Weights) -> None:
        done.num_experts = done.width
        done.out = self._make(op.out, 2 * op.top_k, apart=done.x)

    def _experts(self, op: d.Experts, done: Structure, w: Weights) -> None:
        shared = self._ranks is not None and w.splits[op.down] == "columns"
        up, down = w.matrices[op.up], w.matrices[op.down]
        done.kind, done.num_experts, done.top_k = _kind(op), len(up), self._buffers.width(op.routes) // 2
        done.up = self._linears(up, up[0].out_features)
        done.down, done.shared = self._linears(down, down[0].out_features, raw=shared), int(shared)
        done.out = self._make(op.out, down[0].out_features, apart=done.routes)

    def _gate(self, op: d.Gate, done: Structure, w: Weights) -> None:
        done.routes = self._buffers[op.by]
        done.out = self._make(op.out, done.width)

    def _cap(self, op: d.Cap, done: Structure, w: Weights) -> None:
        done.cap = op.limit
        done.out = self._make(op.out, done.width)

    # What the translators use.

    def _make(self, name: str, width: int, rounds: Structure | None = None, apart: int = -1) -> int:
        """The buffer ``name`` to be written: where it is if it has that width, else a new one.

        ``rounds``: the operation that writes it, if that can also round it. ``apart``: a buffer that is still read
        while it is written.
        """
        made = self._buffers.make(name, width, apart)
        self._rounded.made(made, rounds)
        return made

    def _linears(self, ws: Sequence[PackedWeights], stride: int, factor: float = 1.0, raw: bool = False) -> int:
        """The address of the structs of ``ws``. ``stride``: columns of the output buffer. ``raw``: bare sums."""
        made = [
            structs.Linear(
                format=FORMATS[w.kind], n=w.out_features, k=w.in_features, group_size=w.group_size, out_stride=stride,
                data=self._pointer(w.data), scale=self._floats(w.scale), bias=self._floats(w.bias), factor=factor,
                parts=w.parts, raw=raw,
            )
            for w in ws
        ]  # fmt: skip
        return self._array(structs.Linear, made)

    def _array(self, kind: Any, items: Sequence[object]) -> int:
        """The address of ``items``, one behind the other."""
        array = (kind * max(1, len(items)))(*items)
        self._kept.append(array)
        return ctypes.addressof(array)

    def _floats(self, t: Tensor | None, offset: float = 0.0) -> int | None:
        """The address of ``t + offset`` as float32."""
        return None if t is None else self._pointer(t.detach().float() + offset if offset else t.detach().float())

    def _pointer(self, t: Tensor) -> int:
        """The address of ``t``, which stays where it is."""
        t = t.contiguous()
        self._kept.append(t)
        return t.data_ptr()


_TRANSLATE: dict[type[d.Op], Callable[..., None]] = {  # in the order of OpCode
    d.Embed: Translation._embed, d.AddPositions: Translation._add_positions, d.Norm: Translation._norm,
    d.Product: Translation._product, d.Heads: Translation._attention_heads, d.Attention: Translation._attention,
    d.Activation: Translation._activation, d.Route: Translation._route, d.Experts: Translation._experts,
    d.Gate: Translation._gate, d.Cap: Translation._cap,
}  # fmt: skip


class _Rounding:
    """Which buffers' rows stand rounded in the two places for them, and who may round them while it makes them."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # in each place: the buffer, and how
        self._makers: dict[int, Structure | None] = {}  # since the last rounding

    def made(self, buffer: int, op: Structure | None) -> None:
        """``buffer`` is written, by ``op`` if that can round it."""
        self._held = {place: held for place, held in self._held.items() if held[0] != buffer}
        self._makers[buffer] = op

    def needed(self, op: Structure, how: int) -> None:
        """``op`` takes the rows of its ``x`` rounded, ``how``: let their maker round them, or ``op`` itself."""
        maker = self._makers.get(op.x) or op
        held = ((place, how) for place, (buffer, how) in self._held.items() if buffer == op.x)
        op.place, before = next(held, (maker.place, 0))
        if how & ~before:
            maker.rounding |= how
            self._held[op.place] = op.x, before | how
        self._makers.clear()


class _Buffers:
    """Buffers by name; those that are not in use together share memory (``slots``).

    The one that is called ``output`` at the end is the caller's memory.
    """

    def __init__(self, output: str, input: tuple[str, int] | None) -> None:
        self.widths: list[int] = []
        self.slots: list[int] = []
        self.names: dict[str, int] = {}
        self.output_name = output
        if input is not None:
            self.new(*input)

    def __getitem__(self, name: str) -> int:
        return self.names[name]

    def width(self, name: str) -> int:
        return self.widths[self.names[name]]

    @property
    def output(self) -> int:
        return self.names[self.output_name]

    @property
    def slot_widths(self) -> list[int]:
        """Columns of each slot: those of the widest buffer that it holds."""
        held = [(slot, w) for b, (slot, w) in enumerate(zip(self.slots, self.widths, strict=True)) if b != self.output]
        return [max((w for s, w in held if s == slot), default=0) for slot in range(1 + max(self.slots))]

    def make(self, name: str, width: int, apart: int) -> int:
        """The buffer ``name`` if it is there, as wide and not ``apart``, else a new one."""
        found = self.names.get(name, apart)
        return found if found != apart and self.widths[found] == width else self.new(name, width)

    def new(self, name: str, width: int) -> int:
        used = {self.slots[b] for b in self.names.values()}
        same = [b for b, w in enumerate(self.widths) if w == width and self.slots[b] not in used]
        if not same or name == self.output_name:
            same = [len(self.widths)]
            self.widths.append(width)
            self.slots.append(next(slot for slot in itertools.count() if slot not in used))
        self.names[name] = same[0]
        return same[0]

    def free(self, needed: set[str]) -> None:
        """Forget buffers that no name in ``needed`` means; their memory may be taken."""
        self.names = {n: b for n, b in self.names.items() if n in needed or n == self.output_name}
