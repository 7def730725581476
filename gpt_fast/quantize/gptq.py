"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): int4 weights chosen so that a layer's outputs change least.

For inputs X of a linear layer the error of its outputs is ``tr(D H D^T)`` with H = X^T X and D the change of the
weights. Columns are rounded one after the other, the most important first (act-order), and what each one's rounding
costs is made up for by those not rounded yet, by the Cholesky factor of the inverse of H.

Groups are static: their ranges are found before, by the weights in their own order and weighed by the diagonal of H. So
the rounding may take the columns in any order and the checkpoint needs neither a permutation nor a group index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.kernels.cpu.packing import nibbles
from gpt_fast.kernels.reference import dequantize_int4
from gpt_fast.quantize.refine import refine
from gpt_fast.quantize.rtn import LEVELS, Grid, encode, find_grid, pad_groups

_BLOCK = 128  # columns whose corrections to the rest are applied together
_SWEEPS = 8  # of refinement; on a 5-layer model 4 come half as far beyond none
_DAMPING = 0.01  # of the mean of H's diagonal, added to it


class Hessian:
    """What is known of a layer's inputs X, given batch by batch: ``X^T X / count``, float32 [K, K].

    And ``(X' - X)^T X / count`` of the inputs X' that the layer has in the unquantized model.
    """

    def __init__(self, in_features: int) -> None:
        self._sum = torch.zeros(in_features, in_features)
        self._drift = torch.zeros(in_features, in_features)
        self._count = 0

    def add(self, x: Tensor, exact: Tensor) -> None:
        """``x`` and ``exact``: [..., K] of any floating dtype."""
        rows, others = (t.reshape(-1, t.shape[-1]).float() for t in (x, exact))
        self._sum.addmm_(rows.t(), rows)
        self._drift.addmm_((others - rows).t(), rows)
        self._count += rows.shape[0]

    def mean(self) -> Tensor:
        """Of everything that was added."""
        return self._sum / max(1, self._count)

    def corrected(self, weight: Tensor, damping: float = _DAMPING) -> Tensor:
        """The weight [N, K] whose outputs for X are closest to those of ``weight`` for X'."""
        h, drift = self.mean().double(), (self._drift / max(1, self._count)).double()
        h.diagonal().add_(damping * h.diagonal().mean() + 1e-12)
        correction: Tensor = torch.linalg.solve(h, (weight.double() @ drift).t()).t().float()
        return weight + correction


def gptq(
    weight: Tensor, hessian: Tensor, group_size: int, damping: float = _DAMPING, num_sweeps: int = _SWEEPS
) -> dict[str, Tensor]:
    """``weight`` [N, K] with ``hessian`` float32 [K, K] -> tensors of int4 (scheme.py)."""
    weight = weight.float()
    num_columns = weight.shape[1]
    diagonal = hessian.diagonal()
    padded = pad_groups(weight, group_size)
    importance = torch.zeros(padded.shape[1])
    importance[:num_columns] = diagonal + damping * diagonal.mean()
    grid = find_grid(padded, group_size, importance)
    codes = encode(padded, grid)
    rounded = _round_columns(weight, hessian, grid, group_size, damping)
    damped = hessian + damping * diagonal.mean() * torch.eye(num_columns)
    codes[:, :num_columns], grid = refine(weight, damped, rounded, grid, group_size, num_sweeps)
    return {"weight": nibbles(codes), **grid._asdict()}


def _round_columns(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int, damping: float) -> Tensor:
    """Codes, uint8 [N, K]."""
    order = hessian.diagonal().argsort(descending=True)
    factor = _inverse_factor(hessian[order][:, order], damping)
    groups = order // group_size
    # Rows are columns of the weight in their new order: each step works on contiguous memory.
    w = weight.t()[order].contiguous()  # [K, N]
    step, zero = (t.t()[groups].contiguous() for t in (grid.steps(), grid.zeros()))  # [K, N]
    codes = torch.empty(w.shape, dtype=torch.uint8)
    for begin in range(0, len(w), _BLOCK):
        end = min(begin + _BLOCK, len(w))
        block, inside = w[begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i in range(end - begin):
            s, z = step[begin + i], zero[begin + i]
            q = (block[i] / s + z).round_().clamp_(0, LEVELS)
            codes[begin + i] = q.to(torch.uint8)
            errors[i] = (block[i] - (q - z) * s) / inside[i, i]
            block[i + 1 :].addr_(inside[i, i + 1 :], errors[i], alpha=-1)
        w[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    return codes[order.argsort()].t().contiguous()


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper triangular U, float32, with U^T U the inverse of the damped ``hessian``.

    Inputs that are always zero get a diagonal of their own; damping grows until the matrix is positive definite.
    """
    h = hessian.double()
    diagonal = h.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    diagonal[diagonal == 0] = mean
    for attempt in range(6):
        damped = h + damping * 10.0**attempt * mean * torch.eye(len(h), dtype=h.dtype)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed == 0:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if failed == 0:
                factor: Tensor = upper.float()
                return factor
    raise ValueError("the inputs of a layer are not finite numbers: the calibration text or the weights are broken")


def output_error(weight: Tensor, tensors: dict[str, Tensor], hessian: Tensor) -> float:
    """Mean squared error of the outputs that int4 ``tensors`` cause in the place of ``weight`` [N, K]."""
    quantized = dequantize_int4(tensors["weight"], tensors["scale"], tensors["zero"], tensors["row_scale"])
    change = quantized[:, : weight.shape[1]] - weight
    return float(((change @ hessian) * change).sum() / weight.shape[0])
