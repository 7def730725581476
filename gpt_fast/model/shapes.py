"""Published model shapes by name, for benchmarks that need no download and checkpoints that do not state theirs."""

from __future__ import annotations

from typing import Any

from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.errors import ConfigError


def _llama(
    vocab: int, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, max_seq_len: int = 4096,
    family: str = "llama", **more: Any,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(family, vocab, dim, layers, heads, kv_heads, dim // heads, ffn_dim, max_seq_len, **more)


# What Llama 3.1 and 3.2 share.
_LLAMA3: dict[str, Any] = {"rope_theta": 500000.0, "max_seq_len": 131072}
_LLAMA32 = _LLAMA3 | {"rope_scaling": RopeScaling("llama3", 32.0, 8192), "tie_embeddings": True}
_MISTRAL: dict[str, Any] = {"rope_theta": 1000000.0, "max_seq_len": 32768}
_QWEN25 = _MISTRAL | {"family": "qwen2", "qkv_bias": True, "norm_eps": 1e-6}
_EXPERTS = ExpertsConfig(num_experts=8, top_k=2, ffn_dim=14336)

SHAPES: dict[str, ModelConfig] = {
    "llama-68m": _llama(32000, 768, 2, 12, 12, 3072, norm_eps=1e-6, max_seq_len=2048),
    "llama-160m": _llama(32000, 768, 12, 12, 12, 3072, norm_eps=1e-6, max_seq_len=2048),
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, max_seq_len=2048),
    "llama-3.2-1b": _llama(128256, 2048, 16, 32, 8, 8192, **_LLAMA32),
    "llama-3.2-3b": _llama(128256, 3072, 28, 24, 8, 8192, **_LLAMA32),
    "llama-2-7b": _llama(32000, 4096, 32, 32, 32, 11008),
    "codellama-7b": _llama(32016, 4096, 32, 32, 32, 11008, rope_theta=1000000.0, max_seq_len=16384),
    "llama-3.1-8b": _llama(128256, 4096, 32, 32, 8, 14336, rope_scaling=RopeScaling("llama3", 8.0, 8192), **_LLAMA3),
    "qwen2.5-7b": _llama(152064, 3584, 28, 28, 4, 18944, **_QWEN25),
    # version 0.3, whose context has no sliding window
    "mistral-7b": _llama(32768, 4096, 32, 32, 8, 14336, family="mistral", **_MISTRAL),
    "mixtral-8x7b": _llama(32000, 4096, 32, 32, 8, 14336, family="mixtral", experts=_EXPERTS, **_MISTRAL),
}


def shape(name: str) -> ModelConfig:
    """The shape called ``name``. Raises ConfigError listing the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known; known: {', '.join(SHAPES)}")
    return SHAPES[name]
