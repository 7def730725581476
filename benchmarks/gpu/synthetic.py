"""Random weights and whole programs made of them, for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.config import ModelConfig
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.gpu import linear
from gpt_fast.kernels.gpu.graphs import PROMPT_BUCKETS, CapturedProgram, Run
from gpt_fast.kernels.gpu.program import BlockWeights, GpuProgram
from gpt_fast.model.describing import describe
from gpt_fast.model.description import Matrix
from gpt_fast.model.rope import Rope

PRECISIONS = ("bf16", "int8", "int4", "fp8")
GROUP = 32  # of int4
PAGE = 16


def random_weights(precision: str, n: int, k: int, device: torch.device) -> linear.Weights:
    """[n, k] of about 0.02, drawn on the device."""
    if precision == "bf16":
        return linear.prepare(torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, 0.02))
    scale = torch.full((n,), 0.02, device=device)
    if precision == "int8":
        values = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        return linear.prepare(values, scale=scale / 73)
    if precision == "fp8":
        values = torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_().to(torch.float8_e4m3fn)
        return linear.prepare(values, scale=scale)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    steps = torch.full((n, k // GROUP), 200, dtype=torch.uint8, device=device)
    return linear.prepare(codes, scale=scale / 4.6 / 200, grid=(steps, torch.full_like(steps, 60)))


def num_bytes(w: linear.Weights) -> int:
    """What one product streams."""
    return sum(t.nbytes for t in (w.data, w.scale, w.bias, w.pairs) if t is not None)


def layer_weights(config: ModelConfig) -> int:
    """With how many weights each token of a prompt is multiplied: all but the head's, which one token alone meets."""
    return sum(block.met(m, m.outputs * m.inputs) for block in describe(config).layers for m in block.matrices)


class Streamed(NamedTuple):
    """Bytes of weights that a step reads."""

    always: int
    by_experts: int  # of all experts
    share: float  # of experts that one token goes to

    def bytes_of(self, rows: int) -> int:
        """What a step of ``rows`` tokens reads, if each token goes to any experts."""
        return self.always + round(self.by_experts * (1 - (1 - self.share) ** rows))


def random_program(
    config: ModelConfig, precision: str, tokens: int, device: torch.device
) -> tuple[GpuProgram, Streamed]:
    """A program of the shape ``config`` with room for ``tokens`` in its cache of noise, and what its steps read.

    The head, and keys and values that heads share, are int8 where the rest is int4, as quantize/scheme.py decides.
    """
    description, finer = describe(config), "int8" if precision == "int4" else precision
    ropes = [Rope(table).to(device) for table in description.ropes]
    size = (1 - (-tokens // PAGE), PAGE, config.num_kv_heads, config.head_dim)

    def noise(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=device).normal_()

    def pieces(m: Matrix) -> list[linear.Weights]:
        parts = [("bf16" if m.split == "whole" else precision, m.outputs)]  # "whole": routers
        if m.name == "output":
            parts = [(finer, m.outputs)]
        elif m.name == "wqkv" and precision == "int4" and config.kv_dim < config.q_dim:
            parts = [(precision, config.q_dim), (finer, 2 * config.kv_dim)]
        return [linear.stacked(random_weights(p, n, m.inputs, device), m.num_experts or 1) for p, n in parts]

    weights = [
        BlockWeights(
            {m.name: pieces(m) for m in block.matrices},
            {v.name: torch.ones(v.size, dtype=torch.bfloat16, device=device) for v in block.vectors},
            {t.name: noise(t.num_rows, t.dim) for t in block.tables},
            LayerCache(noise(*size), noise(*size)) if block in description.layers else None,
        )
        for block in description.blocks
    ]
    every = [w for block in weights for found in block.matrices.values() for w in found]
    always, by_experts = (sum(num_bytes(w) for w in every if (w.num_experts > 1) == routed) for routed in (False, True))
    e = config.experts
    streamed = Streamed(always, by_experts, e.top_k / e.num_experts if e else 0.0)
    return GpuProgram(description, weights, ropes, torch.bfloat16), streamed


def recorded_step(
    program: GpuProgram, batch: int, context: int, capture: Callable[[Run], Run] | None = None, each: int = 1
) -> tuple[Run, Tensor]:
    """The replay of one step of ``batch`` sequences of ``context`` tokens, the last ``each`` of them new, and its
    logits [batch * each, V]; always the same."""
    per_slot, rows = -(-context // PAGE), torch.arange(batch * each)
    table = 1 + torch.arange(batch * per_slot).int().view(batch, per_slot)
    graph = CapturedProgram(program, table.to(program.device), (len(rows),), capture, prompt_buckets=())
    graph.warm_up()
    slots, left = rows // each, each - 1 - rows % each  # new tokens behind a row's
    positions = context - 1 - left
    write_slots = table[slots, positions // PAGE].long() * PAGE + positions % PAGE
    start = torch.arange(batch + 1).int() * each
    layout = StepLayout(start, torch.full_like(start[1:], context), graph.page_table, write_slots)
    logits = graph.step(3 * slots + left, positions, torch.full_like(positions, context), layout, rows)

    def replay() -> Tensor:
        return graph.replays[len(rows)]()  # by way of ``graph``: a recording does not keep the tensors that it reads

    return replay, logits


def prompt_step(
    program: GpuProgram, length: int, row: int, capture: Callable[[Run], Run] | None = None
) -> Callable[[], Tensor]:
    """A step of one prompt of ``length`` tokens, always the same ones, as the engine runs it: recorded where prompts of
    that length are. Gives the logits [1, V] of token ``row``."""
    pages, numbers = -(-length // PAGE), torch.arange(length)
    table = 1 + torch.arange(pages).int()[None]
    recorded = (length,) if length <= PROMPT_BUCKETS[-1] else ()
    held = CapturedProgram(program, table.to(program.device), (1,), capture, prompt_buckets=recorded)
    held.warm_up()
    context = torch.tensor([length], dtype=torch.int32)
    layout = StepLayout(torch.tensor([0, length], dtype=torch.int32), context, held.page_table, PAGE + numbers)
    rows = torch.tensor([row])
    return lambda: held.prompts(3 * numbers % 64, numbers, torch.full_like(numbers, length), layout, rows)
