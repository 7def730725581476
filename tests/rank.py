"""One rank of tests/test_ranks.py: loads its share of a checkpoint, computes logits, writes what it found.

python tests/rank.py CHECKPOINT OUT --dtype float32 --way shared|gloo [--quantize int8]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.parallel.group import Group
from gpt_fast.parallel.ranks import Ranks


def main() -> None:
    """Compute the logits of some tokens with the other ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--way", default="shared", choices=["shared", "gloo"])
    parser.add_argument("--quantize")
    parser.add_argument("--stay", action="store_true", help="sleep once that is done")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = Group.from_environment()
    opened = Checkpoint.open(arguments.checkpoint)
    shard = None if group is None else Shard(group.rank, group.count)
    ranks = None if group is None else Ranks(group, 4096, shared=arguments.way == "shared")
    model = opened.build(getattr(torch, arguments.dtype), quantize=arguments.quantize, shard=shard)
    packed = CpuModel(model.eval(), ranks)
    tokens = torch.arange(3, 3 + 2 * 40).view(2, 40) % 500
    logits = packed.forward(tokens)
    torch.save(logits, f"{arguments.out}.{0 if group is None else group.rank}")
    if arguments.stay:
        time.sleep(600)
    if group is not None:
        group.close()


if __name__ == "__main__":
    main()
