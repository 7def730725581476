"""CUDA graphs of a program's steps, one for each of a few numbers of tokens; a step replays the next larger one.

A step of 8B weights in int4 takes a millisecond and some two hundred launches: launched one by one from Python they
would take several times that. A graph is recorded once, with fixed buffers; a step copies its inputs there and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpt_fast.kernels.cache import StepLayout
from gpt_fast.kernels.gpu.launching import MAX_TOKENS
from gpt_fast.kernels.gpu.program import GpuProgram

# The products of 17 to 32 tokens cost the same, and those of 33 to 48.
BUCKETS = (1, 2, 4, 8, 16, 32, MAX_TOKENS)

Run = Callable[[], Tensor]


class CapturedProgram:
    """Steps of at most ``buckets[-1]`` new tokens over the sequences of ``page_table`` [S, P] int32.

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
    ) -> None:
        self.program, self.buckets, self._page_table = program, tuple(sorted(buckets)), page_table
        self._capture = capture or CudaCapture()
        device, slots = program.device, page_table.shape[0]
        self._start = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._context_len = torch.zeros(slots, dtype=torch.int32, device=device)
        # Of each bucket tokens, positions, lengths and write slots, one row each
        self._rows = {b: torch.zeros(4, b, dtype=torch.int64, device=device) for b in self.buckets}
        self.replays: dict[int, Run] = {}  # the step of a bucket with the inputs that are there, until the next replay

    def takes(self, num_tokens: int) -> bool:
        """Whether a bucket holds so many tokens."""
        return 1 <= num_tokens <= self.buckets[-1]

    def bucket(self, num_tokens: int) -> int:
        """The least bucket that holds ``num_tokens``. Raises ValueError where there is none."""
        for bucket in self.buckets:
            if num_tokens <= bucket:
                return bucket
        raise ValueError(f"{num_tokens} new tokens; the largest bucket holds {self.buckets[-1]}")

    @torch.inference_mode()
    def warm_up(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Record all buckets, the largest first, so that the others find its memory. Compiles what is not compiled."""
        self._start.zero_()
        for bucket in reversed(self.buckets):
            report(f"recording steps of {bucket} token{'s' * (bucket > 1)}")
            self._pad(bucket, 0)
            self.replays[bucket] = self._capture(lambda b=bucket: self._run(b))  # type: ignore[misc]

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """Logits [R, V] of the tokens in ``rows``, in new memory. The arguments of ``Transformer.step``.

        ``rows`` and the page table, the recorded one, lie on the device. All others may lie anywhere; from pinned
        memory they are copied without waiting.
        """
        num_tokens = tokens.shape[0]
        bucket = self.bucket(num_tokens)
        if layout.page_table is not self._page_table:
            raise ValueError("another page table than the one that the steps were recorded for")
        self._start.copy_(layout.query_start, non_blocking=True)
        self._context_len.copy_(layout.context_len, non_blocking=True)
        self._pad(bucket, num_tokens)
        given = (tokens, positions, lengths, layout.write_slots)
        for target, source in zip(self._rows[bucket], given, strict=True):
            target[:num_tokens].copy_(source, non_blocking=True)
        return self.replays[bucket]().index_select(0, rows)

    def _pad(self, bucket: int, num_tokens: int) -> None:
        """Rows past the tokens: token 0 at position 0 of a sequence of length 1, written to page 0, seen by nobody."""
        if num_tokens < bucket:
            self._rows[bucket][:, num_tokens:] = 0
            self._rows[bucket][2, num_tokens:] = 1

    def _run(self, bucket: int) -> Tensor:
        tokens, positions, lengths, write_slots = self._rows[bucket]
        layout = StepLayout(self._start, self._context_len, self._page_table, write_slots)
        return self.program.step(tokens, positions, lengths, layout)


class CudaCapture:
    """Records with ``torch.cuda.graph``; all recordings share one pool of memory, so a result lives until the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """``run`` recorded, after two plain runs that compile and allocate."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # it synchronizes first
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
