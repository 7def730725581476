"""Operations of a description run by both executors, plain torch and C++, with the same weights."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout, padded
from gpt_fast.kernels.cpu.building import FLAGS
from gpt_fast.kernels.cpu.library import available, rounded_in_pairs
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.model import description as d
from gpt_fast.model.cpu_model import pack_block
from gpt_fast.model.rope import Rope
from gpt_fast.model.transformer import Block, Context

needs_cpp = pytest.mark.skipif(not available(), reason="needs a C++ compiler and a CPU with AVX2 or NEON")
PAGE = 16
_LONGEST = 64  # tokens of the one sequence of a Twin


def flags_with(level: str) -> tuple[str, ...]:
    """The kernels' flags for the compiler with another level of optimization, by which it takes less time."""
    return tuple(level if flag == "-O3" else flag for flag in FLAGS)


def bytes_of_attention() -> bool:
    """Whether the kernels without tiles multiply int8 caches by bytes and not by pairs of 16 bits: CPUs with VNNI."""
    return platform.machine() in ("x86_64", "AMD64") and not rounded_in_pairs()


def run_ops(
    ops: Sequence[d.Op], weights: Weights, x: Tensor, out: str = "out", layout: StepLayout | None = None
) -> Tensor:
    """The buffer ``out`` after ``ops``, by C++; they find ``x`` [N, width] in the buffer ``in``."""
    program = Program([(ops, weights)], out, input=("in", x.shape[1]))
    rows = torch.arange(x.shape[0])
    return program.run(rows, rows, [], layout, rows, x)


def run_product(x: Tensor, *pieces: PackedWeights, scale: float = 1.0) -> Tensor:
    """x [N, K] times a matrix in ``pieces``."""
    return run_ops([d.Product("in", "out", "w", scale=scale)], Weights({"w": pieces}), x)


def random_weights(module: torch.nn.Module, seed: int = 0) -> None:
    """Matrices of about unit gain, vectors around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 2:
                p.copy_(noise / p.shape[1] ** 0.5)
            else:
                p.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))


class Twin:
    """``ops`` on buffers of the given widths: ``plain`` and ``fast`` return the buffer ``out``, float32 [N, width].

    The tokens are one sequence from position 0. A program has a single input, so products with matrices of zeros and
    ones fill the buffers out of it first.
    """

    def __init__(
        self,
        ops: Sequence[d.Op],
        widths: Mapping[str, int],
        out: str,
        *,
        matrices: Sequence[d.Matrix] = (),
        vectors: Sequence[d.Vector] = (),
        tables: Sequence[d.Table] = (),
        ropes: Sequence[d.RopeTable] = (),
        cache: torch.dtype = torch.float32,
    ) -> None:
        self.widths, self.out, total = widths, out, sum(widths.values())
        fill = [d.Product("in", name, f"fill_{name}") for name in widths]
        picks = [d.Matrix(f"fill_{name}", total, (d.Rows("", width),)) for name, width in widths.items()]
        self.ops = (*fill, *ops)
        block = d.Block("", self.ops, (*picks, *matrices), tuple(vectors), tuple(tables))
        self.block = Block(block)
        random_weights(self.block)
        first = 0
        for name, width in widths.items():
            self.block.get_submodule(f"fill_{name}").weight = torch.nn.Parameter(
                torch.eye(total)[first : first + width]
            )
            first += width
        self.ropes = [Rope(table) for table in ropes]
        self._heads = [op for op in self.ops if isinstance(op, d.Heads)]
        self._cache = cache

    def _context(self, count: int) -> Context:
        positions = torch.arange(count)
        lengths = torch.full_like(positions, count)
        tokens = (positions * 7 + 3) % 11
        return Context(tokens[None], positions, [rope(positions, lengths) for rope in self.ropes])

    @torch.no_grad()
    def plain(self, x: Tensor) -> Tensor:
        """``x`` [N, widths of all buffers together]."""
        values = {"in": x[None], "x": x[None]}
        self.block.run(values, self._context(x.shape[0]))
        for op in self._heads:
            if self.out == op.q:  # C++ keeps all of them in one buffer, filled up
                spare = padded(op.head_dim) - op.head_dim
                parts = [torch.nn.functional.pad(values[name], (0, spare)) for name in (op.q, op.k, op.v)]
                return torch.cat(parts, dim=-2)[0].flatten(-2)
        found = values[self.out]
        if self.out + " experts" in values:
            found = torch.cat((found, values[self.out + " experts"].float()), -1)
        return found[0]

    def program(self) -> Program:
        """The C++ program; raises UnsupportedError."""
        cache = None
        if self._heads:
            op = self._heads[0]
            shape = (1 + _LONGEST // PAGE, PAGE, op.num_kv_heads, padded(op.head_dim))
            cache = LayerCache.zeros(shape, self._cache, torch.device("cpu"))
        weights = pack_block(copy.deepcopy(self.block))._replace(cache=cache)
        return Program([(self.ops, weights)], self.out, input=("in", sum(self.widths.values())))

    def fast(self, x: Tensor, program: Program | None = None) -> Tensor:
        """The same by C++."""
        count = x.shape[0]
        context = self._context(count)
        positions = context.positions
        layout = StepLayout(
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([count], dtype=torch.int32),
            torch.arange(1, 1 + _LONGEST // PAGE, dtype=torch.int32)[None],
            positions + PAGE,
        )
        program = program or self.program()
        return program.run(context.tokens[0], positions, context.angles, layout, positions, x)

    def input(self, count: int, seed: int = 1) -> Tensor:
        """Random numbers for all buffers."""
        return torch.randn(count, sum(self.widths.values()), generator=torch.Generator().manual_seed(seed))
