"""Engine benchmark: prefill and decode of B sequences together, against what this machine's memory allows.

How a row is measured: B prompts of P random tokens are submitted at once, greedy, with no end-of-sequence token.

Prefill: first with one token to generate each, so that nothing decodes beside. From the first submission to the last
token, B x P tokens over that time. Then with N tokens to generate. Time to first token is of this run, so with B > 1
prompts wait for each other and share their steps with decodes, as in service.

Decode is counted only while all B decode together: the last one submitted is the last to start, and the others
generate more, so that it is also the first to end. Its own decode time, stamped by the engine for each token, is the
window: N - 1 steps, each with one token for each of B sequences.

Bytes per step are the weights, read once for all B, and the keys and values of all B at their mean context. Bytes per
step over the step's time is the achieved bandwidth; its share of the measured read bandwidth is the share of the
ceiling. At large B arithmetic may be the lower limit, which is not part of the ceiling.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt_fast.config import MAX_POSITIONS, PREFILL_CHUNKS, ModelConfig, read_key
from gpt_fast.engine.handle import Handle
from gpt_fast.errors import ConfigError
from gpt_fast.fields import Whole
from gpt_fast.foreign.checkpoint import open_checkpoint
from gpt_fast.kernels.roofline import read_bandwidth
from gpt_fast.llm import LLM
from gpt_fast.memory import check_weights, read_numbers
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import describe
from gpt_fast.model.shapes import shape
from gpt_fast.parallel.group import number_of_ranks
from gpt_fast.params import SamplingParams
from gpt_fast.placement import choose_placement, pick_device, usable_threads
from gpt_fast.quantize.apply import bytes_of, check_device, random_quantized
from gpt_fast.quantize.scheme import quant_config, smaller_modes

_POLL_S = 0.002  # how often the caller looks; what it measures is stamped by the engine
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BenchOptions:
    """Which rows to measure: every batch size with every prompt length. Raises ConfigError."""

    batch_sizes: tuple[int, ...] = (1,)
    prompt_tokens: tuple[int, ...] = (128,)  # also the context that decoding starts from
    new_tokens: int = 64
    repeats: int = 3  # runs of each row, of which the medians are reported; one run before them does not count
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "prompt_tokens"):
            read_key(Whole(1, MAX_POSITIONS), min(getattr(self, name), default=0), name)
        read_key(Whole(2, MAX_POSITIONS), self.new_tokens, "new_tokens")  # the first one comes from prefill
        read_key(Whole(1, MAX_POSITIONS), self.repeats, "repeats")


@dataclass(frozen=True)
class Run:
    """One run of one row. Seconds."""

    prefill_s: float
    ttft_s: float  # median over the sequences, each from its own submission
    decode_s: float  # of new_tokens - 1 steps with all sequences


def build(
    *, checkpoint: str | Path | None = None, shape_name: str | None = None, bench: BenchOptions, **options: Any
) -> LLM:
    """A checkpoint, or random weights of a named shape, with room for every row. ``options``: fields of EngineConfig.
    Raises ConfigError or CheckpointError."""
    if (checkpoint is None) == (shape_name is None):
        raise ConfigError("give either a checkpoint or a shape")
    if checkpoint is None and number_of_ranks() > 1:
        raise ConfigError("shape: several ranks read their shares of a checkpoint; save one, or start one process")
    opened = open_checkpoint(checkpoint) if checkpoint is not None else None
    config = opened.config if opened is not None else shape(str(shape_name))
    options |= {
        "max_batch": max(bench.batch_sizes),
        "max_seq_len": _room(config, bench, options.get("prefill_chunk") or min(map(min, PREFILL_CHUNKS.values()))),
        "prefix_cache": False,  # a repeat must not find what the one before has computed
    }
    if opened is not None:
        return LLM(opened, progress=True, **options)
    wanted = {name: options.pop(name) for name in ("device", "dtype") if name in options}
    size = describe(config).num_parameters
    where = choose_placement(size, torch.bfloat16, kernels=options.get("kernels", True), **wanted)
    quant = quant_config(options["quantize"]) if options.get("quantize") else None
    check_device(quant, where.device)
    check_weights(bytes_of(config, where.dtype, quant), where.device, smaller_modes(quant))
    if quant is None:
        model = random_model(config, where.dtype, where.device, column_major=where.column_major)
    else:
        model = random_quantized(config, where.dtype, where.device, quant)
    return LLM.from_model(model, **options)


def benchmark(
    llm: LLM, bench: BenchOptions, report: Callable[[dict[str, Any]], object] = lambda row: None
) -> list[dict[str, Any]]:
    """Measure every row; ``report`` is given each as soon as it is there."""
    rng = random.Random(bench.seed)
    rows = []
    for prompt_tokens in bench.prompt_tokens:
        for batch_size in bench.batch_sizes:
            if llm.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(llm.device)
            measure(llm, batch_size, prompt_tokens, min(_WARM_UP_TOKENS, bench.new_tokens), rng)
            runs = [measure(llm, batch_size, prompt_tokens, bench.new_tokens, rng) for _ in range(bench.repeats)]
            rows.append(_row(llm, batch_size, prompt_tokens, bench.new_tokens, runs))
            report(rows[-1])
    return rows


def measure(llm: LLM, batch_size: int, prompt_tokens: int, new_tokens: int, rng: random.Random) -> Run:
    """One run; see the module's docstring."""
    prefilled = _run_together(llm, prompt_tokens, [1] * batch_size, rng)
    prefill_s = max(h.request.first_token or 0.0 for h in prefilled) - prefilled[0].request.arrival
    slack = _slack(batch_size, prompt_tokens, llm.engine.runner.prefill_chunk)
    handles = _run_together(llm, prompt_tokens, [new_tokens + slack] * (batch_size - 1) + [new_tokens], rng)
    completions = [handle.completion for handle in handles if handle.completion is not None]
    starts = [handle.request.first_token or 0.0 for handle in handles]
    ends = [handle.request.last_token or 0.0 for handle in handles]
    if len(completions[-1].token_ids) != new_tokens or max(starts) > starts[-1] or min(ends) < ends[-1]:
        raise RuntimeError("the sequences did not decode together; the numbers would mean nothing")
    ttft_s = statistics.median(completion.timings.first_token_s for completion in completions)
    return Run(prefill_s, ttft_s, completions[-1].timings.decode_s)


def _run_together(llm: LLM, prompt_tokens: int, lengths: Sequence[int], rng: random.Random) -> list[Handle]:
    """Submit a prompt for each of ``lengths``, wait for the last one to end, stop the others; all have ended."""
    vocabulary = range(llm.config.vocab_size)
    prompts = [rng.choices(vocabulary, k=prompt_tokens) for _ in lengths]
    handles: list[Handle] = []
    try:
        with llm.engine.changed:  # one step takes them all in: on a busy machine the first could end before the last
            for prompt, length in zip(prompts, lengths, strict=True):
                params = SamplingParams(length, 0.0, repetition_penalty=1.0, ignore_eos=True)  # steps without extras
                handles.append(llm.submit(prompt, params))
        ended(handles[-1:])
    finally:
        for handle in handles:
            handle.cancel()
    return ended(handles)


def ended(handles: list[Handle]) -> list[Handle]:
    """``handles``, once all of them have ended. Raises what one has failed with."""
    while not all(handle.finished for handle in handles):
        time.sleep(_POLL_S)  # not wait(): being woken at every token would take the core from the engine
    for handle in handles:
        if handle.error is not None:
            raise handle.error
    return handles


def ceiling(llm: LLM) -> dict[str, Any]:
    """What is known before anything is measured: the model's bytes, the machine's bandwidth, and their quotient."""
    roofline, cache = llm.roofline(), llm.engine.runner.cache
    return {
        "device": torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else str(llm.device),
        "bandwidth_threads": torch.get_num_threads(),  # the engine may choose fewer for a small model
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantize": llm.engine_config.quantize,
        "kv_cache_dtype": str(cache[0].k.dtype if cache else llm.dtype).removeprefix("torch."),
        "path": llm.engine.runner.path,
        "torch": torch.__version__,
        "parameters": llm.num_parameters,
        "bytes_per_token": roofline.bytes_per_token,
        "machine_bandwidth_gb_s": roofline.bandwidth / 1e9,
        "ceiling_tokens_per_second": roofline.ceiling,
        "load_s": llm.load_s,
        "warm_up_s": llm.warm_up_s,
    }


def measure_bandwidth(device: str, threads: int | None) -> None:
    """Measure before the model is there: the memory that this takes must not add to the model's in the peak."""
    if threads is not None:
        torch.set_num_threads(usable_threads(threads))
    read_bandwidth(pick_device(device).type, torch.get_num_threads())


def _row(llm: LLM, batch_size: int, prompt_tokens: int, new_tokens: int, runs: Sequence[Run]) -> dict[str, Any]:
    decode_s = statistics.median(run.decode_s for run in runs)
    prefill_s = statistics.median(run.prefill_s for run in runs)
    steps_per_second = (new_tokens - 1) / decode_s
    mean_context = prompt_tokens + new_tokens // 2
    roofline = llm.roofline(batch_size * mean_context)
    return {
        "batch_size": batch_size,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": len(runs),
        "time_to_first_token_s": statistics.median(run.ttft_s for run in runs),
        "prefill_s": prefill_s,
        "prefill_tokens_per_second": batch_size * prompt_tokens / prefill_s,
        "decode_step_s": 1 / steps_per_second,
        "decode_tokens_per_second": batch_size * steps_per_second,
        "decode_tokens_per_second_per_sequence": steps_per_second,
        "decode_tokens_per_second_runs": [batch_size * (new_tokens - 1) / run.decode_s for run in runs],
        "achieved_bandwidth_gb_s": steps_per_second * roofline.bytes_per_token / 1e9,
        "ceiling_tokens_per_second": batch_size * roofline.ceiling,
        "share_of_ceiling": roofline.share(steps_per_second),
        **_memory(llm.device),
    }


def _slack(batch_size: int, prompt_tokens: int, prefill_chunk: int) -> int:
    """Steps, each a token for the first sequence, until the last one starts. Beside decodes a step takes a quarter of a
    chunk of the prompts; one more each where a prompt ends inside a step."""
    return batch_size + -(-batch_size * prompt_tokens // max(1, prefill_chunk // 4)) if batch_size > 1 else 0


def _room(config: ModelConfig, bench: BenchOptions, prefill_chunk: int) -> int:
    longest = max(bench.prompt_tokens) + bench.new_tokens
    if longest > config.max_seq_len:
        most = f"the context of {config.max_seq_len} of this model"
        raise ConfigError(f"prompt_tokens + new_tokens ({longest}) exceed {most}")
    return longest + max(_slack(b, p, prefill_chunk) for b in bench.batch_sizes for p in bench.prompt_tokens)


def _memory(device: torch.device) -> dict[str, Any]:
    """Gigabytes (1e9). ``rss_gb``: held now. ``peak_rss_gb``: of the process so far, with loading, compiling, earlier
    rows, and half a gigabyte that measuring the bandwidth takes for a moment before the model is loaded."""
    status = read_numbers(Path("/proc/self/status"), 1024)  # of Linux; elsewhere what follows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = {"rss_gb": status.get("VmRSS"), "peak_rss_gb": status.get("VmHWM", peak)}
    if device.type == "cuda":
        memory["peak_device_gb"] = torch.cuda.max_memory_allocated(device)
    return {name: None if num_bytes is None else num_bytes / 1e9 for name, num_bytes in memory.items()}
