"""Options that several commands share. What is not given is absent, so that the dataclasses' own defaults hold."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpt_fast.checkpoint.files import NAME_OF_HUB
from gpt_fast.config import EngineConfig, read_key
from gpt_fast.errors import CheckpointError
from gpt_fast.fields import kinds_of

Table = dict[str, dict[str, Any]]  # flag: what argparse wants to know
_FIELDS = kinds_of(EngineConfig)


class AddAdapter(argparse.Action):
    """Collects ``DIR`` and ``DIR=WEIGHT``, a number, as weights by folder."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        folder, _, weight = values.rpartition("=")
        try:
            new = {folder: float(weight)}
        except ValueError:
            new = {values: 1.0}
        before = vars(namespace).get(self.dest, {})
        if twice := before.keys() & new.keys():
            raise argparse.ArgumentError(self, f"{twice.pop()} is named twice; add its weights up")
        setattr(namespace, self.dest, before | new)


_SWITCH = argparse.BooleanOptionalAction
CHECKPOINT: Table = {
    "--checkpoint": {"required": True, "metavar": "DIR", "help": "a Hugging Face directory or GGUF file, as it is"}
}
LORA: Table = {
    "--lora": {
        "action": AddAdapter,
        "metavar": "DIR",
        "help": "add a LoRA adapter of PEFT to the weights; DIR=0.5 adds half of it (may be repeated)",
    }
}
CACHE: Table = {
    "--kv-cache-dtype": {"metavar": "DTYPE", "help": "of keys and values; int8 halves them (default: as the weights)"},
}
MODEL: Table = {  # where and how a model's weights are held: fields of EngineConfig
    "--device": {"metavar": "DEVICE", "help": "auto, cpu, cuda, cuda:N (default: auto)"},
    "--dtype": {"metavar": "DTYPE", "help": "auto, float32, bfloat16, float16 (default: auto)"},
    "--quantize": {"metavar": "MODE", "help": "quantize the weights while loading: int8, int4, fp8"},
    **LORA,
    "--kernels": {"action": _SWITCH, "help": "own kernels; without: plain torch (default: on)"},
    "--threads": {"type": int, "metavar": "N", "help": "CPU threads (default: one for a small model, else torch's)"},
}


MAX_SEQ_LEN: Table = {
    "--max-seq-len": {
        "type": int,
        "metavar": "N",
        "help": "tokens of prompt and answer together (default: the model's, where memory has room)",
    }
}
MAX_BATCH: Table = {
    "--max-batch": {"type": int, "metavar": "N", "help": "sequences decoded together (default: 8)"},
}


def device_list(text: str) -> str | list[str]:
    """``auto``, or the names of devices with commas between them."""
    return text if text == "auto" else text.split(",")


ENGINE: Table = {  # and how the model is run: fields of EngineConfig too
    "--device-map": {
        "type": device_list,
        "metavar": "DEVICES",
        "help": "share the layers between cuda:0,cuda:1,cpu or what there is (auto), by what memory is free",
    },
    **CACHE,
    "--draft": {"metavar": "DRAFT", "help": "guess tokens by a checkpoint DIR, by lookup, or by int8, int4 (itself)"},
    "--speculate": {
        "metavar": "WHEN",
        "help": "guess where it pays (auto), always or never (default: auto with --draft)",
    },
    "--speculate-k": {"type": int, "metavar": "K", "help": "tokens guessed for each step, at most (default: 4)"},
    "--compile": {"action": _SWITCH, "help": "torch.compile (default: on)"},
    **MODEL,
}


def refuse_absent(checkpoint: str | None) -> None:
    """Raise CheckpointError where the folder or file ``checkpoint`` is not there; None: there is none to be."""
    if checkpoint is None or Path(checkpoint).exists():
        return
    told = f"--checkpoint: there is no folder or file {checkpoint}"
    if of_hub := NAME_OF_HUB.fullmatch(checkpoint):
        named = filter(None, of_hub.group("repo", "file"))
        command = shlex.join(["gpt-fast", "download", *named, "--out", "DIR"])
        told += f"; only serve takes names of the Hub. Fetch it:  {command}"
    raise CheckpointError(told)


def check_place(option: str, path: Path) -> None:
    """Raise before a long measurement what writing ``path`` would raise after it: ValueError or OSError."""
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")
    there = path.exists()
    with open(path, "ab"):
        pass
    if not there:
        path.unlink()


def check_traces(folder: str, name: str) -> None:
    """Make ``folder`` and raise OSError if a trace ``name`` cannot be written there: the profiler would only log it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    check_place("--profile", Path(folder, name))


def add_options(group: Any, table: Table) -> list[str]:
    """Declares the options of ``table``. Returns the names of their values."""
    return [group.add_argument(flag, default=argparse.SUPPRESS, **facts).dest for flag, facts in table.items()]


def add_output_options(parser: argparse.ArgumentParser, also_verbose: str = "") -> None:
    """What commands that measure something print beside it. ``also_verbose``: what else --verbose does."""
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of stdout")
    parser.add_argument("--verbose", action="store_true", help=f"log what happens; a traceback on errors{also_verbose}")


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of ``names`` that were given, and their values."""
    return {name: vars(arguments)[name] for name in names if name in arguments}


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given: keyword arguments for ``LLM``. Raises ConfigError for a value that is
    not taken, with the option as it was typed: what reads these fields later has other names for them."""
    found = given(arguments, _FIELDS)
    for name, value in found.items():
        read_key(_FIELDS[name], value, f"--{name.replace('_', '-')}")
    return found


def set_up_logging(verbose: bool) -> None:
    """Log lines to stderr: warnings, or with ``verbose`` everything this package says."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if verbose:
        logging.getLogger("gpt_fast").setLevel(logging.INFO)
