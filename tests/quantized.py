"""What a quantized layer stands for, by the definition of its format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.kernels.reference import dequantize_int4
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear


def noisy_rows(n: int, k: int, seed: int = 0) -> Tensor:
    """Random weights, float32 [n, k], some of them far from the others, in rows that take turns: as they are; with
    whole numbers, where two codes are as near; all below 0; mostly zeros; constant; too small and too large to square;
    with zeros alone."""
    g = torch.Generator().manual_seed(seed)
    rows = 0.02 * torch.randn(n, k, generator=g) * torch.randn(n, k, generator=g).exp()
    rows[1::8] = torch.randint(-9, 10, rows[1::8].shape, generator=g).float()
    rows[2::8] = -1 - rows[2::8].abs()
    rows[3::8] *= torch.rand(rows[3::8].shape, generator=g) < 0.02
    rows[4::8] = -0.37
    rows[5::8] *= 1e-37
    rows[6::8] *= 1e37
    rows[7::8] = 0
    return rows


def dequantized(layer: nn.Module) -> Tensor:
    """The weight that ``layer`` multiplies with, float32 [N, K]."""
    if isinstance(layer, SplitLinear):
        return torch.cat([dequantized(piece) for piece in layer.pieces()])
    assert isinstance(layer, QuantizedLinear)
    if layer.scheme.kind == "int4":
        columns = dequantize_int4(layer.weight, layer.scale, layer.zero, layer.row_scale)[:, : layer.in_features]
    else:
        columns = layer.weight.float() * layer.scale[:, None]
    return columns if layer.order is None else columns[:, layer.order.argsort()]


def check_ranks(checkpoint: Checkpoint) -> None:
    """Two ranks together hold the weights of one process: in wqkv 32 rows of queries each, 4 of keys and of values, in
    w13 64 of gate and of up."""
    whole, *ranks = (
        checkpoint.build(torch.float32, shard=shard).get_submodule("layers.1")
        for shard in (None, Shard(0, 2), Shard(1, 2))
    )
    for name, runs in {"wqkv": (32, 4, 4), "w13": (64, 64)}.items():
        held = [dequantized(rank.get_submodule(name)).split(runs) for rank in ranks]
        joined = torch.cat([rank[i] for i in range(len(runs)) for rank in held])
        assert torch.equal(joined, dequantized(whole.get_submodule(name)))
    for name in ("wo", "w2"):
        joined = torch.cat([dequantized(rank.get_submodule(name)) for rank in ranks], dim=1)
        assert torch.equal(joined, dequantized(whole.get_submodule(name)))
