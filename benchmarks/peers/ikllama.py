"""Worker: ik_llama.cpp by its C API, greedy, through ik_shim.c, which is compiled here with the checkout's llama.h.

Its defaults, with ``n_batch`` 512, all layers on the CPU and the same threads for prompts and decoding; its fused
operations (up with gate, multiply with add) and its reuse of graphs are on by default. What is not left to chance: each
measure is first run with the file's layout and with weights repacked and merged while loading (``-rtr -mqkv``), each
without flash attention and with it, and the fastest way stays. Every measure has a separate context, no longer than it
needs.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.contexts import N_BATCH, Context, FastestRuns, Row
from peers.gguf_file import bytes_per_token, kv_bytes_per_token
from peers.measures import Measure
from peers.worker import serve

_SOURCE = Path(__file__).with_name("ik_shim.c")


def check() -> dict[str, Any]:
    """Raises RuntimeError without a C compiler."""
    if shutil.which("cc") is None:
        raise RuntimeError("ik_llama.cpp: there is no C compiler named cc; install gcc")
    return {"python": platform.python_version()}


def compile_shim(checkout: Path) -> ctypes.CDLL:
    """ik_shim.c, compiled against the headers and libraries of ``checkout`` and loaded. Raises RuntimeError."""
    include = [f"-I{checkout / folder}" for folder in ("include", "ggml/include")]
    folders = [checkout / "build" / folder for folder in ("src", "ggml/src")]
    link = [word for folder in folders for word in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    with tempfile.TemporaryDirectory() as directory:
        library = str(Path(directory) / "ik_shim.so")
        command = ["cc", "-O2", "-shared", "-fPIC", f"-DMAX_ROWS={N_BATCH}", *include, str(_SOURCE), "-o", library]
        command += [*link, "-lllama", "-lggml"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise RuntimeError(
                f"{_SOURCE.name} does not compile with the llama.h of {checkout}:\n{done.stderr[-2000:]}"
            )
        shim = ctypes.CDLL(library)
    shim.shim_load.restype = shim.shim_context.restype = ctypes.c_void_p
    shim.shim_load.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    shim.shim_context.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_bool]
    return shim


class IkContext:
    """A context of ik_llama.cpp, long enough for ``measure``."""

    def __init__(self, shim: ctypes.CDLL, model: int, measure: Measure, threads: int, flash: bool) -> None:
        self.shim = shim
        self.num_vocab = shim.shim_num_vocab(ctypes.c_void_p(model))
        context = shim.shim_context(model, measure.batch * measure.longest, measure.batch, threads, flash)
        if not context:
            raise RuntimeError(f"llama_init_from_model failed for {measure.name}")
        self.context = ctypes.c_void_p(context)

    def decode(self, rows: Sequence[Row]) -> None:
        """One call of llama_decode. Raises RuntimeError."""
        integers, flags = ctypes.c_int * len(rows), ctypes.c_byte * len(rows)
        tokens, positions, sequences, wanted = zip(*rows, strict=True)
        columns = integers(*tokens), integers(*positions), integers(*sequences), flags(*wanted)
        status = self.shim.shim_decode(self.context, len(rows), *columns)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def likeliest(self, row: int) -> int:
        """The token with the greatest logit. Raises RuntimeError."""
        token = int(self.shim.shim_likeliest(self.context, row, self.num_vocab))
        if token < 0:
            raise RuntimeError(f"llama_get_logits_ith has no logits of row {row}")
        return token

    def forget(self, sequence: int, position: int) -> None:
        """Remove cached tokens. Raises RuntimeError."""
        if self.shim.shim_forget(self.context, sequence, position):
            raise RuntimeError("llama_kv_cache_seq_rm failed")

    def close(self) -> None:
        """Free it."""
        self.shim.shim_close(self.context)


class IkLlama:
    """``options``: gguf, checkout, threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.path, self.threads, self.checkout = options["gguf"], options["threads"], Path(options["checkout"])
        self.shim = compile_shim(self.checkout.resolve())
        self.models: dict[bool, int] = {}
        layouts, attentions = {"file": False, "repacked": True}, {"no flash attention": False, "flash attention": True}
        ways = {
            f"{layout}, {attention}": functools.partial(self._open, repack=repack, flash=flash)
            for layout, repack in layouts.items()
            for attention, flash in attentions.items()
        }
        self.runs = FastestRuns(ways)

    def _open(self, measure: Measure, *, repack: bool, flash: bool) -> Context:
        if repack not in self.models:
            model = self.shim.shim_load(self.path.encode(), repack)
            if not model:
                raise RuntimeError(f"ik_llama.cpp cannot load {self.path}")
            self.models[repack] = model
        return IkContext(self.shim, self.models[repack], measure, self.threads, flash)

    def facts(self) -> dict[str, Any]:
        """A step reads the file without the embedding; the cache is in float16."""
        return {"weight_bytes": bytes_per_token(self.path), "kv_bytes_per_token": kv_bytes_per_token(self.path, 2)}

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        return self.runs.measure(measure)

    def notes(self) -> dict[str, Any]:
        """What was chosen, and which commit it is."""
        command = ["git", "-C", str(self.checkout), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {"ways": self.runs.notes, "commit": done.stdout.strip() or None}


if __name__ == "__main__":
    serve(check, IkLlama)
