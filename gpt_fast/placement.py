"""Where a model runs, by how many threads and in what precision, decided before its weights are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from gpt_fast.cgroups import num_cores
from gpt_fast.config import DTYPE, THREADS, device_name, read_key
from gpt_fast.errors import ConfigError
from gpt_fast.kernels.cpu.library import runs
from gpt_fast.memory import host_memory

log = logging.getLogger(__name__)


class Placement(NamedTuple):
    """``dtype``: of the weights, and of the KV cache unless another is asked for."""

    device: torch.device
    dtype: torch.dtype
    kernels: bool  # the C++ kernels will run it; they compute in float32, whatever the dtype
    column_major: bool  # lay matrices out transposed (``empty_model``)


def in_words(value: Any) -> Any:
    """An option's ``value`` as files of settings have it: dtypes and devices of torch by their names, paths as text,
    also within lists and mappings."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {in_words(key): in_words(each) for key, each in value.items()}
    return [in_words(each) for each in value] if isinstance(value, list | tuple) else value


def choose_placement(
    num_parameters: int, stored: torch.dtype, *, device: str = "auto", dtype: str = "auto", kernels: bool = True
) -> Placement:
    """Decide for a model of ``num_parameters`` whose weights are ``stored`` in this dtype. Options as in EngineConfig.
    Raises ConfigError for a device that is not there."""
    where = pick_device(device)
    chosen = pick_dtype(dtype, where, num_parameters, stored, kernels)
    fast = kernels and runs(chosen, where)
    # torch's float32 products on a CPU want columns; the kernels lay matrices out themselves.
    return Placement(where, chosen, fast, column_major=where.type == "cpu" and chosen == torch.float32 and not fast)


def pick_device(name: str, option: str = "device") -> torch.device:
    """``auto`` is the first CUDA device (ROCm included) where there is one, else the CPU. A CUDA device has its number:
    torch.cuda.set_device takes no other. Raises ConfigError that says which ``option`` names it."""
    if read_key(device_name, name, option) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", 0) if name == "cuda" else torch.device(name)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ConfigError(f"{option}: {name!r} is asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def pick_dtype(
    name: str, device: torch.device, num_parameters: int, stored: torch.dtype = torch.bfloat16, kernels: bool = True
) -> torch.dtype:
    """``auto``: bfloat16 on CUDA, and on CPUs for weights that are stored so and run by kernels or instructions that
    take them; else float32 where it fits half the memory, because torch would emulate bfloat16 products: 5 times slower
    in prefill. Raises ConfigError."""
    if read_key(DTYPE, name, "dtype") != "auto":
        return cast(torch.dtype, getattr(torch, name))
    if device.type != "cpu":
        return torch.bfloat16
    fast = kernels and runs(torch.bfloat16, device)
    fast = fast or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    narrow = stored == torch.bfloat16 and fast
    fits = num_parameters * 4 < host_memory().total / 2
    return torch.bfloat16 if narrow or not fits else torch.float32


def usable_threads(asked: int) -> int:
    """``asked`` CPU threads, but no more than the cores that this process may use; a warning says so. Raises
    ConfigError for a number that is out of range."""
    read_key(THREADS, asked, "threads")
    cores = num_cores()
    if asked > cores:
        why = "the option threads, OMP_NUM_THREADS or torch's own choice"
        log.warning("threads: %d (%s) are more than the %d cores for this process; %d run", asked, why, cores, cores)
        for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
            if os.environ.get(name, "").lower() not in ("", "false"):
                log.warning("%s binds this process to them: unset it, and it may use the others too", name)
    return min(asked, cores)
