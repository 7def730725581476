"""Random weights and whole decoders made of them, for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpt_fast.kernels.layers import LayerWeights
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache
from gpt_fast.kernels.gpu import linear
from gpt_fast.kernels.gpu.decoder import GpuDecoder, Rope
from gpt_fast.kernels.gpu.graphs import CapturedDecoder, Run

PRECISIONS = ("bf16", "int8", "int4", "fp8")
GROUP = 64  # of int4
PAGE = 16


def random_weights(precision: str, n: int, k: int, device: torch.device) -> linear.Weights:
    """[n, k] of about 0.02, drawn on the device."""
    if precision == "bf16":
        return linear.prepare("dense", torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, 0.02))
    scale = torch.full((n,), 0.02, device=device)
    if precision == "int8":
        values = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        return linear.prepare("int8", values, scale=scale / 73)
    if precision == "fp8":
        values = torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_().to(torch.float8_e4m3fn)
        return linear.prepare("fp8", values, scale=scale)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    steps = torch.full((n, k // GROUP), 200, dtype=torch.uint8, device=device)
    return linear.prepare("int4", codes, scale=scale / 4.6 / 200, grid=(steps, torch.full_like(steps, 60)))


def random_decoder(config: Any, precision: str, tokens: int, rope: Rope, device: torch.device) -> GpuDecoder:
    """A decoder of the shape ``config``, a ``ModelConfig``, with room for ``tokens`` in its cache of noise.

    As quantize/scheme.py has it, the head, and keys and values that heads share, are int8 where the rest is int4.
    """
    c, pages = config, -(-tokens // PAGE)
    finer = "int8" if precision == "int4" else precision
    apart = precision == "int4" and c.kv_dim < c.q_dim

    def weights(n: int, k: int, precision: str = precision) -> linear.Weights:
        return random_weights(precision, n, k, device)

    def noise(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=device).normal_()

    ones = torch.ones(c.dim, device=device, dtype=torch.bfloat16)
    layers = [
        LayerWeights(
            ones,
            weights(c.q_dim + (0 if apart else 2 * c.kv_dim), c.dim),
            weights(c.dim, c.q_dim),
            ones,
            weights(2 * c.ffn_dim, c.dim),
            weights(c.dim, c.ffn_dim),
            wkv=weights(2 * c.kv_dim, c.dim, finer) if apart else None,
        )
        for _ in range(c.num_layers)
    ]
    size = (pages + 1, PAGE, c.num_kv_heads, c.head_dim)
    return GpuDecoder(
        noise(c.vocab_size, c.dim),
        layers,
        ones,
        weights(c.vocab_size, c.dim, finer),
        [LayerCache(noise(*size), noise(*size)) for _ in range(c.num_layers)],
        rope,
        num_heads=c.num_heads,
        eps=c.norm_eps,
        dtype=torch.bfloat16,
    )


def recorded_step(
    decoder: GpuDecoder, batch: int, context: int, capture: Callable[[Run], Run] | None = None
) -> tuple[Run, Tensor]:
    """The replay of one decode step of ``batch`` sequences of ``context`` tokens, and its logits; always the same."""
    device, per_slot = decoder.device, -(-context // PAGE)
    table = 1 + torch.arange(batch * per_slot, device=device).int().view(batch, per_slot)
    graph = CapturedDecoder(decoder, table, (batch,), capture)
    graph.warm_up()
    ones = torch.ones(batch, dtype=torch.int64, device=device)
    logits = graph.step(
        torch.arange(batch, device=device) * 7 % decoder.embedding.shape[0],
        ones * (context - 1),
        ones * context,
        torch.arange(batch + 1, device=device).int(),
        (ones * context).int(),
        table,
        table[:, -1].long() * PAGE + (context - 1) % PAGE,
        torch.arange(batch, device=device),
    )
    return lambda: graph.replay(batch), logits
