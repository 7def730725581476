"""A model as data: its operations in order, and each weight with its name in the checkpoint, its shape and its split.

describing.py makes one of a model's configuration. Everything else follows from it: the plain torch model
(transformer.py), the counts of parameters and bytes, what is read from a checkpoint (``Description.parts``), what
quantization and calibration see, and the programs of the C++ and the Triton step. An executor honours every field of an
operation that it runs, and raises :class:`UnsupportedError` for an operation or a value that it does not run.

Operations work on named buffers, one row for each token: ``x`` is the residual stream [N, E].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpt_fast.config import RopeScaling


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
    def parts(self) -> Iterator[Part]:
        """Every tensor that a checkpoint of this model holds, in the model's order. A tied head is not among them."""
        for block in self.blocks:
            for t in block.tables:
                target, shape = f"{block.prefix}{t.name}.weight", (t.num_rows, t.dim)
                yield Part(t.source + ".weight", target, 0, shape, t.split, shape[:1])
            for v in block.vectors:
                for suffix in (v.suffix, ".bias") if v.bias else (v.suffix,):
                    target = f"{block.prefix}{v.name}{suffix or '.weight'}"
                    yield Part(v.source + suffix, target, 0, (v.size,), v.split, (v.size,), unit=v.unit)
            for m in block.matrices:
                start, target, shares = 0, f"{block.prefix}{m.name}", (m.split, m.runs)
                for source, n, layout in m.rows:
                    if not m.tied:
                        shape = (n, m.inputs)
                        yield Part(source + ".weight", target + ".weight", start, shape, *shares, layout, m.unit)
                    if m.bias:
                        layout = PLAIN if layout.kind == "transposed" else layout
                        yield Part(source + ".bias", target + ".bias", start, (n,), *shares, layout, m.unit)
                    start += n

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings included; a tied head is not counted again."""
        return sum(math.prod(part.shape) for part in self.parts)

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
