"""What a batch runs on, decided once: so that each worker, and each later run, gives the same answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpt_fast.checkpoint.fingerprint import fingerprint
from gpt_fast.config import EngineConfig, from_mapping
from gpt_fast.devices import named_devices
from gpt_fast.errors import ConfigError
from gpt_fast.foreign.checkpoint import open_checkpoint
from gpt_fast.llm import LLM
from gpt_fast.placement import pick_device, pick_dtype

# Fields of EngineConfig that change no answer; of ``lora`` the fingerprint sees more. One that is not named here counts
# as one that does.
WITHOUT_EFFECT = frozenset(
    {"compile_cache", "draft", "lookup_history", "lora", "max_batch", "max_waiting", "memory_share"}
    | {"num_pages", "page_size", "prefix_cache", "speculate", "speculate_k", "threads"}
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """``options``: fields of EngineConfig that were given, device and dtype decided. ``weights``: the fingerprint of
    ``checkpoint``. ``names``: what requests may call the model."""

    checkpoint: Path
    options: Mapping[str, Any]
    weights: str
    names: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of all that decides an answer except the request: the weights, and the options that change answers. It sees
        neither the machine nor the version of this package, whose kernels may differ in the last bits of logits."""
        defaults = EngineConfig()
        changing = {k: v for k, v in self.options.items() if k not in WITHOUT_EFFECT and v != getattr(defaults, k)}
        changing["device"] = str(self.options["device"]).partition(":")[0]
        return json.dumps([self.weights, sorted(changing.items())])


def set_up(checkpoint: Path, options: Mapping[str, Any], names: tuple[str, ...], device: str | None = None) -> Setup:
    """Decide what ``options`` leave open. ``device``: where the engine will run, if it is not this machine's own
    choice. Raises ConfigError and CheckpointError."""
    config = from_mapping(EngineConfig, options, "gpt-fast batch")
    opened = open_checkpoint(checkpoint).with_adapters(config.lora)
    where = device or (str(pick_device(config.device)) if config.device == "auto" else config.device)
    place = torch.device(where)
    if config.device_map is not None:
        place, where = named_devices(config)[0], "auto"
    dtype = pick_dtype(config.dtype, place, opened.num_parameters, opened.stored_dtype, config.kernels)
    decided = {**options, "device": where, "dtype": str(dtype).removeprefix("torch.")}
    if config.lora is not None:  # workers may stand in other folders
        decided["lora"] = {str(Path(folder).expanduser().resolve()): weight for folder, weight in config.lora.items()}
    every = tuple(dict.fromkeys(("gpt-fast", opened.directory.resolve().name, *names)))
    return Setup(opened.path.absolute(), decided, fingerprint(opened, progress=True), every)


def open_llm(setup: Setup, progress: bool = False) -> LLM:
    """The engine of one process. Raises ConfigError if the memory has no room for the context: answers, and which
    prompts are too long, must not depend on what happened to be free."""
    llm = LLM(setup.checkpoint, progress=progress, **setup.options)
    wished = llm.engine_config.max_seq_len or llm.config.max_seq_len
    if llm.max_seq_len < wished:
        llm.close()
        short = f"the KV cache has room for a context of {llm.max_seq_len} tokens, and the model takes {wished}"
        raise ConfigError(f"{short}: say --max-seq-len {llm.max_seq_len} or less, so that each run has the same one")
    return llm
