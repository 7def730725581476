"""The description of a model (description.py) by its configuration and its family's names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.config import ModelConfig
from gpt_fast.model.description import (
    PLAIN,
    Activation,
    AddPositions,
    Attention,
    Block,
    Cap,
    Description,
    Embed,
    Experts,
    Gate,
    Heads,
    Layout,
    Matrix,
    Norm,
    Op,
    Part,
    Product,
    RopeTable,
    Route,
    Rows,
    Split,
    Table,
    Vector,
)


@lru_cache(maxsize=64)
def parts(config: ModelConfig) -> list[Part]:
    """``Description.parts`` of a model of ``config``."""
    return list(describe(config).parts)


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
