"""The kernels against float32 on fresh random numbers, without a test runner: what benchmarks/gpu.sh does first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu import attention, fused, linear
from gpt_fast.model.rope import rotate
from gpu import reference
from gpu.synthetic import PAGE, PRECISIONS, random_weights


class Checks:
    """Counts what held, and names what did not. ``enough`` says when to stop for lack of time."""

    def __init__(
        self, device: torch.device, say: Callable[[str], None], enough: Callable[[], bool] = lambda: False
    ) -> None:
        self.device, self.say, self.enough = device, say, enough
        self.count, self.failed = 0, list[str]()

    def near(self, name: str, got: Tensor, wanted: Tensor, tolerance: float = 1e-2) -> None:
        """By the norm of the difference; NaN never passes."""
        error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
        self.true(f"{name}: error {error:.1e}", error < tolerance)

    def same(self, name: str, got: Tensor, wanted: Tensor) -> None:
        """Bit for bit."""
        self.true(f"{name}: the same bits", torch.equal(got, wanted))

    def true(self, name: str, holds: bool) -> None:
        """One check more."""
        self.count += 1
        if not holds:
            self.failed.append(name)
        self.say(f"{'ok  ' if holds else 'FAIL'} {name}")

    def noise(self, *size: int) -> Tensor:
        """Fresh bfloat16 numbers."""
        return torch.randn(*size, device=self.device).bfloat16()


def check_products(checks: Checks, sizes: Sequence[tuple[int, int]]) -> None:
    """Each precision for each (N, K): values, the same bits for a row alone, and what is fused."""
    for precision, (n, k) in ((p, size) for p in PRECISIONS for size in sizes):
        if checks.enough():
            return checks.say("no time for more products")
        name, w = f"{precision} {n} x {k}", random_weights(precision, n, k, checks.device)
        values = linear.dequantized(w, torch.bfloat16).float()
        if w.scale is not None:
            values = values * w.scale[:, None]
        x, residual, norm = checks.noise(40, k), checks.noise(5, n), 1 + 0.1 * checks.noise(k)
        out = linear.linear(x, w)
        checks.near(name, out, reference.linear(x, values))
        alone = torch.cat([linear.linear(x[i : i + 1], w) for i in range(0, 40, 5)])
        checks.same(f"{name}, rows alone", alone, out[::5])
        gated = linear.linear(x[:5], w, gated=True)
        checks.near(f"{name}, gated", gated, reference.linear(x[:5], values, gated=True))
        row = fused.prepare_norm(x[:5], norm, 1e-5)
        got, after = linear.linear_residual(row, w, residual, 1 + 0.1 * checks.noise(n), 1e-5)
        wanted = reference.linear(x[:5], values, norm=norm, eps=1e-5, residual=residual)
        checks.near(f"{name}, norm and residual", got, wanted)
        checks.near(f"{name}, squares", after.squares.sum(1), got.float().pow(2).sum(1), 1e-3)


def check_attention(checks: Checks, contexts: Sequence[int], head_dims: Sequence[int], repeats: int) -> None:
    """Decoding of sequences of these lengths, again and again (a race would show), and what fills the cache."""
    heads, kv_heads, slots = 8, 2, len(contexts)
    pages = -(-max(contexts) // PAGE)
    table = (1 + torch.randperm(slots * pages, device=checks.device)).int().view(slots, pages)
    start = torch.arange(slots + 1, device=checks.device, dtype=torch.int32)
    lengths = torch.tensor(contexts, device=checks.device, dtype=torch.int32)
    layout = StepLayout(start, lengths, table, table[:, 0].long() * PAGE)  # the write slots are not read
    for dim, window in ((d, w) for d in head_dims for w in (0, 100)):
        if checks.enough():
            return checks.say("no time for more attention")
        cache = LayerCache(*(checks.noise(slots * pages + 1, PAGE, kv_heads, dim) for _ in range(2)))
        q, name = checks.noise(slots, heads, dim), f"attention, heads of {dim}, window {window}"

        def attend(q: Tensor = q, cache: LayerCache = cache, window: int = window) -> Tensor:
            return attention.attend(q, cache, layout, window, q.shape[-1] ** -0.5)

        got = attend()
        wanted = [reference.decode(q[s], cache.k, cache.v, table[s], n, window) for s, n in enumerate(contexts)]
        checks.near(name, got, torch.stack(wanted))
        checks.true(f"{name}, {repeats} times again", all(torch.equal(attend(), got) for _ in range(repeats)))
        if not window:
            _check_cache_write(checks, cache, heads, table[:, 0].long())


def _check_cache_write(checks: Checks, cache: LayerCache, heads: int, pages: Tensor) -> None:
    """One new token on the first place of each of ``pages``."""
    tokens, (kv_heads, dim) = pages.shape[0], cache.k.shape[2:]
    qkv, angles = (
        checks.noise(tokens, (heads + 2 * kv_heads) * dim),
        torch.randn(tokens, dim // 2, device=checks.device),
    )
    cos, sin = angles.cos(), angles.sin()
    turned = fused.rope_write(qkv, cos, sin, pages * PAGE, cache, heads)
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    checks.near(f"rotation, heads of {dim}", turned, rotate(q, cos, sin))
    checks.near(f"keys written, heads of {dim}", cache.k[pages, 0], rotate(k, cos, sin))
    checks.same(f"values written, heads of {dim}", cache.v[pages, 0], v)
