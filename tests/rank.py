"""One rank of tests/test_ranks.py: loads its share of a checkpoint in several ways and writes the logits it computes.

python tests/rank.py CHECKPOINT OUT
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.parallel.group import Group
from gpt_fast.parallel.ranks import Ranks

HOW: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "quantize": "int8"},
    "int4": {"dtype": torch.float32, "quantize": "int4"},
}


def logits(checkpoint: Path, how: str, group: Group | None = None, shared: bool = True) -> Tensor:
    """Of some tokens, computed alone or with the other ranks."""
    shard = None if group is None else Shard(group.rank, group.count)
    ranks = None if group is None else Ranks(group, 4096, shared=shared)
    model = Checkpoint.open(checkpoint).build(**HOW[how], shard=shard)
    tokens = torch.arange(3, 3 + 2 * 40).view(2, 40) % 500
    return CpuModel(model.eval(), ranks).forward(tokens)


def main() -> None:
    """Compute them in all ways with the other ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stay", action="store_true", help="sleep instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = Group.from_environment()
    assert group is not None
    if arguments.stay:
        Path(f"{arguments.out}.{group.rank}").touch()
        time.sleep(600)
    found = {(how, way): logits(arguments.checkpoint, how, group, way == "shared") for how in HOW for way in WAYS}
    torch.save(found, f"{arguments.out}.{group.rank}")
    group.close()


WAYS = ("shared", "gloo")

if __name__ == "__main__":
    main()
