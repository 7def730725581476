"""The C++ kernels against their plain-torch twins, and each row's result against itself in other company."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt_fast import kernels, user_cache
from gpt_fast.config import ModelConfig
from gpt_fast.kernels import reference
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.model.attention import paged_attention_eager

needs_cpp = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler and a CPU with AVX2")
KINDS = ("float32", "bfloat16", "int8", "int4-32", "int4-64", "int4-128")
# (N, K): tiles not full, K in several passes, more tiles than a thread takes at once
SHAPES = ((5, 128), (100, 640), (16 * 37 + 3, 256))


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(kind: str, n: int, k: int, seed: int = 0) -> tuple[kernels.LinearWeights, Callable[[Tensor], Tensor]]:
    """Random weights as the kernels take them, and the product with their plain form in torch."""
    g = torch.Generator().manual_seed(seed)
    if kind in ("float32", "bfloat16"):
        w = torch.randn(n, k, generator=g).to(getattr(torch, kind)) / k**0.5
        return kernels.LinearWeights(kind, packing.pack_dense(w), n, k), lambda x: reference.linear_dense(x, w)
    if kind == "int8":
        q = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        s = torch.rand(n, generator=g) / 127 / k**0.5
        return kernels.LinearWeights(kind, packing.pack_int8(q), n, k, s), lambda x: reference.linear_int8(x, q, s)
    size = int(kind.split("-")[1])
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    s, z, row_scale = int4_grid(n, k // size, g)
    row_scale /= 8 * k**0.5
    data = packing.nibbles(q)
    packed = packing.pack_int4(q, s, z)
    made = kernels.LinearWeights("int4", packed, n, k, row_scale, size)
    return made, lambda x: reference.linear_int4(x, data, s, z, row_scale)


def int4_grid(n: int, groups: int, g: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, zeros around 8, and row scales for scales of at most 1."""
    s = torch.randint(1, 256, (n, groups), generator=g, dtype=torch.uint8)
    z = torch.randint(40, 88, (n, groups), generator=g, dtype=torch.uint8)
    return s, z, torch.rand(n, generator=g) / 255


def run(x: Tensor, w: kernels.LinearWeights) -> Tensor:
    return cpu.linear(x, w.kind, w.data, w.out_features, w.scale, w.group_size, w.bias)


# --- packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(16, 32), (5, 40), (33, 128)])
def test_dense_and_int8_unpack_to_what_was_packed(n: int, k: int) -> None:
    w = torch.randn(n, k)
    for dense in (w, w.bfloat16()):
        assert torch.equal(packing.unpack_dense(packing.pack_dense(dense), n), dense)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    assert torch.equal(packing.unpack_int8(packing.pack_int8(q), n, k), q)


@pytest.mark.parametrize("size", packing.GROUP_SIZES)
def test_int4_unpacks_to_what_was_packed(size: int) -> None:
    n, k = 13, 2 * size
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale, zero, _ = int4_grid(n, k // size)
    assert torch.equal(packing.from_nibbles(packing.nibbles(q)), q)
    assert packing.nibbles(q)[0, 3] == int(q[0, 3]) | int(q[0, 19]) << 4
    for got, wanted in zip(packing.unpack_int4(packing.pack_int4(q, scale, zero), n), (q, scale, zero), strict=True):
        assert torch.equal(got, wanted)


def test_int4_refuses_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="group_size 16 is not one of 32, 64, 128"):
        packing.pack_int4(torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 4), torch.zeros(8, 4))
    with pytest.raises(ValueError, match="not a multiple of 32"):
        packing.nibbles(torch.zeros(8, 40, dtype=torch.uint8))


# --- products ------------------------------------------------------------------------------------------------------


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_equal_the_reference(kind: str, n: int, k: int) -> None:
    w, plain = weights(kind, n, k)
    x = torch.randn(19, k)
    torch.testing.assert_close(run(x, w), plain(x), atol=2e-5, rtol=2e-5)


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_its_company_or_the_threads(kind: str, n: int, k: int) -> None:
    w, _ = weights(kind, n, k)
    x = torch.randn(300, k)
    torch.set_num_threads(1)
    whole = run(x, w)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for begin, rows in ((0, 1), (7, 1), (1, 2), (2, 3), (0, 4), (3, 5), (9, 6), (0, 7), (4, 8), (0, 13), (5, 16)):
            assert torch.equal(run(x[begin : begin + rows], w), whole[begin : begin + rows]), (threads, rows)
        for rows in (17, 33, 257, 300):
            assert torch.equal(run(x[:rows], w), whole[:rows]), (threads, rows)


@needs_cpp
def test_int8_takes_any_width_and_its_extremes() -> None:
    q = torch.full((9, 77), -127, dtype=torch.int8)
    q[::2] = 127
    scale = torch.ones(9)
    x = torch.full((3, 77), -2.0)
    expected = reference.linear_int8(x, q, scale)
    assert torch.equal(cpu.linear(x, "int8", packing.pack_int8(q), 9, scale), expected)  # no 16-bit sum overflows


@needs_cpp
def test_int4_does_not_overflow_at_its_extremes() -> None:
    q = torch.full((8, 128), 15, dtype=torch.uint8)
    one = torch.ones(8, 1, dtype=torch.uint8)
    x = torch.full((2, 128), 127.0)
    out = cpu.linear(x, "int4", packing.pack_int4(q, one, 0 * one), 8, torch.ones(8), 128)
    assert torch.equal(out, torch.full((2, 8), 15 * 127 * 128.0))


@needs_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_in_its_row_alone(kind: str) -> None:
    w, _ = weights(kind, 24, 128)
    x = torch.randn(4, 128)
    x[1, 5], x[3, 77] = torch.nan, torch.inf
    out = run(x, w)
    assert not out[1].isfinite().any()
    assert not out[3].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@needs_cpp
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4-32"])
def test_zero_rows_and_no_rows(kind: str) -> None:
    w, _ = weights(kind, 24, 128)
    assert torch.equal(run(torch.zeros(2, 128), w), torch.zeros(2, 24))
    assert run(torch.zeros(0, 128), w).shape == (0, 24)


# --- the table of operations ---------------------------------------------------------------------------------------


@needs_cpp
def test_the_form_of_the_weights_decides_the_path_and_both_agree() -> None:
    x, w = torch.randn(2, 3, 64), torch.randn(20, 64)
    q, scale = torch.randint(-127, 128, (20, 64), dtype=torch.int8), torch.rand(20)
    data = torch.randint(0, 256, (20, 32), dtype=torch.uint8)
    grid = int4_grid(20, 2)
    close = torch.testing.assert_close
    dense = w.bfloat16()
    close(kernels.linear_dense(x, kernels.prepare_dense(dense), 20), kernels.linear_dense(x, dense, 20))
    got = kernels.linear_int8(x, kernels.prepare_int8(q), scale)
    close(got, kernels.linear_int8(x, q, scale), atol=1e-3, rtol=1e-4)  # sums of some hundreds
    packed, plain = kernels.prepare_int4(data, *grid), kernels.Int4Weights(data, *grid)
    assert packed.scale is None
    close(kernels.linear_int4(x, packed), kernels.linear_int4(x, plain), atol=1e-4, rtol=1e-4)
    for op, args in (
        (torch.ops.gpt_fast.linear_dense, (x, kernels.prepare_dense(dense), 20)),
        (torch.ops.gpt_fast.linear_int8, (x, kernels.prepare_int8(q), scale)),
        (torch.ops.gpt_fast.linear_int4, (x, *packed)),
        (torch.ops.gpt_fast.rms_norm, (x, torch.ones(64), 1e-5)),
        (torch.ops.gpt_fast.silu_mul, (x,)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@needs_cpp
def test_glue_equals_torch() -> None:
    x = torch.randn(11, 104) * 3
    weight = torch.randn(104)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    torch.testing.assert_close(kernels.silu_mul(x), reference.silu_mul(x))


# --- attention -----------------------------------------------------------------------------------------------------


class Cache:
    """Sequences in pages of a cache whose other contents are not numbers."""

    def __init__(self, slots: int, longest: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page: int) -> None:
        each = -(-longest // page)
        g = torch.Generator().manual_seed(1)
        self.table = (torch.randperm(slots * each, generator=g) + 1).view(slots, each).int()
        self.page = page
        shape = (slots * each + 1, page, kv_heads, head_dim)
        self.scales: list[Tensor] = []
        if dtype == torch.int8:
            self.k, self.v = torch.full(shape, 127, dtype=dtype), torch.full(shape, -128, dtype=dtype)
            self.scales = [torch.full(shape[:3], torch.nan), torch.full(shape[:3], torch.inf)]
        else:
            self.k, self.v = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.inf, dtype=dtype)

    def places(self, slot: int, begin: int, end: int) -> list[int]:
        return [int(self.table[slot, p // self.page]) * self.page + p % self.page for p in range(begin, end)]

    def attend(self, op: Callable[..., Tensor], parts: list[tuple[int, int, int]], qkv: list, window: int) -> Tensor:
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
        layout = (torch.tensor(start).int(), torch.tensor(context).int(), self.table, torch.tensor(places))
        return op(*(torch.cat(p) for p in picked), self.k, self.v, *layout, window, *self.scales)


def sequences(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(n, h, head_dim, generator=g) for h in (heads, kv_heads, kv_heads)) for n in lengths]


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [0, 1, 70, 600])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 40), (8, 1, 64)])
def test_attention_equals_the_eager_seam(
    window: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, 130, 700]
    qkv = sequences(lengths, heads, kv_heads, head_dim)
    steps = [[(0, 0, 1), (1, 0, 100), (2, 0, 650)], [(1, 100, 101), (2, 650, 695)], [(1, 101, 130), (2, 695, 700)]]
    outs = []
    for op in (cpu.paged_attention, paged_attention_eager):
        cache = Cache(3, 700, kv_heads, head_dim, dtype, 16)
        outs.append([cache.attend(op, step, qkv, window) for step in steps])
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-4)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 90])
def test_a_query_does_not_depend_on_chunks_company_or_threads(dtype: torch.dtype, window: int) -> None:
    lengths, shape = [1200, 77, 530], (8, 2, 32)
    qkv = sequences(lengths, *shape)

    def every_step(steps: list[list[tuple[int, int, int]]], threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        cache = Cache(3, 1200, *shape[1:], dtype, 16)
        results: list[list[Tensor]] = [[], [], []]
        for step in steps:
            out = cache.attend(cpu.paged_attention, step, qkv, window)
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
def test_attention_leaves_padding_zero_and_fills_page_zero_only() -> None:
    qkv = sequences([3], 4, 2, 8)
    cache = Cache(1, 16, 2, 8, torch.float32, 16)
    before = cache.k.clone()
    q, k, v = (torch.cat((t, torch.ones(2, *t.shape[1:]))) for t in qkv[0])
    places = torch.tensor([*cache.places(0, 0, 3), 0, 0])
    start, context = torch.tensor([0, 3]).int(), torch.tensor([3]).int()
    out = cpu.paged_attention(q, k, v, cache.k, cache.v, start, context, cache.table, places, 0)
    assert torch.equal(out[3:], torch.zeros(2, 4, 8))
    changed = (cache.k != before).flatten(1).any(1) & ~(cache.k.isnan() & before.isnan()).flatten(1).all(1)
    assert changed.nonzero().flatten().tolist() == sorted({0, int(cache.table[0, 0])})


# --- whole steps ---------------------------------------------------------------------------------------------------


def decoder_of(model: object, kind: str, cache: list[tuple[Tensor, Tensor]]) -> tuple[kernels.Decoder, object]:
    """A Decoder with the weights of ``model`` in ``kind``; the model's own products become their twins in torch."""
    from gpt_fast.model.transformer import Transformer
    from gpt_fast.quantize.rtn import encode, find_grid

    assert isinstance(model, Transformer)

    def twin(linear: torch.nn.Linear, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: product(x) if linear.bias is None else product(x) + linear.bias

    def pack(linear: torch.nn.Linear) -> kernels.LinearWeights:
        n, k = linear.weight.shape
        bias = None if linear.bias is None else linear.bias.detach()
        w = linear.weight.detach()
        if kind in ("float32", "bfloat16"):
            w = w.to(getattr(torch, kind))
            linear.weight.data = w.float()
            return kernels.LinearWeights(kind, packing.pack_dense(w), n, k, bias=bias)
        if kind == "int8":
            scale = w.abs().amax(1) / 127
            q = (w / scale[:, None]).round().to(torch.int8)
            linear.forward = twin(linear, lambda x: reference.linear_int8(x, q, scale))  # type: ignore[method-assign]
            return kernels.LinearWeights(kind, packing.pack_int8(q), n, k, scale, bias=bias)
        grid = find_grid(w, 32)
        q = encode(w, grid)
        data = packing.nibbles(q)
        linear.forward = twin(linear, lambda x: reference.linear_int4(x, data, *grid))  # type: ignore[method-assign]
        packed = packing.pack_int4(q, grid.scale, grid.zero)
        return kernels.LinearWeights("int4", packed, n, k, grid.row_scale, 32, bias)

    layers = []
    for block in model.layers:
        a, f = block.attention, block.feed_forward
        norms = (None, None) if a.q_norm is None else (a.q_norm.weight, a.k_norm.weight)
        layers.append(
            kernels.LayerWeights(
                block.attention_norm.weight,
                pack(a.wqkv),
                pack(a.wo),
                block.ffn_norm.weight,
                pack(f.w13),
                pack(f.w2),
                *norms,
                a.window,
            )
        )
    c = model.config
    tied = c.tie_embeddings
    output = pack(model.output)
    table = output if tied else model.tok_embeddings.weight
    return kernels.Decoder(
        table, layers, model.norm.weight, output, cache, num_heads=c.num_heads, eps=c.norm_eps
    ), model


CONFIGS = {
    "plain": {},
    "everything": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True, "windows": (0, 9)},
    "tied": {"tie_embeddings": True},
}


@needs_cpp
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        (kind, variant)
        for kind in ("float32", "bfloat16", "int8", "int4-32")
        for variant in CONFIGS
        if not (variant == "tied" and kind.startswith("int"))  # a table of integers is not an embedding
    ],
)
@torch.inference_mode()
def test_a_whole_step_equals_the_model(kind: str, variant: str) -> None:
    from gpt_fast.model.transformer import Transformer

    torch.manual_seed(0)
    c = ModelConfig("llama", 100, 64, 2, 4, 2, 16, 96, 64, **CONFIGS[variant])  # type: ignore[arg-type]
    model = Transformer(c).eval()
    for name, p in model.named_parameters():
        p.data = torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.1) + (1 if name.endswith("norm.weight") else 0)
    page, each, slots = 16, 4, 3
    cache = [tuple(torch.full((slots * each + 1, page, 2, 16), torch.nan) for _ in range(2)) for _ in range(2)]
    decoder, _ = decoder_of(model, kind, cache)  # type: ignore[arg-type]
    tokens = torch.randint(100, (2, 40))
    expected = model(tokens)
    table = (torch.randperm(slots * each) + 1).view(slots, each).int()
    got: list[list[Tensor]] = [[], []]
    for parts in ([(0, 0, 20), (2, 0, 31)], [(0, 20, 21), (2, 31, 32)], [(0, 21, 40), (2, 32, 40)]):
        for threads in (1, 2):  # computing a step again gives the same bits
            torch.set_num_threads(threads)
            flat, positions, places, start, context = [], [], [], [0], [0] * slots
            bounds = {slot: (a, b) for slot, a, b in parts}
            for slot in range(slots):
                a, b = bounds.get(slot, (0, 0))
                flat.append(tokens[slot // 2, a:b])
                positions += range(a, b)
                places += [int(table[slot, p // page]) * page + p % page for p in range(a, b)]
                context[slot] = b
                start.append(len(positions))
            cos, sin = model.rope(torch.tensor(positions))
            layout = (torch.tensor(start).int(), torch.tensor(context).int(), table, torch.tensor(places))
            out = decoder.step(torch.cat(flat), cos, sin, *layout, torch.arange(len(positions)))
            if threads == 1:
                first = out
            assert torch.equal(out, first)
        split = parts[0][2] - parts[0][1]
        got[0].append(out[:split])
        got[1].append(out[split:])
    # Where sums differ in the last bit an activation may round to the next of 127 steps.
    tolerance = 1e-4 if kind in ("float32", "bfloat16") else 0.1
    for i in range(2):
        assert (torch.cat(got[i]) - expected[i]).abs().mean() < tolerance / 20
        torch.testing.assert_close(torch.cat(got[i]), expected[i], atol=tolerance, rtol=tolerance)


# --- building ------------------------------------------------------------------------------------------------------

_PROBE = (
    "import logging; logging.basicConfig(); import torch; from gpt_fast import kernels as k; w = torch.ones(3, 32); "
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
    code = "p = k.prepare_dense(w); print(p.dim(), k.linear_dense(w, p, 3).sum().item()); k.available()"
    done = probe(code, CXX="no-such-compiler", GPT_FAST_CACHE=str(tmp_path), GPT_FAST_KERNELS="")
    assert done.stdout.split() == ["2", "288.0"], done.stderr
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
def test_without_a_compiler_what_another_one_built_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpu.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu.build() == library
    code = "print(k.available(), k.linear_dense(w, k.prepare_dense(w), 3).sum().item())"
    done = probe(code, CXX="no-such-compiler", GPT_FAST_CACHE=str(cache.parent), GPT_FAST_KERNELS="")
    assert (done.stdout.split(), done.stderr) == (["True", "288.0"], "")
    # Of other sources or flags, or not to be trusted: not used.
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-DNEWER"))
        with pytest.raises(cpu.UnavailableError, match="no-such-compiler"):
            cpu.build()
    library.chmod(0o777)
    with pytest.raises(cpu.UnavailableError, match="no-such-compiler"):
        cpu.build()


@needs_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_team_has_a_limit_whoever_asks_for_more() -> None:
    code = (
        "import os, ctypes; from gpt_fast.kernels.cpu.library import library; "
        "before = len(os.listdir('/proc/self/task')); "
        "data = torch.ones(1 << 24, dtype=torch.uint8); library().gpt_fast_read(data.data_ptr(), 1 << 24, 100_000); "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = probe(code, GPT_FAST_KERNELS="")
    assert 0 < int(done.stdout) < 512, done.stderr


@needs_cpp
def test_a_failed_build_says_what_the_compiler_said(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(cpu.UnavailableError, match=r"failed: .*broken\.cpp"):
        cpu._compile([cpu.compiler(), str(source)], tmp_path / "broken.so")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.cpp"]


@needs_cpp
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_the_benchmarks_steps_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    config = ModelConfig("llama", 96, 64, 2, 4, 2, 16, 96, 128)
    steps = importlib.import_module("kernels_cpu").Steps(config, kind, 64, 2, torch.bfloat16)
    assert torch.isfinite(steps.run(2, 1, 40)).all()
    assert steps.weight_bytes > 0
