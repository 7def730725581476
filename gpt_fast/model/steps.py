"""A ``Transformer`` behind the engine (engine/model.py): what it caches, and what runs its steps.

On a CPU the C++ kernels run it where they can (cpu_model.py), on a GPU Triton's (gpu_model.py). Elsewhere torch
compiles it block by block, once for one token and once for any larger number, so a model of any depth compiles in the
time of one block and no later step compiles anything. Without a working C++ compiler the blocks run uncompiled, after
one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gpt_fast.errors import UnsupportedError, first_line
from gpt_fast.foreign.model import ForeignModel, Loaded
from gpt_fast.kernels import gpu
from gpt_fast.kernels.cache import PagedLayer, StepLayout
from gpt_fast.kernels.cpu import translation
from gpt_fast.model import shares
from gpt_fast.model.compile_cache import keep_private
from gpt_fast.model.cpu_model import CpuModel, pack_model
from gpt_fast.model.split import SplitModel
from gpt_fast.model.transformer import KVCache, Transformer

if TYPE_CHECKING:
    from gpt_fast.kernels.gpu.graphs import CapturedProgram

log = logging.getLogger(__name__)

_BLOCK_VARIANTS = 128


class Ranks(translation.Ranks, shares.Collectives, Protocol):
    """The processes that share a model with this one, whatever runs it (parallel/ranks.py)."""


def serve(
    model: Transformer | Loaded | Served,
    *,
    kernels: bool = True,
    compile: bool = True,
    ranks: Ranks | None = None,
    layer_devices: Sequence[torch.device] = (),
) -> Served:
    """``model`` for the engine, or as it is if it is that already.

    ``kernels``: own kernels run its steps where they can, and take its weights away on a CPU. ``compile``: else
    torch.compile's code does. ``ranks``: ``model`` is the share of one of them, who all serve theirs.
    ``layer_devices``: where each layer is; (): where the rest is.
    """
    if isinstance(model, Loaded):
        return ForeignModel(model, kernels=kernels)
    if not isinstance(model, Transformer):
        return model
    if any(device != model.device for device in layer_devices):
        return SplitModel(model.eval(), layer_devices)
    packed = pack_model(model.eval(), ranks) if kernels else None
    return packed or TorchModel(model, kernels=kernels, compile=compile, ranks=ranks)


class TorchModel:
    """``model`` in plain torch, compiled or not, and on a GPU by Triton's kernels where ``kernels`` allows.

    ``ranks``: ``model`` is the share of one of them, and is joined with the others'."""

    def __init__(self, model: Transformer, *, kernels: bool, compile: bool, ranks: Ranks | None = None) -> None:
        self.transformer, self.config = model, model.config
        self._kernels, self._compile = kernels, compile
        self.device, self.dtype, self.vocab_size = model.device, model.dtype, model.config.vocab_size
        self._ranks = ranks
        if ranks is not None:
            shares.join(model, ranks)
        self.cache_layers = [PagedLayer(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers
        self.bytes_per_token, self.forward = model.bytes_per_token, model.forward

    def make_step(self, cache: KVCache, page_table: Tensor) -> TorchStep | GpuStep:
        wanted = self._kernels and self.transformer.device.type == "cuda"
        captured = _capture(self.transformer, cache, page_table, self._ranks) if wanted else None
        plain = partial(TorchStep, self.transformer, cache, compile=self._compile)
        return GpuStep(captured, plain) if captured else plain()


Served = CpuModel | TorchModel | SplitModel | ForeignModel


class GpuStep:
    """The steps of one model over one cache by Triton's kernels; where those cannot be recorded, by ``instead``."""

    chain = ahead = None

    def __init__(self, captured: CapturedProgram, instead: Callable[[], TorchStep]) -> None:
        self.apart: CapturedProgram | None = captured
        self._instead = instead
        self._plain: TorchStep | None = None

    @property
    def path(self) -> str:
        return "kernels" if self._plain is None else self._plain.path

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """All tokens as those of prompts."""
        run = self._plain if self.apart is None else self.apart.prompts
        assert run is not None
        return run(tokens, positions, lengths, layout, rows)

    def reads_host(self) -> bool:
        return self._plain is None

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        if self.apart is not None:
            try:
                self.apart.warm_up(log.info)
                run(1)
                run(longest)
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Triton's compiler raises many types
                log.warning("the GPU kernels failed, and plain torch runs this model, slower: %s", first_line(error))
                self.apart, self._plain = None, self._instead()
        assert self._plain is not None
        self._plain.warm_up(run, longest)


class TorchStep:
    """The steps of one model over one cache in plain torch. ``path`` says whether they are compiled."""

    chain = ahead = apart = None

    def __init__(self, model: Transformer, cache: KVCache, *, compile: bool) -> None:
        self._model, self._cache, self._compiled = model, cache, compile
        if compile:
            keep_private()
            for layer in model.layers:
                if not layer.compiles_whole:
                    layer.run_experts = torch.compiler.disable(layer.run_experts)
                layer.compile(fullgraph=layer.compiles_whole, dynamic=True)

    @property
    def path(self) -> str:
        return "compiled" if self._compiled else "eager"

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        return self._model.step(tokens, positions, lengths, self._cache, layout, rows).float()

    def reads_host(self) -> bool:
        return False

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        # Compiled shapes twice each: the second run must find everything compiled.
        shapes = [1, min(2, longest), 1, longest, min(3, longest)]
        if self._compiled:
            _configure_compiler()
        try:
            for count in shapes:
                run(count)
        except Exception as error:  # the compiler raises many types, none of them public
            if not self._compiled:
                raise
            log.warning("torch.compile failed, running uncompiled and slower: %s", first_line(error))
            self._compiled = False
            for layer in self._model.layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()
            for count in shapes:
                run(count)


def _capture(
    model: Transformer, cache: KVCache, page_table: Tensor, ranks: Ranks | None = None
) -> CapturedProgram | None:
    if not gpu.available():
        return None
    from gpt_fast.kernels.gpu.graphs import CapturedProgram
    from gpt_fast.model.gpu_model import gpu_program

    try:
        captured = CapturedProgram(gpu_program(model, cache, ranks), page_table)
    except UnsupportedError as why:
        log.warning("the GPU kernels do not run %s: plain torch runs this model, and slower", why)
        return None
    return captured


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
