"""A stand-in for ``current`` (gpt_fast/model/split.py): which devices a thread computes on, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def watch_current(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices inside whose ``current`` of ``module`` a call is at the moment, the innermost last."""
    inside: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(module, "current", current)
    return inside
