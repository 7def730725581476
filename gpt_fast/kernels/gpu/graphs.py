"""CUDA graphs of a program's steps, one for each of a few numbers of tokens; a step replays the next larger one.

A step of 8B weights in int4 takes three milliseconds and some two hundred launches: launched one by one from Python
they would take several times that. A graph is recorded once, with fixed buffers; a step copies its inputs there and
replays. Prompts of more tokens than a recording holds take longer than their launches, and are launched one by one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpt_fast.kernels.cache import StepLayout
from gpt_fast.kernels.gpu.launching import MAX_TOKENS
from gpt_fast.kernels.gpu.linear import Row
from gpt_fast.kernels.gpu.program import GpuProgram

BUCKETS = (1, 2, 4, 8, 16, 32, MAX_TOKENS)
PROMPT_BUCKETS = (32, 64, 128, 192, 256, 384, 512)

Found = Tensor | Row
Run = Callable[[], Any]
_Given = TypeVar("_Given", np.ndarray, Tensor)


class CapturedProgram:
    """Steps of generated tokens, at most ``buckets[-1]``, and of any number of prompts' tokens, over the sequences of
    ``page_table`` [S, P] int32.

    The table lies on the program's device and is read by every replay: its owner changes entries in place.
    ``capture`` turns a function into one that does the same again: ``CudaCapture()``, or without CUDA the function
    itself. ``warm_up`` records every bucket and must be called before ``step``. Not for several threads at once.
    """

    def __init__(
        self,
        program: GpuProgram,
        page_table: Tensor,
        buckets: Sequence[int] = BUCKETS,
        capture: Callable[[Run], Run] | None = None,
        prompt_buckets: Sequence[int] = PROMPT_BUCKETS,
    ) -> None:
        self.program, self.page_table = program, page_table
        self.buckets, self._prompt_buckets = tuple(sorted(buckets)), tuple(sorted(prompt_buckets))
        self._capture = capture or CudaCapture()
        # Of each bucket what a step is given, in one tensor and so in one copy: query_start and context_len, then
        # tokens, positions, lengths and write slots.
        self._slots = page_table.shape[0]
        self._given, self._prompts_given = (
            {b: torch.from_numpy(self._padding(b)).to(program.device) for b in found}
            for found in (self.buckets, self._prompt_buckets)
        )
        # The step of a bucket with the inputs that are there. What it gives lives until the next replay.
        self.replays: dict[int, Callable[[], Tensor]] = {}
        self._prompt_replays: dict[int, Callable[[], Found]] = {}

    @property
    def most(self) -> int:
        """How many generated tokens a step takes."""
        return self.buckets[-1]

    def bucket(self, num_tokens: int) -> int:
        """The least bucket that holds ``num_tokens``. Raises ValueError where there is none."""
        bucket = _least(self.buckets, num_tokens)
        if bucket is None:
            raise ValueError(f"{num_tokens} new tokens; the largest bucket holds {self.buckets[-1]}")
        return bucket

    @torch.inference_mode()
    def warm_up(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Record all buckets, the largest first, so that the others find its memory. Compiles what is not compiled."""
        for what, given, run, replays in (
            ("prompts", self._prompts_given, self._run_prompts, self._prompt_replays),
            ("steps", self._given, self._run_step, self.replays),
        ):
            for bucket in sorted(given, reverse=True):
                report(f"recording {what} of {bucket} token{'s' * (bucket > 1)}")
                given[bucket].copy_(torch.from_numpy(self._padding(bucket)))
                replays[bucket] = self._capture(functools.partial(run, given[bucket]))

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """Logits [R, V] of the tokens in ``rows``, in new memory. The arguments of ``Transformer.step``.

        The page table, the recorded one, lies on the device, and the tokens may. All others lie on the host.
        """
        bucket = self.bucket(tokens.shape[0])
        target = self._given[bucket]
        target.copy_(self._filled(bucket, tokens, positions, lengths, layout), non_blocking=True)
        if tokens.device.type != "cpu":
            self._parts(target)[2][0, : tokens.shape[0]].copy_(tokens)
        return self.replays[bucket]().index_select(0, rows.to(target.device, non_blocking=True))

    @torch.inference_mode()
    def prompts(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """The same for any number of tokens of prompts; they lie on the host, too."""
        num_tokens, device = tokens.shape[0], self.program.device
        bucket = _least(self._prompt_buckets, num_tokens)
        filled = self._filled(bucket or num_tokens, tokens, positions, lengths, layout)
        if bucket is None:
            found = self._run_prompts(filled.to(device))
        else:
            self._prompts_given[bucket].copy_(filled, non_blocking=True)
            found = self._prompt_replays[bucket]()
        return self.program.head(found, rows.to(device, non_blocking=True))

    def _filled(self, size: int, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout) -> Tensor:
        """What a step is given, on the host, padded to ``size`` tokens. Tokens that are on the device are left out."""
        if layout.page_table is not self.page_table:
            raise ValueError("another page table than the one that the steps were recorded for")
        given = self._padding(size)
        start, context_len, own = self._parts(given)
        start[:] = layout.query_start.cpu().numpy()
        context_len[:] = layout.context_len.cpu().numpy()
        on_host = tokens.device.type == "cpu"
        for i, source in enumerate((tokens if on_host else None, positions, lengths, layout.write_slots)):
            if source is not None:
                own[i, : tokens.shape[0]] = source.cpu().numpy()
        return torch.from_numpy(given)

    def _padding(self, size: int) -> np.ndarray:
        """Nothing but rows past the tokens: token 0 at position 0 of a sequence of length 1, written to page 0, seen by
        nobody."""
        given = np.zeros(2 * self._slots + 1 + 4 * size, dtype=np.int64)
        self._parts(given)[2][2] = 1
        return given

    def _parts(self, given: _Given) -> tuple[_Given, _Given, _Given]:
        """Views: query_start [S + 1], context_len [S], and tokens, positions, lengths, write slots [4, size]."""
        behind = 2 * self._slots + 1
        return given[: self._slots + 1], given[self._slots + 1 : behind], given[behind:].reshape(4, -1)

    def _run_step(self, given: Tensor) -> Tensor:
        return self.program.step(*self._arguments(given))

    def _run_prompts(self, given: Tensor) -> Found:
        return self.program.prompts(*self._arguments(given))

    def _arguments(self, given: Tensor) -> tuple[Tensor, Tensor, Tensor, StepLayout]:
        start, context_len, rows = self._parts(given)
        tokens, positions, lengths, write_slots = rows
        return tokens, positions, lengths, StepLayout(start.int(), context_len.int(), self.page_table, write_slots)


def _least(buckets: Sequence[int], num_tokens: int) -> int | None:
    return next((bucket for bucket in buckets if num_tokens <= bucket), None)


class CudaCapture:
    """Records CUDA graphs; all recordings share one pool of memory, so a result lives until the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # a graph that nobody needs must not be destroyed while another is recorded

    def __call__(self, run: Run) -> Run:
        """``run`` recorded, after two plain runs that compile and allocate."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
            torch.cuda.synchronize()
            # torch.cuda.graph would collect garbage each time: half a second. What other threads ask of CUDA meanwhile,
            # as NCCL's do, is none of this recording's business.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Any:
            graph.replay()
            return out

        return replay
