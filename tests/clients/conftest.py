"""One TorchServe with the demo model, for all clients. ``scripts/test.sh --clients`` installs them
into a separate environment; where they are not installed, nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

MISSING = [
    name for name in ("guidellm", "instructor", "langchain_openai", "litellm") if not importlib.util.find_spec(name)
]
collect_ignore_glob = ["test_*.py"] if MISSING else []
CHECKPOINT = ROOT / "model_store" / "demo" / "target"

# Read by the clients when they are imported: none of them may ask another host for anything.
os.environ.update(
    HF_HUB_OFFLINE="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LANGSMITH_TRACING="false",
    OPENAI_API_KEY="none",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from serving import skip_reason

    if reason := skip_reason():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What the clients call ``base_url``: the server's, with /v1 at its end."""
    from serving import serve

    from gpt_fast.serve.archive import build_archive

    store = tmp_path_factory.mktemp("model_store")
    build_archive(
        CHECKPOINT, name="gpt-fast", config=ROOT / "model_config.yaml", output=store, archive_format="no-archive"
    )
    with serve(store, {"gpt-fast": "gpt-fast"}) as server:
        server.wait_ready("gpt-fast")
        yield f"http://127.0.0.1:{server.port}/predictions/gpt-fast/1.0/v1"


def run(*command: str, timeout: float = 300) -> str:
    """What a command line client of this environment prints. It must succeed.

    After ``timeout`` seconds the client and its processes are killed. Raises subprocess.TimeoutExpired then.
    """
    pipe, command = subprocess.PIPE, (sys.executable, "-m", *command)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as client:
        try:
            stdout, stderr = client.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(client.pid, signal.SIGKILL)
            raise
    assert client.returncode == 0, f"{stdout[-5000:]}\n{stderr[-5000:]}"
    return stdout
