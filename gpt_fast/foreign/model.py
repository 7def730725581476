"""A causal model of Hugging Face's transformers behind the engine: for families that have no description here.

Three ways to run its steps, tried in this order (ways.py). Each is taken only if it computes what the model computes by
itself:

==========  ======================================================================================================
paged       its attention layers call ours (transformers' attention interface), which reads the pages that all
            sequences share. All new tokens of a step go through the model together, as one row.
cached      every sequence has a cache that transformers made. One call for each sequence of a step.
recomputed  no cache: each step computes its sequences from their first token on
==========  ======================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_fast.config import EngineConfig, ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.foreign.linear import use_kernels
from gpt_fast.foreign.ways import Way, first_that_agrees
from gpt_fast.kernels.cache import LayerCache, PagedLayer, StepLayout
from gpt_fast.model.transformer import weight_bytes

log = logging.getLogger(__name__)

WHOLE_PROMPT = 4096  # tokens: the longest sequence, unless max_seq_len says more, where prompts cannot come in pieces


class Loaded(NamedTuple):
    """An ``AutoModelForCausalLM`` on its device in its dtype, and its shape, as far as the KV cache depends on it."""

    module: nn.Module
    config: ModelConfig


class ForeignModel:
    """The model of ``loaded``, for inference from now on. ``kernels``: the C++ kernels compute its linear layers where
    they can. Raises ConfigError for a model that no way computes, such as one whose logits change from call to call."""

    def __init__(self, loaded: Loaded, *, kernels: bool = True) -> None:
        model, config = loaded
        self.module: Any = model.eval()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if kernels:
            use_kernels(model)
        self.vocab_size = config.vocab_size
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._way = first_that_agrees(self.module, config.vocab_size)
        self.cache_layers: Sequence[PagedLayer] = self._way.cache_layers
        kind = type(model).__name__
        log.warning("transformers runs %s, which has no own path here: %s", kind, self._way.description)
        if self.cache_layers:
            heads, width = (max(sizes) for sizes in zip(*(layer[:2] for layer in self.cache_layers), strict=True))
            count = len(self.cache_layers)
            config = replace(config, num_layers=count, num_heads=heads, num_kv_heads=heads, head_dim=width)
        self.config = config

    @property
    def takes_pieces(self) -> bool:
        """Whether a prompt may be computed in several steps."""
        return self._way.takes_pieces

    def adapted(self, options: EngineConfig) -> EngineConfig:
        """``options`` as far as this model can follow them. Raises ConfigError for a draft that it cannot verify."""
        if options.drafter is not None and not self._way.goes_back:
            kind = type(self.module).__name__
            raise ConfigError(f"draft: {kind} keeps a state that wrong guesses cannot be taken out of; leave it out")
        if not self._way.paged:
            options = replace(options, prefix_cache=False)
        if not self._way.takes_pieces:
            room = options.num_pages * options.page_size if options.num_pages else WHOLE_PROMPT
            longest = options.max_seq_len or min(WHOLE_PROMPT, self.config.max_seq_len, room)
            options = replace(options, max_seq_len=longest, prefill_chunk=longest)
        return options

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size], without a cache."""
        with self._way.plain_attention():
            logits: Tensor = self.module(input_ids=tokens, use_cache=False).logits
        return logits

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        """Bytes read to decode one token with ``context_len`` tokens cached: all weights, experts that are not chosen
        included."""
        return weight_bytes(self.module) + context_len * self.config.kv_bytes_per_token(cache_itemsize)

    def make_step(self, cache: Sequence[LayerCache], page_table: Tensor) -> ForeignStep:
        return ForeignStep(self._way, cache)


class ForeignStep:
    """Steps over ``cache``, which only the paged way fills."""

    chain = ahead = apart = None
    path = "eager"

    def __init__(self, way: Way, cache: Sequence[LayerCache]) -> None:
        self._way, self._cache = way, cache

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        return self._way.run(tokens, positions, self._cache, layout, rows).float()

    def reads_host(self) -> bool:
        return False

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        for count in (1, min(2, longest)):
            run(count)
