"""What the tests against a real TorchServe share."""

from __future__ import annotations

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
    """The bundled demo model."""
    return ROOT / "model_store" / "demo" / "target"
