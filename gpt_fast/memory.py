"""How much memory is free, and how large the KV cache may be.

The cache is allocated once, while loading: at most a share of what is free then (``memory_share``), and never more than
``max_batch`` sequences of ``max_seq_len`` tokens can fill. Sizes that were asked for and do not fit are refused before
anything is allocated; sizes that nobody asked for shrink. On a CPU "free" is what the operating system says is
available, and no more than the control groups of this process (containers) leave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gpt_fast.cgroups import ROOT, groups, number
from gpt_fast.config import EngineConfig, ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.kernels.cache import padded, token_bytes

_STEP_SHARE = 0.05  # of free memory, for a step of prompts that need not be so long
SHARES = {"cpu": 0.5, "cuda": 0.9}  # of free memory, for the KV cache: the default of memory_share
SHORT = 256  # tokens; a cache that has not even room for this of each sequence that was asked for is refused
_UNTOLD = 0.5  # of all memory, taken as free on systems that do not say what is
# By version of control groups: the files of limits and of use, and the keys of memory.stat that are counted as used,
# but given up under pressure.
_MEMORY_FILES = {
    1: (["limit_in_bytes"], "usage_in_bytes", ["total_active_file", "total_inactive_file"]),
    2: (["max", "high"], "current", ["active_file", "inactive_file", "slab_reclaimable"]),
}


class HostMemory(NamedTuple):
    """Bytes of this machine's memory, within the limits of the container."""

    free: int  # available without swapping; page cache that can be given up counts
    total: int
    spare: int  # what may come on top of ``free``: swap space, or what an estimate has left out


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on ``device`` now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later would count as used
        return torch.cuda.mem_get_info(device)[0]
    return host_memory().free


def host_memory(root: Path = ROOT) -> HostMemory:
    """The memory of this machine as ``proc`` and ``sys`` below ``root`` tell it."""
    info = read_numbers(root / "proc/meminfo", 1024)
    if "MemAvailable" not in info:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = int(total * _UNTOLD)
        return HostMemory(free, total, total - free)
    free, total = info["MemAvailable"], info["MemTotal"]
    for limit, used in _limits(root):
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return HostMemory(free, total, info.get("SwapFree", 0))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group that this process is in, the parents' included."""
    for version, folder in groups("memory", root):
        limit_files, use_file, reclaimable = _MEMORY_FILES[version]
        limits = [n for name in limit_files if (n := number(folder / f"memory.{name}")) is not None]
        used = number(folder / f"memory.{use_file}")
        if limits and used is not None:
            stat = read_numbers(folder / "memory.stat")
            yield min(limits), used - sum(stat.get(name, 0) for name in reclaimable)


def read_numbers(file: Path, unit: int = 1) -> Mapping[str, int]:
    """Lines such as ``MemFree: 12 kB`` or ``inactive_file 12`` as numbers, times ``unit``."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {w[0]: int(w[1]) * unit for w in words if len(w) > 1 and w[1].isdigit()}


def check_weights(num_bytes: int, device: torch.device, smaller_modes: Sequence[str]) -> None:
    """Raise ConfigError when weights of ``num_bytes`` certainly do not fit on ``device``. Nothing is allocated.
    ``smaller_modes``: those of ``quantize`` that the message proposes."""
    free = free_bytes(device)
    if num_bytes > free + (host_memory().spare if device.type == "cpu" else 0):
        todo = f"{set_quantize(smaller_modes)}or " if smaller_modes else ""
        todo += "dtype: bfloat16, or " if "int8" in smaller_modes else ""  # weights that are not quantized
        todo += "take a machine with more memory"
        need = f"the weights need {gigabytes(num_bytes)}, and {gigabytes(free)} are free on {device}"
        raise ConfigError(f"{need}; {todo}")


def set_quantize(modes: Sequence[str]) -> str:
    """The beginning of a proposal in a message: one of ``modes``, if there are any."""
    return f"set quantize: {' or '.join(modes)}, " if modes else ""


class CachePlan(NamedTuple):
    """How large the KV cache is and what it holds. ``str`` gives a line for the log."""

    dtype: torch.dtype
    max_batch: int
    max_seq_len: int  # tokens that one sequence may have
    wished: int  # tokens that it should have: what was asked for, or what the model was made for
    num_pages: int  # page 0 not counted
    page_size: int  # tokens
    num_bytes: int
    free: int  # bytes that were free when this was decided
    prefill_chunk: int  # prompt tokens of a step

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_sequences(self) -> float:
        """How many sequences of full length fit."""
        return self.num_tokens / self.max_seq_len

    def __str__(self) -> str:
        size = f"{gigabytes(self.num_bytes)} of {gigabytes(self.free)} free, {self.num_tokens} tokens"
        return f"KV cache: {size}: room for {self.num_sequences:.1f} sequences of {self.max_seq_len} tokens"

    @property
    def shortened(self) -> str:
        """What to say when ``max_seq_len`` is less than ``wished``."""
        why = f"the KV cache of {gigabytes(self.num_bytes)} ({gigabytes(self.free)} free) holds no more"
        todo = "set max_seq_len to what is needed, or raise memory_share or num_pages"
        return f"max_seq_len is {self.max_seq_len} and not {self.wished}: {why}; {todo}"


def plan_cache(
    config: ModelConfig,
    options: EngineConfig,
    *,
    dtype: torch.dtype,
    free: int,
    device_type: str,
    draft: ModelConfig | None = None,
) -> CachePlan:
    """The KV cache for a model of ``config`` with ``free`` bytes left beside its weights, which have ``dtype``: the
    ``num_pages`` that were asked for, else room for ``max_batch`` sequences of ``max_seq_len`` tokens, or for what
    fits beside a step of prompts. A ``draft`` model has as many pages of its shape. Raises ConfigError, naming keys,
    when what was asked for does not fit; without a ``max_seq_len``, room for ``SHORT`` tokens of each sequence is
    enough."""
    dtype = dtype if options.kv_cache_dtype == "auto" else getattr(torch, options.kv_cache_dtype)
    share, free = options.memory_share or SHARES[device_type], max(0, free)
    longest = options.max_seq_len or config.max_seq_len
    if config.learned_positions is not None and longest > config.max_seq_len:
        raise ConfigError(f"max_seq_len: {longest} is more than the model's {config.max_seq_len} learned positions")
    page_bytes = 0
    for c in (config, draft) if draft else (config,):
        head_dim = padded(c.head_dim) if device_type == "cpu" and options.kernels else c.head_dim
        page_bytes += options.page_size * c.num_layers * token_bytes(c.num_kv_heads, head_dim, dtype)
    each = page_bytes + 2 * 4 * options.num_slots  # two page tables, int32, may hold it in every row
    for chunk in options.chunks(device_type):
        rows = max(options.num_slots, chunk)
        steps = _step_bytes(config, rows, rows) + (_step_bytes(draft, rows, options.num_slots) if draft else 0)
        if steps <= _STEP_SHARE * free:
            break
    allowed = int(share * max(0, free - steps))
    fitting = allowed // each - 1  # there is a page 0 as well
    if options.num_pages is not None:
        least = num_pages = options.num_pages
        if options.max_seq_len is not None and num_pages * options.page_size < options.max_seq_len:
            room = f"num_pages: {num_pages} pages of {options.page_size} tokens hold {num_pages * options.page_size}"
            raise ConfigError(f"{room}, and max_seq_len: {options.max_seq_len} wants more; leave one of them out")
    else:
        pages = -(-longest // options.page_size)
        enough = pages if options.max_seq_len else -(-min(longest, SHORT) // options.page_size)
        least = enough * (options.max_batch or 1)
        num_pages = min(fitting, pages * options.num_slots)
    if least > fitting:
        raise ConfigError(_refusal(options, (least + 1) * page_bytes, allowed, free, share))
    max_seq_len = min(longest, num_pages * options.page_size)
    size = (num_pages + 1) * page_bytes
    return CachePlan(dtype, options.num_slots, max_seq_len, longest, num_pages, options.page_size, size, free, chunk)


def _step_bytes(config: ModelConfig, rows: int, num_logits: int) -> int:
    """About what a step of ``rows`` tokens needs beside weights and cache: a block's activations, and logits twice. The
    target computes logits of all rows for a request that wants the log probabilities of its whole prompt, a draft model
    of each sequence's last token alone."""
    width = 2 * config.ffn_dim + config.q_dim + 2 * config.kv_dim + 4 * config.dim
    if config.experts is not None:
        width += config.experts.top_k * (2 * config.dim + 3 * config.experts.ffn_dim)
    return (rows * width + num_logits * 2 * config.vocab_size) * torch.float32.itemsize


def _refusal(options: EngineConfig, needed: int, allowed: int, free: int, share: float) -> str:
    asked = [name for name in ("num_pages", "max_seq_len", "max_batch") if getattr(options, name) is not None]
    what = ", ".join(f"{name}: {getattr(options, name)}" for name in asked) or "one sequence"
    if not {"num_pages", "max_seq_len"} & set(asked):
        what += f", of {SHORT} tokens at least"
    rule = f"memory_share ({share:g}) of the {gigabytes(free)} that are free beside the weights, less what a step needs"
    lower = f"lower {' or '.join(asked)}, " if asked else ""
    todo = f"{lower}set kv_cache_dtype: int8, raise memory_share, or take a machine with more memory"
    return f"the KV cache would need {gigabytes(needed)} ({what}), and {gigabytes(allowed)} are allowed: {rule}; {todo}"


def gigabytes(num_bytes: int) -> str:
    """``num_bytes`` for people: three digits in GB of 10^9 bytes."""
    return f"{num_bytes / 1e9:.3g} GB"
