"""A model as data: its operations in order, and each weight with its name in the checkpoint, its shape and its split.

Everything else follows from it: the plain torch model (transformer.py), the counts of parameters and bytes, what is
read from a checkpoint (:func:`parts`), what quantization and calibration see, and the programs of the C++ and the
Triton step. An executor honours every field of an operation that it runs, and raises :class:`UnsupportedError` for an
operation or a value that it does not run.

Operations work on named buffers, one row for each token: ``x`` is the residual stream [N, E].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.config import ModelConfig, RopeScaling


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
# What ranks may divide: rows (each has some outputs), columns (each has some inputs; what they compute must be added).
Split = Literal["rows", "columns", "whole"]


class Rows(NamedTuple):
    """Rows of a weight that come from one tensor of the checkpoint."""

    source: str  # the tensor's name without .weight or .bias
    number: int
    layout: Layout = PLAIN


class Matrix(NamedTuple):
    """A linear layer [outputs, inputs], or with ``num_experts`` several of them stacked.

    ``tied``: its weight is the table ``tokens``, and no tensor of the checkpoint.
    """

    name: str
    inputs: int
    rows: tuple[Rows, ...]
    bias: bool = False
    split: Split = "rows"
    num_experts: int = 0
    tied: bool = False
    runs: tuple[int, ...] = ()  # of rows that ranks divide each: queries, keys, values; gate, up
    unit: int = 1  # rows of a run that stay together: a head's

    @property
    def outputs(self) -> int:
        return sum(rows.number for rows in self.rows)


class Vector(NamedTuple):
    """A norm's weight, and its bias where it has one, or other numbers for each column or head."""

    name: str
    size: int
    source: str
    bias: bool = False
    split: Split = "whole"
    suffix: str = ".weight"
    unit: int = 1  # numbers that stay together: a head's


class Table(NamedTuple):
    """Rows that tokens or positions choose."""

    name: str
    num_rows: int
    dim: int
    source: str
    split: Split = "whole"


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

    def met(self, m: Matrix, total: int) -> int:
        """Of ``total`` numbers or bytes of ``m`` those that one token meets: of experts those that it is routed to."""
        top_k = next((op.top_k for op in self.ops if isinstance(op, Route)), 0)
        return total // m.num_experts * top_k if m.num_experts else total


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

    def matrix(self, module: str) -> Matrix | None:
        """The matrix of the Transformer's linear layer ``module``, such as ``layers.3.wo``; None for another module."""
        prefix, _, name = module.rpartition(".")
        kind, _, index = prefix.partition(".")
        block: Block = self.layers[int(index)] if index else getattr(self, kind)
        return next((m for m in block.matrices if m.name == name), None)

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
            total += sum(held[block.prefix + table.name] // table.num_rows for table in block.tables)
            total += sum(held[block.prefix + vector.name] for vector in block.vectors)
            total += sum(block.met(m, held[block.prefix + m.name]) for m in block.matrices)
        return total

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets in products."""
        return sum(block.met(m, m.outputs * m.inputs) for block in self.blocks for m in block.matrices)


class Part(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter it fills: ``target[start : start + shape[0]]``.

    ``split``: what ranks divide of the parameter, and ``runs``: the runs of its rows that are divided each, ``unit``
    rows staying together.
    """

    source: str  # name in the checkpoint
    target: str  # name of the parameter of Transformer
    start: int
    shape: tuple[int, ...]
    split: Split
    runs: tuple[int, ...]
    layout: Layout = PLAIN
    unit: int = 1

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
        for t in block.tables:
            target, shape = f"{block.prefix}{t.name}.weight", (t.num_rows, t.dim)
            yield Part(t.source + ".weight", target, 0, shape, t.split, shape[:1])
        for v in block.vectors:
            for suffix in (v.suffix, ".bias") if v.bias else (v.suffix,):
                target = f"{block.prefix}{v.name}{suffix or '.weight'}"
                yield Part(v.source + suffix, target, 0, (v.size,), v.split, (v.size,), unit=v.unit)
        for m in block.matrices:
            start, target, divided = 0, block.prefix + m.name, (m.split, m.runs)
            for source, n, layout in m.rows:
                if not m.tied:
                    yield Part(source + ".weight", target + ".weight", start, (n, m.inputs), *divided, layout, m.unit)
                if m.bias:
                    layout = PLAIN if layout.kind == "transposed" else layout
                    yield Part(source + ".bias", target + ".bias", start, (n,), *divided, layout, m.unit)
                start += n


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Description:
    """The operations and weights of a model of ``config``."""
    ropes = [RopeTable(config.rotary, config.rope_theta, config.rope_scaling)]
    if config.local_rope_theta is not None:
        ropes.append(RopeTable(config.rotary, config.local_rope_theta))
    layers = tuple(_layer(config, i) for i in range(config.num_layers))
    return Description(_embed(config), layers, _head(config), tuple(ropes) if config.rotary else ())


def _embed(c: ModelConfig) -> Block:
    b = _Builder(c, "embed.")
    b.ops.append(Embed("x", "tokens", c.embedding_scale))
    b.tables.append(Table("tokens", c.vocab_rows or c.vocab_size, c.dim, b.names["tokens"], "rows"))
    if c.learned_positions is not None:
        b.ops.append(AddPositions("x", "positions", c.learned_positions))
        b.tables.append(Table("positions", c.max_seq_len + c.learned_positions, c.dim, b.names["positions"]))
    if c.embedding_norm:
        b.norm("norm", "x", "x", source="embedding_norm")
    return b.block()


def _head(c: ModelConfig) -> Block:
    b = _Builder(c, "head.")
    b.norm("norm", "x", "normed")
    b.ops.append(Product("normed", "logits", "output", scale=c.logits_scale))
    b.matrix("output", c.dim, (c.vocab_rows or c.vocab_size,), c.head_bias)
    if c.logits_cap:
        b.ops.append(Cap("logits", "logits", c.logits_cap))
    return b.block()


def _layer(c: ModelConfig, i: int) -> Block:
    """One layer: attention and feed-forward, with their norms where the family has them."""
    b = _Builder(c, f"layers.{i}.", i)
    before, after = c.norms != "after", c.norms != "before"
    normed, made = "normed" if before else "x", "y" if after else "x"
    if before:
        b.norm("attention_norm", "x", "normed")
    if c.parallel == "two norms":
        b.norm("ffn_norm", "x", "ffn_in")
    b.attention(normed, made)
    if after:
        b.norm("attention_post_norm", "y", "x", add="x")
    if before and c.parallel == "no":
        b.norm("ffn_norm", "x", "normed")
    routed = c.experts is not None and (not c.experts.layers or c.experts.layers[i])
    feed_forward = b.experts if routed else b.feed_forward
    feed_forward("ffn_in" if c.parallel == "two norms" else normed, made)
    if after:
        b.norm("ffn_post_norm", "y", "x", add="x")
    return b.block()


class _Builder:
    """One block in the making: each method adds operations together with their weights.

    Attention and feed-forward read the buffer ``x`` and make ``out``; where that is the residual stream they add to it.
    """

    def __init__(self, config: ModelConfig, prefix: str, layer: int = 0) -> None:
        self.c, self.prefix, self.layer = config, prefix, layer
        self.layouts = FAMILIES[config.family].layouts
        self.names = {slot: name.replace("{}", str(layer)) for slot, name in FAMILIES[config.family].names.items()}
        self.ops: list[Op] = []
        self.matrices: list[Matrix] = []
        self.vectors: list[Vector] = []
        self.tables: list[Table] = []

    def block(self) -> Block:
        return Block(self.prefix, tuple(self.ops), tuple(self.matrices), tuple(self.vectors), tuple(self.tables))

    def norm(self, name: str, x: str, out: str, add: str = "", source: str = "") -> None:
        c = self.c
        self.ops.append(Norm(x, out, name, c.norm_eps, c.norm, c.norm_offset, add))
        self.vectors.append(Vector(name, c.dim, self.names[source or name], bias=c.norm == "layer"))

    def attention(self, x: str, out: str) -> None:
        c, i = self.c, self.layer
        rotary = 0 if c.unrotated and c.unrotated[i] else c.rotary
        local = c.local_rope_theta is not None and c.window(i) > 0
        self.matrix("wqkv", c.dim, (c.q_dim, c.kv_dim, c.kv_dim), c.qkv_bias)
        self.matrix("wo", c.q_dim, (c.dim,), c.out_bias, "columns")
        if c.qk_norm != "no":
            split: Split = "rows" if c.qk_norm == "row" else "whole"
            for name, heads in (("q_norm", c.num_heads), ("k_norm", c.num_kv_heads)):
                size = c.head_dim * (heads if c.qk_norm == "row" else 1)
                self.vectors.append(Vector(name, size, self.names[name], split=split, unit=c.head_dim))
        if c.sinks:
            self.vectors.append(Vector("sinks", c.num_heads, self.names["sinks"], split="rows", suffix=""))
        self.ops += [
            Product(x, "qkv", "wqkv"),
            Heads(
                "qkv", "q", "k", "v", c.num_heads, c.num_kv_heads, c.head_dim, rotary, int(local and rotary > 0),
                c.qk_norm, c.norm_eps, c.norm_offset,
            ),
            Attention(
                "q", "k", "v", "attended", c.attention_scale or c.head_dim**-0.5, c.window(i), c.attention_cap, c.alibi,
                "sinks" if c.sinks else "",
            ),
            Product("attended", out, "wo", "x" if out == "x" else "", c.residual_scale),
        ]  # fmt: skip

    def feed_forward(self, x: str, out: str) -> None:
        c = self.c
        self.matrix("w13", c.dim, (c.ffn_dim,) * (1 + c.gated), c.mlp_bias)
        self.matrix("w2", c.ffn_dim, (c.dim,), c.mlp_bias, "columns")
        self.ops += [
            Product(x, "inner", "w13"),
            Activation("inner", "hidden", c.activation, c.gated),
            Product("hidden", out, "w2", "x" if out == "x" else "", c.residual_scale),
        ]

    def experts(self, x: str, out: str) -> None:
        c, e, add = self.c, self.c.experts, "x" if out == "x" else ""
        assert e is not None
        self.matrix("router", c.dim, (e.num_experts,), c.router_bias, "whole")
        self.matrix("experts_w13", c.dim, (e.ffn_dim,) * 2, c.mlp_bias, stack=e.num_experts)
        self.matrix("experts_w2", e.ffn_dim, (c.dim,), c.mlp_bias, "columns", e.num_experts)
        self.ops += [Product(x, "scores", "router"), Route("scores", "routes", e.top_k, e.renormalize)]
        own = Experts(x, "routes", out, "experts_w13", "experts_w2", c.activation, c.gated, add, c.residual_scale)
        if not e.shared_ffn_dim:
            self.ops.append(own)
            return
        self.matrix("shared_w13", c.dim, (e.shared_ffn_dim,) * 2)
        self.matrix("shared_w2", e.shared_ffn_dim, (c.dim,), split="columns")
        self.matrix("shared_gate", c.dim, (1,), split="whole")
        self.ops += [
            Product(x, "inner", "shared_w13"),
            Activation("inner", "hidden", c.activation),
            Product("hidden", "shared", "shared_w2"),
            Product(x, "shared_weight", "shared_gate"),
            own,
            Gate("shared", "shared_weight", out, out),
        ]

    def matrix(
        self, name: str, inputs: int, counts: tuple[int, ...], bias: bool = False, split: Split = "rows", stack: int = 0
    ) -> None:
        """``counts``: rows of queries, keys and values, or of gate and up. ``stack``: experts that have them each."""
        each, tied = max(1, stack), name == "output" and self.c.tie_embeddings
        rows = tuple(rows for i in range(each) for rows in self.rows(name, counts, i))
        runs, unit = counts * each if split == "rows" else (), self.c.head_dim if name == "wqkv" else 1
        self.matrices.append(Matrix(name, inputs, rows, bias, split, stack, tied, runs, unit))

    def rows(self, name: str, counts: tuple[int, ...], expert: int) -> Iterator[Rows]:
        """The tensors of a matrix: one for each of ``counts``, or a single one where the family stores them as one."""
        c, kind = self.c, self.layouts.get(name, "plain")
        sources = self.names[name].replace("{e}", str(expert)).split()
        for i, (source, count) in enumerate(zip(sources, counts if len(sources) > 1 else (sum(counts),), strict=True)):
            layout = PLAIN
            if kind == "transposed":
                layout = Layout("transposed")
            elif kind == "heads":
                layout = Layout("heads", c.num_kv_heads, c.head_dim)
            elif kind == "pairs" and i < 2:  # values do not rotate
                layout = Layout("pairs", count // c.head_dim, c.head_dim, c.rotary)
            elif kind == "interleaved":  # row 2i of the gate, row 2i + 1 of up
                layout = Layout("pairs", 1, count, count)
            yield Rows(source, count, layout)
