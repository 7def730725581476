"""A mixture of experts on a GPU (Shazeer et al. 2017, arXiv 1701.06538): the router's choice, and what becomes of it.

    router's scores | its choice | the order of pairs | gate and up, SwiGLU | down | weighted sum, residual, next norm

A row and one of its experts are a pair. Pairs are sorted by expert, and linear.py multiplies blocks of them with the
weights of their expert, so a step reads the weights of each chosen expert once, and those of no other. Which experts
those are is read on the device alone: as many blocks are launched as any choice can need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.kernels.cache import StepLayout
from gpt_fast.kernels.gpu import launching
from gpt_fast.kernels.gpu.experts_kernel import gather_kernel, order_kernel, route_kernel
from gpt_fast.kernels.gpu.fused import Following, row_of
from gpt_fast.kernels.gpu.linear import Routes, Row

_PAIRS, _EXPERTS = 32, 16  # that a program of the sort takes


def route(scores: Tensor, top_k: int, renormalize: bool, layout: StepLayout) -> Routes:
    """The ``top_k`` experts of each row with the greatest ``scores`` [M, experts], of equal ones the first.

    Weights are softmax over all scores; ``renormalize``: over the chosen ones. Where a score is no number, neither are
    the weights.
    """
    num_rows, num_experts = scores.shape
    weights = scores.new_empty(num_rows, top_k, dtype=torch.float32)
    chosen = scores.new_empty(num_rows, top_k, dtype=torch.int32)
    route_kernel[(num_rows,)](
        scores.contiguous(), weights, chosen, layout.query_start, layout.page_table.shape[0], num_experts, top_k=top_k,
        renormalize=renormalize, experts_pad=launching.power_of_two(num_experts),
        top_pad=launching.power_of_two(top_k), num_warps=1,
    )  # fmt: skip
    num_pairs = num_rows * top_k
    order, starts = chosen.new_empty(num_pairs), chosen.new_empty(num_experts + 1)
    of_pairs, of_experts = -(-num_pairs // _PAIRS), -(-(num_experts + 1) // _EXPERTS)
    order_kernel[(of_pairs + of_experts,)](
        chosen, order, starts, num_pairs, num_experts, of_pairs, block=_PAIRS, experts=_EXPERTS,
        chunk=min(256, launching.power_of_two(num_pairs, 16)), num_warps=4,
    )  # fmt: skip
    return Routes(weights, order, starts)


def gather(
    y: Tensor,
    routes: Routes,
    layout: StepLayout,
    add: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    following: Following | None = None,
) -> tuple[Tensor, Row | None]:
    """What the experts made of each pair, ``y`` [M k, E], in one row for each token [M, E]: their weighted sum, plus
    ``add`` [M, E], plus the first of ``shared`` [M, E] times the sigmoid of the second [M, 1]; and the same waiting for
    the norm that is ``following``, if there is one."""
    num_rows, top_k = routes.weights.shape
    out = y.new_empty(num_rows, y.shape[1])
    row, waiting = row_of(out, following)
    gather_kernel[(num_rows,)](
        y, routes.weights, add, *(shared or (None, None)), layout.query_start, out, *waiting,
        layout.page_table.shape[0], y.shape[1], top_k=top_k, width=launching.power_of_two(y.shape[1]), num_warps=8,
    )  # fmt: skip
    return out, row
