"""Options that several commands share. What is not given is absent, so that the dataclasses' own defaults hold."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any

from gpt_fast.config import EngineConfig

_SWITCH = argparse.BooleanOptionalAction
_WHERE: dict[str, dict[str, Any]] = {  # flag: what argparse wants to know
    "--device": {"metavar": "DEVICE", "help": "auto, cpu, cuda, cuda:N (default: auto)"},
    "--dtype": {"metavar": "DTYPE", "help": "auto, float32, bfloat16, float16 (default: auto)"},
    "--quantize": {"metavar": "MODE", "help": "quantize the weights while loading: int8, int4, fp8"},
    "--kernels": {"action": _SWITCH, "help": "own kernels; without: plain torch (default: on)"},
    "--threads": {"type": int, "metavar": "N", "help": "CPU threads (default: all cores)"},
}
_HOW: dict[str, dict[str, Any]] = {
    "--kv-cache-dtype": {"metavar": "DTYPE", "help": "int8 halves it again (default: as the weights)"},
    "--compile": {"action": _SWITCH, "help": "torch.compile (default: on)"},
}


def add_model_options(group: Any) -> list[str]:
    """Where and how a model's weights are held. Returns the names of the options, which are fields of EngineConfig."""
    return [group.add_argument(flag, default=argparse.SUPPRESS, **facts).dest for flag, facts in _WHERE.items()]


def add_engine_options(group: Any) -> list[str]:
    """Those, and how the model is run."""
    names = [group.add_argument(flag, default=argparse.SUPPRESS, **facts).dest for flag, facts in _HOW.items()]
    return [*add_model_options(group), *names]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """What commands that measure something print beside it."""
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--verbose", action="store_true", help="log what happens; a traceback on errors")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given: keyword arguments for ``LLM``."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in vars(arguments).items() if name in fields}


def set_up_logging(verbose: bool) -> None:
    """Log lines to stderr: warnings, or with ``verbose`` everything this package says."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if verbose:
        logging.getLogger("gpt_fast").setLevel(logging.INFO)
