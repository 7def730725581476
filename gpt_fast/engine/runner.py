"""Runs step plans on one device: builds tensors, calls the model, owns the KV cache and the compiled shapes.

The runner decides nothing. Where own kernels take whole steps, there is nothing to compile. Elsewhere compilation is by
block, once for one token and once for any larger number, so a model of any depth compiles in the time of one block and
no later step compiles anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from gpt_fast.engine.compile_cache import keep_private
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.kernels.cache import LayerCache
from gpt_fast.model.attention import StepLayout
from gpt_fast.model.cpu_model import CpuModel, CpuStep
from gpt_fast.model.transformer import Transformer

log = logging.getLogger(__name__)

_BLOCK_VARIANTS = 128


class Runner:
    """Executes plans of at most ``max_batch`` sequences, each of at most ``max_seq_len`` tokens.

    The cache of ``num_pages`` pages of ``page_size`` tokens is allocated here, once, in ``cache_dtype``: None is the
    dtype of the model. ``kernels``: own ones run the steps where they can.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_batch: int,
        max_seq_len: int,
        num_pages: int,
        page_size: int,
        prefill_chunk: int,
        compile: bool,
        cache_dtype: torch.dtype | None = None,
        kernels: bool = True,
    ) -> None:
        self.model = model
        self.device = model.device
        self.max_batch = max_batch
        self.page_size = page_size
        self.num_pages = num_pages
        self.prefill_chunk = prefill_chunk
        self.pages_per_sequence = -(-max_seq_len // page_size)
        c = model.config
        shape = (num_pages, page_size, c.num_kv_heads, c.head_dim)
        dtype = cache_dtype or model.dtype
        self.cache = [LayerCache.zeros(shape, dtype, self.device) for _ in range(c.num_layers)]
        # Layout tensors have one shape for ever; only their contents change.
        self._query_start = torch.zeros(max_batch + 1, dtype=torch.int32)
        self._context_len = torch.zeros(max_batch, dtype=torch.int32)
        self._page_table = torch.zeros(max_batch, self.pages_per_sequence, dtype=torch.int32)
        self._fast = CpuStep(model, self.cache) if isinstance(model, CpuModel) else None
        self._step = self._fast or model.step
        self.path = "kernels" if self._fast else "compiled" if compile else "eager"
        if self.path == "compiled":
            keep_private()
            for layer in model.layers:
                layer.compile(fullgraph=True, dynamic=True)

    @property
    def compiled(self) -> bool:
        """Whether steps run as machine code made for them, own kernels or torch.compile's."""
        return self.path != "eager"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache over all layers."""
        return sum(layer.num_bytes for layer in self.cache)

    @property
    def cache_itemsize(self) -> float:
        """Bytes of the cache for each number in it, scales included."""
        return self.cache_bytes / sum(layer.k.numel() + layer.v.numel() for layer in self.cache)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """Run one step; returns logits [plan.num_logits, vocab_size] in the plan's order, on the device."""
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        self._query_start.zero_()
        self._context_len.zero_()
        for s, sequence in enumerate(plan.sequences):
            self._place(sequence, s, positions, lengths, slots)
            tokens += sequence.tokens
            rows += range(len(tokens) - sequence.num_logits, len(tokens))
            self._query_start[s + 1 :] = len(tokens)
        given = [self._query_start, self._context_len, self._page_table]
        given += [torch.tensor(values, dtype=torch.int64) for values in (slots, tokens, positions, lengths)]
        if self._fast is None or not self._fast.takes(len(tokens)):
            given = [self._to_device(t) for t in given]
        start, context_len, page_table, write_slots, new, places, totals = given
        layout = StepLayout(start, context_len, page_table, write_slots)
        wanted = self._to_device(torch.tensor(rows, dtype=torch.int64))
        return self._step(new, places, totals, self.cache, layout, wanted)

    def _place(
        self, sequence: SequencePlan, s: int, positions: list[int], lengths: list[int], slots: list[int]
    ) -> None:
        """Append where the new tokens of slot ``s`` stand, and fill its row of the page table."""
        end = sequence.start + len(sequence.tokens)
        self._context_len[s] = end
        pages = sequence.pages
        self._page_table[s, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        size = self.page_size
        for position in range(sequence.start, end):
            positions.append(position)
            lengths.append(max(sequence.prompt_len, position + 1))
            slots.append(pages[position // size] * size + position % size)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def warm_up(self, report: Callable[[str], None] = log.info) -> None:
        """Run every shape that service will see, so that nothing compiles or allocates later.

        Without a working C++ compiler the blocks run uncompiled, after one warning.
        """
        if self.path == "compiled":
            _configure_compiler()
        if self._fast is not None:
            self._fast.warm_up(report)
        try:
            self._run_shapes(report)
        except Exception as error:  # the compiler raises many types, none of them public
            if self.path != "compiled":
                raise
            log.warning("torch.compile failed, running uncompiled and slower: %s", str(error).strip().splitlines()[0])
            self.path = "eager"
            for layer in self.model.layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()
            self._run_shapes(report)

    def _run_shapes(self, report: Callable[[str], None]) -> None:
        longest = min(
            self.prefill_chunk, (self.num_pages - 1) * self.page_size, self.pages_per_sequence * self.page_size
        )
        counts = [1, min(2, longest)]
        if self.path != "kernels":  # twice each: the second run must find everything compiled
            counts += [1, longest, min(3, longest)]
        for count in counts:
            report(f"warm-up: {count} token{'s' * (count > 1)} per step")
            pages = tuple(range(1, 2 + (count - 1) // self.page_size))
            logits = self.execute(StepPlan((SequencePlan((0,) * count, 0, pages, 1, count),)))
        if not logits.isfinite().all():
            log.warning("the model computes logits that are not finite: what it generates means nothing")


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
