"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): int4 weights chosen so that a layer's outputs change least.

For inputs X of a linear layer the error of its outputs is ``tr(D H D^T)`` with H = X^T X and D the change of the
weights. Columns are rounded one after the other, the most important first (act-order). The columns not rounded yet are
then changed to make up for the error, by the Cholesky factor of the inverse of H.

Groups are static: their ranges are found before, for the columns in their own order, weighed by the diagonal of H. So
the rounding may take the columns in any order and the checkpoint needs neither a permutation nor a group index.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels.cpu.packing import nibbles
from gpt_fast.quantize.refine import refine
from gpt_fast.quantize.rtn import LEVELS, Grid, encode, find_grid, pad_groups

_BLOCK = 128  # columns whose corrections to the rest are applied together
_SWEEPS = 8  # of refinement; on a 5-layer model 4 come half as far beyond none
_DAMPING = 0.01  # of the mean of H's diagonal, added to it


class Hessian:
    """Sums over a layer's inputs X, which come batch by batch: of ``X^T X`` and ``(X' - X)^T X``, float32 [K, K].

    X' are the inputs that the layer has in the unquantized model.
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
        return self._sum / max(1, self._count)

    def corrected(self, weight: Tensor, damping: float = _DAMPING) -> Tensor:
        """The weight [N, K] whose outputs for X are closest to those of ``weight`` for X'."""
        h, drift = self.mean().double(), (self._drift / max(1, self._count)).double()
        h.diagonal().add_(damping * h.diagonal().mean() + 1e-12)
        correction: Tensor = torch.linalg.solve(h, (weight.double() @ drift).t()).t().float()
        return weight + correction


def gptq(weight: Tensor, hessian: Tensor, group_size: int, num_sweeps: int = _SWEEPS) -> dict[str, Tensor]:
    """``weight`` [N, K] with ``hessian`` [K, K], both float32 -> tensors of int4 (scheme.py)."""
    num_columns = weight.shape[1]
    damping = (_DAMPING * hessian.diagonal().mean()).clamp(min=1e-12)  # the least: for inputs that are all zero
    damped = hessian + damping * torch.eye(num_columns)
    padded = pad_groups(weight, group_size)
    importance = F.pad(damped.diagonal(), (0, padded.shape[1] - num_columns))
    grid = find_grid(padded, group_size, importance)
    codes = encode(padded, grid)
    rounded = _round_columns(weight, hessian, grid, group_size)
    codes[:, :num_columns], grid = refine(weight, damped, rounded, grid, group_size, num_sweeps)
    return {"weight": nibbles(codes), **grid._asdict()}


def _round_columns(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Tensor:
    """Codes, uint8 [N, K]."""
    order = hessian.diagonal().argsort(descending=True)
    factor = _inverse_factor(hessian[order][:, order])
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


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular U, float32, with U^T U the inverse of the damped ``hessian``.

    Inputs that are always zero get a diagonal of one value; damping grows until the matrix is positive definite.
    """
    h = hessian.double()
    diagonal = h.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    diagonal[diagonal == 0] = mean
    for attempt in range(6):
        damped = h + _DAMPING * 10.0**attempt * mean * torch.eye(len(h), dtype=h.dtype)
        with contextlib.suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
            return factor.float()
    raise ValueError("the inputs of a layer are not finite numbers: the calibration text or the weights are broken")
