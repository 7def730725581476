"""What the engine needs of a model. Whatever has these methods can stand behind it; model/steps.py wraps our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, PagedLayer, StepLayout, StepNumbers
from gpt_fast.kernels.race import Draw

# Numbers of a step, the page table, the slot of each row, and draws -> the tokens drawn for each row.
Chain = Callable[[StepNumbers, Tensor, Sequence[int], Sequence[Sequence[Draw]]], list[list[int]]]


class Drawing(Protocol):
    """A step that is being computed while the host goes on, and the tokens that it draws."""

    def tolist(self) -> list[int]:
        """Waits for the tokens of each row."""


class Ahead(Protocol):
    """Steps in another thread of the host, as ``kernels.cpu.program.Program`` runs them."""

    def begin(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        slots: Sequence[int],
        draws: Sequence[Draw],
        before: Any,  # a Drawing of this object, whose rows ``index`` draw the step's tokens; None: they are known
        index: Sequence[int],
    ) -> Drawing: ...
    def hold(self) -> None:
        """Leave out what has begun and not started."""


class Apart(Protocol):
    """Steps of generated tokens, and of prompts, by different kernels. Arguments and result as of :class:`Step`, which
    are on the host but for the page table; tokens may lie anywhere."""

    @property
    def most(self) -> int:
        """How many tokens ``step`` takes."""

    def step(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor: ...
    def prompts(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor
    ) -> Tensor: ...


class Step(Protocol):
    """Runs the steps of one model over one cache. ``path``: by ``kernels``, ``compiled`` or ``eager``."""

    @property
    def path(self) -> str: ...
    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """New tokens [N] at ``positions`` [N] -> logits [R, vocab_size] of the tokens in ``rows`` [R]; int64 all.
        ``lengths`` [N]: tokens of the sequence when this one was computed, its prompt at least. The cache receives the
        new tokens where ``layout`` says."""

    @property
    def apart(self) -> Apart | None:
        """What computes generated tokens apart from prompts; None: a step takes both together."""

    @property
    def chain(self) -> Chain | None:
        """Several steps in one call, as ``kernels.cpu.program.Program.chain`` runs them; None: the runner takes one
        after the other."""

    @property
    def ahead(self) -> Ahead | None:
        """What runs a step while the caller goes on, on a host. None: nothing does, or a GPU does it anyway."""

    def reads_host(self) -> bool:
        """Whether steps take their tensors from the host, all but the page table, which is on the model's device."""

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        """Compile and record what steps need, before the first one. ``run(n)`` runs a step of one sequence with n <=
        ``longest`` new tokens."""


class Model(Protocol):
    """A model behind the engine."""

    device: torch.device
    dtype: torch.dtype  # of the activations, and of the cache unless another is asked for
    vocab_size: int

    @property
    def cache_layers(self) -> Sequence[PagedLayer]: ...

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        """Bytes read to decode one token of one sequence with ``context_len`` tokens cached."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size], without a cache: what steps are tested against."""

    def make_step(self, cache: Sequence[LayerCache], page_table: Tensor) -> Step:
        """Steps over ``cache`` [one for each layer] and ``page_table`` [S, P] int32, both updated in place."""
