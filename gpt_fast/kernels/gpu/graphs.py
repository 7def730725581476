"""CUDA graphs of a program's steps, one for each of a few numbers of tokens; a step replays the next larger one.

A step of 8B weights in int4 takes a millisecond and some two hundred launches: launched one by one from Python they
would take several times that. A graph is recorded once, with fixed buffers; a step copies its inputs there and replays.

The program's plain call is the twin of a replay. ``capture`` may be anything that turns a function into one that does
the same again: ``cuda_capture``, or on a machine without CUDA the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.gpu.program import GpuProgram

BUCKETS = (1, 2, 4, 8, 16)

Run = Callable[[], Tensor]


class _Rows(NamedTuple):
    """The inputs of one bucket; views of one tensor, so that one copy fills them."""

    all: Tensor  # [4, bucket] int64

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tokens, positions, lengths and write slots, [bucket] each."""
        return self.all.unbind(0)


class CapturedProgram:
    """Steps of at most ``buckets[-1]`` new tokens over the sequences of ``page_table`` [S, P] int32.

    The table lies on the program's device and is read by every replay: its owner changes entries in place.
    ``warm_up`` records every bucket and must be called before ``step``. Not for several threads at once.
    """

    def __init__(
        self,
        program: GpuProgram,
        page_table: Tensor,
        buckets: Sequence[int] = BUCKETS,
        capture: Callable[[Run], Run] | None = None,
    ) -> None:
        self.program, self.buckets = program, tuple(sorted(buckets))
        self._capture = capture or CudaCapture()
        device = program.device
        self._page_table = page_table
        num_slots = page_table.shape[0]
        self._slots = torch.zeros(2 * num_slots + 1, dtype=torch.int32, device=device)
        self._views = self._slots.split((num_slots + 1, num_slots))  # query_start and context_len
        self._rows = {b: _Rows(torch.zeros(4, b, dtype=torch.int64, device=device)) for b in self.buckets}
        self._replay: dict[int, Run] = {}

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
        self._slots.zero_()
        for bucket in reversed(self.buckets):
            report(f"recording steps of {bucket} token{'s' * (bucket > 1)}")
            self._pad(bucket, 0)
            self._replay[bucket] = self._capture(lambda b=bucket: self._run(b))  # type: ignore[misc]

    @torch.inference_mode()
    def step(
        self,
        tokens: Tensor,  # [N] int64; this and the others on any device, copied from pinned memory without waiting
        positions: Tensor,
        lengths: Tensor,
        query_start: Tensor,  # [S + 1] int32
        context_len: Tensor,  # [S] int32
        page_table: Tensor,  # the one that was recorded
        write_slots: Tensor,  # [N] int64
        rows: Tensor,  # [R] int64, on the device
    ) -> Tensor:
        """Logits [R, V] of the tokens in ``rows``, in memory of their own. The arguments of ``Transformer.step``."""
        num_tokens = tokens.shape[0]
        bucket = self.bucket(num_tokens)
        if page_table is not self._page_table:
            raise ValueError("another page table than the one that the steps were recorded for")
        for view, given in zip(self._views, (query_start, context_len), strict=True):
            view.copy_(given, non_blocking=True)
        self._pad(bucket, num_tokens)
        for target, given in zip(self._rows[bucket].parts, (tokens, positions, lengths, write_slots), strict=True):
            target[:num_tokens].copy_(given, non_blocking=True)
        return self.replay(bucket).index_select(0, rows)

    def replay(self, bucket: int) -> Tensor:
        """The step of ``bucket`` once more, with the inputs that are there; its result lives until the next replay."""
        return self._replay[bucket]()

    def _pad(self, bucket: int, num_tokens: int) -> None:
        """Rows past the tokens: token 0 at position 0 of a sequence of length 1, written to page 0, seen by nobody."""
        if num_tokens < bucket:
            self._rows[bucket].all[:, num_tokens:] = 0
            self._rows[bucket].parts[2][num_tokens:] = 1

    def _run(self, bucket: int) -> Tensor:
        tokens, positions, lengths, write_slots = self._rows[bucket].parts
        start, context_len = self._views
        return self.program.step(tokens, positions, lengths, start, context_len, self._page_table, write_slots)


class CudaCapture:
    """Records with ``torch.cuda.graph``; all recordings share one pool of memory, so a result lives until the next."""

    def __init__(self, warm_up_runs: int = 2) -> None:
        self.warm_up_runs = warm_up_runs
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """``run`` recorded, after some plain runs on a stream of their own that compile and allocate."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.warm_up_runs):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
