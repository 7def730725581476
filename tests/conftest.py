"""What all tests share: where the public data lies that is not part of the repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and on a busy machine threads that wait for each other lose a lot."""
    import torch  # not at the top: many tests do without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
