"""One start of the engine in this process, each phase timed. ``benchmarks/start.py`` runs it:

    python benchmarks/starting/worker.py '{"begun": MONOTONIC_SECONDS, "checkpoint": FOLDER, "options": {...}}'

The engine has no timers: the functions that do the work are wrapped here, from outside. One phase goes on at a time, so
phases are disjoint and add up to the time from ``begun``, when the process was started, to the first token. A piece of
a mapped file is touched when it is handed out: what is timed as reading is bringing its pages in, and what uses it does
not wait for them. The last line of stdout is JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ELSE, READING, CACHE = "everything else", "reading weights", "KV cache"
_AGAIN = 5  # requests after the first one


def clock() -> tuple[float, float]:
    """Seconds on the clock that all processes share, and those that the system has worked for this process."""
    return time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_stime


class Phases:
    """Seconds, seconds of the system's work (of all threads) and bytes by phase. The time between two phases, or behind
    them, belongs to ``ELSE``.

    Any thread may be in a phase, but one at a time: while the engine's thread warms up, the main thread waits."""

    def __init__(self, first: str, begun: float, clock: Callable[[], tuple[float, float]] = clock) -> None:
        """``begun``: when this process and the phase ``first`` began."""
        self.seconds: dict[str, float] = {}
        self.system: defaultdict[str, float] = defaultdict(float)
        self.num_bytes: Counter[str] = Counter()  # read and written
        self._clock, self._now, self._since = clock, first, (begun, 0.0)

    def switch(self, phase: str) -> str:
        """Begin ``phase``; returns the one that went on until now."""
        before, (since, worked), now = self._now, self._since, self._clock()
        self.seconds[before] = self.seconds.get(before, 0.0) + now[0] - since
        self.system[before] += now[1] - worked
        self._now, self._since = phase, now
        return before

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """What runs in here belongs to ``phase``, but for the phases that begin and end in it."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def wrap(
        self, owner: Any, name: str, phase: str | Callable[..., str], num_bytes: Callable[..., int] | None = None
    ) -> None:
        """Time each call of the function ``name`` of ``owner``, a module or a class, as ``phase``, which its arguments
        may choose. ``num_bytes``: of the result and the arguments, what it read and wrote."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            own = phase if isinstance(phase, str) else phase(*args)
            with self.timed(own):
                result = inner(*args, **kwargs)
            if num_bytes is not None:
                self.num_bytes[own] += num_bytes(result, *args)
            return result

        setattr(owner, name, outer)


def wrap_engine(phases: Phases) -> None:
    """Time what :class:`gpt_fast.LLM` calls. A function is wrapped where it is looked up when it is called."""
    from gpt_fast import llm, loading
    from gpt_fast.checkpoint import checkpoint
    from gpt_fast.checkpoint.stored import StoredTensor
    from gpt_fast.engine.runner import Runner
    from gpt_fast.engine.speculate.speculation import Speculation
    from gpt_fast.kernels.cache import PagedLayer
    from gpt_fast.kernels.cpu import library
    from gpt_fast.model import cpu_model
    from gpt_fast.model.steps import TorchModel
    from gpt_fast.quantize import rtn
    from gpt_fast.quantize.linear import QuantizedLinear

    phases.wrap(llm, "open_checkpoint", "configuration, headers")
    phases.wrap(llm, "_tokenizer_of", "tokenizer")
    phases.wrap(loading, "open_draft", "configuration, headers")
    phases.wrap(library, "library", "kernels' library")
    phases.wrap(checkpoint, "empty_model", "modules without weights")
    rows = StoredTensor.rows
    StoredTensor.rows = lambda *args: touched(rows(*args))  # type: ignore[method-assign]
    phases.wrap(StoredTensor, "rows", READING, lambda found, *_: int(found.nbytes))
    phases.wrap(StoredTensor, "release", READING)
    phases.wrap(StoredTensor, "copy_to", "copying weights", lambda _, own, to, *__: int(own.num_bytes + to.nbytes))
    phases.wrap(rtn, "quantize_rows", _rounding, _bytes_of_rounding)
    phases.wrap(QuantizedLinear, "store", lambda own, *_: f"rounding to {own.scheme.kind}")
    phases.wrap(checkpoint, "_warn_not_finite", "looking for NaN", _bytes_looked_at)
    phases.wrap(cpu_model, "pack_rows", _packing, lambda packed, own, part: packed.data.nbytes + _bytes_of(own, part))
    phases.wrap(PagedLayer, "allocate", CACHE, lambda cache, *_: int(cache.num_bytes))
    for model in (cpu_model.CpuModel, TorchModel):
        phases.wrap(model, "make_step", "program of a step")
    phases.wrap(Runner, "warm_up", "warm-up steps")
    phases.wrap(Speculation, "control", "times of steps with drafts")


def touched(rows: Any) -> Any:
    """``rows``, a tensor, with one byte of each of its pages read."""
    if rows.is_contiguous():
        import torch

        rows.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return rows


def _rounding(rows: Any, scheme: Any) -> str:
    return f"rounding to {scheme.kind}"


def _bytes_of_rounding(found: Any, rows: Any, scheme: Any) -> int:
    return int(rows.nbytes + sum(tensor.nbytes for tensor in found.values()))


def _bytes_looked_at(_: None, model: Any, where: str) -> int:
    tensors = model.state_dict().values()
    return sum(t.nbytes for t in tensors if t.is_floating_point() and t.dtype.itemsize > 1)


def _packing(module: Any, rows: slice) -> str:
    kind = module.scheme.kind if hasattr(module, "scheme") else str(module.weight.dtype).removeprefix("torch.")
    return f"packing {kind}"


def _bytes_of(module: Any, rows: slice) -> int:
    return int(module.weight[rows].nbytes)


def bytes_from_disk() -> int | None:
    """What this process has had read from storage until now; None where the system does not count it."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def start(begun: float, checkpoint: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load ``checkpoint`` with ``options`` of LLM, generate a token; what that took."""
    phases = Phases("interpreter", begun)
    phases.switch("import torch")
    import torch

    phases.switch("import gpt_fast")
    from gpt_fast.llm import LLM
    from gpt_fast.params import SamplingParams

    phases.switch(ELSE)
    wrap_engine(phases)
    before, params = bytes_from_disk(), SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    llm = LLM(checkpoint, **options)
    with phases.timed("first token"):
        llm.generate([1], params)
    seconds, total = dict(phases.seconds), time.monotonic() - begun
    after, again = bytes_from_disk(), []
    for _ in range(_AGAIN):
        at = time.perf_counter()
        llm.generate([1], params)
        again.append(time.perf_counter() - at)
    llm.close()
    disk = None if before is None or after is None else after - before
    found = {"total_s": total, "seconds": seconds, "system": phases.system, "bytes": phases.num_bytes}
    return found | {"again_s": min(again), "from_disk": disk, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(start(given["begun"], given["checkpoint"], given["options"])))
