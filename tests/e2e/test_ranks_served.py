"""Two ranks in one worker of a real TorchServe: clients get what one process answers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import HANG_S, ROOT, Reply, Server, serve, wait_for

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


def test_another_server_with_ranks_runs_beside_it(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_new_tokens": 20, "temperature": 0, "stream": False}
    with serve(server.model_store, {"gpt-fast": "gpt-fast"}) as other:
        other.wait_ready("gpt-fast")
        assert other.predict(body).text == server.predict(body).text


def ranks_of(server: Server) -> list[int]:
    """The processes of the ranks, rank 0 first."""
    found = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "RANK" in p.environ()]
    found = [p for p in found if p.cmdline()[1:2] != ["-m"] and "torchrun" not in " ".join(p.cmdline())]
    return [p.pid for p in sorted(found, key=lambda p: int(p.environ()["RANK"]))]


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_costs_no_more_than_the_answers_of_the_moment(server: Server, victim: int) -> None:
    body = {"prompt": "Once upon a time", "max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    before = server.predict({**body, "stream": False, "max_new_tokens": 20}).text
    replies: list[Reply | Exception] = []
    begun = threading.Event()  # before that TorchServe may keep the request for the next worker

    def stream() -> None:
        try:
            replies.append(server.predict({**body, "max_new_tokens": 2000}, begun=begun))
        except Exception as broken:  # the connection ended before the answer did
            replies.append(broken)

    client = threading.Thread(target=stream)
    client.start()
    old = ranks_of(server)
    assert len(old) == 2
    assert begun.wait(HANG_S)
    os.kill(old[victim], signal.SIGKILL)
    client.join(HANG_S)
    assert len(replies) == 1
    wait_for(lambda: not any(map(psutil.pid_exists, old)))
    server.wait_ready("gpt-fast")
    assert server.predict({**body, "stream": False, "max_new_tokens": 20}).text == before
