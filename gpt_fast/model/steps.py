"""A ``Transformer`` behind the engine (engine/model.py): what it caches, and what runs its steps.

Own kernels run the steps where they can (packed.py). Elsewhere torch compiles block by block, once for one token and
once for any larger number, so a model of any depth compiles in the time of one block and no later step compiles
anything. Without a working C++ compiler the blocks run uncompiled, after one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from gpt_fast.kernels.cache import PagedLayer
from gpt_fast.model.attention import StepLayout
from gpt_fast.model.compile_cache import keep_private
from gpt_fast.model.packed import fast_step, pack_model
from gpt_fast.model.transformer import KVCache, Transformer

log = logging.getLogger(__name__)

_BLOCK_VARIANTS = 128


class ServedTransformer:
    """``model`` for inference. ``kernels``: it is packed for own kernels where they can run it, and they run its steps;
    ``compile``: else torch.compile's code does."""

    def __init__(self, model: Transformer, *, kernels: bool = True, compile: bool = True) -> None:
        self._model, self._kernels, self._compile = model.eval(), kernels, compile
        if kernels:
            pack_model(model)
        config = model.config
        self.device, self.dtype = model.tok_embeddings.weight.device, model.norm.weight.dtype
        self.vocab_size = config.vocab_size
        self.cache_layers = [PagedLayer(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.bytes_per_token, self.forward = model.bytes_per_token, model.forward

    def make_step(self, cache: KVCache, page_table: Tensor) -> TransformerStep:
        return TransformerStep(self._model, cache, page_table, kernels=self._kernels, compile=self._compile)


class TransformerStep:
    """The steps of one model over one cache. ``path`` says what runs them."""

    def __init__(self, model: Transformer, cache: KVCache, page_table: Tensor, *, kernels: bool, compile: bool) -> None:
        self._model, self._cache = model, cache
        self._fast = fast_step(model, cache, page_table) if kernels else None
        self._run = self._fast or model.step
        self.path = "kernels" if self._fast else "compiled" if compile else "eager"
        if self.path == "compiled":
            keep_private()
            for layer in model.layers:
                layer.compile(fullgraph=True, dynamic=True)

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        return self._run(tokens, positions, lengths, self._cache, layout, rows)

    def reads_host(self, num_tokens: int) -> bool:
        return self._fast is not None and self._fast.takes(num_tokens)

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        if self._fast is not None:
            self._fast.warm_up(log.info)
            shapes = [1, min(2, longest)]
        else:  # twice each: the second run must find everything compiled
            shapes = [1, min(2, longest), 1, longest, min(3, longest)]
        if self.path == "compiled":
            _configure_compiler()
        try:
            for count in shapes:
                run(count)
        except Exception as error:  # the compiler raises many types, none of them public
            if self.path != "compiled":
                raise
            log.warning("torch.compile failed, running uncompiled and slower: %s", str(error).strip().splitlines()[0])
            self.path = "eager"
            for layer in self._model.layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()
            for count in shapes:
                run(count)


def _configure_compiler() -> None:
    """In the thread that compiles: another thread's settings do not count."""
    # Imported here because that takes seconds and makes a folder (compile_cache.keep_private).
    import torch._dynamo.config
    import torch._inductor.config

    # Precompiled headers go into the shared temporary folder whatever the environment says, under a name that everybody
    # can guess. Without them blocks compile as fast.
    torch._inductor.config.cpp_cache_precompile_headers = False
    # Dynamo counts the variants of Block.forward over all models of the process: two for each kind of block.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _BLOCK_VARIANTS)
