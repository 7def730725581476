"""Options that several commands share, and how they become dataclasses."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from gpt_fast.params import SamplingParams

_ENGINE_FIELDS = ("device", "dtype", "quantize", "kv_cache_dtype", "compile", "kernels", "max_seq_len", "threads")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the model is run: the fields of EngineConfig that matter to one request."""
    group = parser.add_argument_group("engine")
    add_model_options(group)
    group.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE", help="int8 halves it again (default: as the weights)"
    )
    group.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile (default: on)"
    )
    group.add_argument("--max-seq-len", type=int, metavar="N", help="context, prompt and answer together, in tokens")


def add_model_options(group: Any) -> None:
    """Which model, and where and how its weights are held."""
    group.add_argument("--checkpoint", required=True, metavar="DIR", help="a Hugging Face directory, as it is")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (default: %(default)s)")
    group.add_argument("--quantize", metavar="MODE", help="quantize the weights while loading: int8, int4, fp8")
    group.add_argument(
        "--kernels", action=argparse.BooleanOptionalAction, default=True, help="own kernels; without: plain torch"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``LLM``."""
    return {name: getattr(arguments, name) for name in _ENGINE_FIELDS}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's own, else 0)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0: all")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to probability P; 1: all")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest")
    group.add_argument("--seed", type=int, help="makes sampling repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT (may be repeated)")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises RequestError, a ValueError, for a value out of range."""
    return SamplingParams(
        max_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def set_up_logging(verbose: bool) -> None:
    """Log lines to stderr: warnings, or with ``verbose`` everything this package says."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if verbose:
        logging.getLogger("gpt_fast").setLevel(logging.INFO)
