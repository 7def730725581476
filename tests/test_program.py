"""Every operation of a description in C++ against plain torch, and every field of every operation honoured or refused.

The mathematics of plain torch is compared with transformers elsewhere (parity, families); here the two executors are
compared with each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from programs import Twin, needs_cpp

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import Weights
from gpt_fast.model import description as d

pytestmark = [needs_cpp, pytest.mark.usefixtures("threads_restored")]

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def matrix(name: str, inputs: int, outputs: int, bias: bool = False, experts: int = 0) -> d.Matrix:
    """``experts`` > 0: each has so many outputs."""
    rows = tuple(d.Rows("", outputs) for _ in range(max(1, experts)))
    return d.Matrix(name, inputs, rows, bias, num_experts=experts)


def vector(name: str, size: int, bias: bool = False) -> d.Vector:
    return d.Vector(name, size, "", bias)


def table(name: str, num_rows: int, dim: int) -> d.Table:
    return d.Table(name, num_rows, dim, "")


def heads(head_dim: int, rotary: int = 0, num: int = 4, kv: int = 2, **more: Any) -> d.Heads:
    return d.Heads("qkv", "q", "k", "v", num, kv, head_dim, rotary, **more)


def attention(**more: Any) -> d.Attention:
    return d.Attention("q", "k", "v", "out", **({"scale": 0.3} | more))


def of_heads(op: d.Heads, *then: d.Op, out: str = "q", **more: Any) -> dict[str, Any]:
    """A Twin's arguments: ``op`` and others behind it, on a buffer of its width."""
    count = {"head": 1, "row": op.num_heads, "no": 0}[op.norm], {"head": 1, "row": op.num_kv_heads, "no": 0}[op.norm]
    norms = [vector(name, n * op.head_dim) for name, n in zip(("q_norm", "k_norm"), count, strict=True) if n]
    ropes = [d.RopeTable(op.rotary, theta) for theta in (10000.0, 100.0)] if op.rotary else []
    vectors = [*norms, *more.pop("vectors", ())]
    width = (op.num_heads + 2 * op.num_kv_heads) * op.head_dim
    return {"ops": (op, *then), "widths": {"qkv": width}, "out": out, "ropes": ropes, "vectors": vectors, **more}


def experts(
    dim: int, inner: int, count: int, top_k: int, *, renormalize: bool = True, bias: bool = False, **more: Any
) -> dict[str, Any]:
    op = d.Experts("a", "routes", "out", "up", "down", **({"kind": "silu"} | more))
    up = matrix("up", dim, inner * (1 + op.gated), bias, count)
    ops = (d.Route("scores", "routes", top_k, renormalize), op)
    widths = {"a": dim, "scores": count, "b": dim}
    return {"ops": ops, "widths": widths, "out": "out", "matrices": [up, matrix("down", inner, dim, bias, count)]}


KINDS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
CASES: dict[str, dict[str, Any]] = {
    **{
        f"embed {dim}": {
            "ops": (d.Embed("out", "t", scale),), "widths": {"a": 3}, "out": "out", "tables": [table("t", 11, dim)],
        }
        for dim, scale in ((1, 1.0), (37, 0.5), (64, 8.0))
    },
    **{
        f"positions {dim}": {
            "ops": (d.AddPositions("a", "t", 2),), "widths": {"a": dim}, "out": "a", "tables": [table("t", 70, dim)],
        }
        for dim in (1, 24, 65)
    },
    **{
        f"norm {kind} {dim} {offset} {add}": {
            "ops": (d.Norm("a", "out", "w", 1e-5, kind, offset, add),), "widths": {"a": dim, "b": dim}, "out": "out",
            "vectors": [vector("w", dim, kind == "layer")],
        }
        for kind, dim, offset, add in (
            ("rms", 3, 0.0, ""), ("rms", 77, 1.0, ""), ("rms", 128, 0.0, "b"), ("rms", 20, 1.0, "a"),
            ("layer", 2, 0.0, ""), ("layer", 40, 1.0, "b"), ("layer", 129, 0.0, ""),
        )
    },
    **{
        f"product {n}x{k} {scale} {add}": {
            "ops": (d.Product("a", "out", "w", add, scale),), "widths": {"a": k, "b": n}, "out": "out",
            "matrices": [matrix("w", k, n, bias)],
        }
        for n, k, scale, add, bias in (
            (1, 5, 1.0, "", False), (16, 33, 0.25, "b", True), (77, 20, 1.0, "b", False), (40, 100, 3.0, "", True),
        )
    },
    **{
        f"activation {kind} {width} {gated}": {
            "ops": (d.Activation("a", "out", kind, gated),), "widths": {"a": width * (1 + gated)}, "out": "out",
        }
        for kind in KINDS
        for width, gated in ((1, True), (37, True), (1100, True), (20, False))
        if gated or kind != "clamped_swiglu"
    },
    **{
        f"heads {op.num_heads}/{op.num_kv_heads}/{op.head_dim} {op.rotary} {op.rope} {op.norm}": of_heads(op)
        for op in (
            heads(8, 8), heads(8), heads(16, 8, rope=1), heads(20, 20, num=3, kv=1), heads(5, 0, num=2, kv=1),
            heads(12, 4, num=6, kv=3, rope=1), heads(80, 32), heads(1, num=2, kv=2),
            heads(16, 16, norm="head", norm_eps=1e-5), heads(20, 10, norm="head", norm_eps=1e-3, norm_offset=1.0),
            heads(8, 8, norm="row", norm_eps=1e-5), heads(5, 0, norm="row", norm_eps=1e-6, norm_offset=0.5),
        )
    },
    **{
        f"attention {op.num_heads}/{op.num_kv_heads}/{op.head_dim} {more}": of_heads(
            op, attention(**more), out="out", vectors=[vector("s", op.num_heads)]
        )
        for op, more in (
            (heads(8, 8), {}), (heads(20, 20), {"window": 3}), (heads(5, num=3, kv=1), {"cap": 2.0}),
            (heads(16, num=8, kv=1), {"alibi": True}), (heads(8, num=6, kv=3), {"alibi": True, "sinks": "s"}),
            (heads(12, 4, num=4, kv=4), {"sinks": "s", "window": 5, "scale": 1.0}), (heads(1, num=5, kv=5), {}),
            (heads(64, 64), {"cap": 0.5, "alibi": True, "sinks": "s", "window": 7}),
        )
    },
    **{
        f"route {top_k} of {count} {renormalize}": {
            "ops": (d.Route("a", "out", top_k, renormalize),), "widths": {"a": count}, "out": "out",
        }
        for count, top_k, renormalize in ((1, 1, True), (5, 2, False), (8, 4, True), (60, 4, False), (4, 4, False))
    },
    "experts": experts(24, 40, 5, 2),
    "experts of odd widths": experts(7, 11, 3, 1, renormalize=False, bias=True, kind="gelu", add="b", scale=0.5),
    "experts of many": experts(32, 16, 60, 6, kind="clamped_swiglu", bias=True),
    "experts without gates": experts(17, 33, 4, 4, gated=False, kind="relu", add="a"),
    **{
        f"gate {dim} {out}": {"ops": (d.Gate("a", "by", out, "b"),), "widths": {"a": dim, "b": dim, "by": 1},
                              "out": out}
        for dim, out in ((1, "out"), (37, "b"), (64, "a"))
    },
    **{
        f"cap {dim}": {"ops": (d.Cap("a", out, 1.5),), "widths": {"a": dim}, "out": out}
        for dim, out in ((1, "out"), (2100, "a"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operation_equals_plain_torch(name: str) -> None:
    """Of one row and many; and a row alone and in company is the same to the bit, whatever the number of threads."""
    twin = Twin(**CASES[name])
    x = twin.input(21)
    torch.set_num_threads(1)
    program = twin.program()
    whole = twin.fast(x, program)
    torch.testing.assert_close(whole, twin.plain(x), **CLOSE)
    for count in (1, 2, 7):
        assert torch.equal(twin.fast(x[:count], program), whole[:count])
    torch.set_num_threads(2)
    for count in (21, 5):
        assert torch.equal(twin.fast(x[:count], program), whole[:count])


# --- the walk: every field of every operation ----------------------------------------------------------------------

_A = {"a": 16, "b": 16, "x": 16}
_NORMS = [vector("w", 16, True), vector("w2", 16, True)]
_TABLES = [table("t", 80, 16), table("t2", 80, 16)]
_NAMES = {"x": "b", "out": "a", "add": "b"}  # what names of buffers change to
_EXPERTS = [matrix("up", 16, 24, True, 4), matrix("down", 12, 16, True, 4), matrix("up2", 16, 24, False, 4),
            matrix("down2", 12, 16, False, 4)]  # fmt: skip
_ROUTES = (d.Route("s", "routes", 2, True), d.Route("s2", "routes2", 2, True))
_HEADS = d.Heads("qkv", "q", "k", "v", 4, 2, 8, 8, 0, "head", 1e-5, 0.0)
_HEADS2 = d.Heads("qkv2", "q2", "k2", "v2", 4, 2, 8)
_VECTORS = [vector(name, 8) for name in ("q_norm", "k_norm")] + [vector("s", 4), vector("s2", 4)]
_ROPES = (d.RopeTable(8, 100.0), d.RopeTable(8, 7.0), d.RopeTable(4, 100.0))

# For each operation: it with all its fields away from what does nothing, the Twin around it, and for each field another
# value or, with what must change beside it, several.
WALK: dict[type[Any], tuple[d.Op, dict[str, Any], dict[str, Any]]] = {
    d.Embed: (
        d.Embed("a", "t", 2.0),
        {"widths": _A, "tables": _TABLES},
        {"out": "b", "table": "t2", "scale": 3.0},
    ),
    d.AddPositions: (
        d.AddPositions("a", "t", 2),
        {"widths": _A, "tables": _TABLES},
        {"x": "b", "table": "t2", "offset": 0},
    ),
    d.Norm: (
        d.Norm("x", "a", "w", 1e-2, "rms", 0.5, "b"),
        {"widths": _A, "vectors": _NORMS},
        {"x": "b", "out": "b", "weight": "w2", "eps": 1.0, "kind": "layer", "offset": 0.0, "add": ""},
    ),
    d.Product: (
        d.Product("x", "a", "w", "b", 0.5),
        {"widths": _A, "matrices": [matrix("w", 16, 16, True), matrix("w2", 16, 16, True)]},
        {"x": "b", "out": "b", "matrix": "w2", "add": "", "scale": 2.0},
    ),
    d.Heads: (
        _HEADS,
        {"widths": {"qkv": 64, "qkv2": 64}, "after": (d.Attention("q", "k", "v", "out", 0.3),),
         "vectors": _VECTORS, "ropes": _ROPES, "out": "out"},
        {"x": "qkv2", "q": "q2", "k": "k2", "v": "v2", "num_heads": {"num_heads": 6, "num_kv_heads": 1},
         "num_kv_heads": {"num_heads": 6, "num_kv_heads": 1},
         "head_dim": {"head_dim": 16, "num_heads": 2, "num_kv_heads": 1, "norm": "no"},
         "rotary": {"rotary": 4, "rope": 2}, "rope": 1, "norm": "no", "norm_eps": 1.0, "norm_offset": 1.0},
    ),
    d.Attention: (
        d.Attention("q", "k", "v", "out", 0.3, 6, 2.0, True, "s"),
        {"widths": {"qkv": 64, "qkv2": 64, "b": 32}, "before": (_HEADS,), "vectors": _VECTORS,
         "ropes": _ROPES, "out": "out"},
        {"q": "q2", "k": "k2", "v": "v2", "out": "b", "scale": 1.0, "window": 0, "cap": 0.0, "alibi": False,
         "sinks": "s2"},
    ),
    d.Activation: (
        d.Activation("x", "a", "silu", False),
        {"widths": _A | {"wide": 32}},
        {"x": "b", "out": "b", "kind": "gelu", "gated": {"gated": True, "x": "wide"}},
    ),
    d.Route: (
        d.Route("s", "routes", 2, True),
        {"widths": {"s": 4, "s2": 4}, "before": _ROUTES[1:], "out": "routes"},
        {"x": "s2", "out": "routes2", "top_k": 3, "renormalize": False},
    ),
    d.Experts: (
        d.Experts("x", "routes", "a", "up", "down", "silu", True, "b", 0.5),
        {"widths": _A | {"s": 4, "s2": 4}, "before": _ROUTES, "matrices": [*_EXPERTS, matrix("flat", 16, 12, True, 4)]},
        {"x": "b", "routes": "routes2", "out": "b", "up": "up2", "down": "down2", "kind": "relu",
         "gated": {"gated": False, "up": "flat"}, "add": "", "scale": 2.0},
    ),
    d.Gate: (
        d.Gate("x", "by", "a", "b"),
        {"widths": _A | {"by": 1, "by2": 1}},
        {"x": "b", "by": "by2", "out": "b", "add": "x"},
    ),
    d.Cap: (
        d.Cap("x", "a", 1.0),
        {"widths": _A},
        {"x": "b", "out": "b", "limit": 3.0},
    ),
}  # fmt: skip
_OTHER_HEADS = {d.Heads: dataclasses.replace(_HEADS, x="qkv2"), d.Attention: _HEADS2}
# A block has one cache, so other names mean what no operation made.
REFUSED = {(kind, name) for kind in (d.Heads, d.Attention) for name in "qkv"}
FIELDS = [(kind, f.name) for kind in d.Op.__args__ for f in dataclasses.fields(kind)]


def twin_of(op: d.Op, around: dict[str, Any], out: str, *before: d.Op) -> Twin:
    more = {name: value for name, value in around.items() if name not in ("before", "after", "out")}
    return Twin((*before, *around.get("before", ()), op, *around.get("after", ())), out=out, **more)


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_field_is_honoured_or_refused(kind: type[Any], field: str) -> None:
    """A new operation or field has no case here, and this fails until it has one."""
    op, around, changes = WALK[kind]
    change = changes[field] if isinstance(changes[field], dict) else {field: changes[field]}
    changed = dataclasses.replace(op, **change)
    if field == "head_dim":  # the norms' weights are of one width
        op = dataclasses.replace(op, norm="no")
    assert getattr(changed, field) != getattr(op, field)
    # Where the operation writes elsewhere, what stands there is looked at.
    out = changed.out if field == "out" else around.get("out") or getattr(op, "out", None) or op.x
    refused = (kind, field) in REFUSED
    before = twin_of(op, around, out)
    after = twin_of(changed, around, out, *([_OTHER_HEADS[kind]] if refused else []))
    x = before.input(13)
    base, expected = before.plain(x), after.plain(x)
    assert base.shape != expected.shape or not torch.allclose(base, expected, atol=1e-3), "plain torch ignores it"
    torch.testing.assert_close(before.fast(x), base, **CLOSE)
    if refused:
        with pytest.raises(UnsupportedError):
            after.program()
        with pytest.raises(UnsupportedError):
            twin_of(changed, around, out).program()
    else:
        torch.testing.assert_close(after.fast(x), expected, **CLOSE)


def test_what_the_program_does_not_know_is_refused() -> None:
    def program(*ops: d.Op, cache: LayerCache | None = None, **weights: Any) -> Program:
        return Program([(ops, Weights({}, cache=cache, **weights))], "out", input=("in", 24))

    with pytest.raises(UnsupportedError, match="the activation swish"):
        program(d.Activation("in", "out", "swish"))
    with pytest.raises(UnsupportedError, match="clamped_swiglu without a gate"):
        program(d.Activation("in", "out", "clamped_swiglu", gated=False))
    with pytest.raises(UnsupportedError, match="the operation str"):
        program("no operation")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="float16"):
        program(d.Embed("out", "t"), tables={"t": torch.zeros(3, 4, dtype=torch.float16)})
    op = d.Heads("in", "out", "k", "v", 1, 1, 8)
    shape = (2, 16, 1, 8)
    with pytest.raises(UnsupportedError, match="a KV cache of"):
        program(op, cache=LayerCache(*torch.zeros(2, *shape, dtype=torch.float16)))
    with pytest.raises(UnsupportedError, match="for heads of 8"):
        program(op, cache=LayerCache(*torch.zeros(2, 2, 16, 2, 8)))
    with pytest.raises(ValueError, match="of one shape and dtype"):
        program(op, cache=LayerCache(torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)))


def test_rope_tables_must_be_as_wide_as_the_operation_says() -> None:
    twin = Twin(**of_heads(heads(8, 8)))
    program = twin.program()
    twin.ropes = Twin(**of_heads(heads(8, 4))).ropes
    with pytest.raises(ValueError, match="rope table 0 must have 4 columns, not 2"):
        twin.fast(twin.input(2), program)


# --- buffers and roundings -----------------------------------------------------------------------------------------

_SQUARE = [matrix(name, 16, 16) for name in ("w", "w2", "w3")]
CHAINS: dict[str, dict[str, Any]] = {
    "a product into its own input": {
        "ops": (d.Product("a", "a", "w"), d.Product("a", "a", "w2", "a")), "out": "a",
    },
    "an output that is made twice": {
        "ops": (d.Norm("a", "out", "n", 1e-5), d.Product("out", "out", "w"), d.Product("out", "out", "w2", "b")),
        "out": "out",
    },
    "an output of two widths": {
        "ops": (d.Product("a", "out", "wide"), d.Norm("out", "n1", "wide_n", 1e-5), d.Product("n1", "out", "narrow")),
        "out": "out",
    },
    "two norms, products of one before and after the other": {
        "ops": (
            d.Norm("a", "n1", "n", 1e-5), d.Product("n1", "y", "w"), d.Norm("b", "n2", "n", 1e-5),
            d.Product("n1", "z", "w2", "y"), d.Product("n2", "out", "w3", "z"),
        ),
        "out": "out",
    },
    "an input that changes between its products": {
        "ops": (
            d.Product("a", "y", "w"), d.AddPositions("a", "t", 0), d.Product("a", "z", "w", "y"),
            d.Gate("b", "by", "a", "a"), d.Product("a", "out", "w2", "z"),
        ),
        "out": "out",
    },
    "routes where the scores are": {
        "ops": (d.Product("a", "s", "four"), d.Route("s", "s", 2, False),
                d.Experts("b", "s", "out", "up", "down", "silu")),
        "out": "out",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("mode", ["float32", "int8"])
def test_buffers_keep_what_is_still_read(name: str, mode: str) -> None:
    from gpt_fast.quantize.linear import QuantizedLinear
    from gpt_fast.quantize.rtn import quantize_rows
    from gpt_fast.quantize.scheme import Scheme

    twin = Twin(
        widths={"a": 16, "b": 16, "by": 1},
        vectors=[vector("n", 16), vector("wide_n", 40)],
        matrices=[*_SQUARE, matrix("wide", 16, 40), matrix("narrow", 40, 16), matrix("four", 16, 4), *_EXPERTS[:2]],
        tables=_TABLES,
        **CHAINS[name],
    )
    if mode == "int8":
        for m in twin.block.block.matrices:
            if not m.name.startswith("fill_"):
                linear = twin.block.get_submodule(m.name)
                assert isinstance(linear, torch.nn.Linear)
                made = QuantizedLinear(m.inputs, m.outputs, Scheme("int8"), linear.bias, "cpu")
                made.store(0, quantize_rows(linear.weight.detach(), Scheme("int8")))
                made.rounded = True
                setattr(twin.block, m.name, made)
    x = twin.input(9)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        # A number on the border of two integers may fall to either side.
        torch.testing.assert_close(
            twin.fast(x), twin.plain(x), **(CLOSE if mode == "float32" else {"atol": 0.02, "rtol": 0.01})
        )
