"""Improves int4 weights for the error of a layer's outputs, ``tr(D H D^T)``, which no step here can increase.

GPTQ decides each code once, with ranges that were found for the weights, not for the outputs. Two kinds of sweeps go on
from there. Over codes: each is set to the best level while all others stay (cyclic coordinate descent, Behdin et al.
2023, arXiv 2309.01885). Over ranges: each group's scale and minimum are set by least squares for the outputs, while
all others and all codes stay. A sweep costs as much arithmetic as GPTQ itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.quantize.rtn import LEVELS, Grid, to_float16


def refine(
    weight: Tensor, hessian: Tensor, codes: Tensor, grid: Grid, group_size: int, num_sweeps: int
) -> tuple[Tensor, Grid]:
    """``codes`` uint8 and ``weight`` float32, [N, K], ``hessian`` float32 [K, K] -> better codes and ranges."""
    # Rows are columns of the weight: each step works on contiguous memory.
    q, w = codes.t().float().contiguous(), weight.t()  # [K, N]
    scale, minimum = (t.t().float().contiguous() for t in grid)  # [groups, N]
    bounds = [(a, min(a + group_size, len(q))) for a in range(0, len(q), group_size)]
    change = torch.cat([q[a:b] * scale[g] + minimum[g] - w[a:b] for g, (a, b) in enumerate(bounds)])  # D, [K, N]
    for _ in range(num_sweeps):
        slope = hessian @ change  # half the gradient; carried along, and computed anew against rounding errors
        for g, (a, b) in enumerate(bounds):
            step = _fit_range(q[a:b], scale[g], minimum[g], hessian[a:b, a:b], slope[a:b])
            change[a:b] += step
            slope.addmm_(hessian[:, a:b], step)
        slope = hessian @ change
        for g, (a, b) in enumerate(bounds):
            step = _choose_codes(q[a:b], scale[g], hessian[a:b, a:b], slope[a:b])
            change[a:b] += step
            slope.addmm_(hessian[:, a:b], step)
    return q.t().to(torch.uint8).contiguous(), Grid(scale.t().half().contiguous(), minimum.t().half().contiguous())


def _choose_codes(q: Tensor, scale: Tensor, hessian: Tensor, slope: Tensor) -> Tensor:
    """One pass over the columns of a group, in place in ``q`` [g, N]; returns by how much the weights change."""
    before, slope = q.clone(), slope.clone()
    for i in range(len(q)):
        best = (q[i] - slope[i] / (hessian[i, i] * scale)).round_().clamp_(0, LEVELS)
        slope.addr_(hessian[i], (best - q[i]) * scale)
        q[i] = best
    return (q - before) * scale


def _fit_range(q: Tensor, scale: Tensor, minimum: Tensor, hessian: Tensor, slope: Tensor) -> Tensor:
    """Least squares for one group, in place in ``scale`` and ``minimum`` [N]; returns the weights' change [g, N]."""
    h_q, h_1 = hessian @ q, hessian.sum(1)  # [g, N], [g]
    a, b, c = (q * h_q).sum(0), h_q.sum(0), h_1.sum()  # [[a, b], [b, c]] (d scale, d minimum) = -(u, v)
    u, v = (q * slope).sum(0), slope.sum(0)
    determinant = a * c - b * b
    sound = determinant > 1e-6 * a * c
    d_scale = torch.where(sound, (b * v - c * u) / determinant, 0.0)
    d_minimum = torch.where(sound, (b * u - a * v) / determinant, 0.0)
    new_scale, new_minimum = to_float16(scale + d_scale, minimum + d_minimum)
    d_scale, d_minimum = new_scale - scale, new_minimum - minimum  # as they can be stored
    gain = a * d_scale**2 + 2 * b * d_scale * d_minimum + c * d_minimum**2 + 2 * (u * d_scale + v * d_minimum)
    better = sound & (gain < 0)
    d_scale, d_minimum = (torch.where(better, d, 0.0) for d in (d_scale, d_minimum))
    scale += d_scale
    minimum += d_minimum
    return q * d_scale + d_minimum
