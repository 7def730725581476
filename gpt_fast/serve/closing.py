"""A file that closes a server: while it is there, the workers refuse new requests and finish those that run.

TorchServe itself cannot stop taking requests. Who starts a server names the file in the environment of its workers.
"""

from __future__ import annotations

import os

from gpt_fast.errors import RequestError

VARIABLE = "GPT_FAST_CLOSED"  # the path of the file; without it a server never closes
BACK_S = 10  # what a client is told to wait: a server that is started again needs about so long
FILE = "closed"  # its name in the temp folder of a server that this project starts


def is_closed() -> bool:
    """Whether the file is there."""
    return os.path.exists(os.environ.get(VARIABLE, ""))


def refuse_if_closed() -> None:
    """Raise RequestError, 503 with the time to come back, where new requests are not taken any more."""
    if is_closed():
        message = "this server is about to stop and takes no new requests; try again later, or another server"
        raise RequestError(message, None, "stopping", 503, BACK_S)
