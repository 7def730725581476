"""Several ranks run one Transformer, each a share of it (Shoeybi et al. 2019, arXiv 1909.08053): what they add up.

Applied from outside to the share that a checkpoint was read into (checkpoint/shard.py), by what the description says of
each weight:

=======  ===========================================================================================================
split    what a rank computes, and what becomes of it
=======  ===========================================================================================================
rows     some outputs: its heads and inner dimensions, which stay there; its logits, put side by side by all ranks;
         of the embedding table its tokens' rows, zeros for all others: added up
columns  a part of every output's sum: added up before scale and residual; rank 0's part has the bias. Experts: behind
         their weighted sum
whole    what the other ranks compute as well
=======  ===========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast.config import VocabShare
from gpt_fast.model.attention import alibi_slopes
from gpt_fast.model.transformer import Block, Transformer, mean_of_row


class Collectives(Protocol):
    """The ranks of one model, who all ask for the same in the same order. Results are equal in all of them."""

    rank: int
    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' ``x``."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., count n]: the columns of all ranks, in their order."""


def join(model: Transformer, ranks: Collectives) -> None:
    """Make ``model``, the share of this rank, compute with the others what the whole one computes."""
    for block in (model.embed, *model.layers, model.head):
        assert isinstance(block, Block)
        _join_block(block, ranks, model.config.vocab_size)
    for matrix in model.head.block.matrices:
        if matrix.split == "rows":
            _behind(model.head.get_submodule(matrix.name), joined_logits(ranks, model.config.vocab_size))


def _join_block(block: Block, ranks: Collectives, vocab_size: int) -> None:
    for table in block.block.tables:
        if table.split == "rows":
            weight = block.get_parameter(f"{table.name}.weight")
            assert isinstance(weight, nn.Parameter)
            block.set_submodule(table.name, _TokenRows(weight, ranks, vocab_size))
    for matrix in block.block.matrices:
        if matrix.split != "columns":
            continue
        module = block.get_submodule(matrix.name)
        if ranks.rank:
            module.register_parameter("bias", None)
        if matrix.num_experts:
            block.run_experts = _summed(block.run_experts, ranks)
        else:
            _behind(module, ranks.sum)
    block.mean_of_row = _mean_of_whole_row(ranks)
    if block.slopes is not None:
        block.slopes = alibi_slopes(len(block.slopes), ranks.rank, ranks.count).to(block.slopes.device)


def _behind(module: nn.Module, collective: Callable[[Tensor], Tensor]) -> None:
    """Let ``module`` return what ``collective`` makes of its output."""
    module.register_forward_hook(lambda _module, _inputs, out: collective(out))


def joined_logits(ranks: Collectives, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """What makes the logits of all ranks of one rank's: of each one's columns those that count as its own, as
    ``VocabShare`` says."""

    def joined(own: Tensor) -> Tensor:
        every = ranks.side_by_side(own)
        if every.shape[-1] == vocab_size:
            return every
        places = [VocabShare.of(vocab_size, rank, ranks.count) for rank in range(ranks.count)]
        pieces = zip(every.chunk(ranks.count, dim=-1), places, strict=True)
        return torch.cat([piece[..., place.own - place.first :] for piece, place in pieces], dim=-1)

    return joined


def _summed(run: Callable[..., Tensor], ranks: Collectives) -> Callable[..., Tensor]:
    return lambda *arguments: ranks.sum(run(*arguments))


def _mean_of_whole_row(ranks: Collectives) -> Callable[[Tensor], Tensor]:
    """Of rows of which each rank has as many columns, and a column that several have no more often than the others."""
    return lambda x: ranks.sum(mean_of_row(x)) / ranks.count


class _TokenRows(nn.Module):
    """The embedding table of all ranks; ``weight``: the rows of this one."""

    def __init__(self, weight: nn.Parameter, ranks: Collectives, vocab_size: int) -> None:
        super().__init__()
        self.weight, self._ranks = weight, ranks
        _, self._first, self._own = VocabShare.of(vocab_size, ranks.rank, ranks.count)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self._first
        elsewhere = (tokens < self._own) | (rows >= len(self.weight))
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self._ranks.sum(found.masked_fill(elsewhere[..., None], 0.0))
