"""gpt_fast: a small native-PyTorch engine that decodes a transformer as fast as memory allows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_fast.errors import RequestError
    from gpt_fast.llm import LLM
    from gpt_fast.outputs import Completion, Delta
    from gpt_fast.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Delta", "RequestError", "SamplingParams"]

_HOME = {"LLM": "llm", "Completion": "outputs", "Delta": "outputs", "RequestError": "errors",
         "SamplingParams": "params"}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported when first used: torch takes seconds, and protocol or client code does without it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpt_fast.{_HOME[name]}"), name)
