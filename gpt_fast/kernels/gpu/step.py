"""``Transformer.step`` for a model on a GPU: short steps from CUDA graphs of the fused kernels, long ones by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gpt_fast.kernels.gpu.decoder import decoder_of
from gpt_fast.kernels.gpu.graphs import BUCKETS, CapturedDecoder, Run


class GpuStep:
    """Called as ``Transformer.step`` is, always with the cache that it was made for.

    ``model``, ``cache`` and ``page_table`` [S, P] int32 are shared, not copied: every step reads what is in them then.
    Raises ValueError for weights that the kernels do not take. ``capture``: as ``CapturedDecoder`` has it.
    """

    def __init__(
        self,
        model: Any,
        cache: Sequence[Any],
        page_table: Tensor,
        buckets: Sequence[int] = BUCKETS,
        capture: Callable[[Run], Run] | None = None,
    ) -> None:
        self._model, self._cache = model, cache
        self.captured = CapturedDecoder(decoder_of(model, cache), page_table, buckets, capture)

    def takes(self, num_tokens: int) -> bool:
        """Whether a graph holds so many tokens."""
        return self.captured.takes(num_tokens)

    def warm_up(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Compile the kernels and record every bucket. Must be called before the first step."""
        self.captured.warm_up(report)

    def __call__(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, cache: Sequence[Any], layout: Any, rows: Tensor
    ) -> Tensor:
        """Logits [R, V] float32 of the tokens in ``rows``.

        A short step takes its tensors from any device, pinned memory best; a long one from the model's. The page table
        is always the one that was given.
        """
        assert cache is self._cache
        if self.captured.takes(tokens.shape[0]):
            start, context_len, page_table, write_slots = layout
            return self.captured.step(
                tokens, positions, lengths, start, context_len, page_table, write_slots, rows
            )  # fmt: skip
        logits: Tensor = self._model.step(tokens, positions, lengths, cache, layout, rows)
        return logits.float()
