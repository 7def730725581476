"""Worker: llama.cpp by the low-level interface of llama-cpp-python, greedy.

Its defaults, with ``n_batch`` 512, all layers on the CPU and the same threads for prompts and decoding. Flash
attention is not left to chance: each measure is first run without it and with it, and the faster one stays. Every
measure gets a new context, no longer than it needs; a prompt stays in the cache and only what was decoded is
removed.

``python -m peers.llamacpp quantize FROM.gguf TO.gguf Q4_0|Q8_0 THREADS`` quantizes a file.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.contexts import N_BATCH, Context, FastestRuns, Row
from peers.gguf_file import bytes_per_token, kv_bytes_per_token
from peers.measures import Measure
from peers.worker import serve

_FTYPES = {"Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


def check() -> dict[str, Any]:
    """Versions, without the time that importing takes."""
    return {"llama-cpp-python": metadata.version("llama-cpp-python"), "python": platform.python_version()}


class LlamaContext:
    """A context of llama.cpp, long enough for ``measure``."""

    def __init__(self, lib: Any, model: Any, measure: Measure, threads: int, flash: bool) -> None:
        self.lib = lib
        self.num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        params = lib.llama_context_default_params()
        params.n_seq_max = measure.batch
        params.n_ctx = measure.batch * measure.longest
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama_init_from_model failed for {measure.name}")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(N_BATCH, 0, 1)

    def decode(self, rows: Sequence[Row]) -> None:
        """One call of llama_decode. Raises RuntimeError."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def likeliest(self, row: int) -> int:
        """The token with the greatest logit."""
        import numpy as np  # llama_cpp needs it anyway

        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.num_vocab,)).argmax())

    def forget(self, sequence: int, position: int) -> None:
        """Remove cached tokens. Raises RuntimeError."""
        if not self.lib.llama_memory_seq_rm(self.memory, sequence, position, -1):
            raise RuntimeError("llama_memory_seq_rm failed")

    def close(self) -> None:
        """Free it."""
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)


class LlamaCpp:
    """``options``: gguf, threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.lib = importlib.import_module("llama_cpp")
        self.path, self.threads = options["gguf"], options["threads"]
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.lib.llama_model_load_from_file(self.path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {self.path}")
        ways = {"no flash attention": False, "flash attention": True}
        self.runs = FastestRuns({name: functools.partial(self._open, flash=flash) for name, flash in ways.items()})

    def _open(self, measure: Measure, *, flash: bool) -> Context:
        return LlamaContext(self.lib, self.model, measure, self.threads, flash)

    def facts(self) -> dict[str, Any]:
        """A step reads the file without the embedding; the cache is in float16."""
        return {"weight_bytes": bytes_per_token(self.path), "kv_bytes_per_token": kv_bytes_per_token(self.path, 2)}

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        return self.runs.measure(measure)

    def notes(self) -> dict[str, Any]:
        """What was chosen, and what the library was built for."""
        info = self.lib.llama_print_system_info().decode(errors="replace").strip()
        return {"ways": self.runs.notes, "system_info": info}


def quantize(source: str, target: str, kind: str, threads: int) -> None:
    """Write ``target``, whole or not at all. Raises RuntimeError."""
    lib = importlib.import_module("llama_cpp")
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(lib, _FTYPES[kind]), threads
    part = Path(f"{target}.part")
    if lib.llama_model_quantize(source.encode(), str(part).encode(), ctypes.byref(params)):
        part.unlink(missing_ok=True)
        raise RuntimeError(f"llama_model_quantize failed for {source} to {kind}")
    part.rename(target)


if __name__ == "__main__":
    if sys.argv[1:2] == ["quantize"]:
        quantize(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        serve(check, LlamaCpp)
