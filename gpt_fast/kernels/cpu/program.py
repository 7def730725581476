"""Programs for the C++ step: operations of a model's description as the structs that ``src/program.h`` reads.

Every field of an operation is translated or refused here. A :class:`Program` runs any list of operations: those of a
whole model, or a single one on an input buffer, which is how tests look at kernels one by one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import Structure
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpt_fast.config import VocabShare
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout, StepNumbers, check_cache, holds_whole_groups, padded
from gpt_fast.kernels.cpu import structs
from gpt_fast.kernels.cpu.library import CACHE_FORMATS, FORMATS, library, rounding
from gpt_fast.kernels.race import Draw, draw_table
from gpt_fast.model import description as d
from gpt_fast.model.attention import alibi_slopes
from gpt_fast.model.rope import Angles

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


def named(name: str) -> AbstractContextManager[object]:
    """``name`` in a profiler's trace. Without a profiler it costs nothing (record_function takes 7 us)."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


class Drawing:
    """A step that another thread computes, and the tokens that it draws. What it reads and writes is kept until it is
    done."""

    def __init__(self, library: ctypes.CDLL, number: int, tokens: array[int], kept: object) -> None:
        self.tokens = tokens  # [R], written when the step is done
        self._library, self._number, self._kept = library, number, kept

    def tolist(self) -> list[int]:
        """Waits for the tokens of each row; -1 for one that could not be drawn."""
        with named("gpt_fast::cpu_wait"):
            self._library.gpt_fast_wait(self._number)
        return self.tokens.tolist()

    def __del__(self) -> None:
        self._library.gpt_fast_wait(self._number)


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


class Program:
    """Operations compiled for C++: ``blocks`` are run one after the other, each with its own weights.

    ``output``: the buffer that :meth:`run` returns. ``rows_before``: index of the block before which only the wanted
    tokens' rows are kept (the head's); None: all are. ``input``: name and width of a buffer that the caller fills.
    ``ranks``: the weights are this rank's share, of a vocabulary of ``vocab_size``; all ranks run the same steps, and
    each has the whole output. Caches are read and written in place, [pages, page_size, K, padded(D)] of one dtype,
    float32, bfloat16, or int8 with scales; paged.h has the order in that memory. The program keeps all tensors alive
    that it reads. Raises UnsupportedError.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Sequence[d.Op], Weights]],
        output: str,
        *,
        rows_before: int | None = None,
        input: tuple[str, int] | None = None,
        ranks: Ranks | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._library, self._ranks, self._vocab_size = library(), ranks, vocab_size
        self._kept: list[object] = [] if ranks is None else [ranks]
        self._ops: list[Structure] = []
        self._buffers = b = _Buffers(output, input)
        self._widest = [1, 1]  # of the rows that are rounded in each place
        self._rounded = _Rounding()
        self._heads: dict[tuple[str, str, str], Structure] = {}  # of the block, by the names of q, k and v
        self._halves: dict[int, int] = {}  # of each rope table that is used: columns of its angles
        caches = [weights.cache for _, weights in blocks if weights.cache is not None]
        k_cache = check_cache(caches) if caches else None
        for i, (ops, weights) in enumerate(blocks):
            if i == rows_before:
                self._keep_wanted_rows()
            self._block(ops, weights)
        if len(b.widths) > _MAX_BUFFERS:
            raise UnsupportedError(f"{len(b.widths)} buffers, more than {_MAX_BUFFERS}")
        self._width, self._rows = b.widths[b.output], rows_before is not None
        self._angles: Sequence[Angles] | None = None  # of the last step
        self._waves: tuple[list[Tensor], array[int]] = [], array("q")  # these, and where they are
        self._logits: Tensor | None = None  # of chains
        self._last = 0  # the number of what began last in another thread; 0: all of that is done
        self._in_place = input is not None and b.output == 0
        widths, slots, slot_widths = (self._array(ctypes.c_int64, n) for n in (b.widths, b.slots, b.slot_widths))
        self._program = structs.Program(
            ops=self._array(structs.Op, self._ops), num_ops=len(self._ops), widths=widths, slots=slots,
            num_buffers=len(b.widths), slot_widths=slot_widths, num_slots=len(b.slot_widths),
            widest=self._widest[0], widest_activated=self._widest[1],
            input=-1 if input is None else 0, output=b.output,
            cache_format=0 if k_cache is None else CACHE_FORMATS[k_cache.dtype],
            page_size=1 if k_cache is None else k_cache.shape[1],
            ranks=None if ranks is None else ctypes.addressof(ranks.struct),
        )  # fmt: skip

    def run(
        self,
        tokens: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        angles: Sequence[Angles],  # of each rope table, a row for each token
        layout: StepLayout | None,
        rows: Tensor,  # [R] int64: tokens whose outputs are wanted
        input: Tensor | None = None,  # [N, width] float32
        by_position: bool = False,  # the angles have a row for each position from 0 on, not for each token
    ) -> Tensor:
        """The output buffer, float32 [R or N, width]; keys and values of all tokens go into the caches.

        Raises ValueError for rope tables of another width than the operations'.
        """
        self.finish()
        step, out, kept = self._step(tokens, positions, angles, layout, rows, by_position, input)
        self._library.gpt_fast_run(ctypes.addressof(self._program), ctypes.addressof(step), torch.get_num_threads())
        del kept
        if self._ranks is not None:
            self._ranks.check()
        return out

    def chain(
        self,
        numbers: StepNumbers,  # of the first step, whose rows are the last tokens of the slots that have one
        page_table: Tensor,  # [S, P] int32, with the pages of the later steps as well
        angles: Sequence[Angles],  # of all positions from 0 on
        row_slots: Sequence[int],  # [R], rising: the slot of each row
        draws: Sequence[Sequence[Draw]],
    ) -> list[list[int]]:
        """A step, and then one after the other those of the tokens that are drawn behind its rows: ``draws[r]`` says
        how (the fields of ``Draw``) and, by its length, how many. A row drops out after its last token, and later
        steps hold the tokens of the others in order. Returns the tokens of each row; -1 for one that cannot be drawn.

        No tensor is made here. The weights of a step push Python out of the CPU's caches, so the host is slow between
        two steps: each tensor would take 10 to 30 us.
        """
        self.finish()
        step, chain, drawn, kept = self._chain(numbers, page_table, angles, row_slots, draws)
        addresses = (ctypes.addressof(struct) for struct in (self._program, step, chain))
        self._library.gpt_fast_chain(*addresses, torch.get_num_threads())
        del kept
        return [drawn[r :: len(draws)][: len(own)].tolist() for r, own in enumerate(draws)]

    def begin(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        angles: Sequence[Angles],
        row_slots: Sequence[int],
        draws: Sequence[Draw],
        before: Drawing | None = None,
        index: Sequence[int] = (),
    ) -> Drawing:
        """A step, and a token drawn behind each of its rows, in another thread, behind all that was begun before it.
        ``before``: the tokens of the step are those that ``before`` draws behind the rows ``index`` of that step, and
        where one of these is -1, so are all of this one."""
        step, chain, drawn, kept = self._chain(numbers, page_table, angles, row_slots, [[own] for own in draws])
        rows = array("q", index)
        if before is not None:
            chain.before, chain.before_rows = structs.address(before.tokens), structs.address(rows)
        addresses = (ctypes.addressof(struct) for struct in (self._program, step, chain))
        number = self._library.gpt_fast_begin(*addresses, torch.get_num_threads())
        self._last = number
        return Drawing(self._library, number, drawn, (self, page_table, kept, rows, before and before.tokens))

    def hold(self) -> None:
        """Leave out what was begun and has not started; its tokens are -1. Any thread may call it."""
        self._library.gpt_fast_hold()

    def finish(self) -> None:
        """Wait for all that was begun."""
        if self._last:
            self._library.gpt_fast_wait(self._last)
            self._last = 0

    def _chain(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        angles: Sequence[Angles],
        row_slots: Sequence[int],
        draws: Sequence[Sequence[Draw]],
    ) -> tuple[Structure, Structure, array[int], object]:
        """The structs of a step and its chain, where the tokens go, and what must be kept meanwhile."""
        n, count = numbers, [len(each) for each in draws]
        num_tokens, num_rows, longest = len(n.tokens), len(n.rows), max(count)
        if self._logits is None or self._logits.shape[0] < num_rows:
            self._logits = torch.empty(num_rows, self._width)
        wide = array("q", [*n.tokens, *n.positions, *n.write_slots, *n.rows, *row_slots, *count])
        narrow = array("i", [*n.query_start, *n.context_len])
        sizes = (0, num_tokens, num_tokens, num_tokens, num_rows, num_rows)
        at = [structs.address(wide) + 8 * before for before in itertools.accumulate(sizes)]
        starts = structs.address(narrow)
        step = structs.Step(
            tokens=at[0], positions=at[1], turns=at[1], num_tokens=num_tokens, angles=self._angle_pointers(angles),
            query_start=starts, context_len=starts + 4 * len(n.query_start), page_table=page_table.data_ptr(),
            write_slots=at[2], slots=page_table.shape[0], pages_per_slot=page_table.shape[1],
            rows=at[3], num_rows=num_rows, output=self._logits.data_ptr(),
        )  # fmt: skip
        table = draw_table(itertools.chain(*itertools.zip_longest(*draws, fillvalue=Draw())))
        drawn = array("q", [-1]) * (longest * num_rows)
        chain = structs.Chain(
            draws=structs.address(table), counts=at[5], row_slots=at[4], num_steps=longest, vocab=self._width,
            tokens=structs.address(drawn),
        )  # fmt: skip
        return step, chain, drawn, (wide, narrow, table, self._logits)

    def _step(
        self,
        tokens: Tensor,
        positions: Tensor,
        angles: Sequence[Angles],
        layout: StepLayout | None,
        rows: Tensor,
        by_position: bool,
        input: Tensor | None = None,
    ) -> tuple[Structure, Tensor, object]:
        """The struct of a step, its output, and what must be kept while it runs."""
        given = [t.contiguous() for t in (tokens, positions, rows, *(layout or _NO_LAYOUT))]
        tokens, positions, rows, start, context_len, page_table, write_slots = given
        source = None if input is None else input.clone(memory_format=torch.contiguous_format)
        if self._in_place and source is not None:
            out = source
        else:
            out = torch.empty(rows.shape[0] if self._rows else tokens.shape[0], self._width)
        step = structs.Step(
            tokens=tokens.data_ptr(), positions=positions.data_ptr(), num_tokens=tokens.shape[0],
            angles=self._angle_pointers(angles), turns=positions.data_ptr() if by_position else None,
            query_start=start.data_ptr(), context_len=context_len.data_ptr(), page_table=page_table.data_ptr(),
            write_slots=write_slots.data_ptr(), slots=page_table.shape[0], pages_per_slot=page_table.shape[1],
            rows=rows.data_ptr(), num_rows=rows.shape[0], input=None if source is None else source.data_ptr(),
            output=out.data_ptr(),
        )  # fmt: skip
        return step, out, (given, source)

    def _angle_pointers(self, angles: Sequence[Angles]) -> int:
        """Where the addresses of ``angles`` stand, which are kept until others come: those of all positions come with
        every step. Raises ValueError."""
        if angles is not self._angles:
            for table, half in self._halves.items():
                if angles[table][0].shape[-1] != half or angles[table][1].shape[-1] != half:
                    raise ValueError(f"rope table {table} must have {half} columns, not {angles[table][0].shape[-1]}")
            waves = [t.contiguous() for pair in angles for t in pair]
            self._angles, self._waves = angles, (waves, array("q", [t.data_ptr() for t in waves]))
        return structs.address(self._waves[1])

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
        if op.rotary and self._halves.setdefault(op.rope, op.rotary // 2) != op.rotary // 2:
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
    d.Embed: Program._embed, d.AddPositions: Program._add_positions, d.Norm: Program._norm,
    d.Product: Program._product, d.Heads: Program._attention_heads, d.Attention: Program._attention,
    d.Activation: Program._activation, d.Route: Program._route, d.Experts: Program._experts, d.Gate: Program._gate,
    d.Cap: Program._cap,
}  # fmt: skip
_NOTHING = torch.zeros(1, dtype=torch.int32)
_NO_LAYOUT = StepLayout(_NOTHING, _NOTHING[:0], _NOTHING[:0].view(0, 1), torch.zeros(0, dtype=torch.int64))


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
