"""Attention in C++ against its plain-torch twin, and each query's result against itself in other company."""

from __future__ import annotations

import pytest
import torch
from programs import bytes_of_attention, flags_with, needs_cpp, run_ops
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout, padded
from gpt_fast.kernels.cpu import building, program
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu.translation import Weights
from gpt_fast.model import description as d
from gpt_fast.model.attention import Scoring, alibi_slopes, paged_attention_eager

pytestmark = pytest.mark.usefixtures("threads_restored")


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
        self.layer = LayerCache.zeros(sizes, dtype, torch.device("cpu"))
        worst = (127, -128, torch.nan, torch.inf) if dtype == torch.int8 else (torch.nan, torch.inf)
        for part, value in zip(self.layer, worst, strict=False):
            assert part is not None
            part.fill_(value)

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


# How far attention to int8 caches may be off where queries and weights are rounded so: a result, and the mean square.
ROUNDED_TO_BYTES, ROUNDED_TO_PAIRS = (0.05, 1e-4), (2e-4, 4e-9)
SHAPES_OF_HEADS = [(4, 2, 8), (3, 3, 40), (8, 1, 64), (6, 2, 20), (5, 1, 5)]


def fast_and_eager(
    qkv: list[tuple[Tensor, ...]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    steps: list[list[tuple[int, int, int]]],
    scoring: Scoring,
) -> list[tuple[Tensor, Tensor]]:
    """What both give for each step over sequences of at most 700 tokens."""
    outs = []
    for fast in (True, False):
        cache = Cache(len(qkv), 700, shape, dtype, 16, fast)
        outs.append([cache.attend(step, qkv, scoring) for step in steps])
    return list(zip(*outs, strict=True))


def three_steps(
    window: int, shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """``fast_and_eager`` of prompts, pieces of prompts and single tokens; ``spread``: of the scores."""
    qkv = sequences([1, 130, 700], *shape)
    steps = [[(0, 0, 1), (1, 0, 100), (2, 0, 650)], [(1, 100, 101), (2, 650, 695)], [(1, 101, 130), (2, 695, 700)]]
    return fast_and_eager(qkv, shape, dtype, steps, Scoring(window, spread * shape[2] ** -0.5))


@needs_cpp
@pytest.mark.parametrize("window", [0, 1, 70, 600])
@pytest.mark.parametrize("shape", SHAPES_OF_HEADS, ids=str)
def test_attention_equals_the_eager_seam(window: int, shape: tuple[int, int, int]) -> None:
    for got, expected in three_steps(window, shape, torch.float32):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("shape", SHAPES_OF_HEADS, ids=str)
def test_attention_in_bfloat16_is_near_the_eager_seam(window: int, shape: tuple[int, int, int]) -> None:
    """Where products take pairs of bfloat16, queries and weights are rounded to that, each by 0.4 % at most."""
    for got, expected in three_steps(window, shape, torch.bfloat16):
        torch.testing.assert_close(got, expected, atol=0.03, rtol=0)
        assert (got - expected).square().mean() < 1e-5 * expected.square().mean()


@needs_cpp
@pytest.mark.parametrize("window", [0, 1, 70, 600])
@pytest.mark.parametrize("shape", [*SHAPES_OF_HEADS, (4, 2, 96), (2, 1, 264)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_attention_to_int8_is_near_the_eager_seam(spread: float, window: int, shape: tuple[int, int, int]) -> None:
    """Queries and weights are rounded to 16 bits with a scale for each row, with VNNI to 8, with tiles (AMX) to
    bfloat16, as are the scaled values; there weights are powers of two in steps of a 128th as well."""
    tiles = "amx" in building.variants()
    if tiles and spread > 1:
        pytest.skip("rounded to bfloat16, large scores are off by more than a weight")
    close, most = (0.03, 2e-5) if tiles else ROUNDED_TO_BYTES if bytes_of_attention() else ROUNDED_TO_PAIRS
    for got, expected in three_steps(window, shape, torch.int8, spread):
        torch.testing.assert_close(got, expected, atol=spread * close, rtol=0)
        assert (got - expected).square().mean() < spread * most * expected.square().mean()


@needs_cpp
@pytest.mark.parametrize("variant", ["avx512_vnni", "avx_vnni", "avx2"])
def test_attention_to_int8_is_near_the_eager_seam_by_kernels_for_older_cpus(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant not in building.variants():
        pytest.skip(f"this CPU has no {variant}")
    monkeypatch.setattr(building, "FLAGS", flags_with("-O1"))
    library = cpu._load(building.build([variant]))
    monkeypatch.setattr(program, "library", lambda: library)
    close, most = ROUNDED_TO_PAIRS if variant == "avx2" else ROUNDED_TO_BYTES
    for window, shape in ((0, (8, 1, 64)), (70, (4, 2, 96)), (600, (3, 3, 40))):
        for got, expected in three_steps(window, shape, torch.int8):
            torch.testing.assert_close(got, expected, atol=close, rtol=0)
            assert (got - expected).square().mean() < most * expected.square().mean()


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 3, 40), (16, 1, 32)], ids=str)
def test_attention_is_the_same_for_pages_of_any_size(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Sixteen places lie together in the cache, whatever a page is."""
    qkv = sequences([1, 130, 77], *shape)
    steps = [[(1, 0, 100)], [(0, 0, 1), (1, 100, 101), (2, 0, 77)], [(1, 101, 130)]]

    def with_pages_of(page: int, window: int) -> Tensor:
        cache = Cache(3, 130, shape, dtype, page, fast=True)
        return torch.cat([cache.attend(step, qkv, Scoring(window, shape[2] ** -0.5)) for step in steps])

    for window in (0, 9):
        usual = with_pages_of(16, window)
        for page in (1, 3, 8, 20, 32, 48, 130):
            assert torch.equal(with_pages_of(page, window), usual), page


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_cache_that_ends_within_a_group_is_refused(dtype: torch.dtype) -> None:
    cache = Cache(1, 5, (1, 1, 8), dtype, 5, fast=True)
    cache.layer = LayerCache(*(part.clone() for part in cache.layer if part is not None))
    with pytest.raises(ValueError, match="ends within a group"):
        cache.attend([(0, 0, 5)], sequences([5], 1, 1, 8), Scoring(0, 1.0))


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
def test_attention_with_any_scale_and_with_queries_of_nothing(scale: float, dtype: torch.dtype) -> None:
    q, k, v = sequences([90], 4, 2, 16)[0]
    q[::3, 0], q[1::3, 1] = 0.0, 1e-37
    steps = [[(0, 0, 70)], [(0, 70, 71)], [(0, 71, 90)]]
    for got, expected in fast_and_eager([(q, k, v)], (4, 2, 16), dtype, steps, Scoring(0, scale)):
        torch.testing.assert_close(got, expected, atol=2e-6 if dtype == torch.float32 else 0.05, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.5, 4.0])
def test_attention_where_later_keys_score_more(scale: float, dtype: torch.dtype) -> None:
    """So that earlier sums are given another scale: never, sometimes and with each block of keys."""
    q, k, v = sequences([700], 8, 2, 32)[0]
    grows = (1 + torch.arange(700) / 50).floor().view(-1, 1, 1)
    qkv = [(q.sign(), k.sign() * grows, v)]  # whole numbers, exact in bfloat16
    steps = [[(0, 0, 650)], [(0, 650, 651)]]
    for got, expected in fast_and_eager(qkv, (8, 2, 32), dtype, steps, Scoring(0, scale)):
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("loud", [3, 40, 100, 600])
def test_attention_where_one_key_scores_most(loud: int, spread: float, dtype: torch.dtype) -> None:
    """By any factor, and at any place: among the keys that give a scale, in their block, in a later one or split."""
    q, k, v = sequences([640], 4, 2, 32)[0]
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[loud] = spread / 32
    v = v.bfloat16().float()
    steps = [[(0, 0, 639)], [(0, 639, 640)]]
    for got, expected in fast_and_eager([(q, k, v)], (4, 2, 32), dtype, steps, Scoring(0, 1.0)):
        torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32])
def test_a_score_of_minus_infinity_has_no_weight(dim: int, dtype: torch.dtype) -> None:
    """The product of such a query and such a key does not fit float32; those with the other keys do."""
    shape = (4, 2, dim)
    qkv = sequences([130], *shape)
    q, k, _ = qkv[0]
    q[..., 0], k[..., 0], k[7, :, 0] = 1e20, 0, -1e20
    for got, expected in fast_and_eager(qkv, shape, dtype, [[(0, 0, 100)], [(0, 100, 101)]], Scoring(0, 0.25)):
        keep = torch.arange(len(got)) != 7  # a token sees itself
        torch.testing.assert_close(got[keep], expected[keep], atol=2e-6 if dtype == torch.float32 else 0.03, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 5e-6, 1e-4), (torch.bfloat16, 0.03, 0.0), (torch.int8, 0.05, 0.0)]
)
@pytest.mark.parametrize("window", [0, 70])
def test_attention_with_caps_slopes_and_sinks_equals_the_eager_seam(
    window: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    """Over several splits of the keys, in prompts and where one token decodes."""
    shape = (6, 2, 24)
    qkv = sequences([1, 130, 700], *shape)
    steps = [[(0, 0, 1), (1, 0, 100), (2, 0, 650)], [(1, 100, 101), (2, 650, 651)], [(1, 101, 130), (2, 651, 700)]]
    scoring = Scoring(window, 0.5, 3.0, alibi_slopes(6), torch.randn(6))
    for got, expected in fast_and_eager(qkv, shape, dtype, steps, scoring):
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [24, 32])  # of 32 registers of tiles take whole lines
@pytest.mark.parametrize("steps", [[(0, 0, 70)], [(0, 0, 69), (0, 69, 70)]], ids=["prompt", "one"])
def test_a_query_that_is_not_finite_spoils_itself_alone(
    steps: list[tuple[int, int, int]], dim: int, dtype: torch.dtype
) -> None:
    q, k, v = sequences([70], 4, 2, dim)[0]
    outs = []
    for _ in range(2):
        cache = Cache(1, 70, (4, 2, dim), dtype, 16, fast=True)
        outs.append(torch.cat([cache.attend([step], [(q, k, v)], Scoring(0, dim**-0.5)) for step in steps]))
        q = q.clone()
        q[5, 2, 0], q[66, 0, 3], q[69, 1, 3] = torch.nan, torch.inf, torch.nan
    sound, spoiled = outs
    for token, head in ((5, 2), (66, 0), (69, 1)):
        assert spoiled[token, head].isnan().all()
        sound[token, head] = spoiled[token, head] = 0
    assert torch.equal(sound, spoiled)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("dim", [24, 32])
@pytest.mark.parametrize("place", [5, 19])  # among the first sixteen keys and behind them
def test_a_key_or_value_that_is_not_finite_shows_in_all_later_tokens(
    place: int, dim: int, which: int, dtype: torch.dtype
) -> None:
    """Else a model that computes no numbers for a prompt would answer as if nothing were wrong."""
    for bad in (torch.nan, -torch.nan, torch.inf):
        if which == 1 and bad == torch.inf:
            continue  # a score of -infinity is one to leave out
        qkv = sequences([40], 4, 2, dim)
        qkv[0][which][place, 0, 17] = bad
        cache = Cache(1, 40, (4, 2, dim), dtype, 16, fast=True)
        cache.attend([(0, 0, 20)], qkv, Scoring(0, dim**-0.5))
        later = cache.attend([(0, 20, 40)], qkv, Scoring(0, dim**-0.5))
        assert not later[:, :2].isfinite().all(-1).any()
        assert later[:, 2:].isfinite().all()


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
