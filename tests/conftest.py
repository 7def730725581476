"""What all tests share: where the public data lies that is not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def test_data_dir() -> Path:
    """Real checkpoints, vocabularies and texts: $GPT_FAST_TEST_DATA, else ../shared/data from the root."""
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    return Path(os.environ.get("GPT_FAST_TEST_DATA", default))


test_data_dir.__test__ = False  # its name looks like a test's where it is imported


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """``test_data_dir()``; skips the test where the folder is absent."""
    path = test_data_dir()
    if not path.is_dir():
        pytest.skip(f"needs the public test data, and {path} is absent (set GPT_FAST_TEST_DATA)")
    return path
