"""What TorchServe picks out of a worker's output for its own metrics (port 8082, /metrics).

TorchServe's pattern for names has no colon, so they begin with ``vllm_`` there; configs/prometheus.yml renames them
while they are scraped.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TextIO

from gpt_fast.serve.metrics import Sample, number_text

NO_WORKER = "0"  # the number outside of TorchServe


def worker_id(argv: Sequence[str]) -> str:
    """TorchServe's number of the worker that was started with ``argv``, "9000" for instance; NO_WORKER elsewhere. It
    stays the same when the worker dies and is replaced, so a replaced worker goes on with the same series."""
    for flag, value in pairwise(argv):
        if flag in ("--sock-name", "--port") and (number := re.search(r"\d+$", value)):
            return number[0]
    return NO_WORKER


def torchserve_line(sample: Sample, hostname: str, timestamp: int) -> str:
    """``sample`` as TorchServe expects it in a worker's output. ts/metrics/caching_metric.py writes the same, one
    system call and some 70 us a line; a flush has hundreds."""
    # TorchServe splits at these signs and drops a dimension without a value, and with it the whole line.
    labels = ((name, re.sub(r"[,:|\r\n]", "_", value) or "_") for name, value in sample.labels)
    dimensions = ",".join(f"{name}:{value}" for name, value in labels)
    return (
        f"[METRICS]vllm_{sample.name}.{sample.unit}:{number_text(sample.value)}|#{dimensions}"
        f"|#type:{sample.kind.upper()}|#hostname:{hostname},{timestamp}"
    )


def write_torchserve(samples: Sequence[Sample], stream: TextIO | None = None) -> None:
    """Report ``samples`` to TorchServe: write them to a worker's standard output, in one piece."""
    hostname, timestamp = socket.gethostname(), int(time.time())
    text = "".join(torchserve_line(sample, hostname, timestamp) + "\n" for sample in samples)
    print(text, end="", file=stream, flush=True)
