"""A model as data: its operations in order, and each weight with its name in the checkpoint, its shape and its split.

Everything else follows from it: the plain torch model (transformer.py), the counts of parameters and bytes, what is
read from a checkpoint (:func:`parts`), what quantization and calibration see, and the programs of the C++ and the
Triton step. An operation is a frozen dataclass; its fields are all there is to know about it. Who executes operations
must honour every field of those that it takes, and refuse the others by raising :class:`UnsupportedError`.

Operations work on named buffers, one row for each token: ``x`` is the residual stream [N, E].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from gpt_fast.checkpoint.family import Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling


@dataclass(frozen=True)
class Embed:
    """``out = table[token] * scale``."""

    out: str
    table: str
    scale: float = 1.0


@dataclass(frozen=True)
class AddPositions:
    """``x += table[position + offset]``: learned positions."""

    x: str
    table: str
    offset: int


@dataclass(frozen=True)
class Norm:
    """``out = norm(x) * (weight + offset) + bias``, plus ``add`` where one is named.

    ``rms``: root-mean-square (Zhang & Sennrich 2019, arXiv 1910.07467), no bias. ``layer``: Ba et al. 2016, arXiv
    1607.06450.
    """

    x: str
    out: str
    weight: str
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    add: str = ""


@dataclass(frozen=True)
class Product:
    """``out = scale * (matrix @ x + bias)``, plus ``add`` where one is named."""

    x: str
    out: str
    matrix: str
    add: str = ""
    scale: float = 1.0


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values out of ``x``, side by side there: normed where asked, rotated; keys and values cached.

    Of each head of queries and keys the first ``rotary`` dimensions rotate, their first half against their second, by
    angles table ``rope`` (Su et al. 2021, arXiv 2104.09864). ``norm``: RMS norm with weights ``q_norm`` and ``k_norm``,
    of each ``head`` or of the whole ``row``.
    """

    x: str
    q: str
    k: str
    v: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: int = 0
    rope: int = 0
    norm: Literal["no", "head", "row"] = "no"
    norm_eps: float = 0.0
    norm_offset: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Causal attention of ``q`` over the layer's keys and values up to each token.

    ``window`` > 0: the last ``window`` positions alone. ``cap``: scores become cap * tanh(score / cap). ``alibi``:
    scores fall linearly with distance, by the head's slope. ``sinks``: a vector of scores, one for each head, that take
    weight and give nothing.
    """

    q: str
    k: str
    v: str
    out: str
    scale: float
    window: int = 0
    cap: float = 0.0
    alibi: bool = False
    sinks: str = ""


@dataclass(frozen=True)
class Activation:
    """``out = kind(x)``; ``gated``: x is gate and up side by side, and ``out = kind(gate) * up``."""

    x: str
    out: str
    kind: str
    gated: bool = True


@dataclass(frozen=True)
class Route:
    """The ``top_k`` greatest of the router's scores ``x`` [N, experts]: which experts, and with what weight.

    Weights are softmax over all scores; ``renormalize``: over the chosen ones.
    """

    x: str
    out: str
    top_k: int
    renormalize: bool


@dataclass(frozen=True)
class Experts:
    """``add`` plus ``scale`` times the weighted sum of each token's experts, as ``routes`` says.

    An expert is ``down @ activation(up @ x)``, as ``Activation`` with the fields of the same names.
    """

    x: str
    routes: str
    out: str
    up: str
    down: str
    kind: str
    gated: bool = True
    add: str = ""
    scale: float = 1.0


@dataclass(frozen=True)
class Gate:
    """``out = add + sigmoid(by) * x``; ``by`` has one column."""

    x: str
    by: str
    out: str
    add: str


@dataclass(frozen=True)
class Cap:
    """``out = limit * tanh(x / limit)``."""

    x: str
    out: str
    limit: float


Op = Embed | AddPositions | Norm | Product | Heads | Attention | Activation | Route | Experts | Gate | Cap


class Layout(NamedTuple):
    """How the rows of a stored tensor become those of the parameter.

    ``transposed``: the tensor is stored [inputs, outputs]. ``heads``: each of ``groups`` groups holds the queries of
    its heads, its key and its value, of ``head_dim`` rows each; the parameter holds all queries, all keys, all values.
    ``pairs``: of the ``pairs`` first rows of each head 2i and 2i + 1 rotate together; in the parameter i and i + half.
    """

    kind: Literal["plain", "transposed", "heads", "pairs"] = "plain"
    groups: int = 0
    head_dim: int = 0
    pairs: int = 0


PLAIN = Layout()


class Rows(NamedTuple):
    """Rows of a weight that come from one tensor of the checkpoint; ranks take whole multiples of ``unit`` of them."""

    source: str  # the tensor's name without .weight or .bias
    number: int
    unit: int = 1
    layout: Layout = PLAIN


class Matrix(NamedTuple):
    """A linear layer [outputs, inputs], or with ``num_experts`` several of them stacked.

    ``split``: what ranks may divide: ``rows`` (each has some outputs), ``columns`` (each has some inputs; what they
    compute must be added), ``whole``. ``unit``: columns that stay together. ``tied``: its weight is the table
    ``tokens``, and no tensor of the checkpoint.
    """

    name: str
    inputs: int
    rows: tuple[Rows, ...]
    bias: bool = False
    split: Literal["rows", "columns", "whole"] = "rows"
    unit: int = 1
    num_experts: int = 0
    tied: bool = False
    runs: tuple[int, ...] = ()  # of rows that ranks divide each: queries, keys, values; gate, up

    @property
    def outputs(self) -> int:
        return sum(rows.number for rows in self.rows)


class Vector(NamedTuple):
    """A norm's weight, and its bias where it has one, or other numbers for each column or head."""

    name: str
    size: int
    source: str
    bias: bool = False
    split: Literal["rows", "whole"] = "whole"
    unit: int = 1
    suffix: str = ".weight"


class Table(NamedTuple):
    """Rows that tokens or positions choose."""

    name: str
    num_rows: int
    dim: int
    source: str


class Block(NamedTuple):
    """Operations that run together, and their weights. ``prefix`` stands before the names of the parameters."""

    prefix: str
    ops: tuple[Op, ...]
    matrices: tuple[Matrix, ...] = ()
    vectors: tuple[Vector, ...] = ()
    tables: tuple[Table, ...] = ()

    def matrix(self, name: str) -> Matrix:
        """The matrix called ``name``."""
        return next(m for m in self.matrices if m.name == name)


class RopeTable(NamedTuple):
    """One set of rotary frequencies: ``dim`` dimensions of a head rotate."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


class Description(NamedTuple):
    """A whole model. ``ropes``: the tables that ``Heads.rope`` counts."""

    embed: Block
    layers: tuple[Block, ...]
    head: Block
    ropes: tuple[RopeTable, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.embed, *self.layers, self.head)

    def block(self, prefix: str) -> Block:
        """The block called ``prefix``: ``embed``, ``layers.3`` or ``head``."""
        kind, _, index = prefix.partition(".")
        return {"embed": self.embed, "head": self.head}[kind] if not index else self.layers[int(index)]

    def matrix(self, module: str) -> Matrix | None:
        """The matrix of the Transformer's linear layer ``module``, such as ``layers.3.wo``; None for another module."""
        prefix, _, name = module.rpartition(".")
        return next((m for m in self.block(prefix).matrices if m.name == name), None)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings included; a tied head is not counted again."""
        return sum(math.prod(part.shape) for part in _parts(self))

    def bytes_per_token(self, held: Mapping[str, int]) -> int:
        """Bytes of weights read to decode one token; ``held``: bytes of each weight by its full name.

        Of tables one row is read, of experts those that a token is routed to.
        """
        total = 0
        for block in self.blocks:
            used = next((op.top_k for op in block.ops if isinstance(op, Route)), 0)
            total += sum(held[block.prefix + table.name] // table.num_rows for table in block.tables)
            total += sum(held[block.prefix + vector.name] for vector in block.vectors)
            for m in block.matrices:
                num_bytes = held[block.prefix + m.name]
                total += num_bytes // m.num_experts * used if m.num_experts else num_bytes
        return total

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets in products: of experts those that it is routed to."""
        total = 0
        for block in self.blocks:
            used = next((op.top_k for op in block.ops if isinstance(op, Route)), 0)
            for m in block.matrices:
                total += m.outputs * m.inputs // max(1, m.num_experts) * (used if m.num_experts else 1)
        return total


class Part(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter it fills: ``target[start : start + shape[0]]``."""

    source: str  # name in the checkpoint
    target: str  # name of the parameter of Transformer
    start: int
    shape: tuple[int, ...]
    layout: Layout = PLAIN

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The tensor's own shape in an unquantized checkpoint."""
        return self.shape[::-1] if self.layout.kind == "transposed" else self.shape


@lru_cache(maxsize=64)
def parts(config: ModelConfig) -> list[Part]:
    """Every tensor that a checkpoint of ``config`` holds, in the model's order. A tied head is not among them."""
    return list(_parts(describe(config)))


def _parts(description: Description) -> Iterator[Part]:
    for block in description.blocks:
        for table in block.tables:
            yield Part(table.source + ".weight", f"{block.prefix}{table.name}.weight", 0, (table.num_rows, table.dim))
        for v in block.vectors:
            suffixes = (v.suffix, ".bias") if v.bias else (v.suffix,)
            for suffix in suffixes:
                yield Part(v.source + suffix, f"{block.prefix}{v.name}{suffix or '.weight'}", 0, (v.size,))
        for m in block.matrices:
            start = 0
            for rows in m.rows:
                target = f"{block.prefix}{m.name}"
                if not m.tied:
                    yield Part(rows.source + ".weight", target + ".weight", start, (rows.number, m.inputs), rows.layout)
                if m.bias:
                    layout = PLAIN if rows.layout.kind == "transposed" else rows.layout
                    yield Part(rows.source + ".bias", target + ".bias", start, (rows.number,), layout)
                start += rows.number


def split_of(target: str, config: ModelConfig) -> tuple[str, tuple[int, ...]]:
    """How ranks divide the parameter ``target``: rows, columns or whole, and the runs of rows that are divided each."""
    module, _, _ = target.rpartition(".")
    prefix, _, name = module.rpartition(".")
    block = describe(config).block(prefix)
    for table in block.tables:
        if table.name == name:
            return ("rows", (table.num_rows,)) if name == "tokens" else ("whole", ())
    for vector in block.vectors:
        if vector.name == name:
            return vector.split, (vector.size,)
    matrix = block.matrix(name)
    return matrix.split, matrix.runs


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Description:
    """The operations and weights of a model of ``config``."""
    row, scaling = FAMILIES[config.family], config.rope_scaling
    ropes = [RopeTable(config.rotary, config.rope_theta, scaling)]
    if config.local_rope_theta is not None:
        ropes.append(RopeTable(config.rotary, config.local_rope_theta))
    layers = tuple(_layer(config, row, i) for i in range(config.num_layers))
    return Description(_embed(config, row), layers, _head(config, row), tuple(ropes) if config.rotary else ())


def _embed(c: ModelConfig, row: Family) -> Block:
    ops: list[Op] = [Embed("x", "tokens", c.embedding_scale)]
    tables = [Table("tokens", c.vocab_size, c.dim, row.names["tokens"])]
    vectors = []
    if c.learned_positions is not None:
        ops.append(AddPositions("x", "positions", c.learned_positions))
        tables.append(Table("positions", c.max_seq_len + c.learned_positions, c.dim, row.names["positions"]))
    if c.embedding_norm:
        ops.append(_norm(c, "x", "x", "norm"))
        vectors.append(_vector(c, row, "norm", row.names["embedding_norm"]))
    return Block("embed.", tuple(ops), (), tuple(vectors), tuple(tables))


def _head(c: ModelConfig, row: Family) -> Block:
    ops: list[Op] = [_norm(c, "x", "normed", "norm"), Product("normed", "logits", "output", scale=c.logits_scale)]
    if c.logits_cap:
        ops.append(Cap("logits", "logits", c.logits_cap))
    output = Matrix(
        "output",
        c.dim,
        (Rows(row.names["output"], c.vocab_size),),
        c.head_bias,
        tied=c.tie_embeddings,
        runs=(c.vocab_size,),
    )
    return Block("head.", tuple(ops), (output,), (_vector(c, row, "norm", row.names["norm"]),))


def _norm(c: ModelConfig, x: str, out: str, weight: str, add: str = "") -> Norm:
    return Norm(x, out, weight, c.norm_eps, c.norm, c.norm_offset, add)


def _vector(c: ModelConfig, row: Family, name: str, source: str) -> Vector:
    return Vector(name, c.dim, source, bias=c.norm == "layer")


def _layer(c: ModelConfig, row: Family, i: int) -> Block:
    """One layer: attention and feed-forward, with their norms where the family has them."""
    names = {slot: name.replace("{}", str(i)) for slot, name in row.names.items()}
    prefix, after = f"layers.{i}.", c.norms != "before"
    ops: list[Op] = []
    vectors: list[Vector] = []

    def norm(slot: str, x: str, out: str, add: str = "") -> None:
        ops.append(_norm(c, x, out, slot, add))
        vectors.append(_vector(c, row, slot, names[slot]))

    before = c.norms != "after"
    if before:
        norm("attention_norm", "x", "normed")
    if c.parallel == "two norms":
        norm("ffn_norm", "x", "ffn_in")
    attention = _attention(c, row, names, i, "normed" if before else "x", "y" if after else "x")
    ops += attention.ops
    if after:
        norm("attention_post_norm", "y", "x", add="x")
    ffn_in = {"one norm": "normed", "two norms": "ffn_in", "no": "normed" if before else "x"}[c.parallel]
    if before and c.parallel == "no":
        norm("ffn_norm", "x", "normed")
    routed = c.experts is not None and (not c.experts.layers or c.experts.layers[i])
    feed = (_experts if routed else _feed_forward)(c, row, names, ffn_in, "y" if after else "x")
    ops += feed.ops
    if after:
        norm("ffn_post_norm", "y", "x", add="x")
    vectors += attention.vectors
    return Block(prefix, tuple(ops), attention.matrices + feed.matrices, tuple(vectors))


def _attention(c: ModelConfig, row: Family, names: dict[str, str], i: int, x: str, out: str) -> Block:
    rotary = 0 if c.unrotated and c.unrotated[i] else c.rotary
    local = c.local_rope_theta is not None and c.window(i) > 0
    counts = (c.q_dim, c.kv_dim, c.kv_dim)
    wqkv = Matrix("wqkv", c.dim, _rows(row, names, "wqkv", counts, c, unit=c.head_dim), c.qkv_bias, runs=counts)
    wo = Matrix("wo", c.q_dim, _rows(row, names, "wo", (c.dim,), c), c.out_bias, "columns", c.head_dim)
    vectors = []
    if c.qk_norm != "no":
        heads = {"q_norm": c.num_heads, "k_norm": c.num_kv_heads}
        for name, count in heads.items():
            size = c.head_dim * (count if c.qk_norm == "row" else 1)
            split: Literal["rows", "whole"] = "rows" if c.qk_norm == "row" else "whole"
            vectors.append(Vector(name, size, names[name], split=split, unit=c.head_dim))
    if c.sinks:
        vectors.append(Vector("sinks", c.num_heads, names["sinks"], split="rows", suffix=""))
    added = "x" if out == "x" else ""
    ops: tuple[Op, ...] = (
        Product(x, "qkv", "wqkv"),
        Heads(
            "qkv", "q", "k", "v", c.num_heads, c.num_kv_heads, c.head_dim, rotary, int(local and rotary > 0),
            c.qk_norm, c.norm_eps, c.norm_offset,
        ),
        Attention(
            "q", "k", "v", "attended", c.attention_scale or c.head_dim**-0.5, c.window(i), c.attention_cap, c.alibi,
            "sinks" if c.sinks else "",
        ),
        Product("attended", out, "wo", added, c.residual_scale),
    )  # fmt: skip
    return Block("", ops, (wqkv, wo), tuple(vectors))


def _feed_forward(c: ModelConfig, row: Family, names: dict[str, str], x: str, out: str) -> Block:
    counts = (c.ffn_dim,) * (1 + c.gated)
    up = Matrix("w13", c.dim, _rows(row, names, "w13", counts, c), c.mlp_bias, runs=counts)
    down = Matrix("w2", c.ffn_dim, _rows(row, names, "w2", (c.dim,), c), c.mlp_bias, "columns")
    ops = (
        Product(x, "inner", "w13"),
        Activation("inner", "hidden", c.activation, c.gated),
        Product("hidden", out, "w2", "x" if out == "x" else "", c.residual_scale),
    )
    return Block("", ops, (up, down))


def _experts(c: ModelConfig, row: Family, names: dict[str, str], x: str, out: str) -> Block:
    e = c.experts
    assert e is not None
    add = "x" if out == "x" else ""
    matrices = [
        Matrix("router", c.dim, (Rows(names["router"], e.num_experts),), c.router_bias, "whole"),
        *_expert_matrices(c, e, row, names),
    ]
    ops: list[Op] = [Product(x, "scores", "router"), Route("scores", "routes", e.top_k, e.renormalize)]
    if e.shared_ffn_dim:
        width = e.shared_ffn_dim
        matrices += [
            Matrix("shared_w13", c.dim, _rows(row, names, "shared_w13", (width, width), c), runs=(width, width)),
            Matrix("shared_w2", width, _rows(row, names, "shared_w2", (c.dim,), c), split="columns"),
            Matrix("shared_gate", c.dim, (Rows(names["shared_gate"], 1),), split="whole"),
        ]
        ops += [
            Product(x, "inner", "shared_w13"),
            Activation("inner", "hidden", c.activation),
            Product("hidden", "shared", "shared_w2"),
            Product(x, "shared_weight", "shared_gate"),
        ]
    ops.append(Experts(x, "routes", out, "experts_w13", "experts_w2", c.activation, c.gated, add, c.residual_scale))
    if e.shared_ffn_dim:
        ops.append(Gate("shared", "shared_weight", out, out))
    return Block("", tuple(ops), tuple(matrices))


def _expert_matrices(c: ModelConfig, e: ExpertsConfig, row: Family, names: dict[str, str]) -> tuple[Matrix, Matrix]:
    """All experts' matrices, one below the other."""

    def stacked(slot: str, counts: Sequence[int]) -> tuple[Rows, ...]:
        each = (_rows(row, {slot: names[slot].replace("{e}", str(n))}, slot, counts, c) for n in range(e.num_experts))
        return tuple(rows for expert in each for rows in expert)

    up = Matrix("experts_w13", c.dim, stacked("experts_w13", (e.ffn_dim,) * 2), num_experts=e.num_experts)
    up = up._replace(runs=(e.ffn_dim,) * (2 * e.num_experts))
    down = Matrix("experts_w2", e.ffn_dim, stacked("experts_w2", (c.dim,)), split="columns", num_experts=e.num_experts)
    if c.mlp_bias:
        up, down = up._replace(bias=True), down._replace(bias=True)
    return up, down


def _rows(
    row: Family, names: dict[str, str], slot: str, counts: Sequence[int], c: ModelConfig, unit: int = 1
) -> tuple[Rows, ...]:
    """The tensors of one matrix: one for each of ``counts``, or a single one where the family stores them stacked."""
    sources, kind = names[slot].split(), row.layouts.get(slot, "plain")
    if len(sources) == 1:
        counts = (sum(counts),)
    found = []
    for i, (source, count) in enumerate(zip(sources, counts, strict=True)):
        layout = PLAIN
        if kind == "transposed":
            layout = Layout("transposed")
        elif kind == "heads":
            layout = Layout("heads", c.num_kv_heads, c.head_dim)
        elif kind == "pairs" and i < 2:  # values do not rotate
            layout = Layout("pairs", count // c.head_dim, c.head_dim, c.rotary)
        elif kind == "interleaved":  # row 2i of the gate, row 2i + 1 of up
            layout = Layout("pairs", 1, count, count)
        found.append(Rows(source, count, unit, layout))
    return tuple(found)
