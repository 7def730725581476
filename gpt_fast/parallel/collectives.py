"""What ranks add up and put side by side in plain torch: gloo between CPUs, NCCL between GPUs.

``gpt_fast::sum_of_ranks`` is one operation to the compiler, and a CUDA graph can hold it.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

_ONE_SHOT_BYTES = 256 * 1024  # more than a few tokens of any model; beyond it each rank should not read all of all


def sum_of_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' ``x``, in its dtype; the same bits in all of them."""
    out: Tensor = torch.ops.gpt_fast.sum_of_ranks(x)
    return out


def side_by_side(x: Tensor) -> Tensor:
    """[..., n] -> [..., ranks n]: the columns of all ranks, in their order."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    if x.numel():
        dist.all_gather(found, x.contiguous())
    return torch.cat(found, dim=-1)


def _sum_of_ranks(x: Tensor) -> Tensor:
    room = _one_shot_room(x.device, x.dtype) if x.device.type == "cuda" else None
    if room is not None and x.nbytes <= _ONE_SHOT_BYTES and x.nbytes % 16 == 0:
        name = _group().group_name
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(room, x.contiguous(), "sum", name)
        return summed
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out)
    return out


@cache
def _one_shot_room(device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Memory that all GPUs see, through which each reads what all others have and adds it up in the order of the ranks:
    one exchange instead of NCCL's several, which is what small sums wait for. None where torch has no such operation
    or the GPUs no fast links. All ranks ask for it together, for the first sum of a dtype, and agree.

    Not yet run on GPUs.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    there = torch.ones(1, dtype=torch.int32)
    try:
        import torch.distributed._symmetric_memory as symmetric

        room = symmetric.empty(_ONE_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(room, _group())
        torch.ops.symm_mem.one_shot_all_reduce_copy  # noqa: B018 (whether it is there)
    except (ImportError, AttributeError, RuntimeError) as why:
        log.info("small sums of ranks go through NCCL, because there is no symmetric memory: %s", why)
        there.zero_()
    dist.all_reduce(there, dist.ReduceOp.MIN)
    return room if there else None


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


_library = torch.library.Library("gpt_fast", "FRAGMENT")
_library.define("sum_of_ranks(Tensor x) -> Tensor")
_library.impl("sum_of_ranks", _sum_of_ranks, "CPU")
_library.impl("sum_of_ranks", _sum_of_ranks, "CUDA")


@torch.library.register_fake("gpt_fast::sum_of_ranks")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
