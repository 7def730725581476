"""Time to first token of prompts that share a long beginning: the first time, and when it is cached.

    python benchmarks/prefix_cache.py --shape tinyllama-1.1b [--dtype float32] [--prefix 1000] [--tail 8] [--repeats 3]

Every repeat uses a new beginning, twice, with different tails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch

from gpt_fast import LLM, SamplingParams
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import describe
from gpt_fast.model.shapes import shape
from gpt_fast.placement import choose_placement


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--tail", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = shape(arguments.shape)
    size = describe(config).num_parameters
    where = choose_placement(size, torch.bfloat16, device=arguments.device, dtype=arguments.dtype)
    model = random_model(config, where.dtype, where.device, column_major=where.column_major)
    firsts: dict[str, list[float]] = {"fresh": [], "cached": []}
    with LLM.from_model(model, max_batch=2, max_seq_len=arguments.prefix + arguments.tail + 16) as llm:
        generator = torch.Generator().manual_seed(0)
        for _ in range(arguments.repeats):
            prefix = torch.randint(3, config.vocab_size, (arguments.prefix,), generator=generator).tolist()
            for name in firsts:
                tail = torch.randint(3, config.vocab_size, (arguments.tail,), generator=generator).tolist()
                done = llm.submit(prefix + tail, SamplingParams(max_tokens=1, temperature=0.0))
                completion = list(done)[-1].completion
                assert completion is not None
                firsts[name].append(completion.timings.first_token_s)
    medians = {f"first_token_s_{name}": round(statistics.median(values), 4) for name, values in firsts.items()}
    pairs = [fresh / cached for fresh, cached in zip(firsts["fresh"], firsts["cached"], strict=True)]
    sooner = round(statistics.median(pairs), 1)
    print(json.dumps({**medians, "times_sooner": sooner, "prefix_tokens": arguments.prefix}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
