"""A mixture of experts against a dense model that reads as many bytes for a token; Mixtral's shape scaled down.

    python benchmarks/experts.py [--modes bfloat16 int8 int4] [--layers 4] [--prompt 512] [--new 64] [--repeats 9]

For each mode: what decoding one sequence reaches of the measured read bandwidth, both models in turns; and the most
memory that is resident while a prompt is computed, in parts of the weights' bytes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from gpt_fast import LLM, SamplingParams
from gpt_fast.config import ModelConfig
from gpt_fast.model.building import random_model
from gpt_fast.model.shapes import shape
from gpt_fast.model.transformer import weight_bytes
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.scheme import quant_config


def shapes(num_layers: int) -> dict[str, ModelConfig]:
    """Mixtral with a quarter of its width, and a dense model with two experts' inner width."""
    sizes: dict[str, Any] = {"dim": 1024, "num_layers": num_layers, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    mixtral = dataclasses.replace(shape("mixtral-8x7b"), ffn_dim=3584, **sizes)
    assert mixtral.experts is not None
    experts = dataclasses.replace(mixtral.experts, ffn_dim=3584)
    dense = dataclasses.replace(mixtral, family="mistral", ffn_dim=3584 * experts.top_k, experts=None)
    return {"dense": dense, "experts": dataclasses.replace(mixtral, experts=experts)}


def made(config: ModelConfig, mode: str, max_seq_len: int) -> tuple[LLM, int]:
    """A random model of ``config``, served, and the bytes of its weights."""
    model = random_model(config, torch.float32 if mode == "float32" else torch.bfloat16)
    if mode.startswith("int"):
        quantize_model(model, quant_config(mode))
    num_bytes = weight_bytes(model)
    return LLM.from_model(model, max_batch=1, max_seq_len=max_seq_len, prefill_chunk=512, prefix_cache=False), num_bytes


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return torch.randint(3, 32000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rate(llm: LLM, new_tokens: int, seed: int) -> float:
    """Tokens per second of decoding after a short prompt."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    completion = llm.generate(prompt_of(16, seed), params)
    assert not isinstance(completion, list)
    return completion.timings.tokens_per_second(new_tokens)


def resident(field: str) -> int:
    """Bytes in memory, now (VmRSS) or at most (VmHWM) since the last reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


def prefill_peak(llm: LLM, length: int) -> int:
    """Bytes by which resident memory grows at most while a prompt is computed."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    llm.generate(prompt_of(length, 0), SamplingParams(max_tokens=1))
    return resident("VmHWM") - before


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One mode: shares of the bandwidth, and the memory of a prefill."""
    max_seq_len = max(arguments.prompt, arguments.new) + 64
    found: dict[str, Any] = {"mode": mode, "threads": torch.get_num_threads()}
    llms: dict[str, LLM] = {}
    for name, config in shapes(arguments.layers).items():
        llms[name], found[f"{name}_weight_bytes"] = made(config, mode, max_seq_len)
    grown = prefill_peak(llms["experts"], arguments.prompt)
    found["prefill_memory_over_weights"] = round(1 + grown / found["experts_weight_bytes"], 3)
    rates: dict[str, list[float]] = {name: [] for name in llms}
    for repeat in range(arguments.repeats):
        for name, llm in llms.items():
            rates[name].append(rate(llm, arguments.new, repeat))
    for name, llm in llms.items():
        roofline = llm.roofline(16 + arguments.new // 2)
        found[f"{name}_bytes_per_token"] = roofline.bytes_per_token
        for word, value in (("median", statistics.median(rates[name])), ("best", max(rates[name]))):
            found[f"{name}_share_{word}"] = round(roofline.share(value), 3)
        llm.close()
    found["bandwidth_gb_s"] = round(roofline.bandwidth / 1e9, 2)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--modes", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for mode in arguments.modes:
        rows.append(measure(mode, arguments))
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), file=sys.stderr)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
