"""One rank of tests/test_shares.py: does all jobs one after the other, because starting a process costs more than they.

python tests/torch_rank.py JOBS OUT: JOBS, a JSON list; what is found goes to OUT.<rank>, a list as well.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.model import steps
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.model.steps import Served, TorchModel, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.parallel.group import Group
from gpt_fast.parallel.ranks import Ranks

NUM_TOKENS = 40
ASKED = ("Once upon a time", SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True))


class Forgetful:
    """``ranks`` that leave out the sum with the number ``which``."""

    def __init__(self, ranks: Ranks, which: int) -> None:
        self.rank, self.count, self.struct = ranks.rank, ranks.count, ranks.struct
        self.side_by_side, self.check = ranks.side_by_side, ranks.check
        self._ranks, self._which = ranks, which
        self.num_sums = 0

    def sum(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x if self.num_sums == self._which else self._ranks.sum(x)


@torch.inference_mode()
def logits(model: Served) -> tuple[Tensor, Tensor]:
    """Of one prompt: as a whole, and by steps over a paged cache, of which the last one decodes."""
    whole = model.forward(torch.tensor([tokens_of(model)]))[0]
    runner = Runner(model, max_batch=2, max_seq_len=48, num_pages=8, page_size=16, prefill_chunk=48)
    return whole, stepped(model, runner, (0, 20, NUM_TOKENS - 1, NUM_TOKENS))


def tokens_of(model: Served) -> list[int]:
    return [(7 * i * i + 3 * i + 1) % model.vocab_size for i in range(NUM_TOKENS)]


def stepped(model: Served, runner: Runner, ends: Sequence[int]) -> Tensor:
    """The logits of steps between ``ends``, the first of a prompt."""
    found = []
    for start, end in itertools.pairwise(ends):
        placed = -(-start // 16)
        pages = (3, 1, 2)[placed : -(-end // 16)]
        tokens = tuple(tokens_of(model)[start:end])
        plan = SequencePlan(1, tokens, start, placed, pages, end - start, NUM_TOKENS, start == 0)
        found.append(runner.execute(StepPlan((plan,))))
    return torch.cat(found)


@torch.inference_mode()
def by_triton(model: TorchModel) -> tuple[Tensor, str]:
    """The logits of a few tokens by steps as on a GPU, interpreted and without recordings; and what ran them."""
    from gpt_fast.kernels.gpu import attention, graphs

    short = partial(graphs.CapturedProgram, buckets=(1, 4), capture=lambda run: run, prompt_buckets=(8,))
    with (
        mock.patch.object(Transformer, "device", torch.device("cuda")),
        mock.patch.object(steps.gpu, "available", return_value=True),
        mock.patch.object(graphs, "CapturedProgram", short),
    ):
        runner = Runner(model, max_batch=2, max_seq_len=48, num_pages=8, page_size=16, prefill_chunk=48)
    if runner._step.apart is not None:
        runner._step.apart.warm_up()
    with mock.patch.object(attention, "num_splits", return_value=2):
        return stepped(model, runner, (0, 8, 11, 12)), runner.path


def compute(group: Group, ranks: Ranks, job: dict[str, Any]) -> dict[str, Any]:
    """The logits of one checkpoint, and how many sums they took in plain torch."""
    forgetful = Forgetful(ranks, job.get("left_out", 0))
    model = load(job, Shard(group.rank, group.count), forgetful)
    if job.get("triton"):
        assert isinstance(model, TorchModel)
        found, path = by_triton(model)
        return {"stepped": found, "path": path}
    whole, found = logits(model)
    kernels = isinstance(model, CpuModel)
    return {"whole": whole, "stepped": found, "num_sums": forgetful.num_sums, "kernels": kernels}


def load(job: dict[str, Any], shard: Shard | None = None, ranks: Forgetful | None = None) -> Served:
    """The model of ``job``, or a share of it."""
    model = Checkpoint.open(job["checkpoint"]).build(torch.float32, quantize=job.get("quantize"), shard=shard)
    if job.get("triton"):
        return TorchModel(model, kernels=True, compile=False, ranks=ranks)
    return serve(model, kernels=job.get("kernels", False), compile=False, ranks=ranks)


def generate(job: dict[str, Any]) -> dict[str, Any] | None:
    """What LLM answers; None from those that follow."""
    os.environ["MASTER_PORT"] = str(job["port"])  # its own group
    llm = LLM(job["checkpoint"], **job["options"])
    if llm.follows:
        llm.follow()
        llm.close()
        return None
    with llm:
        done = llm.generate(*ASKED)
        found = {"tokens": done.token_ids, "num_accepted": done.num_accepted, "path": llm.status()["path"]}
        llm.close()  # once more at the end of the block
        return found


def main(jobs: str, out: str) -> None:
    torch.set_num_threads(1)
    asked = json.loads(jobs)
    group = Group.from_environment()
    assert group is not None
    ranks = Ranks(group, 4096)
    found: list[Any] = [compute(group, ranks, job) for job in asked if "options" not in job]
    group.close()
    found += [generate(job) for job in asked if "options" in job]
    torch.save(found, f"{out}.{group.rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
