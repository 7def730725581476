"""The configurations of TorchServe's gpt_fast examples as they are, on files as gpt-fast writes them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from gpt_fast_files import State, int8_state, meta_state

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.families import to_hf_config
from gpt_fast.config import ExpertsConfig
from gpt_fast.model.building import random_model

pytest.importorskip("ts", reason="torchserve is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "model_store" / "demo"
PROMPT = "Once upon a time, there was a little"


def state_of(name: str) -> State:
    state = meta_state(Checkpoint.open(DEMO / name).build(torch.float32))
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def mixtral_state() -> tuple[State, dict[str, Any]]:
    dense = Checkpoint.open(DEMO / "target").config
    experts = ExpertsConfig(4, 2, dense.ffn_dim)
    config = dataclasses.replace(dense, family="mixtral", experts=experts, num_layers=2, tie_embeddings=False)
    return meta_state(random_model(config, torch.bfloat16)), to_hf_config(config, "bfloat16")


def lay_out(archive: Path, block: dict[str, Any]) -> None:
    """The checkpoints that a handler ``block`` names, as gpt-fast's scripts leave them: each file beside config.json
    and tokenizer.model."""
    names = {"converted_ckpt_dir": "target", "draft_checkpoint_path": "draft"}
    for key, name in names.items():
        if key not in block:
            continue
        file = archive / block[key]
        file.parent.mkdir(parents=True)
        shutil.copy(DEMO / name / "tokenizer.model", file.parent)
        shutil.copy(DEMO / name / "config.json", file.parent)
        state = state_of(name)
        if "Mixtral" in block[key]:
            state, raw = mixtral_state()
            (file.parent / "config.json").write_text(json.dumps(raw))
        torch.save(int8_state(state) if "int8" in file.name else state, file)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOCAL_RANK", "1")  # which reports no metrics
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return importlib.import_module("handler")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "example_configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_configuration_serves_its_files(
    path: Path, handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(traces))
    monkeypatch.delenv("LOG_LOCATION", raising=False)
    config = yaml.safe_load(path.read_text())
    block = config["handler"]
    lay_out(tmp_path, block)
    adapter = handler.GPTFastHandler()
    facts = {"model_dir": str(tmp_path), "gpu_id": None}
    context = Context(facts, config)
    adapter.initialize(context)
    with adapter.llm as llm:
        assert "deviceType is gpu, but there is no GPU" in caplog.text or torch.cuda.is_available()
        request = {"prompt": PROMPT, "stream": False, "return_token_ids": True}
        answer = json.loads(adapter.handle([{"body": json.dumps(request).encode()}], context)[0])
        assert answer["usage"]["completion_tokens"] == 50
        if "draft_checkpoint_path" in block:
            assert llm.engine.speculation is not None
    with LLM(tmp_path / block["converted_ckpt_dir"], device=str(llm.device)) as plain:
        params = SamplingParams(max_tokens=50)
        assert answer["token_ids"] == list(plain.generate(PROMPT, params).token_ids)
    if path.stem == "gpt_fast":
        with LLM(DEMO / "target", device=str(llm.device), dtype=str(plain.dtype).removeprefix("torch.")) as original:
            assert answer["token_ids"] == list(original.generate(PROMPT, params).token_ids)
    if block.get("profile"):
        assert adapter.trace.written.wait(60)
    check_trace(traces, bool(block.get("profile")))


class Context(SimpleNamespace):
    """What the handler asks of TorchServe's context, for one request in sync mode."""

    def __init__(self, facts: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(system_properties=facts, model_yaml_config=config, model_name="m", request_ids={0: "r"})

    def get_all_request_header(self, index: int) -> dict[str, str]:
        return {"content-length": "1"}

    def get_request_header(self, index: int, name: str) -> str | None:
        return None

    def set_response_status(self, *_: Any) -> None: ...

    def set_response_content_type(self, *_: Any) -> None: ...


def check_trace(folder: Path, wanted: bool) -> None:
    """With ``profile: true`` the first request leaves one trace of the engine's steps, else none."""
    found = list(folder.glob("gpt-fast-rank0-*.trace.json"))
    assert len(found) == wanted
    for trace in found:
        names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("gpt_fast::cpu_" in name or "aten::" in name for name in names)
