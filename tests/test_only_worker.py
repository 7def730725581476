"""One worker for each model with continuous batching."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpt_fast.errors import ConfigError
from gpt_fast.serve import only_worker
from gpt_fast.serve.only_worker import claim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a second worker is not seen")


def test_one_place_for_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(only_worker, "WAIT_S", 0.0)
    model, other = f"a {tmp_path}", f"b {tmp_path}"
    first, second = claim(model), claim(other)
    assert first is not None
    assert second is not None
    with pytest.raises(ConfigError, match="there is one already"):
        claim(model)
    monkeypatch.setattr(only_worker, "front_end", lambda: "another TorchServe")
    with_another = claim(model)
    for place in (first, second, with_another):
        assert place is not None
        place.close()


def test_a_worker_that_was_killed_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    # TorchServe's shape: a front end, one worker that is killed, and another that waits for its place meanwhile.
    script = f"""
        import os, signal, sys, time
        from gpt_fast.serve.only_worker import claim
        ready, written = os.pipe()
        if not (first := os.fork()):
            place = claim({str(tmp_path)!r})
            os.write(written, b".")
            time.sleep(600)
        os.read(ready, 1)
        if not (second := os.fork()):
            started = time.monotonic()
            os.write(written, b".")
            place = claim({str(tmp_path)!r})
            os._exit(0 if time.monotonic() - started > 0.3 else 3)
        os.read(ready, 1)
        time.sleep(0.5)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, check=False)
    assert done.returncode == 0
