"""A brake for a served model's engine: a test decides how far it gets, so that no verdict depends on its speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Put behind a handler's source. While the file is there, the engine makes no more steps than the number in it.
_CODE = """

def _put_on_the_brake():
    import itertools
    import time
    from pathlib import Path

    from gpt_fast import loading
    from gpt_fast.engine.runner import Runner

    loading.num_cores = lambda: 1  # no step begins before the one before it has ended: each has its number

    file, steps = Path({file!r}), itertools.count(1)

    def braked(run):
        def wait_and_run(self, plan, *more):
            nonlocal steps
            number = next(steps)
            while True:
                try:
                    allowed = int(file.read_text())
                except FileNotFoundError:
                    steps = itertools.count(1)
                    return run(self, plan, *more)
                if number <= allowed:
                    return run(self, plan, *more)
                time.sleep(0.002)

        return wait_and_run

    Runner.execute, Runner.draw = braked(Runner.execute), braked(Runner.draw)


_put_on_the_brake()
"""


class Brake:
    """One model's. ``folder`` is where its file and its handler lie."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.steps"
        self._folder = folder
        self._name = name

    def handler(self, source: str) -> Path:
        """A file with the handler ``source`` and the brake."""
        path = self._folder / f"{self._name.replace('-', '_')}_braked.py"
        path.write_text(source + _CODE.format(file=str(self._file)))
        return path

    def allow(self, num_steps: int) -> None:
        """So many since the brake was put on, all in all."""
        whole = self._file.with_suffix(".new")
        whole.write_text(str(num_steps))
        os.replace(whole, self._file)

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    @contextmanager
    def held(self, num_steps: int) -> Iterator[None]:
        """No more than so many steps inside, unless more are allowed. Nothing may run when it begins."""
        self.allow(num_steps)
        try:
            yield
        finally:
            self.release()
