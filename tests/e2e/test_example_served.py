"""Two configurations of TorchServe's gpt_fast example in a real TorchServe, on files as gpt-fast writes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from gpt_fast_files import int8_state, meta_state
from serving import ROOT, TORCHSERVE, Server, java_home, serve, wait_for

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint

CONFIGS = ROOT / "tests" / "example_configs"
DEMO = ROOT / "model_store" / "demo"
PROMPT = "Once upon a time, there was a little"


def archive(name: str, config: Path, store: Path) -> Path:
    """The example's own command, with this project's handler."""
    command = ["torch-model-archiver", "--model-name", name, "--version", "1.0", "--handler", "handler.py"]
    command += ["--config-file", str(config), "--extra-files", "gpt_fast"]
    command += ["--archive-format", "no-archive", "--export-path", str(store)]
    path = f"{TORCHSERVE.parent}{os.pathsep}{os.environ['PATH']}"
    # The archiver deletes $TMPDIR/<model name>, so each archive gets another folder.
    environment = {**os.environ, "PATH": path, "TMPDIR": str(store.parent), "JAVA_HOME": str(java_home())}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return store / name


def put(model: str, file: Path) -> None:
    """``model`` of the demo where the example puts a checkpoint: the weights beside config.json and tokenizer.model."""
    file.parent.mkdir(parents=True)
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(DEMO / model / name, file.parent)
    state = {n: t.bfloat16() for n, t in meta_state(Checkpoint.open(DEMO / model).build(torch.float32)).items()}
    torch.save(int8_state(state) if "int8" in file.name else state, file)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("example") / "model_store"
    store.mkdir()
    block = yaml.safe_load((CONFIGS / "gpt_fast.yaml").read_text())["handler"]
    put("target", archive("gpt_fast", CONFIGS / "gpt_fast.yaml", store) / block["converted_ckpt_dir"])
    block = yaml.safe_load((CONFIGS / "gpt_fast_speculative.yaml").read_text())["handler"]
    made = archive("speculative", CONFIGS / "gpt_fast_speculative.yaml", store)
    put("target", made / block["converted_ckpt_dir"])
    put("draft", made / block["draft_checkpoint_path"])
    return store


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with serve(store, {"gpt_fast": "gpt_fast", "speculative": "speculative"}) as running:
        for name in ("gpt_fast", "speculative"):
            running.wait_ready(name)
        yield running


def test_the_base_configuration_streams_the_models_text(server: Server) -> None:
    reply = server.predict({"prompt": PROMPT}, "gpt_fast")
    with LLM(DEMO / "target") as llm:
        assert reply.text == llm.generate(PROMPT, SamplingParams(max_tokens=50)).text
    assert server.streams({"prompt": PROMPT}, "gpt_fast"), "it was not streamed"
    assert "deviceType is gpu, but there is no GPU" in server.log or torch.cuda.is_available()


def test_the_speculative_configuration_of_four_ranks_drafts_and_leaves_a_trace(server: Server, store: Path) -> None:
    reply = server.predict({"prompt": PROMPT, "draft_counts": True}, "speculative")
    answer = reply.json()
    with LLM(next(store.glob("speculative/checkpoints/*/*13b*/model_int8.pth"))) as llm:
        assert answer["text"] == llm.generate(PROMPT, SamplingParams(max_tokens=50)).text
    assert answer["usage"]["completion_tokens"] == 50
    assert "draft_n" in answer["usage"]
    wait_for(lambda: "gpt-fast-rank0-" in server.log)
    (trace,) = server.home.glob("gpt-fast-rank0-*.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]
