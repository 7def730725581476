"""What all tests share: where public data lies, and one verdict on every machine."""

from __future__ import annotations

import os
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

DATA = Path(__file__).resolve().parent / "data"

# The same examples in every run, and no limit to how long one may take: a slow machine is no failure.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: when the last file of a parallel run is long, all others wait for it."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Small public checkpoints, vocabularies and texts: ``tests/data``; its README says which."""
    return DATA


@pytest.fixture(scope="session")
def extra_data_dir() -> Path:
    """Public data that may not be copied: $GPT_FAST_TEST_DATA, else ../shared/data. Skips where it is absent."""
    default = DATA.parents[2] / "shared" / "data"
    path = Path(os.environ.get("GPT_FAST_TEST_DATA", default))
    if not path.is_dir():
        pytest.skip(f"needs vocabularies that may not be copied, and {path} is absent (set GPT_FAST_TEST_DATA)")
    return path


@pytest.fixture(scope="session", autouse=True)
def temporary_files_go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tested processes leave in the folder for temporary files: torchrun its logs, a killed server its own."""
    tmp_path_factory.getbasetemp()  # tests' own folders lie elsewhere, to be looked at after a failure
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TMPDIR=folder),
        mock.patch.object(tempfile, "tempdir", folder),
    ):
        yield


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """A test may set torch's number of threads."""
    import torch  # not at the top: many tests do without it

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads_restored: None) -> None:
    """Tiny models gain nothing from threads, and on a busy machine threads that wait for each other lose a lot."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    """Every test draws the same numbers each time, alone and among others; so do requests without a seed."""
    random.seed(0)
    if "torch" in sys.modules:  # many tests do without it
        sys.modules["torch"].manual_seed(0)
    # Not by monkeypatch: that would undo what tests patch after other fixtures have ended.
    with mock.patch.object(secrets, "randbits", random.Random(0).getrandbits):
        yield
