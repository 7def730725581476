"""The trace of a server's first request: where it lies."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpt_fast.engine.engine import Engine
from gpt_fast.serve.tracing import FirstRequest


@pytest.mark.parametrize("place", ["logs", "tmp"])
def test_the_trace_lies_beside_the_logs_which_outlive_the_server(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gpt-fast serve`` removes its server's folder for temporary files; without logs there is no better one."""
    for name in ("logs", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("LOG_LOCATION", str(tmp_path / "logs") if place == "logs" else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    engine: Any = SimpleNamespace(on_step=lambda *_: None, on_finish=lambda _: None)
    trace = FirstRequest(cast(Engine, engine), "cpu")
    torch.zeros(2).add(1)
    engine.on_step(None, 0.0)
    engine.on_finish(None)
    assert trace.written.wait(60)
    (written,) = tmp_path.glob("*/gpt-fast-rank0-*.trace.json")
    assert written.parent.name == place
    assert json.loads(written.read_text())["traceEvents"]
