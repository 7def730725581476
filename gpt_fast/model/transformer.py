"""A decoder-only transformer: mathematics only.

What it is: embeddings, blocks of attention and a gated MLP (Llama and the families that share its shape,
families.py), a head. What it is not: it does not know checkpoints, quantization, parallelism, pages or batches;
those are applied from outside (quantize/, parallel.py, attention.py, engine/).

The same blocks run in two layouts. ``forward`` takes whole sequences [B, T] without a cache: training, and the
plain reference. ``step`` takes the new tokens [N] of one engine step with a cache (attention.py).

Linear weights are stored fused, as they are read: ``wqkv`` is q, k and v stacked, ``w13`` gate and up. Rotary
embeddings rotate the two halves of a head (Hugging Face's layout); importers permute interleaved weights.

Legend: B sequences, T tokens, N new tokens, H query heads, K key-value heads, D head dimension, E model dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast.config import ModelConfig
from gpt_fast.kernels.cache import LayerCache
from gpt_fast.model.attention import StepLayout, attend, attend_plain

KVCache = Sequence[LayerCache]  # one for each layer


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467), computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Rope(nn.Module):
    """Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) with the scalings of ``RopeScaling``.

    ``forward(positions, lengths)`` gives cos and sin, float32, [..., D / 2]. ``lengths`` matters to ``dynamic``
    scaling alone, whose frequencies depend on how long the sequence was when the token was computed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)  # [D / 2] float32

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.type == "dynamic" and lengths is not None:
            inv_freq = self._dynamic(lengths)
        angles = positions.float()[..., None] * inv_freq
        return angles.cos(), angles.sin()

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """NTK-aware frequencies per token, [..., D / 2]: the base grows with the sequence's length (bloc97 2023)."""
        scaling = self.config.rope_scaling
        assert scaling is not None
        dim = self.config.head_dim
        longest = lengths.clamp(min=scaling.original_max_seq_len).double()
        growth = scaling.factor * longest / scaling.original_max_seq_len - (scaling.factor - 1)
        base = self.config.rope_theta * growth ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=lengths.device, dtype=torch.float64) / dim
        return (base[..., None] ** -exponents).float()


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[D / 2] float32: radians per position of each rotated pair, scaled as the checkpoint asks."""
    dim, scaling = config.head_dim, config.rope_scaling
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if scaling is None or scaling.type == "dynamic":
        return inv_freq
    if scaling.type == "linear":
        return inv_freq / scaling.factor
    # Llama 3.1: low frequencies are interpolated, high ones kept, those between blended smoothly.
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_max_seq_len / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., H, D] by [..., D / 2] angles, first half of a head against the second."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, window: int) -> None:
        super().__init__()
        self.config, self.window = config, window
        self.wqkv = nn.Linear(config.dim, config.q_dim + 2 * config.kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.q_dim, config.dim, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None,
        layout: StepLayout | None,
    ) -> Tensor:
        c = self.config
        q, k, v = self.wqkv(x).split((c.q_dim, c.kv_dim, c.kv_dim), dim=-1)
        q = q.unflatten(-1, (-1, c.head_dim))  # [..., H, D]
        k = k.unflatten(-1, (-1, c.head_dim))  # [..., K, D]
        v = v.unflatten(-1, (-1, c.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if layout is None or cache is None:
            out = attend_plain(q, k, v, self.window)
        else:
            out = attend(q, k, v, cache, layout, self.window)
        result: Tensor = self.wo(out.flatten(-2))
        return result


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        out: Tensor = self.w2(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, config.window(layer))
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,  # [..., E]
        cos: Tensor,  # [..., D / 2]
        sin: Tensor,
        cache: LayerCache | None = None,
        layout: StepLayout | None = None,
    ) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, cache, layout)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rope = Rope(config)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size]; no cache, no pages. The plain reference."""
        num_tokens = tokens.shape[1]
        positions = torch.arange(num_tokens, device=tokens.device)
        cos, sin = self.rope(positions, torch.full_like(positions, num_tokens))
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def step(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, cache: KVCache, layout: StepLayout, rows: Tensor
    ) -> Tensor:
        """One engine step: new tokens [N] at ``positions`` [N] -> logits [R, vocab_size] of the tokens in ``rows`` [R].

        ``lengths`` [N]: tokens of the sequence when this one was computed (``Rope``). ``cache`` receives the new
        keys and values where ``layout`` says.
        """
        cos, sin = self.rope(positions, lengths)
        x = self.tok_embeddings(tokens)  # [N, E]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, cos, sin, layer_cache, layout)
        return self.logits(x, rows)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [N, E] -> logits [R, vocab_size] of the chosen rows."""
        out: Tensor = self.output(self.norm(x[rows]))
        return out

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        """Bytes read to decode one token at batch 1 with ``context_len`` tokens cached: all weights but the unused
        rows of the embedding, and the keys and values."""
        weights = weight_bytes(self)
        if not self.config.tie_embeddings:
            table = self.tok_embeddings.weight
            weights -= (table.numel() - self.config.dim) * table.element_size()
        return weights + context_len * self.config.kv_bytes_per_token(cache_itemsize)

    def flops_per_token(self, context_len: int) -> int:
        """Multiply-adds, counted as two, to compute one token with ``context_len`` tokens cached."""
        c = self.config
        matmul = c.num_parameters if c.tie_embeddings else c.num_parameters - c.vocab_size * c.dim
        return 2 * matmul + 4 * c.num_layers * c.q_dim * context_len


def weight_bytes(module: nn.Module) -> int:
    """Bytes of ``unique_tensors``."""
    return sum(t.numel() * t.element_size() for t in unique_tensors(module))


def unique_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and persistent buffers of ``module``, a shared one once."""
    seen = {t.data_ptr() or id(t): t for t in module.state_dict(keep_vars=True).values()}
    return list(seen.values())
