"""Programs for the C++ step: operations of a model's description as the structs that ``src/program.h`` reads.

Every field of an operation is translated or refused here. A :class:`Program` runs any list of operations: those of a
whole model, or a single one on an input buffer, which is how tests look at kernels one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout, check_cache, padded
from gpt_fast.kernels.cpu.library import CACHE_FORMATS, FORMATS, library
from gpt_fast.model import description as d
from gpt_fast.model.attention import alibi_slopes

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swiglu": 4}

_I, _P, _D = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_CODES: tuple[type[d.Op], ...] = (
    d.Embed, d.AddPositions, d.Norm, d.Product, d.Heads, d.Attention, d.Activation, d.Route, d.Experts, d.Gate, d.Cap,
)  # fmt: skip
_ROWS = len(_CODES)  # the code of the operation that keeps only the wanted tokens' rows
_MAX_BUFFERS = 64  # program.h


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("format", "n", "k", "group_size", "out_stride")),
        *((name, _P) for name in ("data", "scale", "bias")),
        ("factor", _D),
    ]


class _Op(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("code", "x", "out", "add", "width", "column", "quantize", "kind", "gated")),
        *((name, _P) for name in ("weight", "bias")),
        *((name, _D) for name in ("eps", "scale", "cap")),
        ("linear", _Linear),
        ("table", _P),
        *((name, _I) for name in ("table_bfloat16", "table_packed", "position_offset")),
        *((name, _I) for name in ("heads", "kv_heads", "head_dim", "padded_dim", "rotary", "rope", "window")),
        ("norm_rows", _I),
        *((name, _P) for name in ("q_norm", "k_norm", "slopes", "sinks", "k_cache", "v_cache", "k_scale", "v_scale")),
        *((name, _I) for name in ("top_k", "renormalize", "num_experts")),
        *((name, _P) for name in ("up", "down")),
        ("routes", _I),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("ops", _P),
        ("num_ops", _I),
        *((name, _P) for name in ("widths", "slots")),
        ("num_buffers", _I),
        ("slot_widths", _P),
        *((name, _I) for name in ("num_slots", "widest", "input", "output", "cache_format", "page_size")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("tokens", "positions")),
        ("num_tokens", _I),
        *((name, _P) for name in ("angles", "query_start", "context_len", "page_table", "write_slots")),
        *((name, _I) for name in ("slots", "pages_per_slot", "longest")),
        ("rows", _P),
        ("num_rows", _I),
        *((name, _P) for name in ("input", "output")),
    ]


class PackedWeights(NamedTuple):
    """One matrix as the kernels stream it: ``kind`` is a key of FORMATS, ``data`` packed (packing.py)."""

    kind: str
    data: Tensor
    out_features: int
    in_features: int  # with what fills up int4's last group
    scale: Tensor | None = None  # int8, and int4's row_scale: [N] float32
    group_size: int = 0  # int4
    bias: Tensor | None = None  # [N]

    @property
    def num_bytes(self) -> int:
        """Bytes that one product streams."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Weights(NamedTuple):
    """What the operations of one block name.

    matrices: of one matrix several packed ones where parts of it are stored otherwise, or one for each expert.
    vectors: weight, and bias or None. tables: [V, E] float32 or bfloat16, or packed dense weights that the head shares.
    """

    matrices: Mapping[str, Sequence[PackedWeights]]
    vectors: Mapping[str, tuple[Tensor, Tensor | None]] = {}
    tables: Mapping[str, Tensor | PackedWeights] = {}
    cache: LayerCache | None = None


def check(ops: Sequence[d.Op]) -> None:
    """Raise UnsupportedError for an operation that the program does not run, before any weight is packed."""
    for op in ops:
        if type(op) not in _TRANSLATE:
            raise UnsupportedError(f"the operation {type(op).__name__}")
        if isinstance(op, (d.Activation, d.Experts)):
            _kind(op)


class Program:
    """Operations compiled for C++: ``blocks`` are run one after the other, each with its own weights.

    ``output``: the buffer that :meth:`run` returns. ``rows_before``: index of the block before which only the wanted
    tokens' rows are kept (the head's); None: all are. ``input``: name and width of a buffer that the caller fills.
    Caches are read and written in place, [pages, page_size, K, padded(D)] of one dtype, float32, bfloat16 or int8 with
    scales. Everything given is kept alive by this object. Raises UnsupportedError.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Sequence[d.Op], Weights]],
        output: str,
        *,
        rows_before: int | None = None,
        input: tuple[str, int] | None = None,
    ) -> None:
        self._library = library()
        for which, kind in enumerate((_Linear, _Op, _Program, _Step)):
            assert self._library.gpt_fast_struct_bytes(which) == ctypes.sizeof(kind), f"{kind.__name__} differs"
        self._kept: list[object] = []
        self._ops: list[_Op] = []
        self._buffers = _Buffers(output, input)
        self._widest = 1
        self._rounded = _Rounding()
        self._heads: dict[tuple[str, str, str], _Op] = {}  # of the block, by the names of queries, keys and values
        self._halves: dict[int, int] = {}  # of each rope table that is used: columns of its angles
        caches = [weights.cache for _, weights in blocks if weights.cache is not None]
        k_cache = check_cache(caches, len(caches)) if caches else None
        for i, (ops, weights) in enumerate(blocks):
            if i == rows_before:
                self._keep_wanted_rows()
            self._block(ops, weights)
        self._width = self._buffers.widths[self._buffers.output]
        self._rows = rows_before is not None
        self._in_place = input is not None and self._buffers.output == 0
        self._program = self._struct(input, k_cache)

    def run(
        self,
        tokens: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        angles: Sequence[tuple[Tensor, Tensor]],  # for each rope table cosines and sines, [N, rotary / 2] float32
        layout: StepLayout | None,
        rows: Tensor,  # [R] int64: tokens whose outputs are wanted
        input: Tensor | None = None,  # [N, width] float32
    ) -> Tensor:
        """The output buffer, float32 [R or N, width]; keys and values of all tokens go into the caches.

        Raises ValueError for rope tables of another width than the operations'.
        """
        for table, half in self._halves.items():
            if {t.shape[-1] for t in angles[table]} != {half}:
                raise ValueError(f"rope table {table} must have {half} columns, not {angles[table][0].shape[-1]}")
        given = [tokens, positions, rows, *(t for pair in angles for t in pair)]
        tokens, positions, rows, *turns = (t.contiguous() for t in given)
        layout = layout or NO_LAYOUT
        start, context_len, page_table, write_slots = (t.contiguous() for t in layout)
        pointers = (_P * max(1, len(turns)))(*(t.data_ptr() for t in turns))
        source = None if input is None else input.clone(memory_format=torch.contiguous_format)
        if self._in_place and source is not None:
            out = source
        else:
            out = torch.empty(rows.shape[0] if self._rows else tokens.shape[0], self._width)
        step = _Step(
            tokens.data_ptr(),
            positions.data_ptr(),
            tokens.shape[0],
            ctypes.addressof(pointers),
            *(t.data_ptr() for t in (start, context_len, page_table, write_slots)),
            *page_table.shape,
            0,
            rows.data_ptr(),
            rows.shape[0],
            None if source is None else source.data_ptr(),
            out.data_ptr(),
        )
        self._library.gpt_fast_run(ctypes.addressof(self._program), ctypes.addressof(step), torch.get_num_threads())
        return out

    def _struct(self, input: tuple[str, int] | None, k_cache: Tensor | None) -> _Program:
        b = self._buffers
        if len(b.widths) > _MAX_BUFFERS:
            raise UnsupportedError(f"{len(b.widths)} buffers, more than {_MAX_BUFFERS}")
        arrays = [(_I * max(1, len(n)))(*n) for n in (b.widths, b.slots, b.slot_widths)]
        ops = (_Op * len(self._ops))(*self._ops)
        self._kept += [ops, arrays]
        widths, slots, slot_widths = map(ctypes.addressof, arrays)
        return _Program(
            ctypes.addressof(ops),
            len(ops),
            widths,
            slots,
            len(b.widths),
            slot_widths,
            len(b.slot_widths),
            self._widest,
            -1 if input is None else 0,
            b.output,
            0 if k_cache is None else CACHE_FORMATS[k_cache.dtype],
            1 if k_cache is None else k_cache.shape[1],
        )

    def _keep_wanted_rows(self) -> None:
        x, width = self._buffers["x"], self._buffers.width("x")
        self._ops.append(_Op(code=_ROWS, x=x, out=self._buffers.new("x", width), add=-1, width=width))
        self._rounded = _Rounding()  # rows stand elsewhere now

    def _block(self, ops: Sequence[d.Op], weights: Weights) -> None:
        check(ops)
        self._heads.clear()
        for i, op in enumerate(ops):
            for done in _TRANSLATE[type(op)](self, op, weights):
                done.code = _CODES.index(type(op))
                self._ops.append(done)
            self._buffers.free({name for later in ops[i + 1 :] for name in _reads(later)} | {"x"})

    # What translators use.

    def buffer(self, name: str) -> int:
        """The buffer called ``name`` now, or -1 for no name."""
        return self._buffers[name] if name else -1

    def width(self, name: str) -> int:
        """Its columns."""
        return self._buffers.width(name)

    def make(self, name: str, width: int, rounds: _Op | None = None, apart: Sequence[int] = ()) -> int:
        """The buffer ``name`` to be written: where it is if it has that width, else a new one.

        ``rounds``: the operation that writes it, if that can also round it. ``apart``: buffers that are still read
        while it is written.
        """
        made = self._buffers.make(name, width, apart)
        self._rounded.made(made, rounds)
        return made

    def make_heads(self, op: d.Heads, done: _Op) -> None:
        """Name what ``done`` makes of its buffer, which it writes as well, or of another one if heads are filled up."""
        if self._heads:
            raise UnsupportedError("two operations of one block that cache keys and values")
        self._rounded.made(done.x, None)
        out = done.x
        if done.padded_dim != op.head_dim:
            out = done.out = self.make(op.q, (op.num_heads + 2 * op.num_kv_heads) * done.padded_dim)
        for name in (op.q, op.k, op.v):
            self._buffers.alias(name, out)
        self._heads[op.q, op.k, op.v] = done
        if op.rotary and self._halves.setdefault(op.rope, op.rotary // 2) != op.rotary // 2:
            raise UnsupportedError(f"heads that rotate by {op.rotary} dimensions of a narrower or wider rope table")

    def heads(self, op: d.Attention) -> _Op:
        """What made the queries, keys and values of ``op``."""
        found = self._heads.get((op.q, op.k, op.v))
        if found is None:
            raise UnsupportedError(f"attention of {op.q}, {op.k}, {op.v}, which do not come from one operation")
        return found

    def needs_rounded(self, buffer: int, width: int, op: _Op) -> None:
        """``op`` takes the rows of ``buffer`` rounded to 8 bits: let their maker round them, or ``op`` itself."""
        self._widest = max(self._widest, width)
        self._rounded.needed(buffer, op)

    def linear(self, w: PackedWeights, stride: int, factor: float = 1.0) -> _Linear:
        """The struct of one matrix. ``stride``: columns of the output buffer."""
        return _Linear(
            FORMATS[w.kind], w.out_features, w.in_features, w.group_size, stride, self.pointer(w.data),
            self.floats(w.scale), self.floats(w.bias), factor,
        )  # fmt: skip

    def linears(self, ws: Sequence[PackedWeights]) -> int:
        """The address of one struct for each expert's matrix."""
        array = (_Linear * len(ws))(*(self.linear(w, w.out_features) for w in ws))
        self._kept.append(array)
        return ctypes.addressof(array)

    def floats(self, t: Tensor | None, offset: float = 0.0) -> int | None:
        """The address of ``t + offset`` as float32."""
        return None if t is None else self.pointer(t.detach().float() + offset if offset else t.detach().float())

    def pointer(self, t: Tensor) -> int:
        """The address of ``t``, which stays where it is."""
        t = t.contiguous()
        self._kept.append(t)
        return t.data_ptr()


_NOTHING = torch.zeros(1, dtype=torch.int32)
NO_LAYOUT = StepLayout(_NOTHING, _NOTHING[:0], _NOTHING[:0].view(0, 1), torch.zeros(0, dtype=torch.int64))


class _Rounding:
    """Which buffer's rows stand rounded in the one place for them, and who may round them while it makes them."""

    def __init__(self) -> None:
        self._held = -1
        self._makers: dict[int, _Op | None] = {}  # since the last rounding

    def made(self, buffer: int, op: _Op | None) -> None:
        if buffer == self._held:
            self._held = -1
        self._makers[buffer] = op

    def needed(self, buffer: int, op: _Op) -> None:
        if buffer != self._held:
            maker = self._makers.get(buffer)
            (op if maker is None else maker).quantize = 1
            self._held = buffer
        self._makers.clear()


class _Buffers:
    """Buffers by name; those that are not in use together share memory (``slots``)."""

    def __init__(self, output: str, input: tuple[str, int] | None) -> None:
        self.widths: list[int] = []
        self.slots: list[int] = []
        self.slot_widths: list[int] = []
        self.output = -1
        self._output_name, self._names = output, dict[str, int]()
        if input is not None:
            self._names[input[0]] = self._add(input[1])

    def __getitem__(self, name: str) -> int:
        return self._names[name]

    def width(self, name: str) -> int:
        return self.widths[self._names[name]]

    def make(self, name: str, width: int, apart: Sequence[int]) -> int:
        """The buffer ``name`` if it is there, as wide and none of ``apart``, else a new one."""
        found = self._names.get(name, -1)
        return found if found >= 0 and self.widths[found] == width and found not in apart else self.new(name, width)

    def new(self, name: str, width: int) -> int:
        if name == self._output_name:  # the caller's memory
            self.widths.append(width)
            self.slots.append(-1)
            self.alias(name, len(self.widths) - 1)
        else:
            self._names[name] = self._add(width)
        return self._names[name]

    def alias(self, name: str, buffer: int) -> None:
        self._names[name] = buffer
        if name != self._output_name:
            return
        if self.output >= 0 and self.slots[self.output] < 0:  # of the same name, but not the last: memory like others
            self.slots[self.output] = len(self.slot_widths)
            self.slot_widths.append(self.widths[self.output])
        self.output = buffer

    def free(self, needed: set[str]) -> None:
        """Forget buffers that no name in ``needed`` means; their memory may be taken."""
        self._names = {n: b for n, b in self._names.items() if n in needed or n == self._output_name}

    def _add(self, width: int) -> int:
        used = {self.slots[b] for b in self._names.values()}
        same = [b for b, w in enumerate(self.widths) if w == width and self.slots[b] not in used and b != self.output]
        if same:
            return same[0]
        free = [s for s in range(len(self.slot_widths)) if s not in used]
        slot = free[0] if free else len(self.slot_widths)
        if not free:
            self.slot_widths.append(0)
        self.slot_widths[slot] = max(self.slot_widths[slot], width)
        self.widths.append(width)
        self.slots.append(slot)
        return len(self.widths) - 1


def _reads(op: d.Op) -> Iterator[str]:
    for field in ("x", "add", "q", "k", "v", "routes", "by"):
        name = getattr(op, field, "")
        if name:
            yield name


def _embed(p: Program, op: d.Embed, w: Weights) -> Iterator[_Op]:
    done = _Op(add=-1, scale=op.scale)
    _read_table(p, done, w.tables[op.table])
    done.out = p.make(op.out, done.width)
    yield done


def _add_positions(p: Program, op: d.AddPositions, w: Weights) -> Iterator[_Op]:
    done = _Op(add=-1, position_offset=op.offset)
    _read_table(p, done, w.tables[op.table])
    done.x = done.out = p.make(op.x, done.width)
    yield done


def _read_table(p: Program, done: _Op, table: Tensor | PackedWeights) -> None:
    packed = isinstance(table, PackedWeights)
    data = table.data if isinstance(table, PackedWeights) else table
    if data.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(f"an embedding table of {data.dtype}")
    done.width = table.in_features if isinstance(table, PackedWeights) else data.shape[1]
    done.table, done.table_bfloat16, done.table_packed = p.pointer(data), data.dtype == torch.bfloat16, packed


def _norm(p: Program, op: d.Norm, w: Weights) -> Iterator[_Op]:
    weight, bias = w.vectors[op.weight]
    x, add, width = p.buffer(op.x), p.buffer(op.add), p.width(op.x)
    done = _Op(x=x, add=add, width=width, kind=op.kind == "layer", eps=op.eps)
    done.weight, done.bias = p.floats(weight, op.offset), p.floats(bias)
    done.out = p.make(op.out, width, rounds=done)
    yield done


def _product(p: Program, op: d.Product, w: Weights) -> Iterator[_Op]:
    pieces = w.matrices[op.matrix]
    x, width, total = p.buffer(op.x), p.width(op.x), sum(piece.out_features for piece in pieces)
    add = p.buffer(op.add)
    ops, column = [], 0
    for piece in pieces:
        done = _Op(x=x, add=add, width=width, column=column, linear=p.linear(piece, total, op.scale))
        if piece.kind.startswith("int"):
            p.needs_rounded(x, width, done)
        ops.append(done)
        column += piece.out_features
    out = p.make(op.out, total, apart=[x])
    for done in ops:
        done.out = out
        yield done


def _heads(p: Program, op: d.Heads, w: Weights) -> Iterator[_Op]:
    done = _Op(
        x=p.buffer(op.x), add=-1, heads=op.num_heads, kv_heads=op.num_kv_heads, head_dim=op.head_dim,
        padded_dim=padded(op.head_dim), rotary=op.rotary, rope=op.rope, eps=op.norm_eps, norm_rows=op.norm == "row",
    )  # fmt: skip
    _use_cache(p, done, w.cache)
    if op.norm != "no":
        done.q_norm, done.k_norm = (p.floats(w.vectors[name][0], op.norm_offset) for name in ("q_norm", "k_norm"))
    p.make_heads(op, done)
    yield done


def _use_cache(p: Program, done: _Op, cache: LayerCache | None) -> None:
    assert cache is not None
    if cache.k.dtype not in CACHE_FORMATS:
        raise UnsupportedError(f"a KV cache of {cache.k.dtype}")
    if tuple(cache.k.shape[2:]) != (done.kv_heads, done.padded_dim):
        raise UnsupportedError(f"a KV cache of {tuple(cache.k.shape[2:])} a token for heads of {done.head_dim}")
    done.k_cache, done.v_cache, done.k_scale, done.v_scale = (None if t is None else p.pointer(t) for t in cache)


def _attention(p: Program, op: d.Attention, w: Weights) -> Iterator[_Op]:
    heads = p.heads(op)
    done = _Op(
        x=p.buffer(op.q), add=-1, scale=op.scale, cap=op.cap, window=op.window, heads=heads.heads,
        kv_heads=heads.kv_heads, head_dim=heads.head_dim, padded_dim=heads.padded_dim,
    )  # fmt: skip
    _use_cache(p, done, w.cache)
    done.slopes = p.floats(alibi_slopes(heads.heads)) if op.alibi else None
    done.sinks = p.floats(w.vectors[op.sinks][0]) if op.sinks else None
    done.out = p.make(op.out, heads.heads * heads.head_dim, apart=[done.x])
    yield done


def _activation(p: Program, op: d.Activation, w: Weights) -> Iterator[_Op]:
    width = p.width(op.x) // (2 if op.gated else 1)
    done = _Op(x=p.buffer(op.x), add=-1, width=width, kind=_kind(op), gated=op.gated)
    done.out = p.make(op.out, width, rounds=done)
    yield done


def _kind(op: d.Activation | d.Experts) -> int:
    if op.kind not in ACTIVATIONS or (op.kind == "clamped_swiglu" and not op.gated):
        raise UnsupportedError(f"the activation {op.kind}{'' if op.gated else ' without a gate'}")
    return ACTIVATIONS[op.kind]


def _route(p: Program, op: d.Route, w: Weights) -> Iterator[_Op]:
    done = _Op(x=p.buffer(op.x), add=-1, top_k=op.top_k, renormalize=op.renormalize, num_experts=p.width(op.x))
    done.out = p.make(op.out, 2 * op.top_k, apart=[done.x])
    yield done


def _experts(p: Program, op: d.Experts, w: Weights) -> Iterator[_Op]:
    up, down = w.matrices[op.up], w.matrices[op.down]
    done = _Op(
        x=p.buffer(op.x), add=p.buffer(op.add), width=p.width(op.x), routes=p.buffer(op.routes), kind=_kind(op),
        gated=op.gated, scale=op.scale, top_k=p.width(op.routes) // 2, num_experts=len(up), up=p.linears(up),
        down=p.linears(down),
    )  # fmt: skip
    done.out = p.make(op.out, down[0].out_features, apart=[done.routes])
    yield done


def _gate(p: Program, op: d.Gate, w: Weights) -> Iterator[_Op]:
    width = p.width(op.x)
    done = _Op(x=p.buffer(op.x), add=p.buffer(op.add), width=width, routes=p.buffer(op.by))
    done.out = p.make(op.out, width)
    yield done


def _cap(p: Program, op: d.Cap, w: Weights) -> Iterator[_Op]:
    width = p.width(op.x)
    yield _Op(x=p.buffer(op.x), out=p.make(op.out, width), add=-1, width=width, cap=op.limit)


_TRANSLATE: dict[type[d.Op], Callable[..., Iterator[_Op]]] = {
    d.Embed: _embed,
    d.AddPositions: _add_positions,
    d.Norm: _norm,
    d.Product: _product,
    d.Heads: _heads,
    d.Attention: _attention,
    d.Activation: _activation,
    d.Route: _route,
    d.Experts: _experts,
    d.Gate: _gate,
    d.Cap: _cap,
}
