"""What the tests against a real TorchServe share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from serving import ROOT, skip_reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked ``e2e``, and skipped where no TorchServe can run."""
    reason = skip_reason()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The bundled demo model where it is there, else a public checkpoint of the same kind."""
    demo = ROOT / "model_store" / "demo" / "target"
    if (demo / "config.json").is_file():
        return demo
    data = Path(os.environ.get("GPT_FAST_TEST_DATA", ROOT.parent / "shared" / "data"))
    public = data / "models" / "stories260K_hf"
    if not public.is_dir():
        pytest.skip(f"neither the bundled demo model {demo} nor {public} is here")
    return public
