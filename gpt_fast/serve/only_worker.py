"""One worker for each model that batches: of two, TorchServe lets the idle one stall the busy one.

model_config.yaml alone cannot see to it: the management API changes the number of workers while the server runs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import time

from gpt_fast.errors import ConfigError

WAIT_S = 10.0  # for one that ends: TorchServe has killed it, and starts another in its place


def claim(model: str) -> socket.socket | None:
    """Be the only worker of ``model`` while what is returned is open; None where the system cannot tell (not Linux).

    ``model``: tells it from the other models of this TorchServe. Raises ConfigError while another worker serves it."""
    if not sys.platform.startswith("linux"):
        return None
    # A name that is no file: the system forgets it with the process, however that ends.
    name = b"\0gpt-fast-" + hashlib.sha256(f"{front_end()} {model}".encode()).hexdigest().encode()
    place = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            place.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() >= deadline:
                place.close()
                why = "an idle second one stalls the busy one. Set min_worker and max_worker of the management API to 1"
                raise ConfigError(f"continuousBatching needs one worker, and there is one already: {why}") from None
            time.sleep(0.1)
        else:
            return place


def front_end() -> str:
    """The process that has started this worker, or torchrun for it. Its number alone may be another container's."""
    import psutil  # TorchServe needs it

    parent = psutil.Process(os.getppid())
    if "LOCAL_RANK" in os.environ:
        parent = parent.parent() or parent
    return f"{parent.pid} {parent.create_time()}"
