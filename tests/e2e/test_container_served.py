"""scripts/container.py with a real TorchServe: it serves, and ends without cutting an answer off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving import ROOT, TORCHSERVE, base_port, java_home, wait_for

from gpt_fast.kernels.cpu.building import build
from gpt_fast.kernels.cpu.library import available
from gpt_fast.serve.launch.ports import derive_config


class Container:
    """The script in a copy of the image's folder, on separate ports."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        image = folder / "image"
        for name in ("handler.py", "model_config.yaml", "configs/log4j2.xml", "scripts/container.py"):
            (image / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, image / name)
        self.port = base_port()
        text = (ROOT / "config.properties").read_text()
        (image / "config.properties").write_text(derive_config(text, self.port))
        java = java_home()
        assert java is not None
        # The sockets of TorchServe lie here; their paths may have no more than a hundred characters.
        self.run = folder / "run"
        self.command = [sys.executable, str(image / "scripts" / "container.py")]
        self.environment = os.environ | {
            "JAVA_HOME": java,
            "PATH": f"{TORCHSERVE.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GPT_FAST_MODEL": str(checkpoint),
            "GPT_FAST_RUN": str(self.run),
        }
        if available():  # its cache is empty at first
            self.environment["GPT_FAST_KERNEL_DIR"] = str(build().parent)
        with (folder / "log").open("wb") as log:
            self.process = psutil.Popen(self.command, env=self.environment, stdout=log, stderr=log)

    def url(self, route: str) -> str:
        return f"http://127.0.0.1:{self.port}{route}"

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, (self.run.parent / "log").read_text()
        done = subprocess.run([*self.command, "healthy"], env=self.environment, capture_output=True, check=False)
        return done.returncode == 0


@pytest.fixture
def container(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Container]:
    found = Container(tmp_path_factory.mktemp("c"), checkpoint)
    yield found
    if found.process.poll() is None:
        for process in [*found.process.children(recursive=True), found.process]:
            process.kill()
        found.process.wait(60)


def test_it_serves_and_ends_after_the_answers_that_run(container: Container) -> None:
    wait_for(container.is_healthy)
    body = json.dumps({"prompt": "Once", "max_new_tokens": 240, "ignore_eos": True}).encode()
    request = urllib.request.Request(container.url("/predictions/gpt-fast"), body, {"Content-Type": "application/json"})
    processes = container.process.children(recursive=True)
    with urllib.request.urlopen(request, timeout=300) as whole:
        expected = whole.read()
    with urllib.request.urlopen(request, timeout=300) as streamed:
        first = streamed.read1()
        container.process.send_signal(signal.SIGTERM)
        # It goes on serving: this answer to its end, and requests of clients that have not heard of it yet.
        with urllib.request.urlopen(container.url("/predictions/gpt-fast/1.0/v1/models"), timeout=60) as late:
            assert json.load(late)["data"]
        assert first + streamed.read() == expected
    assert container.process.wait(60) == 0
    wait_for(lambda: not any(process.is_running() for process in processes))
    written = {path.name for path in container.run.iterdir()}
    assert written >= {"model_store", "config.properties", "logs", "tmp"}
    assert not (container.run / "key_file.json").exists(), "there are no tokens"


def test_a_server_that_ends_by_itself_ends_the_container(container: Container) -> None:
    wait_for(lambda: (container.run / "tmp" / ".model_server.pid").exists())
    os.kill(int((container.run / "tmp" / ".model_server.pid").read_text()), signal.SIGKILL)
    assert container.process.wait(60) == 1
