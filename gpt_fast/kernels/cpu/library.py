"""The C++ kernels of ``src/``, which building.py has built, loaded through ctypes.

The library brings its own threads (``src/team.h`` says why), as many as ``torch.get_num_threads()`` at the time of the
call. ``$GPT_FAST_KERNELS=reference`` switches the kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast.errors import UnavailableError
from gpt_fast.kernels.cpu import building, structs
from gpt_fast.user_cache import private_folder

log = logging.getLogger(__name__)

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

# The functions of the library, named without "gpt_fast_": what each returns, then its arguments.
_P, _I, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_CALLS: dict[str, tuple[Any, ...]] = {
    "run": (None, _P, _P, _INT),
    "pack": (None, _P, _P, _I, _I, _I, _I, _INT),
    "quantize": (None, _P, _I, _I, _I, _I, _P, _P, _P, _P, _INT),
    "quantize_int8": (None, _P, _I, _I, _I, _P, _P, _INT),
    "chain": (None, _P, _P, _P, _INT),
    "draw": (None, _P, _P, _P, _I, _I, _INT),
    "begin": (_I, _P, _P, _P, _INT),
    "wait": (None, _I),
    "tell": (None, _P, _P, _I),
    "hear": (ctypes.POINTER(_I), _P),
    "read": (_I, _P, _I, _INT, _INT),
    "tiles_work": (_I,),
    "rounding": (_I, _I),
    "rounded_together": (_I,),
    "rounded_in_pairs": (_I,),
    "rounded_by_powers": (_I,),
    "struct_bytes": (_I, _I),
}
# These take a microsecond: to let other threads of Python run meanwhile would cost more.
_QUICK: dict[str, tuple[Any, ...]] = {
    "hold": (None,),
    "automaton": (_P,),
    "automaton_free": (None, _P),
    "automaton_bytes": (_I, _P),
    "automaton_extend": (None, _P, _P, _I, _P, _I),
    "automaton_find": (None, _P, _P, _I, _P, _I),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises UnavailableError; the first call may compile for some seconds."""
    if os.environ.get("GPT_FAST_KERNELS", "") == "reference":
        raise UnavailableError("GPT_FAST_KERNELS=reference")
    lib = _built_and_loaded(None)
    if not lib.gpt_fast_tiles_work():
        log.warning("this CPU's tiles (AMX) do not give what they should: the kernels do without them")
        lib = _built_and_loaded([name for name in building.variants() if name != "amx"])
    return lib


def _built_and_loaded(names: Sequence[str] | None) -> ctypes.CDLL:
    """What building.py builds, loaded. A library of the user's cache that cannot be loaded, because it was cut short
    perhaps, is thrown away and built again. Raises UnavailableError."""
    path = building.build(names)
    try:
        return _load(path)
    except UnavailableError as error:
        if path.parent != private_folder("kernels"):
            raise
        log.warning("%s; it is built again", error)
        try:
            path.unlink(missing_ok=True)
        except OSError as why:  # a read-only cache
            raise UnavailableError(f"{error}, and it cannot be thrown away: {why}") from why
        return _load(building.build(names))


def _load(path: Path) -> ctypes.CDLL:
    """Raises UnavailableError."""
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error
    for name, (returned, *arguments) in _CALLS.items():
        call = getattr(lib, f"gpt_fast_{name}")
        call.restype, call.argtypes = returned, arguments
    for name, kind in _QUICK.items():
        name = f"gpt_fast_{name}"
        setattr(lib, name, ctypes.PYFUNCTYPE(*kind)((name, lib)))
    for which, kind in enumerate(structs.CHECKED):
        assert lib.gpt_fast_struct_bytes(which) == ctypes.sizeof(kind), f"{kind.__name__} differs"
    return lib


@functools.cache
def available() -> bool:
    """Whether the C++ kernels run here; says why not in one warning."""
    try:
        library()
    except UnavailableError as why:
        level = logging.INFO if os.environ.get("GPT_FAST_KERNELS") == "reference" else logging.WARNING
        log.log(level, "CPU kernels are off, plain torch runs instead and slower: %s", why)
        return False
    return True


def rounding(kind: str) -> int:
    """How products with weights of ``kind``, a key of FORMATS, round their inputs: 1 and 4 to int8, for weights of 8
    and of 4 bits, 2 to bfloat16, 0 not."""
    return int(library().gpt_fast_rounding(FORMATS[kind]))


def rounded_together() -> int:
    """How many values of a row have one scale where products round it to int8: 128 with tiles (AMX), else 32."""
    return int(library().gpt_fast_rounded_together()) if available() else 32


def rounded_in_pairs() -> bool:
    """Whether for int8 that scale covers sums of two neighbours as well: on CPUs with AVX2 and without VNNI, where the
    products of both are added in 16 bits."""
    return available() and bool(library().gpt_fast_rounded_in_pairs())


def rounded_by_powers() -> bool:
    """Whether that scale is a power of two: on CPUs that add up products of bytes in 32 bits, but by tiles."""
    return available() and bool(library().gpt_fast_rounded_by_powers())


READ_ORDERS = range(3)  # kernels.cpp says which


def read(data: Tensor, order: int) -> None:
    """Read all of ``data``, contiguous, a multiple of 128 kB long, in one of READ_ORDERS."""
    library().gpt_fast_read(data.data_ptr(), data.numel() * data.element_size(), order, torch.get_num_threads())


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the C++ kernels run models on ``device`` whose weights that are not quantized are of ``dtype``."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available()
