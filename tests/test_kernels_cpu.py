"""The C++ kernels against their plain-torch twins, and each row's result against itself in other company."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from programs import run_ops, run_product
from torch import Tensor

from gpt_fast import user_cache
from gpt_fast.config import ModelConfig
from gpt_fast.kernels import reference
from gpt_fast.kernels.cache import LayerCache, StepLayout, padded
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.program import PackedWeights, Weights
from gpt_fast.model import description as d
from gpt_fast.model.attention import Scoring, alibi_slopes, paged_attention_eager

needs_cpp = pytest.mark.skipif(not cpu.available(), reason="needs a C++ compiler and a CPU with AVX2 or NEON")
KINDS = ("float32", "bfloat16", "int8", "int4-32", "int4-64", "int4-128")
# (N, K): tiles not full, K in several passes, more tiles than a thread takes at once
SHAPES = ((5, 128), (100, 640), (16 * 37 + 3, 256))


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeights, Callable[[Tensor], Tensor]]:
    """Random weights as the kernels take them, and the product with their plain form in torch."""
    g = torch.Generator().manual_seed(seed)
    if kind in ("float32", "bfloat16"):
        dtype = getattr(torch, kind)
        w = torch.randn(n, k, generator=g).to(dtype) / k**0.5
        inputs = dtype if cpu.rounding(kind) else torch.float32
        return PackedWeights(kind, packing.pack_dense(w), n, k), lambda x: reference.exact_product(
            x.to(inputs), w.float()
        )
    if kind == "int8":
        q = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        s = torch.rand(n, generator=g) / 127 / k**0.5
        plain = q.float() * s[:, None]
        return PackedWeights(kind, packing.pack_int8(q), n, k, s), lambda x: reference.rounded_product(x, plain, kind)
    size = int(kind.split("-")[1])
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    s, z, row_scale = int4_grid(n, k // size, g)
    row_scale /= 8 * k**0.5
    plain = reference.dequantize_int4(packing.nibbles(q), s, z, row_scale)
    made = PackedWeights("int4", packing.pack_int4(packing.nibbles(q), s, z), n, k, row_scale, size)
    return made, lambda x: reference.rounded_product(x, plain, "int4")


def int4_grid(n: int, groups: int, g: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, zeros around 8, and row scales for scales of at most 1."""
    s = torch.randint(1, 256, (n, groups), generator=g, dtype=torch.uint8)
    z = torch.randint(40, 88, (n, groups), generator=g, dtype=torch.uint8)
    z[0] = torch.arange(groups) * 40 % 256  # beyond the codes as well
    return s, z, torch.rand(n, generator=g) / 255


# --- packing -------------------------------------------------------------------------------------------------------


@needs_cpp
@pytest.mark.parametrize(("n", "k"), [(16, 32), (5, 40), (33, 128)])
def test_dense_and_int8_stand_where_the_layout_says(n: int, k: int) -> None:
    w, q = torch.randn(n, k), torch.randint(-128, 128, (n, k), dtype=torch.int8)
    i, j = torch.arange(n)[:, None], torch.arange(k)
    packed = packing.pack_dense(w)
    assert torch.equal(packed[i // 16, j, i % 16], w)
    assert packed.count_nonzero() == w.count_nonzero()  # the rest is zeros
    for plain, packed, unit in ((w.bfloat16(), packing.pack_dense(w.bfloat16()), 2), (q, packing.pack_int8(q), 4)):
        assert torch.equal(packed[i // 16, j // 32, j % 32 // unit, i % 16, j % unit], plain)
        assert packed.count_nonzero() == plain.count_nonzero()


@needs_cpp
@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4_stands_where_the_layout_says(size: int) -> None:
    n, k = 29, 2 * size
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale, zero, _ = int4_grid(n, k // size)
    data = packing.nibbles(q)
    assert torch.equal(packing.from_nibbles(data), q)
    assert data[0, 3] == int(q[0, 3]) | int(q[0, 19]) << 4
    packed = packing.pack_int4(data, scale, zero)
    i, group, byte = torch.arange(n)[:, None], torch.arange(2), torch.arange(k // 2)
    assert torch.equal(packed[i // 16, group, i % 16], scale)
    assert torch.equal(packed[i // 16, group, 16 + i % 16], zero)
    body = packed[:, :, 32:].unflatten(2, (-1, 4, 16, 4))  # blocks of 32 k, 16 bytes each
    at = byte % (size // 2)
    assert torch.equal(body[i // 16, byte // (size // 2), at // 16, at % 16 // 4, i % 16, at % 4], data)
    assert packed.count_nonzero() == sum(t.count_nonzero() for t in (data, scale, zero))


def test_what_does_not_fit_the_layout_is_refused() -> None:
    q, grid = torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"K \(64\) is not 4 groups of whole blocks of 32"):
        packing.pack_int4(packing.nibbles(q), grid, grid)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        packing.nibbles(q[:, :40])
    with pytest.raises(ValueError, match=r"takes float32 or bfloat16, not torch\.uint8"):
        packing.pack_dense(q)
    with pytest.raises(ValueError, match=r"takes int8, not torch\.uint8"):
        packing.pack_int8(q)


# --- products ------------------------------------------------------------------------------------------------------


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_equal_the_reference(kind: str, n: int, k: int) -> None:
    w, plain = weights(kind, n, k)
    x = torch.randn(19, k)
    torch.testing.assert_close(run_product(x, w), plain(x), atol=2e-5, rtol=2e-5)


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_its_company_or_the_threads(kind: str, n: int, k: int) -> None:
    w, _ = weights(kind, n, k)
    x = torch.randn(300, k)
    torch.set_num_threads(1)
    whole = run_product(x, w)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for begin, rows in ((0, 1), (7, 1), (1, 2), (2, 3), (0, 4), (3, 5), (9, 6), (0, 7), (4, 8), (0, 13), (5, 16)):
            assert torch.equal(run_product(x[begin : begin + rows], w), whole[begin : begin + rows]), (threads, rows)
        for rows in (17, 33, 257, 300):
            assert torch.equal(run_product(x[:rows], w), whole[:rows]), (threads, rows)


@needs_cpp
@pytest.mark.parametrize(
    "pair", [(-2.0, -2.0), (2.0, 2.0), (127.0, -127.0), (-127.0, 127.0), (0.0, 127.0), (64.0, 63.0)]
)
def test_int8_takes_any_width_and_its_extremes(pair: tuple[float, float]) -> None:
    q = torch.full((9, 77), -127, dtype=torch.int8)
    q[::2], q[2::3, ::2], q[3::3, 1::2] = 127, -127, 127
    x = torch.tensor(pair).repeat(3, 39)[:, :77]
    expected = reference.rounded_product(x, q.float(), "int8")
    w = PackedWeights("int8", packing.pack_int8(q), 9, 77, torch.ones(9))
    torch.testing.assert_close(run_product(x, w), expected, atol=0.01, rtol=1e-6)  # no 16-bit sum overflows


@needs_cpp
def test_neighbours_count_together_where_16_bits_hold_their_products() -> None:
    pairs = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [-3.0, -3.0]]).repeat(1, 16)
    most = [4.0, 3.0, 6.0] if cpu.rounded_in_pairs() else [3.0, 3.0, 3.0]
    values, scales = reference.quantize_activations(pairs, 32, cpu.rounded_in_pairs())
    torch.testing.assert_close(scales[:, 0], torch.tensor(most) / 127)
    assert values.unflatten(-1, (-1, 2)).int().sum(-1).abs().max() <= (128 if cpu.rounded_in_pairs() else 254)
    ones = torch.eye(32, dtype=torch.int8)
    got = run_product(pairs, PackedWeights("int8", packing.pack_int8(ones), 32, 32, torch.ones(32)))
    torch.testing.assert_close(got, (values * scales[..., None]).flatten(-2))


@needs_cpp
@pytest.mark.parametrize("rows", [2, 100])  # for many, weights are made ready first
@pytest.mark.parametrize(("code", "zero", "step"), [(15, 0, 1), (0, 255, 1), (15, 128, 1), (0, 129, 1), (15, 0, 255)])
def test_int4_does_not_overflow_at_its_extremes(code: int, zero: int, step: int, rows: int) -> None:
    q = torch.full((8, 128), code, dtype=torch.uint8)
    scale = torch.full((8, 1), step, dtype=torch.uint8)
    zeros = torch.full_like(scale, zero)
    x = torch.full((rows, 128), 127.0)
    w = PackedWeights("int4", packing.pack_int4(packing.nibbles(q), scale, zeros), 8, 128, torch.ones(8), 128)
    assert torch.equal(run_product(x, w), torch.full((rows, 8), (code - zero / 8) * step * 127 * 128))


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_in_its_row_alone(kind: str) -> None:
    w, _ = weights(kind, 24, 128)
    x = torch.randn(4, 128)
    x[1, 5], x[3, 77] = torch.nan, torch.inf
    out = run_product(x, w)
    assert not out[1].isfinite().any()
    assert not out[3].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@needs_cpp
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4-32"])
def test_zero_rows_and_no_rows(kind: str) -> None:
    w, _ = weights(kind, 24, 128)
    assert torch.equal(run_product(torch.zeros(2, 128), w), torch.zeros(2, 24))
    assert run_product(torch.zeros(0, 128), w).shape == (0, 24)


@needs_cpp
def test_pieces_of_a_matrix_stand_side_by_side() -> None:
    """Queries in 4 bits beside keys and values in 8, with biases, and everything scaled at the end."""
    (queries, plain), (rest, plain_rest) = weights("int4-32", 40, 64), weights("int8", 21, 64)
    bias = torch.randn(61)
    pieces = queries._replace(bias=bias[:40]), rest._replace(bias=bias[40:])
    x = torch.randn(5, 64)
    expected = 0.5 * (torch.cat((plain(x), plain_rest(x)), -1) + bias)
    torch.testing.assert_close(run_product(x, *pieces, scale=0.5), expected, atol=2e-5, rtol=2e-5)


# --- norms and activations -----------------------------------------------------------------------------------------


@needs_cpp
def test_glue_equals_torch_also_where_numbers_are_large() -> None:
    x = torch.randn(11, 104) * 3
    weight = torch.randn(104)
    given = Weights({}, {"w": (weight, None)})
    expected = F.rms_norm(x, (104,), weight, 1e-5)
    torch.testing.assert_close(run_ops([d.Norm("in", "out", "w", 1e-5)], given, x), expected)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    x[1, :4] = torch.tensor([-1e30, 1e30, -1e4, 1e4])
    x[2, 7], x[3, 5], x[3, 6] = torch.nan, torch.inf, -3e31
    for kind, plain in {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu": F.relu,
    }.items():
        out = run_ops([d.Activation("in", "out", kind, gated=False)], Weights({}), x)
        expected = plain(x)  # torch gives NaN for some infinities
        finite = expected.isfinite()
        assert torch.equal(out.isfinite(), finite)
        torch.testing.assert_close(out[finite], expected[finite], atol=2e-6, rtol=2e-5)
    capped = run_ops([d.Cap("in", "out", 30.0)], Weights({}), x)
    torch.testing.assert_close(capped, 30 * torch.tanh(x / 30), atol=5e-6, rtol=2e-5, equal_nan=True)


@needs_cpp
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_what_is_not_finite_spoils_a_norms_row_alone(kind: str) -> None:
    x = torch.randn(3, 40)
    x[1, 9] = torch.nan
    weight = torch.ones(40)
    out = run_ops([d.Norm("in", "out", "w", 1e-5, kind)], Weights({}, {"w": (weight, None)}), x)  # type: ignore[arg-type]
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


# --- attention -----------------------------------------------------------------------------------------------------


Attend = Callable[[Tensor, Tensor, Tensor, LayerCache, StepLayout, Scoring], Tensor]


class Cache:
    """Sequences in pages of a cache whose other contents are not numbers. ``fast``: as the C++ kernels keep heads."""

    def __init__(
        self, slots: int, longest: int, shape: tuple[int, int, int], dtype: torch.dtype, page: int, fast: bool
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        each = -(-longest // page)
        g = torch.Generator().manual_seed(1)
        self.table = (torch.randperm(slots * each, generator=g) + 1).view(slots, each).int()
        self.page, self.fast = page, fast
        sizes = (slots * each + 1, page, self.kv_heads, padded(self.head_dim) if fast else self.head_dim)
        if dtype == torch.int8:
            k, v = torch.full(sizes, 127, dtype=dtype), torch.full(sizes, -128, dtype=dtype)
            self.layer = LayerCache(k, v, torch.full(sizes[:3], torch.nan), torch.full(sizes[:3], torch.inf))
        else:
            self.layer = LayerCache(*(torch.full(sizes, value, dtype=dtype) for value in (torch.nan, torch.inf)))

    def places(self, slot: int, begin: int, end: int) -> list[int]:
        return [int(self.table[slot, p // self.page]) * self.page + p % self.page for p in range(begin, end)]

    def attend(self, parts: list[tuple[int, int, int]], qkv: list[tuple[Tensor, ...]], scoring: Scoring) -> Tensor:
        """One step with tokens [begin, end) of each (slot, begin, end); qkv[slot] holds whole sequences."""
        start, context, places = [0], [0] * len(self.table), []
        picked: list[list[Tensor]] = [[], [], []]
        by_slot = {slot: (begin, end) for slot, begin, end in parts}
        for slot in range(len(self.table)):
            begin, end = by_slot.get(slot, (0, 0))
            for i in range(3):
                picked[i].append(qkv[slot][i][begin:end])
            places += self.places(slot, begin, end)
            context[slot] = end
            start.append(start[-1] + end - begin)
        layout = StepLayout(torch.tensor(start).int(), torch.tensor(context).int(), self.table, torch.tensor(places))
        q, k, v = (torch.cat(p) for p in picked)
        return self.run(q, k, v, layout, scoring)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layout: StepLayout, scoring: Scoring) -> Tensor:
        """[N, H, D] of each head."""
        if not self.fast:
            return paged_attention_eager(q, k, v, self.layer, layout, scoring)
        ops = (
            d.Heads("in", "q", "k", "v", self.heads, self.kv_heads, self.head_dim),
            d.Attention("q", "k", "v", "out", scoring.scale, scoring.window, scoring.cap, scoring.slopes is not None,
                        "s" if scoring.sinks is not None else ""),
        )  # fmt: skip
        vectors = {} if scoring.sinks is None else {"s": (scoring.sinks, None)}
        x = torch.cat((q, k, v), dim=1).flatten(1)
        out = run_ops(ops, Weights({}, vectors, cache=self.layer), x, layout=layout)
        return out.unflatten(1, (self.heads, self.head_dim))


def sequences(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(n, h, head_dim, generator=g) for h in (heads, kv_heads, kv_heads)) for n in lengths]


SHAPES_OF_HEADS = [(4, 2, 8), (3, 3, 40), (8, 1, 64), (6, 2, 20), (5, 1, 5)]


def fast_and_eager(
    window: int, shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Of three steps; ``spread``: of the scores."""
    qkv = sequences([1, 130, 700], *shape)
    steps = [[(0, 0, 1), (1, 0, 100), (2, 0, 650)], [(1, 100, 101), (2, 650, 695)], [(1, 101, 130), (2, 695, 700)]]
    outs = []
    for fast in (True, False):
        cache = Cache(3, 700, shape, dtype, 16, fast)
        outs.append([cache.attend(step, qkv, Scoring(window, spread * shape[2] ** -0.5)) for step in steps])
    return list(zip(*outs, strict=True))


@needs_cpp
@pytest.mark.parametrize("window", [0, 1, 70, 600])
@pytest.mark.parametrize("shape", SHAPES_OF_HEADS, ids=str)
def test_attention_equals_the_eager_seam(window: int, shape: tuple[int, int, int]) -> None:
    for got, expected in fast_and_eager(window, shape, torch.float32):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("shape", SHAPES_OF_HEADS, ids=str)
def test_attention_in_bfloat16_is_near_the_eager_seam(window: int, shape: tuple[int, int, int]) -> None:
    """Where products take pairs of bfloat16, queries and weights are rounded to that, each by 0.4 % at most."""
    for got, expected in fast_and_eager(window, shape, torch.bfloat16):
        torch.testing.assert_close(got, expected, atol=0.03, rtol=0)
        assert (got - expected).square().mean() < 1e-5 * expected.square().mean()


@needs_cpp
@pytest.mark.parametrize("window", [0, 1, 70, 600])
@pytest.mark.parametrize("shape", [*SHAPES_OF_HEADS, (4, 2, 96), (2, 1, 264)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_attention_to_int8_is_near_the_eager_seam(spread: float, window: int, shape: tuple[int, int, int]) -> None:
    """Queries and weights are rounded to 16 bits with a scale for each row, with tiles (AMX) to bfloat16."""
    tiles = "amx" in cpu.variants()
    for got, expected in fast_and_eager(window, shape, torch.int8, spread):
        torch.testing.assert_close(got, expected, atol=spread * (0.03 if tiles else 2e-4), rtol=0)
        error = (got - expected).square().mean() / expected.square().mean()
        assert error < spread**2 * (1e-5 if tiles else 1e-9)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.5, 4.0])
def test_attention_where_later_keys_score_more(scale: float, dtype: torch.dtype) -> None:
    """So that earlier sums are given another scale: never, sometimes and with each block of keys."""
    q, k, v = sequences([700], 8, 2, 32)[0]
    grows = (1 + torch.arange(700) / 50).floor().view(-1, 1, 1)
    qkv = [(q.sign(), k.sign() * grows, v)]  # whole numbers, exact in bfloat16
    outs = []
    for fast in (True, False):
        cache = Cache(1, 700, (8, 2, 32), dtype, 16, fast)
        outs.append([cache.attend(step, qkv, Scoring(0, scale)) for step in ([(0, 0, 650)], [(0, 650, 651)])])
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 5e-6, 1e-4), (torch.bfloat16, 0.03, 0.0)])
@pytest.mark.parametrize("window", [0, 70])
def test_attention_with_caps_slopes_and_sinks_equals_the_eager_seam(
    window: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    """Over several splits of the keys, in prompts and where one token decodes."""
    shape = (6, 2, 24)
    qkv = sequences([1, 130, 700], *shape)
    steps = [[(0, 0, 1), (1, 0, 100), (2, 0, 650)], [(1, 100, 101), (2, 650, 651)], [(1, 101, 130), (2, 651, 700)]]
    scoring = Scoring(window, 0.5, 3.0, alibi_slopes(6), torch.randn(6))
    outs = []
    for fast in (True, False):
        cache = Cache(3, 700, shape, dtype, 16, fast)
        outs.append([cache.attend(step, qkv, scoring) for step in steps])
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("adjusted", [False, True])
def test_a_query_does_not_depend_on_chunks_company_or_threads(dtype: torch.dtype, window: int, adjusted: bool) -> None:
    lengths, shape = [1200, 77, 530], (8, 2, 32)
    qkv = sequences(lengths, *shape)
    more = (3.0, alibi_slopes(8), torch.randn(8)) if adjusted else ()
    scoring = Scoring(window, 32**-0.5, *more)

    def every_step(steps: list[list[tuple[int, int, int]]], threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        cache = Cache(3, 1200, shape, dtype, 16, fast=True)
        results: list[list[Tensor]] = [[], [], []]
        for step in steps:
            out = cache.attend(step, qkv, scoring)
            for slot, begin, end in sorted(step):
                results[slot].append(out[: end - begin])
                out = out[end - begin :]
        return [torch.cat(r) for r in results]

    alone = every_step([[(s, 0, n)] for s, n in enumerate(lengths)], 1)
    pieces = [[(0, a, min(a + 37, 1190))] for a in range(0, 1190, 37)] + [[(0, a, a + 1)] for a in range(1190, 1200)]
    pieces += [[(1, 0, 70), (2, 0, 529)], [(1, 70, 77), (2, 529, 530)]]
    for threads in (1, 2):
        for got, expected in zip(every_step(pieces, threads), alone, strict=True):
            assert torch.equal(got, expected)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [16, 24, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_a_query_has_the_same_bits_beside_any_number_of_others(group: int, dim: int, dtype: torch.dtype) -> None:
    """``group`` queries of a token share a head's keys; few and many of them take different ways."""
    shape = (2 * group, 2, dim)
    qkv = sequences([70], *shape)  # two whole blocks of keys and a part of one

    def in_pieces(size: int) -> Tensor:
        cache = Cache(1, 70, shape, dtype, 16, fast=True)
        steps = [[(0, begin, min(begin + size, 70))] for begin in range(0, 70, size)]
        return torch.cat([cache.attend(step, qkv, Scoring(0, dim**-0.5)) for step in steps])

    whole = in_pieces(70)
    for size in (1, 2, 3, 5, 8, 16):
        assert torch.equal(in_pieces(size), whole), size


@needs_cpp
def test_attention_leaves_padding_zero_and_fills_page_zero_only() -> None:
    qkv = sequences([3], 4, 2, 8)
    cache = Cache(1, 16, (4, 2, 8), torch.float32, 16, fast=True)
    before = cache.layer.k.clone()
    q, k, v = (torch.cat((t, torch.ones(2, *t.shape[1:]))) for t in qkv[0])
    places = torch.tensor([*cache.places(0, 0, 3), 0, 0])
    layout = StepLayout(torch.tensor([0, 3]).int(), torch.tensor([3]).int(), cache.table, places)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = cache.run(q, k, v, layout, Scoring(0, 1.0))
        assert torch.equal(out[3:], torch.zeros(2, 4, 8))
    after = cache.layer.k
    changed = (after != before).flatten(1).any(1) & ~(after.isnan() & before.isnan()).flatten(1).all(1)
    assert changed.nonzero().flatten().tolist() == sorted({0, int(cache.table[0, 0])})


@needs_cpp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    code = (  # torch's own threads do not survive a fork, so the child uses the library alone
        "import os; data = torch.ones(1 << 24, dtype=torch.uint8); "
        "read = lambda: k.library().gpt_fast_read(data.data_ptr(), 1 << 24, 1, 2); read(); pid = os.fork(); read(); "
        "os._exit(0) if pid == 0 else None; "
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = probe(code, GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["0"], done.stderr


# --- building ------------------------------------------------------------------------------------------------------

_PROBE = "import logging; logging.basicConfig(); import torch; from gpt_fast.kernels.cpu import library as k; "
# A model's step by the kernels where they are, by plain torch where not.
_STEP = (
    "from gpt_fast.config import ModelConfig; from gpt_fast.model.building import random_model; "
    "from gpt_fast.model.steps import serve; from gpt_fast.engine.runner import Runner; "
    "served = serve(random_model(ModelConfig('llama', 32, 32, 1, 2, 1, 16, 32, 64), torch.float32), compile=False); "
    "r = Runner(served, max_batch=1, max_seq_len=32, num_pages=3, page_size=16, prefill_chunk=8); "
    "r.warm_up(); print(k.available(), r.path)"
)


def probe(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-c", _PROBE + code],
        cwd=root,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_reference_runs_after_one_warning(tmp_path: Path) -> None:
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_CACHE=str(tmp_path), GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["False", "eager"], done.stderr
    assert done.stderr.count("CPU kernels are off") == 1
    assert "no-such-compiler" in done.stderr


def test_the_kernels_can_be_switched_off_without_a_warning() -> None:
    done = probe("print(k.available())", GPT_FAST_KERNELS="reference")
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@needs_cpp
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cpu.build()
    monkeypatch.setattr(cpu, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpu.build() == path


@needs_cpp
def test_tiles_that_give_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "variants", lambda: ["amx", "avx512_bf16"])
    monkeypatch.setattr(cpu, "build", lambda names=("amx", "avx512_bf16"): names[0])
    monkeypatch.setattr(
        cpu, "_load", lambda name: SimpleNamespace(name=name, gpt_fast_tiles_work=lambda: name != "amx")
    )
    assert cpu.library.__wrapped__().name == "avx512_bf16"
    assert "do without them" in caplog.text


PLANTED = b"not a library, and not this user's"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own, and a compiler that copies what was built before: its folder is returned."""
    built = cpu.build()
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nfor last; do :; done\ncp {built} "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    user_cache._temporary.cache_clear()
    return tmp_path / "cache" / "kernels"


def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``path`` to another user, or without the right to do that take another user's part."""
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)


@needs_cpp
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_a_built_library_is_for_its_owner_alone_whatever_the_umask(cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        library = cpu.build()
    finally:
        os.umask(before)
    assert library.parent == cache
    assert [p.stat().st_mode & 0o777 for p in (cache.parent, cache, library)] == [0o700] * 3
    stamp = library.stat().st_mtime_ns
    assert cpu.build() == library
    assert library.stat().st_mtime_ns == stamp, "built again"


@needs_cpp
@pytest.mark.parametrize("how", ["file of somebody else", "file that others can write"])
def test_a_planted_library_is_built_anew(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = cpu.build()
    good = library.read_bytes()
    library.write_bytes(PLANTED)
    if how == "file of somebody else":
        if os.getuid():
            pytest.skip("only root can give a file away")
        foreign(library, monkeypatch)
    else:
        library.chmod(0o777)
    assert cpu.build() == library
    assert library.read_bytes() == good
    assert caplog.text.count("is not used") == 1
    cpu.build()
    assert caplog.text.count("is not used") == 1, "the next start finds it in order"


@needs_cpp
def test_a_folder_that_others_could_write_in_is_emptied(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = cpu.build()
    good = library.read_bytes()
    library.write_bytes(PLANTED)
    cache.chmod(0o777)
    assert cpu.build() == library
    assert library.read_bytes() == good
    assert cache.stat().st_mode & 0o777 == 0o700
    assert "could write in it" in caplog.text


@needs_cpp
@pytest.mark.parametrize("how", ["of somebody else", "that others can write"])
def test_a_cache_of_somebody_else_is_left_alone(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what lies in it is loaded, nor is anything put there; the library is built for this process."""
    library = cpu.build()
    library.write_bytes(PLANTED)
    if how == "of somebody else":
        foreign(cache.parent, monkeypatch)
    else:
        cache.parent.chmod(0o777)
    elsewhere = cpu.build()
    assert cache.parent not in elsewhere.parents
    assert elsewhere.read_bytes() != PLANTED
    assert library.read_bytes() == PLANTED
    assert elsewhere.parent.parent.stat().st_mode & 0o777 == 0o700
    cpu.build()
    assert caplog.text.count("is not kept for the next start") == 1


@needs_cpp
@pytest.mark.parametrize(
    ("version", "takes_all"), [("g++ (Debian 12.2.0-14) 12.2.0", True), ("Apple clang version 17.0.0", False)]
)
def test_clang_gets_no_flag_that_it_refuses(version: str, takes_all: bool, cache: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    Path(os.environ["CXX"]).write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\n'
        f'echo "$@" >>{said}\nfor last; do :; done\ntouch "$last"\n'
    )
    cpu.build()
    commands = said.read_text().splitlines()
    assert len(commands) == len(cpu.COMPILED) + 1
    assert [flag in command for flag in cpu.FLAGS_OF_GCC for command in commands] == [takes_all] * len(commands)


@needs_cpp
def test_without_a_compiler_what_another_one_built_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpu.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu.build() == library
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_CACHE=str(cache.parent), GPT_FAST_KERNELS="")
    assert (done.stdout.split(), done.stderr) == (["True", "kernels"], "")
    # Of other sources or flags, or not to be trusted: not used.
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-DNEWER"))
        with pytest.raises(cpu.UnavailableError, match="no-such-compiler"):
            cpu.build()
    library.chmod(0o777)
    with pytest.raises(cpu.UnavailableError, match="no-such-compiler"):
        cpu.build()


@needs_cpp
def test_kernels_are_built_for_other_machines(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container: built by root for all CPUs, run by somebody else on any of them, without a compiler."""
    folder = tmp_path / "kernels"
    built = cpu.build_all(folder)
    assert [path.name.split("-")[1] for path in built] == cpu._of_this_architecture()
    assert [path.stat().st_mode & 0o777 for path in (folder, *built)] == [0o755] * (1 + len(built))
    assert not cache.exists(), "it was kept in this user's cache as well"
    by_name = dict(zip(cpu._of_this_architecture(), built, strict=True))
    monkeypatch.setenv("GPT_FAST_KERNEL_DIR", str(folder))
    for compiler in (os.environ["CXX"], "no-such-compiler"):  # what was built goes before the compiler
        monkeypatch.setenv("CXX", compiler)
        for name in by_name:
            monkeypatch.setattr(cpu, "variants", lambda name=name: [name])
            assert cpu.build() == by_name[name]
    monkeypatch.setattr(cpu, "variants", lambda: [*by_name])
    built[0].unlink()
    assert cpu.build() == built[1], "the next older one"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # Of other sources, or not to be trusted: said, and looked for elsewhere.
    for path in built[1:]:
        path.chmod(0o777)
    with pytest.raises(cpu.UnavailableError, match="no-such-compiler"):
        cpu.build()
    assert f"GPT_FAST_KERNEL_DIR: {folder} holds no kernels of these sources for this CPU" in caplog.text


@needs_cpp
def test_a_folder_of_kernels_runs_without_a_compiler(cache: Path, tmp_path: Path) -> None:
    """The real thing in a process of its own; the variant for this CPU is the one that the tests built."""
    cpu.build_all(tmp_path / "kernels")
    given = {"GPT_FAST_KERNEL_DIR": str(tmp_path / "kernels"), "GPT_FAST_CACHE": str(tmp_path / "empty")}
    done = probe(_STEP, CXX="no-such-compiler", GPT_FAST_KERNELS="", **given)
    assert (done.stdout.split(), done.stderr) == (["True", "kernels"], "")


@needs_cpp
def test_a_variant_that_the_compiler_does_not_know_is_left_out(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = cpu._of_this_architecture()
    compile_one = cpu._compile

    def refuse(command: list[str], sources: list[Path], target: Path) -> None:
        if f"-{first}-" in target.name or not rest:
            raise cpu.CompilerError("unknown instructions")
        compile_one(command, sources, target)

    monkeypatch.setattr(cpu, "_compile", refuse)
    assert [path.name.split("-")[1] for path in cpu.build_all(tmp_path / "kernels")] == rest
    assert f"no {first} kernels: unknown instructions" in caplog.text
    rest.clear()
    with pytest.raises(cpu.UnavailableError, match="built none of the kernels"):
        cpu.build_all(tmp_path / "none")


@needs_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_team_has_a_limit_whoever_asks_for_more() -> None:
    code = (
        "import os, ctypes; from gpt_fast.kernels.cpu.library import library; "
        "before = len(os.listdir('/proc/self/task')); "
        "data = torch.ones(1 << 24, dtype=torch.uint8); library().gpt_fast_read(data.data_ptr(), 1 << 24, 0, 100_000); "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = probe(code, GPT_FAST_KERNELS="", OMP_NUM_THREADS="1")  # no threads of torch's beside them
    assert 0 < int(done.stdout) < 512, done.stderr


@needs_cpp
def test_a_failed_build_says_what_the_compiler_said(tmp_path: Path) -> None:
    sources = [tmp_path / "broken.cpp", tmp_path / "whole.cpp"]
    for source, text in zip(sources, ("int main( {", "int one() { return 1; }"), strict=True):
        source.write_text(text)
    with pytest.raises(cpu.UnavailableError, match=r"failed: .*broken\.cpp"):
        cpu._compile([cpu.compiler()], sources, tmp_path / "broken.so")
    assert sorted(tmp_path.iterdir()) == sources


@needs_cpp
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_the_benchmarks_steps_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    config = ModelConfig("llama", 96, 64, 2, 4, 2, 16, 96, 128)
    steps = importlib.import_module("kernels_cpu").Steps(config, kind, 64, 2, torch.bfloat16)
    assert torch.isfinite(steps.run(2, 1, 40)).all()
    assert steps.weight_bytes > 0
