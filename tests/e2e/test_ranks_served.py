"""Two ranks in one worker of a real TorchServe: clients get what one process answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, Server, serve

from gpt_fast import LLM, SamplingParams
from gpt_fast.serve.archive import build_archive

PROMPTS = ("Once upon a time", "The little dog", "Lily and Tom", "Her mom said", "One day", "The sun", "A bird", "Ben")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("model_store")
    build_archive(checkpoint, name="gpt-fast", config=ROOT / "configs" / "model_config_tp.yaml", output=store)
    with serve(store, {"gpt-fast": "gpt-fast"}) as running:
        running.wait_ready("gpt-fast")
        yield running


def test_eight_clients_get_what_one_process_answers(server: Server, checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", threads=1) as llm:
        params = [SamplingParams(max_tokens=40, temperature=0.8, seed=i) for i in range(len(PROMPTS))]
        wanted = [done.text for done in llm.generate(list(PROMPTS), params)]

    def ask(i: int) -> str:
        body: dict[str, Any] = {"prompt": PROMPTS[i], "max_new_tokens": 40, "temperature": 0.8, "seed": i}
        return json.loads(server.predict({**body, "stream": False}).text)["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == wanted
