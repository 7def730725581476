"""The C++ kernels against their plain-torch twins, and each row's result against itself in other company."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from programs import needs_cpp, run_ops, run_product
from torch import Tensor

from gpt_fast.config import ModelConfig
from gpt_fast.kernels import reference
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.model import description as d

pytestmark = pytest.mark.usefixtures("threads_restored")
KINDS = ("float32", "bfloat16", "int8", "int4-32", "int4-64", "int4-128")
# (N, K): tiles not full, K in several passes, more tiles than a thread takes at once
SHAPES = ((5, 128), (100, 640), (16 * 37 + 3, 256))


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
@pytest.mark.parametrize(("of_x", "of_w"), [(1e-19, 1e-20), (1.0, 1e-39), (1e-39, 1.0), (1e18, 1e20)])
def test_tiny_and_huge_numbers_have_the_same_bits_in_any_company(of_x: float, of_w: float) -> None:
    """Registers of tiles take numbers below 2^-126 as zeros, vectors only if they are told to."""
    w = (torch.randn(40, 96) * of_w).bfloat16()
    packed, x = PackedWeights("bfloat16", packing.pack_dense(w), 40, 96), torch.randn(16, 96) * of_x
    whole = run_product(x, packed)
    for rows in range(1, 16):
        assert torch.equal(run_product(x[:rows], packed).nan_to_num(), whole[:rows].nan_to_num()), rows
    if of_x * of_w < 1:
        torch.testing.assert_close(whole, x.bfloat16().float() @ w.float().T, atol=1e-36, rtol=0)


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
    most = torch.tensor([4.0, 3.0, 6.0] if cpu.rounded_in_pairs() else [3.0, 3.0, 3.0])
    how = cpu.rounded_together(), cpu.rounded_in_pairs(), cpu.rounded_by_powers()
    values, scales = reference.quantize_activations(pairs, *how)
    expected = (most / 127).log2().ceil().exp2() if cpu.rounded_by_powers() else most / 127
    torch.testing.assert_close(scales[:, 0], expected)
    assert values.unflatten(-1, (-1, 2)).int().sum(-1).abs().max() <= (128 if cpu.rounded_in_pairs() else 254)
    ones = torch.eye(32, dtype=torch.int8)
    got = run_product(pairs, PackedWeights("int8", packing.pack_int8(ones), 32, 32, torch.ones(32)))
    torch.testing.assert_close(got, (values * scales[..., None]).flatten(-2)[:, :32])


@needs_cpp
@pytest.mark.parametrize("most", [2, 127, 127.1, 2**-119, 2**-130, 0, 2.0**110, 2.0**112, torch.inf, torch.nan])
def test_blocks_have_the_least_power_of_two_that_holds_them(most: float) -> None:
    x = torch.linspace(-1, 1, 32)[None] * most
    values, scales = reference.quantize_activations(x, 32, by_powers=True)
    if 2**-120 < most < 2**111:
        assert 63 < values.abs().max() <= 127
        assert float(scales.log2()) % 1 == 0
        assert (values * scales[..., None] - x).abs().max() <= scales.max() / 2
    else:
        assert bool(scales.isnan()) == (not most < 2**111)
        assert most > 1 or not values.any()
    ones = PackedWeights("int8", packing.pack_int8(torch.eye(32, dtype=torch.int8)), 32, 32, torch.ones(32))
    if cpu.rounded_by_powers():
        got, expected = run_product(x, ones), (values * scales[..., None])[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@needs_cpp
@pytest.mark.parametrize("rows", [2, 8, 20, 100])  # for many, weights are made ready first
@pytest.mark.parametrize(
    ("code", "zero", "step"),
    [(15, 0, 1), (0, 255, 1), (15, 128, 1), (0, 129, 1), (15, 0, 255), (0, 255, 255), (15, 193, 255)],
)
def test_int4_does_not_overflow_at_its_extremes(code: int, zero: int, step: int, rows: int) -> None:
    q = torch.full((8, 128), code, dtype=torch.uint8)
    scale = torch.full((8, 1), step, dtype=torch.uint8)
    zeros = torch.full_like(scale, zero)
    x = torch.full((rows, 128), 127.0)
    w = PackedWeights("int4", packing.pack_int4(packing.nibbles(q), scale, zeros), 8, 128, torch.ones(8), 128)
    assert torch.equal(run_product(x, w), torch.full((rows, 8), (code - zero / 8) * step * 127 * 128))


@needs_cpp
@pytest.mark.parametrize("nan", [0x7FC00000, 0x7FFF0000, 0x7FFFFFFF, -1], ids=lambda bits: f"{bits & 0xFFFFFFFF:x}")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_in_its_row_alone(kind: str, nan: int) -> None:
    w, _ = weights(kind, 24, 128)
    x = torch.randn(4, 128)
    x[1, 5], x[3, 77] = torch.tensor([nan], dtype=torch.int32).view(torch.float32), torch.inf
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
    torch.set_num_threads(1)  # so that the product and its activation are one
    wide, ops = weights(kind, 1536, 128)[0], [d.Product("in", "y", "w"), d.Activation("y", "out", "silu")]
    assert run_ops(ops, Weights({"w": [wide]}), torch.zeros(0, 128)).shape == (0, 768)


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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [True, False])
def test_a_product_and_its_activation_as_one_have_the_bits_of_both_alone(kind: str, gated: bool) -> None:
    for width in (128, 640) if kind.startswith("int4") else (24, 128, 168, 1136):
        up, down, other = (
            weights(kind, n, k, seed)[0]._replace(bias=torch.randn(n))
            for seed, (n, k) in enumerate([(width * (1 + gated), 128), (48, width), (40, 128)])
        )
        given = Weights(
            {"up": [up], "down": [down], "other": [other]}, {"n": (torch.ones(128), None), "m": (torch.ones(48), None)}
        )
        ops = [d.Product("n", "y", "up"), d.Activation("y", "h", "silu", gated), d.Product("h", "a", "down")]
        for more in ([], [d.Product("n", "b", "other"), d.Product("h", "a", "down", "a")]):  # whether n is kept
            as_one = [d.Norm("in", "n", "n", 1e-5), *ops, *more, d.Norm("a", "out", "m", 1e-5)]
            apart = [*as_one[:-1], d.Gate("in", "y", "g", "in"), as_one[-1]]  # which reads y
            for threads, count in ((1, 1), (2, 3), (2, 17), (1, 60), (2, 300)):
                torch.set_num_threads(threads)
                x = torch.randn(count, 128)
                results = [run_ops(each, given, x) for each in (as_one, apart)]
                assert torch.equal(*results)


@needs_cpp
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_what_is_not_finite_spoils_a_norms_row_alone(kind: str) -> None:
    x = torch.randn(3, 40)
    x[1, 9] = torch.nan
    weight = torch.ones(40)
    out = run_ops([d.Norm("in", "out", "w", 1e-5, kind)], Weights({}, {"w": (weight, None)}), x)  # type: ignore[arg-type]
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@needs_cpp
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_score_that_is_not_finite_spoils_its_rows_experts_alone(renormalize: bool) -> None:
    scores = torch.randn(4, 6)
    scores[1, 4], scores[2, 0] = torch.nan, torch.inf
    out = run_ops([d.Route("in", "out", 2, renormalize)], Weights({}), scores)
    assert out[1:3, :2].isnan().any(-1).all()
    assert out[[0, 3]].isfinite().all()
    assert torch.equal(out[:, 2:], scores.topk(2).indices.float())


@needs_cpp
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_the_benchmarks_steps_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    config = ModelConfig("llama", 96, 64, 2, 4, 2, 16, 96, 128)
    steps = importlib.import_module("kernels_cpu").Steps(config, kind, [(2, 64)], torch.bfloat16)
    assert torch.isfinite(steps.run(2, 1, 40)).all()
    assert steps.weight_bytes > 0
