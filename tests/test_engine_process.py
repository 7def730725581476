"""An engine and the process that it runs in: its forks, its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
BEGIN = """
import os, signal, threading
from fake_model import FakeModelLLM
from gpt_fast import SamplingParams
from gpt_fast.errors import EngineError
llm = FakeModelLLM()
handle = llm.submit([3], SamplingParams(max_tokens=100, ignore_eos=True), max_uncollected=5)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in another process."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_that_the_engine_is_not_there() -> None:
    done = run(f"""{BEGIN}
held, done = threading.Event(), threading.Event()
def hold():  # the lock, as the engine's thread may when the process forks
    with llm.engine.changed:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    try:
        llm.generate([3])
    except EngineError as error:
        print(str(error).replace(str(os.getppid()), "PARENT"), flush=True)
    llm.close()
    os._exit(0)
done.set()
status = os.waitpid(pid, 0)[1]
handle.cancel()
print(os.waitstatus_to_exitcode(status), len(llm.generate([3], SamplingParams(max_tokens=5)).token_ids))
llm.close()
""")
    told = "the engine runs in process PARENT, and this is a fork of it: load the model here"
    assert done.stdout.splitlines() == [told, "0 5"], done.stderr


def test_what_nobody_closes_ends_before_python_does() -> None:
    """A thread that comes back from C++ while Python ends could abort the process. The status was 134 then."""
    first = "import atexit, sys; atexit.register(lambda: print(llm.engine._thread.is_alive()))"  # so it runs last
    done = run(first + BEGIN + "sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "False\n"), done.stderr
