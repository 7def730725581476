"""Worker: llama.cpp by the low-level interface of llama-cpp-python, greedy.

Its defaults, with ``n_batch`` 512, all layers on the CPU and the same threads for prompts and decoding. Flash
attention is not left to chance: each measure is first run without it and with it, and the faster one stays. Every
measure has a context of its own, no longer than it needs; a prompt stays in the cache and only what was decoded is
removed.

``python -m peers.llamacpp quantize FROM.gguf TO.gguf Q4_0|Q8_0 THREADS`` quantizes a file.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.gguf_file import bytes_per_token
from peers.measures import Measure, prompt_ids
from peers.worker import serve

N_BATCH = 512
_FTYPES = {"Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


def check() -> dict[str, Any]:
    """Versions, without the time that importing takes."""
    return {"llama-cpp-python": metadata.version("llama-cpp-python"), "python": platform.python_version()}


class Context:
    """A llama context for one measure, its prompts computed."""

    def __init__(self, lib: Any, model: Any, measure: Measure, threads: int, flash: bool) -> None:
        self.lib, self.measure = lib, measure
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
        self.prompts = [prompt_ids(measure.prompt_tokens, self.num_vocab, i) for i in range(measure.batch)]
        if measure.kind == "decode":
            for sequence, prompt in enumerate(self.prompts):
                self._prefill(sequence, prompt)

    def run(self) -> float:
        """Seconds."""
        m = self.measure
        begin = time.perf_counter()
        if m.kind == "prefill":
            self._prefill(0, self.prompts[0])
            self._likeliest(-1)
        else:
            tokens = [prompt[0] for prompt in self.prompts]
            for position in range(m.prompt_tokens, m.prompt_tokens + m.new_tokens):
                self._decode([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
                tokens = [self._likeliest(i) for i in range(m.batch)]
        seconds = time.perf_counter() - begin
        for sequence in range(m.batch):
            keep = m.prompt_tokens if m.kind == "decode" else 0
            if not self.lib.llama_memory_seq_rm(self.memory, sequence, keep, -1):
                raise RuntimeError("llama_memory_seq_rm failed")
        return seconds

    def close(self) -> None:
        """Free it."""
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)

    def _prefill(self, sequence: int, prompt: list[int]) -> None:
        last = len(prompt) - 1
        for begin in range(0, len(prompt), N_BATCH):
            part = prompt[begin : begin + N_BATCH]
            self._decode([(token, i, sequence, i == last) for i, token in enumerate(part, begin)])

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One call with tokens, positions, sequences and whether logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _likeliest(self, row: int) -> int:
        import numpy as np  # llama_cpp needs it anyway

        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.num_vocab,)).argmax())


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
        self.contexts: dict[Measure, Context] = {}
        self.flash: dict[str, dict[str, Any]] = {}

    def facts(self) -> dict[str, Any]:
        """A step reads the file without the embedding; the cache is in float16."""
        lib, model = self.lib, self.model
        head_dim = lib.llama_model_n_embd(model) // lib.llama_model_n_head(model)
        kv_bytes = 2 * lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * head_dim * 2
        return {"weight_bytes": bytes_per_token(self.path), "kv_bytes_per_token": kv_bytes}

    def measure(self, measure: Measure) -> float:
        """Seconds; the first call for a measure chooses between flash attention and none."""
        if measure not in self.contexts:
            found = {}
            for flash in (False, True):
                context = Context(self.lib, self.model, measure, self.threads, flash)
                context.run()
                found[flash] = (context.run(), context)
            best = found[True][0] < found[False][0]
            found[not best][1].close()
            self.contexts[measure] = found[best][1]
            self.flash[measure.name] = {"on": best, "seconds_off": found[False][0], "seconds_on": found[True][0]}
        return self.contexts[measure].run()

    def notes(self) -> dict[str, Any]:
        """What was chosen, and what the library was built for."""
        info = self.lib.llama_print_system_info().decode(errors="replace").strip()
        return {"flash_attention": self.flash, "system_info": info}


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
