"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) with the scalings of ``RopeScaling``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpt_fast.config import RopeScaling
from gpt_fast.model.description import RopeTable

Angles = tuple[Tensor, Tensor]  # cosines and sines


class Rope(nn.Module):
    """One table. ``forward(positions, lengths)``: cosines and sines, float32 [..., D / 2] for D rotated dimensions.

    ``lengths``: tokens of the sequence when each token was computed. They matter to ``dynamic`` and ``longrope``
    scaling alone, whose frequencies depend on them.
    """

    def __init__(self, table: RopeTable) -> None:
        super().__init__()
        self.table = table
        self.inv_freq: Tensor
        self.long: Tensor
        scaling = table.scaling
        self.register_buffer("inv_freq", inverse_frequencies(table), persistent=False)  # [D / 2] float32
        if scaling is not None and scaling.type == "longrope":
            long = _unscaled(table) / torch.tensor(scaling.long, device="cpu")
            self.register_buffer("long", long, persistent=False)

    @property
    def by_position(self) -> bool:
        """Whether the lengths do not matter."""
        return self.table.scaling is None or not self.table.scaling.grows

    def forward(self, positions: Tensor, lengths: Tensor) -> Angles:
        inv_freq, scaling = self.inv_freq, self.table.scaling
        if scaling is not None and scaling.type == "dynamic":
            inv_freq = _dynamic(self.table, scaling, lengths)
        elif scaling is not None and scaling.type == "longrope":
            inv_freq = torch.where((lengths > scaling.original_max_seq_len)[..., None], self.long, inv_freq)
        angles = positions.float()[..., None] * inv_freq
        if scaling is None or scaling.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of heads [..., H, D] by [..., R / 2] angles, first half of R against the second."""
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def inverse_frequencies(table: RopeTable) -> Tensor:
    """[D / 2] float32: radians per position of each rotated pair; of short sequences where they depend on length."""
    scaling, inv_freq = table.scaling, _unscaled(table)
    if scaling is None or scaling.type == "dynamic":
        return inv_freq
    if scaling.type == "linear":
        return inv_freq / scaling.factor
    if scaling.type == "longrope":
        return inv_freq / torch.tensor(scaling.short, device="cpu")
    if scaling.type == "yarn":
        return _yarn(table, scaling)
    # Llama 3.1: low frequencies are interpolated, high ones kept, those between blended smoothly.
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_max_seq_len / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def _unscaled(table: RopeTable) -> Tensor:
    exponents = torch.arange(0, table.dim, 2, dtype=torch.float32, device="cpu") / table.dim
    return 1.0 / table.theta**exponents


def _yarn(table: RopeTable, scaling: RopeScaling) -> Tensor:
    """Frequencies that turn often within the original length stay, those that turn seldom are interpolated."""

    def dimension(rotations: float) -> float:
        length = scaling.original_max_seq_len / (rotations * 2 * math.pi)
        return table.dim * math.log(length) / (2 * math.log(table.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, table.dim - 1)
    high += 0.001 * (low == high)
    kept = 1 - ((torch.arange(table.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    inv_freq = _unscaled(table)
    return inv_freq / scaling.factor * (1 - kept) + inv_freq * kept


def _dynamic(table: RopeTable, scaling: RopeScaling, lengths: Tensor) -> Tensor:
    """NTK-aware frequencies per token, [..., D / 2]: the base grows with the sequence's length (bloc97 2023)."""
    dim = table.dim
    longest = lengths.clamp(min=scaling.original_max_seq_len).double()
    growth = scaling.factor * longest / scaling.original_max_seq_len - (scaling.factor - 1)
    base = table.theta * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=lengths.device, dtype=torch.float64) / dim
    return (base[..., None] ** -exponents).float()
