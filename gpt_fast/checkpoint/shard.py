"""What one of several tensor-parallel ranks holds of each weight (Shoeybi et al. 2019, arXiv 1909.08053).

Heads, the inner dimension of the MLP and of each expert, and the vocabulary are divided evenly. Weights whose outputs
these are give a rank its rows, weights whose inputs these are its columns; what is neither (norms, biases, routers)
every rank has. Where there are fewer heads of keys and values than ranks, several ranks have the same one. Where the
ranks do not divide the vocabulary, several have some of the same rows (``VocabShare``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig, VocabShare
from gpt_fast.errors import ConfigError
from gpt_fast.model.description import Part


class Cut(NamedTuple):
    """The share of one stored tensor: all of it, or some of its rows, or one of several equal runs of its columns."""

    rows: tuple[tuple[int, int], ...] | None = None  # start and number of each run; None: all
    column: int = 0  # which run of columns
    num_columns: int = 1  # how many runs there are

    def rows_of(self, stored: StoredTensor) -> StoredTensor:
        """The rows that are read of ``stored``."""
        if self.rows is None:
            return stored
        if len(self.rows) == 1:
            return stored.part(*self.rows[0])
        return stored.picked(torch.cat([torch.arange(start, start + num) for start, num in self.rows]))

    def columns_of(self, rows: Tensor) -> Tensor:
        """The columns of ``rows`` [n, ...]; a vector has none and is kept."""
        return rows.chunk(self.num_columns, dim=1)[self.column] if rows.dim() == 2 and self.num_columns > 1 else rows

    def of(self, stored: StoredTensor) -> StoredTensor:
        """The rows and columns of ``stored``; a vector has no columns and is kept."""
        stored = self.rows_of(stored)
        if self.num_columns == 1 or len(stored.shape) < 2:
            return stored
        width = stored.shape[1] // self.num_columns
        return stored.columns(self.column * width, width)


class Shard(NamedTuple):
    """Rank ``rank`` of ``num_ranks``."""

    rank: int
    num_ranks: int

    def config(self, config: ModelConfig) -> ModelConfig:
        """The shape of what a rank holds. Raises ConfigError for one that the ranks do not divide."""
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"shard: rank {self.rank} is not one of {self.num_ranks}, which are counted from 0")
        c, experts = config, config.experts
        own: dict[str, Any] = {"num_heads": self._own("num_heads", c.num_heads)}
        if c.vocab_size < self.num_ranks:
            raise ConfigError(f"shard: a vocabulary of {c.vocab_size} tokens is too small for {self.num_ranks} ranks")
        own["vocab_rows"] = VocabShare.of(c.vocab_size, *self).num_rows
        if c.num_kv_heads > self.num_ranks or self.num_ranks % c.num_kv_heads:
            own["num_kv_heads"] = self._own("num_kv_heads", c.num_kv_heads)
        else:
            own["num_kv_heads"] = 1
        if experts is None or not all(experts.layers or (True,)):
            own["ffn_dim"] = self._own("ffn_dim", c.ffn_dim)
        if experts is not None:
            inner = self._own("experts' ffn_dim", experts.ffn_dim)
            shared = self._own("experts' shared_ffn_dim", experts.shared_ffn_dim)
            own["experts"] = replace(experts, ffn_dim=inner, shared_ffn_dim=shared)
        return replace(c, **own)

    def _own(self, name: str, size: int) -> int:
        if size % self.num_ranks:
            raise ConfigError(f"shard: {name} ({size}) is not a multiple of the {self.num_ranks} ranks")
        return size // self.num_ranks

    def _run(self, size: int, unit: int) -> tuple[int, int]:
        """Of a run of ``size`` rows, of which ``unit`` stay together, the first that this rank has, and how many. Of
        fewer units than ranks several ranks have the same one, and else several have some of the same."""
        units = size // unit
        if units < self.num_ranks:
            return self.rank * units // self.num_ranks * unit, unit
        if units % self.num_ranks:
            share = VocabShare.of(units, *self)
            return share.first * unit, share.num_rows * unit
        return self.rank * size // self.num_ranks, size // self.num_ranks

    def cut(self, part: Part) -> tuple[Cut, Part]:
        """What this rank reads of ``part``, and where it goes: the part of the rank's own model."""
        if part.split == "columns" and len(part.shape) == 2:
            n, k = part.shape
            return Cut(None, self.rank, self.num_ranks), part._replace(shape=(n, k // self.num_ranks))
        if part.split != "rows":
            return Cut(), part
        taken: list[tuple[int, int]] = []
        first, start = -part.start, 0  # of a run in this tensor, and of this tensor in the rank's own parameter
        for size in part.runs:
            begin, own = self._run(size, part.unit)
            if first < 0:
                start += own
            elif first < part.shape[0]:
                taken.append((first + begin, own))
            first += size
        num_rows = sum(num for _, num in taken)
        return Cut(tuple(taken)), part._replace(start=start, shape=(num_rows, *part.shape[1:]))
