"""``gpt-fast info``: what a checkpoint is, what it needs, and how fast this machine could decode it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from gpt_fast.commands import options
from gpt_fast.config import EngineConfig
from gpt_fast.errors import ConfigError, TokenizerMissing

if TYPE_CHECKING:
    from gpt_fast.checkpoint.checkpoint import Checkpoint
    from gpt_fast.foreign.checkpoint import ForeignCheckpoint


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("info", help="describe a checkpoint and this machine", description=__doc__)
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="a Hugging Face directory or GGUF file; without it: the machine alone"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    loading = parser.add_argument_group("how the checkpoint would be loaded")
    options.add_options(loading, {flag: options.MODEL[flag] for flag in ("--device", "--dtype", "--quantize")})
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; reads config and tokenizer, not the weights."""
    import torch

    from gpt_fast.cgroups import num_cores
    from gpt_fast.kernels.roofline import read_bandwidth
    from gpt_fast.memory import free_bytes, gigabytes
    from gpt_fast.placement import pick_device

    options.refuse_absent(arguments.checkpoint)
    for name in ("dtype", "quantize"):
        if name in arguments and arguments.checkpoint is None:
            raise ValueError(f"--{name} means nothing without --checkpoint")
    o = EngineConfig(**options.engine_options(arguments))
    device = pick_device(o.device)
    on_cuda = device.type == "cuda"
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_cuda else f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "cores": num_cores(),
        "free_bytes": free_bytes(device),
        "read_bandwidth_gb_s": round(read_bandwidth(device.type, torch.get_num_threads()) / 1e9, 2),
    }
    if arguments.checkpoint:
        facts |= _checkpoint_facts(arguments.checkpoint, o, device, facts)
    if arguments.json:
        print(json.dumps(facts))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {gigabytes(value) if name.endswith('_bytes') else value}")
    return 0


def _checkpoint_facts(directory: str, o: EngineConfig, device: Any, machine: dict[str, Any]) -> dict[str, Any]:
    from gpt_fast.foreign.checkpoint import open_checkpoint
    from gpt_fast.kernels.roofline import Roofline
    from gpt_fast.placement import pick_dtype

    checkpoint = open_checkpoint(directory)
    defaults, tokenizer = checkpoint.defaults, None
    with contextlib.suppress(TokenizerMissing):  # it is served with prompts of token ids
        tokenizer = checkpoint.tokenizer
    dtype = pick_dtype(o.dtype, device, checkpoint.num_parameters, checkpoint.stored_dtype)
    model = _model_facts(checkpoint, dtype, o.quantize)
    weights, token_bytes = model["weight_bytes"], model.get("bytes_per_decoded_token", model["weight_bytes"])
    return {
        **model,
        "parameters": checkpoint.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": o.quantize or checkpoint.format.method,
        "kv_bytes_per_token": checkpoint.config.kv_bytes_per_token(dtype.itemsize),
        **_cache_facts(checkpoint.config, dtype, device.type, machine["free_bytes"] - weights),
        "ceiling_tokens_per_second": round(Roofline(token_bytes, 1e9 * machine["read_bandwidth_gb_s"]).ceiling, 1),
        "tokenizer": type(tokenizer).__name__ if tokenizer else None,
        "tokenizer_vocab_size": tokenizer.vocab_size if tokenizer else None,
        "eos_token_ids": list(defaults.eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ())),
        "sampling_defaults": {name: getattr(defaults.sampling, name) for name in _SAMPLING},
    }


def _model_facts(checkpoint: Checkpoint | ForeignCheckpoint, dtype: Any, quantize: str | None) -> dict[str, Any]:
    """What the family's description tells; of one that has none, its name and its size."""
    from gpt_fast.foreign.checkpoint import ForeignCheckpoint
    from gpt_fast.model.transformer import weight_bytes

    config = checkpoint.config
    if isinstance(checkpoint, ForeignCheckpoint):
        shape = {name: getattr(config, name) for name in ("vocab_size", "dim", "num_layers", "max_seq_len")}
        weights = checkpoint.num_bytes(dtype, quantize)
        return {"family": f"{config.family}, run by transformers", **shape, "weight_bytes": weights}
    model = checkpoint.meta_model(dtype, quantize)
    return {
        **{name: value for name, value in dataclasses.asdict(config).items() if name not in ("windows", "vocab_rows")},
        "sliding_window": max(config.windows, default=0) or None,
        "weight_bytes": weight_bytes(model),
        "bytes_per_decoded_token": model.bytes_per_token(0, dtype.itemsize),
        "flops_per_token": model.flops_per_token(0),
    }


def _cache_facts(config: Any, dtype: Any, device_type: str, free: int) -> dict[str, Any]:
    """What fits with ``free`` bytes beside the weights, by the engine's defaults; or why nothing does."""
    from gpt_fast.memory import plan_cache

    try:
        plan = plan_cache(config, EngineConfig(), dtype=dtype, free=free, device_type=device_type)
    except ConfigError as error:
        return {"does_not_fit": str(error)}
    return {
        "cache_bytes": plan.num_bytes,
        "cache_tokens": plan.num_tokens,
        "cache_holds": f"{plan.num_sequences:.1f} sequences of {plan.max_seq_len} tokens",
    }
