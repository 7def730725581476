"""The Triton kernels against their plain twins, and each row against itself in other company.

The checks run in their own process (triton_checks.py): interpreted on a CPU, and compiled where there is a GPU.
By hand:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels_gpu.py -o python_functions='check_*'
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_checks import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    RUNNING,
    SCALE,
    WEIGHT_KINDS,
    Case,
    assert_near,
    layout_of,
    needs_cuda,
    needs_triton,
    noise,
    plain,
    run_checks,
    weights,
)  # isort: skip

from gpt_fast.engine import sampling
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.cpu.packing import from_nibbles
from gpt_fast.kernels.race import Draw, plain_race, race_key
from gpt_fast.kernels.reference import quantize_activations, quantize_heads
from gpt_fast.model.attention import Scoring, paged_attention_eager, paged_attention_static
from gpt_fast.model.rope import rotate
from gpt_fast.model.transformer import activate, rms_norm

if RUNNING:
    attention = pytest.importorskip("gpt_fast.kernels.gpu.attention")
    experts = pytest.importorskip("gpt_fast.kernels.gpu.experts")
    fused = pytest.importorskip("gpt_fast.kernels.gpu.fused")
    least_kept = pytest.importorskip("gpt_fast.kernels.gpu.least_kept")
    linear = pytest.importorskip("gpt_fast.kernels.gpu.linear")
    race = pytest.importorskip("gpt_fast.kernels.gpu.race")


@needs_triton
@pytest.mark.slow
def test_the_checks_hold_interpreted() -> None:
    run_checks(__file__, TRITON_INTERPRET="1")


@needs_triton
@needs_cuda
def test_the_checks_hold_on_this_gpu() -> None:
    run_checks(__file__)


def test_the_package_does_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import gpt_fast.llm, gpt_fast.kernels.gpu as g; g.available()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(
    ("n", "k", "dtype"), [*((48, 1024, dtype) for dtype in DTYPES), (37, 416, torch.float32)], ids=str
)
def check_products(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    w, values = weights(kind, n, k, dtype)
    x = noise(70, k, seed=3).to(dtype)
    out = linear.linear(x, w)
    assert out.dtype == dtype
    assert_near(out, plain.linear(x, values), dtype)
    for begin, end in ((5, 6), (9, 16), (16, 33), (30, 70)):  # alone and in any company and place: the same bits
        assert torch.equal(linear.linear(x[begin:end].contiguous(), w), out[begin:end])


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def check_other_tilings_agree(kind: str) -> None:
    w, values = weights(kind, 64, 2048, torch.float32)
    x = noise(2, 2048, seed=3)
    used = linear.tiling(w)
    for division in (used._replace(tile=16, stages=2), used._replace(tile=64, warps=2), used._replace(splits=1)):
        assert_near(linear.linear(x, w, division=division), plain.linear(x, values), torch.float32)


def check_more_rows_than_there_is_room_for() -> None:
    w, _ = weights("dense", 64, 2048, torch.float32)
    assert linear.tiling(w).splits > 1
    x = noise(150, 2048, seed=3)
    memory = torch.full((4 * 64 * 64 * 8,), 7.0, device=DEVICE)
    room = linear.make_room([(w, 1)], 64, torch.device(DEVICE))
    small = room._replace(partial=memory[: room.partial.numel()])  # what is behind it belongs to others
    assert torch.equal(linear.linear(x, w, room=small), linear.linear(x, w))
    assert (memory == 7.0).all()
    assert torch.equal(linear.linear(x[:20], w, room=small), linear.linear(x[:20], w))
    assert not (memory[: room.partial.numel()] == 7.0).all()


@pytest.mark.parametrize("kind", ["dense", "int8", "int4-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (44, 200)])
def check_everything_around_a_product(kind: str, dtype: torch.dtype, n: int, k: int) -> None:
    x, residual = noise(18, k, seed=3).to(dtype), noise(18, n, seed=4).to(dtype)
    norm, after = (1 + 0.1 * noise(k, seed=5)).to(dtype), (1 + 0.1 * noise(n, seed=6)).to(dtype)
    w, values = weights(kind, n, k, dtype, bias=True)
    wanted = plain.linear(x, values, bias=w.bias, norm=norm, eps=1e-5, residual=residual)
    row = fused.prepare_norm(x, norm, 1e-5)
    out, waiting = linear.linear_residual(row, w, residual, after, 1e-6)
    assert_near(out, wanted, dtype)
    # What waits for its norm is, once divided, the norm of what was stored.
    ready = waiting.weighted.float() * torch.rsqrt(waiting.squares.sum(1, keepdim=True) / n + waiting.eps)
    assert_near(ready, out.float() * torch.rsqrt(out.float().pow(2).mean(1, keepdim=True) + 1e-6) * after, dtype)
    for i in (2, 16, 17):
        alone, alone_waiting = linear.linear_residual(
            fused.prepare_norm(x[i : i + 1], norm, 1e-5), w, residual[i : i + 1].contiguous(), after, 1e-6
        )
        assert torch.equal(alone, out[i : i + 1])
        assert torch.equal(alone_waiting.squares, waiting.squares[i : i + 1])
        assert torch.equal(alone_waiting.weighted, waiting.weighted[i : i + 1])


def rounded(x: Tensor) -> Tensor:
    """x [M, K] rounded to bytes in blocks of 128, in float32."""
    values, scales = quantize_activations(x.cpu(), 128)
    return (values * scales[..., None]).flatten(1)[:, : x.shape[1]].to(DEVICE)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("n", "k", "dtype"), [(64, 512, dtype) for dtype in DTYPES] + [(44, 416, torch.bfloat16)])
def check_products_of_prompts(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    """Each row has the same bits alone and in any company. Those of int8 weights are products of bytes."""
    w, values = weights(kind, n, k, dtype, bias=True)
    x, residual = noise(530, k, seed=3).to(dtype), noise(530, n, seed=4).to(dtype)
    if INTERPRETED:  # which takes its time
        x, residual = x[:40], residual[:40]
    out = linear.linear(x, w, residual=residual, many=True)
    taken = rounded(x) if kind == "int8" else x
    assert_near(out, plain.linear(taken, values, bias=w.bias, residual=residual), dtype)
    for begin, end in ((5, 6), (9, 16), (16, 39), (0, 40), (30, 150), (0, 300)):
        own = residual[begin:end].contiguous()
        assert torch.equal(linear.linear(x[begin:end].contiguous(), w, residual=own, many=True), out[begin:end])
    assert linear.linear(x[:0], w, many=True).shape == (0, n)
    norm = (1 + 0.1 * noise(k, seed=5)).to(dtype)
    row = fused.prepare_norm(x[:20], norm, 1e-5)
    got = linear.linear(row, w, gated=True, many=True)
    scale = torch.rsqrt(row.squares / k + 1e-5)
    taken = (rounded(row.weighted) if kind == "int8" else row.weighted.float()) * scale
    assert_near(got, plain.linear(taken, values, bias=w.bias, gated=True), dtype)
    assert torch.equal(linear.linear(row, w, gated=True, many=True)[3:4], got[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def check_rounding_to_bytes(dtype: torch.dtype) -> None:
    x = noise(7, 1500).to(dtype) * torch.logspace(-6, 4, 7, device=DEVICE)[:, None].to(dtype)
    x[2, 130:300] = 0.0
    x[3, 256:384] = 2e-37  # 127 by it is infinite
    values, scales = quantize_activations(x.cpu(), 128)  # a GPU's torch divides by multiplying
    got = linear.round_rows(x)
    assert torch.equal(got.scale.cpu(), scales.T)
    exact = x.cpu().double() / scales.double().repeat_interleave(128, dim=1)[:, :1500].clamp(min=1e-300)
    tie = (exact - exact.floor() - 0.5).abs() < 1e-4  # a GPU adds without rounding what it multiplied
    off = (got.values.cpu().int() - values.flatten(1)[:, :1500].int()).abs()
    assert off.max() <= 1
    assert not off[~tie].any()
    for bad in (float("nan"), float("inf")):
        x[1, 1400] = bad
        finite = linear.round_rows(x).scale.isfinite()
        assert not finite[10, 1]
        assert finite.sum() == finite.numel() - 1


@pytest.mark.parametrize("kind", ["dense", "fp8", "int4-64"])
@pytest.mark.parametrize("f", [32, 23])
def check_gated_products(kind: str, f: int) -> None:
    w, values = weights(kind, 2 * f, 256, torch.float16, bias=True)
    x = noise(18, 256, seed=3).half()
    out = linear.linear(x, w, gated=True)
    assert_near(out, plain.linear(x, values, bias=w.bias, gated=True), torch.float16)
    for i in (1, 17):
        assert torch.equal(linear.linear(x[i : i + 1].contiguous(), w, gated=True), out[i : i + 1])


def check_every_byte_is_read_right() -> None:
    """Products with unit vectors are the weights themselves."""
    stored = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64).to(DEVICE)
    eight = torch.where(stored & 0x7F == 0x7F, 0, stored)  # two bytes are not numbers
    wanted = {
        "fp8": eight.view(torch.float8_e4m3fn).float(),
        "int8": stored.view(torch.int8).float(),
        "int4": from_nibbles(stored).float() - 8,
    }
    one = torch.ones(4, 1, device=DEVICE)
    for dtype in DTYPES:
        made = {
            "fp8": linear.prepare(eight.view(torch.float8_e4m3fn), scale=one[:, 0]),
            "int8": linear.prepare(stored.view(torch.int8), scale=one[:, 0]),
            "int4": linear.prepare(stored, scale=one[:, 0], grid=(one.byte(), 64 * one.byte()), dtype=dtype),
        }
        for kind, w in made.items():
            eye = torch.eye(w.in_features, device=DEVICE, dtype=dtype)
            for begin in range(0, w.in_features, 16):
                x = eye[begin : begin + 16].contiguous()
                got = linear.linear(x, w, out=torch.empty(x.shape[0], 4, device=DEVICE))
                assert torch.equal(got, wanted[kind][:, begin : begin + 16].T), (kind, dtype)


@pytest.mark.parametrize(("kind", "gated"), [("gelu", False), ("gelu_tanh", True), ("relu", True), ("silu", False)])
def check_activations_and_caps(kind: str, gated: bool) -> None:
    w, values = weights("dense", 64, 96, torch.float32, bias=True)
    x = 5 * noise(3, 96, seed=3)
    made = plain.linear(x, values, bias=w.bias)
    for many in (False, True):
        got = linear.linear(x, w, gated=gated, activation=kind, many=many)
        assert_near(got, activate(made, kind, gated), torch.float32)
        assert_near(linear.linear(x, w, cap=0.8, many=many), 0.8 * torch.tanh(made / 0.8), torch.float32)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def check_products_of_many_rows(kind: str) -> None:
    w, values = weights(kind, 20, 96, torch.bfloat16, bias=True)
    x = noise(2, 9, 96).bfloat16()
    got = linear.product(x, w)
    assert_near(got, plain.linear(x, values, bias=w.bias), torch.bfloat16)
    assert_near(linear.product(x[:, :8].contiguous(), w), got[:, :8], torch.bfloat16)


def check_what_a_product_refuses() -> None:
    w, _ = weights("dense", 16, 64, torch.float32)
    with pytest.raises(ValueError, match="have 64 columns"):
        linear.linear(noise(1, 32), w)
    with pytest.raises(UnsupportedError, match="group_size 16, which is not one of"):
        linear.prepare(noise(4, 32).byte(), scale=noise(4), grid=(noise(4, 4).byte(), noise(4, 4).byte()))


# --- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_real", "num_experts", "top_k"),
    [(1, 1, 8, 2), (19, 17, 5, 3), (150, 150, 60, 4), (70, 70, 2, 2)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def check_routes(num_tokens: int, num_real: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    scores = noise(num_tokens, num_experts).round(decimals=1)  # some are equal
    found = experts.route(scores, top_k, renormalize, layout_of(num_tokens, num_real))
    order = scores.sort(dim=1, descending=True, stable=True)
    chosen, top = order.indices[:, :top_k], order.values[:, :top_k]
    wanted = top.softmax(1) if renormalize else scores.softmax(1).gather(1, chosen)
    torch.testing.assert_close(found.weights, wanted, atol=1e-6, rtol=1e-5)
    chosen[num_real:] = num_experts
    flat = chosen.flatten()
    assert torch.equal(found.order.long(), flat.sort(stable=True).indices)
    assert found.starts.tolist() == [int((flat < e).sum()) for e in range(num_experts + 1)]


def check_scores_that_are_no_numbers() -> None:
    scores = noise(4, 6)
    scores[1, 3], scores[2, 0], scores[3] = torch.nan, -torch.inf, -torch.inf
    found = experts.route(scores, 2, True, layout_of(4, 4))
    assert found.weights.isnan().all(1).tolist() == [False, True, False, True]
    assert sorted(found.order.tolist()) == list(range(8))
    assert found.starts[-1] == 8


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("many", [False, True])
def check_products_of_experts(kind: str, many: bool) -> None:
    """Against each pair by itself. A row has the same bits alone and in any company, whatever others choose."""
    num_experts, top_k, k, f, count = 5, 2, 512, 40, 27
    up, values = weights(kind, num_experts * 2 * f, k, torch.float16, bias=True)
    w = linear.stacked(up, num_experts)
    x, norm = noise(count, k, seed=3).half(), 1 + 0.1 * noise(k, seed=5)
    scores = noise(count, num_experts, seed=4)
    scores[:, 3] = -9.0  # which nobody chooses

    def made(begin: int, end: int) -> tuple[Tensor, Any]:
        routes = experts.route(scores[begin:end], top_k, True, layout_of(end - begin, end - begin))
        row = fused.prepare_norm(x[begin:end], norm, 1e-5)
        return linear.linear(row, w, gated=True, routes=routes, many=many).view(end - begin, top_k, f), row

    out, row = made(0, count)
    taken = rounded(row.weighted) if kind == "int8" and many else row.weighted.float()
    taken = taken * torch.rsqrt(row.squares / k + 1e-5)
    chosen = scores.topk(top_k, dim=1).indices
    for j in range(top_k):
        rows = [slice(e * 2 * f, (e + 1) * 2 * f) for e in chosen[:, j].tolist()]
        wanted = [
            plain.linear(t[None], values[r], bias=w.bias[r], gated=True) for t, r in zip(taken, rows, strict=True)
        ]
        assert_near(out[:, j], torch.cat(wanted), torch.float16)
    for begin, end in ((3, 4), (5, 20), (0, 9)):
        assert torch.equal(made(begin, end)[0], out[begin:end])


def check_experts_with_parts_that_meet() -> None:
    """The parts of products with few outputs meet in a room that was made for any step."""
    num_experts, top_k, count = 4, 2, 60
    stored, values = weights("dense", num_experts * 32, 2048, torch.float32)
    w = linear.stacked(stored, num_experts)
    assert linear.tiling(w, 16, top_k).splits > 1
    room = linear.make_room([(w, top_k)], 64, torch.device(DEVICE))
    room.partial.fill_(torch.nan)
    x, scores = noise(count, 2048, seed=3), noise(count, num_experts, seed=4)
    for n in (1, 9, count):
        routes = experts.route(scores[:n], top_k, True, layout_of(n, n))
        out = linear.linear(x[:n], w, routes=routes, room=room)
        assert torch.equal(linear.linear(x[:n], w, routes=routes), out)
        assert not room.arrivals.any()
    pairs = torch.einsum("mk,enk->men", x, values.view(num_experts, 32, 2048))
    chosen = scores.topk(top_k, dim=1).indices
    assert_near(out.view(count, top_k, 32), pairs.gather(1, chosen[..., None].expand(-1, -1, 32)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_what_experts_made_is_gathered(dtype: torch.dtype) -> None:
    layout, norm = layout_of(6, 5), 1 + 0.1 * noise(72, seed=2)
    routes = experts.route(noise(6, 4), 2, True, layout)
    y, add, shared = (noise(n, 72, seed=n).to(dtype) for n in (12, 6, 7))
    y[10:] = torch.nan  # of a row that only pads
    by = noise(6, 1, seed=3).to(dtype)
    out, row = experts.gather(y, routes, layout, add, (shared[:6], by), (norm, 1e-5))
    summed = (y.float().view(6, 2, 72) * routes.weights[..., None]).sum(1)
    summed[5] = 0.0
    assert_near(out, add.float() + summed + by.float().sigmoid() * shared[:6].float(), dtype)
    ready = row.weighted.float() * torch.rsqrt(row.squares / 72 + row.eps)
    assert_near(ready, rms_norm(out.float(), norm, 1e-5), dtype)
    alone, no_row = experts.gather(y, routes, layout)
    assert_near(alone, summed, dtype)
    assert no_row is None


# --- attention -----------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.float32)


def fast_attention(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> Tensor:
    cache.write(k, v, layout.write_slots)
    out: Tensor = attention.attend(q, cache, layout, scoring.window, scoring.scale)
    return out


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, torch.float32) for dim in (64, 80, 96, 128, 256)), (128, torch.float16), (80, torch.bfloat16)],
    ids=str,
)
def check_decoding_attention(dim: int, dtype: torch.dtype) -> None:
    case = Case([1, 1, 1], [90, 1, 33], 6, 2, dim)
    got = case.run(fast_attention, 0, dtype, dtype)
    assert got.dtype == dtype
    assert_near(got, case.run(paged_attention_eager, 0, torch.float32, dtype), dtype)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(
    ("counts", "heads", "kv_heads"),
    [
        ([1, 0, 1, 1], 8, 2),
        ([2, 1, 0, 3], 4, 2),
        ([0, 2, 0, 0], 5, 1),
        ([20, 0, 3, 1], 8, 2),
        ([0, 0, 60, 0], 2, 2),
        ([5, 40, 3, 1], 4, 2),
        ([7, 61, 3, 1], 20, 1),
    ],
    ids=str,
)
def check_steps_of_any_mixture(counts: list[int], window: int, heads: int, kv_heads: int) -> None:
    contexts = [max(c, e) for c, e in zip(counts, (91, 0, 90, 8), strict=True)]
    case = Case(counts, [c if n else 0 for c, n in zip(contexts, counts, strict=True)], heads, kv_heads, 64)
    got = case.run(fast_attention, window, torch.float32, torch.float32)
    assert_near(got, case.run(paged_attention_eager, window, torch.float32, torch.float32), torch.float32)


@pytest.mark.parametrize("counts", [[1, 2, 1], [5, 60, 3]])
@pytest.mark.parametrize("extra", ["cap", "slopes", "sinks"])
def check_what_becomes_of_scores(extra: str, counts: list[int]) -> None:
    case = Case(counts, [91, 60, 8], 4, 2, 64)
    given = {"cap": 0.6, "slopes": 0.3 * noise(4, seed=3).abs(), "sinks": 2 * noise(4, seed=3)}[extra]
    cache = LayerCache(case.k_cache, case.v_cache)
    scoring = Scoring(20, SCALE, **{extra: given})
    wanted = case.run(lambda q, k, v, c, layout, _: paged_attention_eager(q, k, v, c, layout, scoring), 0, *FLOATS)
    for many in (False, True):
        if sum(counts) <= 64 or many:
            got = attention.attend(case.q, cache, case.layout, 20, SCALE, many=many, **{extra: given})
            assert_near(got, wanted, torch.float32)


def check_a_cache_of_another_dtype_is_written_and_read() -> None:
    case = Case([1, 2], [50, 20], 4, 2, 64)
    for dtype in (torch.bfloat16, torch.float16):
        wanted = case.run(paged_attention_static, 0, torch.float32, dtype)
        assert_near(case.run(fast_attention, 0, torch.float32, dtype), wanted, torch.float32)


@pytest.mark.parametrize("window", [0, 30])
def check_a_query_is_the_same_in_any_company(window: int) -> None:
    case = Case([1, 2, 1, 17], [91, 67, 3, 40], 2, 1, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    start, length, table, write = case.layout
    whole = attention.attend(case.q, cache, case.layout, window, SCALE)
    for s in range(4):
        for token in range(int(start[s]), int(start[s + 1])):
            alone = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
            position = length[s : s + 1] - (start[s + 1] - token) + 1
            layout = StepLayout(alone, position, table[s : s + 1], write[:0])
            got = attention.attend(case.q[token : token + 1], cache, layout, window, SCALE)
            assert torch.equal(got, whole[token : token + 1])


@pytest.mark.parametrize("window", [0, 70])
def check_a_prompt_is_the_same_in_any_pieces(window: int) -> None:
    case = Case([60, 9], [200, 30], 4, 2, 64, pages=50)
    cache = LayerCache(case.k_cache, case.v_cache)
    _, length, table, write = case.layout
    whole = attention.attend(case.q, cache, case.layout, window, SCALE, many=True)
    for begin, end in ((0, 23), (23, 60), (7, 8), (59, 60)):
        ends = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        layout = StepLayout(ends, length[:1] - (60 - end), table[:1], write[:0])
        got = attention.attend(case.q[begin:end], cache, layout, window, SCALE, many=True)
        assert torch.equal(got, whole[begin:end])


def check_scratch_is_ready_for_the_next_launch() -> None:
    case = Case([1, 2], [91, 40], 4, 2, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    room = attention.scratch(16, 4, 2, 64, torch.device(DEVICE))
    room.partial.fill_(torch.nan)
    first, again = (attention.attend(case.q, cache, case.layout, 0, SCALE, room) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, attention.attend(case.q, cache, case.layout, 0, SCALE))
    assert not room.arrivals.any()


@pytest.mark.parametrize("window", [0, 150, 1000])
def check_many_parts(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "num_splits", lambda _: 4)
    case = Case([1, 1], [250, 130], 4, 1, 64, page=16, pages=16)
    got = case.run(fast_attention, window, torch.float32, torch.float32)
    assert_near(got, case.run(paged_attention_eager, window, torch.float32, torch.float32), torch.float32)


def check_rows_that_only_pad_are_zero() -> None:
    case = Case([1, 1], [9, 5], 4, 2, 64)
    cache = LayerCache(case.k_cache, case.v_cache)
    q = torch.cat((case.q, noise(3, 4, 64)))
    out = attention.attend(q, cache, case.layout, 0, SCALE)
    assert not out[2:].any()
    assert torch.equal(out[:2], attention.attend(case.q, cache, case.layout, 0, SCALE))


def check_an_int8_cache() -> None:
    case = Case([1, 2], [80, 21], 4, 2, 64)
    keys, values = (torch.where(t.isfinite(), t, 0.0) for t in (case.k_cache, case.v_cache))
    (qk, ks), (qv, vs) = quantize_heads(keys), quantize_heads(values)
    got = attention.attend(case.q, LayerCache(qk, qv, ks, vs), case.layout, 0, SCALE)
    exact = LayerCache(qk * ks[..., None], qv * vs[..., None])
    assert_near(got, attention.attend(case.q, exact, case.layout, 0, SCALE), torch.float32)
    assert (got - attention.attend(case.q, LayerCache(keys, values), case.layout, 0, SCALE)).norm() < 0.02 * got.norm()


# --- what stands between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "normed", "dtype"),
    [
        (4, 2, 64, 64, True, torch.float32),
        (3, 1, 80, 80, False, torch.float32),
        (2, 2, 96, 96, True, torch.bfloat16),
        (4, 2, 64, 16, True, torch.float32),
        (3, 1, 80, 34, False, torch.float32),
        (2, 1, 24, 0, True, torch.float32),
    ],
    ids=str,
)
def check_rotation_and_cache_write(
    heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    qkv = noise(5, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = noise(5, rotary // 2, seed=1)
    slots = torch.tensor([7, 0, 3, 12, 4], device=DEVICE)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=-1))
    norms = [(1 + 0.1 * noise(dim, seed=i)).to(dtype) for i in range(2)]
    wq, wk = (rms_norm(t.float(), w.float(), 1e-6) if normed else t.float() for t, w in zip((q, k), norms, strict=True))
    wq, wk = (rotate(t, angles.cos(), angles.sin()) for t in (wq, wk))
    weights = norms if normed else (None, None)
    cache = LayerCache(*(torch.zeros(4, 4, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in range(2)))
    got = fused.rope_write(qkv, angles.cos(), angles.sin(), slots, cache, heads, *weights, eps=1e-6)
    assert_near(got, wq, dtype)
    written = [t.view(-1, kv_heads, dim)[slots] for t in cache[:2] if t is not None]
    assert_near(written[0], wk, dtype)
    assert torch.equal(written[1], v)
    untouched = torch.ones(16, dtype=torch.bool).index_fill_(0, slots.cpu(), False)
    assert not cache.k.view(16, -1)[untouched.to(DEVICE)].any()
    if dtype == torch.float32:
        small = LayerCache(
            *(torch.zeros(4, 4, kv_heads, dim, device=DEVICE, dtype=torch.int8) for _ in range(2)),
            *(torch.zeros(4, 4, kv_heads, device=DEVICE) for _ in range(2)),
        )
        rope_write = (angles.cos(), angles.sin(), slots, small, heads, *weights)
        fused.rope_write(qkv, *rope_write, eps=1e-6)
        for stored, scale, exact in ((small.k, small.k_scale, wk), (small.v, small.v_scale, v)):
            wanted, wanted_scale = quantize_heads(exact)  # the rotation may differ in the last bit, at a tie
            assert (stored.view(-1, kv_heads, dim)[slots].int() - wanted.int()).abs().max() <= 1
            assert_near(scale.view(-1, kv_heads)[slots], wanted_scale, dtype)
        broken = qkv.clone()
        broken[1, -1] = torch.nan  # of the last head's value
        fused.rope_write(broken, *rope_write, eps=1e-6)
        finite = small.v_scale.view(-1, kv_heads)[slots].isfinite()
        assert not finite[1, -1]
        assert finite.sum() == finite.numel() - 1


@pytest.mark.parametrize("dtype", DTYPES)
def check_norms_and_embedding(dtype: torch.dtype) -> None:
    x, norm = noise(3, 200).to(dtype), 1 + 0.1 * noise(200, seed=2)
    tokens = torch.tensor([2, 0, 2], device=DEVICE)
    for scale in (1.0, 14.1):
        wanted = x[tokens] * torch.tensor(scale, dtype=dtype)
        got, row = fused.embed(tokens, x, (norm, 1e-5), dtype, scale)
        assert_near(got, wanted, dtype) if scale != 1.0 else torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for waiting in (row, fused.prepare_norm(got, norm, 1e-5)):
            ready = waiting.weighted.float() * torch.rsqrt(waiting.squares / 200 + waiting.eps)
            assert_near(ready, rms_norm(wanted.float(), norm, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def check_norms_that_nobody_waits_for(dtype: torch.dtype) -> None:
    x, weight, bias, add = (
        noise(*size, seed=i).to(dtype) for i, size in enumerate(((3, 200), (200,), (200,), (3, 200)))
    )
    out, row = fused.norm(x, weight, None, 1e-5, add=add, following=(1 + bias, 1e-6))
    assert_near(out, rms_norm(x.float(), weight.float(), 1e-5) + add.float(), dtype)
    ready = row.weighted.float() * torch.rsqrt(row.squares / 200 + 1e-6)
    assert_near(ready, rms_norm(out.float(), 1 + bias.float(), 1e-6), dtype)
    layer, no_row = fused.norm(x + 7, weight, bias, 1e-5, centred=True)
    assert_near(layer, F.layer_norm((x + 7).float(), (200,), weight.float(), bias.float(), 1e-5), dtype)
    assert no_row is None
    columns = x.split((40, 160), dim=1)
    wanted = rms_norm(columns[1].float(), weight[:160].float(), 1e-5)
    first = columns[0].clone()
    fused.norm(columns[1], weight[:160], None, 1e-5, out=columns[1])
    assert_near(x[:, 40:], wanted, dtype)
    assert torch.equal(x[:, :40], first)


# --- draws ---------------------------------------------------------------------------------------------------------


def check_draws_equal_the_plain_race() -> None:
    logits = 3 * noise(6, 5000)
    logits[logits < -4] = -torch.inf
    logits[3, 4999], logits[4] = torch.nan, -torch.inf
    keys = torch.tensor([race_key(7, p) for p in range(6)], dtype=torch.int32, device=DEVICE)
    drawn = race.race(logits, keys)
    assert drawn.tolist() == plain_race(logits, keys).tolist()
    assert drawn[3:5].tolist() == [-1, -1]


def check_the_cut_of_top_k_and_top_p_equals_the_sorted_one() -> None:
    logits = 3 * noise(7, 20000)
    logits[2] = logits[2].round()  # many that are equal
    logits[3, 5:] = -torch.inf
    logits[4], logits[5] = 1.5, -0.0
    for draws in (
        [Draw(1.0, top_p=p) for p in (0.9, 0.5, 0.95, 0.99, 0.3, 0.7, 1e-6)],
        [Draw(1.0, top_k=k) for k in (1, 50, 3, 7, 2, 20000, 19999)],
        [Draw(1.0, top_k=40, top_p=p) for p in (0.9, 0.5, 0.95, 0.99, 0.3, 0.7, 1.0)],
    ):
        top_k = torch.tensor([own.top_k or 20000 for own in draws], dtype=torch.int32, device=DEVICE)
        found = least_kept.least_kept(logits, top_k, torch.tensor([own.top_p for own in draws], device=DEVICE))
        wanted = sampling._least_kept(logits.cpu(), draws).to(DEVICE)
        assert torch.equal(logits >= found[:, None], logits >= wanted[:, None])
        alone = least_kept.least_kept(logits[1:2], top_k[1:2], torch.tensor([draws[1].top_p], device=DEVICE))
        assert torch.equal(alone, found[1:2])
