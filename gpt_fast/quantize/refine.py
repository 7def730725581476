"""Improves int4 weights for the error of a layer's outputs, ``tr(D H D^T)``, which no step here can increase.

GPTQ decides each code once, with ranges that were found for the weights, not for the outputs. Two kinds of sweeps go on
from there. Over codes: each is set to the best level while all others stay (cyclic coordinate descent, Behdin et al.
2023, arXiv 2309.01885). Over ranges: the scale and zero of each group are set by least squares for the outputs, while
all others and all codes stay. A sweep costs as much arithmetic as GPTQ itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.quantize.rtn import LARGEST, LEVELS, ZERO_STEPS, Grid, to_zero


def refine(
    weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, group_size: int, num_sweeps: int
) -> tuple[Tensor, Grid]:
    """``codes`` uint8 and ``weight`` float32, [N, K], ``hessian`` float32 [K, K] -> better codes and ranges."""
    # Rows are columns of the weight: each step works on contiguous memory.
    q, w = codes.t().float().contiguous(), weight.t()  # [K, N]
    step, zero = grid.steps().t().contiguous(), grid.zeros().t().contiguous()  # [groups, N]
    bounds = [(a, min(a + group_size, len(q))) for a in range(0, len(q), group_size)]
    change = torch.cat([(q[a:b] - zero[g]) * step[g] - w[a:b] for g, (a, b) in enumerate(bounds)])  # D, [K, N]
    for sweep in range(2 * num_sweeps):  # over ranges and over codes in turn
        slope = hessian @ change  # half the gradient; carried along, and computed anew against rounding errors
        for g, (a, b) in enumerate(bounds):
            inside = hessian[a:b, a:b]
            if sweep % 2 == 0:
                moved = _fit_range(q[a:b], step[g], zero[g], grid.row_scale, inside, slope[a:b])
            else:
                moved = _choose_codes(q[a:b], step[g], inside, slope[a:b])
            change[a:b] += moved
            slope.addmm_(hessian[:, a:b], moved)
    found = (q, (step / grid.row_scale).round(), zero * ZERO_STEPS)
    codes, scale, zero = (values.t().to(torch.uint8).contiguous() for values in found)
    return codes, Grid(scale, zero, grid.row_scale)


def _choose_codes(q: Tensor, step: Tensor, hessian: Tensor, slope: Tensor) -> Tensor:
    """One pass over the columns of a group, in place in ``q`` [g, N]; returns by how much the weights change."""
    before, slope = q.clone(), slope.clone()
    for i in range(len(q)):
        best = (q[i] - slope[i] / (hessian[i, i] * step)).round_().clamp_(0, LEVELS)
        slope.addr_(hessian[i], (best - q[i]) * step)
        q[i] = best
    return (q - before) * step


def _fit_range(q: Tensor, step: Tensor, zero: Tensor, row_scale: Tensor, hessian: Tensor, slope: Tensor) -> Tensor:
    """Least squares for one group, in place in ``step`` and ``zero`` [N]; returns the weights' change [g, N]."""
    h_q, h_1 = hessian @ q, hessian.sum(1)  # [g, N], [g]
    # In step and offset = -zero * step: [[a, b], [b, c]] (d step, d offset) = -(u, v)
    a, b, c = (q * h_q).sum(0), h_q.sum(0), h_1.sum()
    u, v = (q * slope).sum(0), slope.sum(0)
    determinant = a * c - b * b
    sound = determinant > 1e-6 * a * c
    wanted = step + torch.where(sound, (b * v - c * u) / determinant, 0.0)
    new_step = (wanted / row_scale).round_().clamp_(1, LARGEST) * row_scale  # as it can be stored
    d_step, offset = new_step - step, -zero * step
    new_zero = to_zero(((v + b * d_step) / c - offset) / new_step)  # the best beside that step, as it can be stored
    d_offset = -new_zero * new_step - offset
    gain = a * d_step**2 + 2 * b * d_step * d_offset + c * d_offset**2 + 2 * (u * d_step + v * d_offset)
    better = sound & (gain < 0)
    step.copy_(torch.where(better, new_step, step))
    zero.copy_(torch.where(better, new_zero, zero))
    return torch.where(better, q * d_step + d_offset, 0.0)
