"""A ``Transformer`` whose layers are on several devices, behind the engine: in plain torch, one layer after the other.

Embedding and head are on the model's device. The hidden state goes where the next layer is, and so does what every
layer reads: positions, angles and the step's layout, the page table included, once for each change of device. CUDA
graphs, torch.compile and the C++ program of whole steps hold one device each, so none of them runs here; on a GPU
attention and quantized products still use Triton. It has not been run on GPUs yet: tests run it on CPUs, and check that
no operation mixes devices.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gpt_fast.kernels.cache import PagedLayer, StepLayout
from gpt_fast.model.transformer import Context, KVCache, Transformer

log = logging.getLogger(__name__)


class SplitModel:
    """``model``, whose layers are on ``devices``, one for each layer, and all else on its own device."""

    def __init__(self, model: Transformer, devices: Sequence[torch.device]) -> None:
        self.transformer, self.config, self.devices = model, model.config, devices
        self.device, self.dtype, self.vocab_size = model.device, model.dtype, model.config.vocab_size
        heads = self.config.num_kv_heads, self.config.head_dim
        self.cache_layers = [PagedLayer(*heads, device) for device in devices]
        self.bytes_per_token = model.bytes_per_token
        runs = ", ".join(f"{len(list(group))} on {device}" for device, group in itertools.groupby(devices))
        log.info("layers: %s; plain torch runs them, without graphs, torch.compile and the C++ program", runs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size], without a cache."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        with current(self.device):
            context = self.transformer.context(tokens, positions, torch.full_like(positions, tokens.shape[1]))
            logits: Tensor = self.transformer.head(self.hidden(context).to(self.device), context)
        return logits

    def make_step(self, cache: KVCache, page_table: Tensor) -> SplitStep:
        return SplitStep(self, cache)

    def hidden(self, context: Context, cache: KVCache | None = None) -> Tensor:
        """What the last layer makes, [..., E], on its device. ``context`` is on the model's device."""
        x: Tensor = self.transformer.embed(context.tokens, context)
        place = self.device
        for i, (layer, device) in enumerate(zip(self.transformer.layers, self.devices, strict=True)):
            if device != place:
                place, x, context = device, x.to(device), moved(context, device)
            with current(device):
                x = layer(x, context if cache is None else context._replace(cache=cache[i]))
        return x


class SplitStep:
    """The steps of one model over one cache, each layer's part of which is on the layer's device."""

    chain = ahead = apart = None
    path = "eager"

    def __init__(self, model: SplitModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        whole = self._model.transformer
        with current(self._model.device):
            context = whole.context(tokens, positions, lengths)
            x = self._model.hidden(context._replace(layout=layout), self._cache).to(self._model.device)
            logits: Tensor = whole.head(x[rows], context)
        return logits.float()

    def reads_host(self) -> bool:
        return False

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        for count in (1, longest):
            run(count)


def moved(context: Context, device: torch.device) -> Context:
    """``context`` of a step or of whole sequences on ``device``."""
    layout = None if context.layout is None else StepLayout(*(t.to(device) for t in context.layout))
    angles = [(cos.to(device), sin.to(device)) for cos, sin in context.angles]
    tokens, positions = context.tokens.to(device), context.positions.to(device)
    return context._replace(tokens=tokens, positions=positions, angles=angles, layout=layout)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the one on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
