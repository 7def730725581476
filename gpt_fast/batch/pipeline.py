"""Several engines at once, one for each worker process, as a Ray Data pipeline (https://docs.ray.io/en/latest/data).

Ray starts the workers, on this machine or on those of a cluster (``RAY_ADDRESS``), and gives them blocks of lines. When
a worker dies, Ray starts it again and gives its blocks to a living one. The process that runs the command alone writes
the journal. Ray is the extra ``ray``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

from gpt_fast.batch.answering import Answerer, Job
from gpt_fast.batch.rows import Answer
from gpt_fast.batch.setup import Setup, open_llm
from gpt_fast.cgroups import num_cores
from gpt_fast.config import DEFAULT_MAX_BATCH
from gpt_fast.errors import BatchError, ConfigError, MissingPackageError

_RESTARTS = 3  # for each worker: if they die more often, it is by their rows, or for want of memory
_BLOCKS_AT_ONCE = 2  # of a worker: while the last answers of one are made, the next one fills the engine's batch


def import_ray() -> Any:
    """Ray, with what Ray Data needs. Raises MissingPackageError."""
    try:
        import pyarrow  # noqa: F401 - what Ray Data keeps blocks in
        import ray
        import ray.data
    except ImportError as error:
        how = "pip install 'gpt-fast-serve[ray]', or leave --workers out"
        raise MissingPackageError(f"--workers needs Ray Data ({error.name or error} is not installed): {how}") from None
    return ray


class Cluster:
    """``workers`` engines on the machines of a Ray cluster that ``RAY_ADDRESS`` names, else on this one. ``device``:
    GPUs where there are any, one for each worker; else CPUs, whose cores are divided between the workers."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._ray = ray = import_ray()
        here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(workers, num_cores())}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
        ray.init(log_to_driver=False, logging_level="error", include_dashboard=False, **here)
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it fails of is raised as well
        ray.data.DataContext.get_current().enable_progress_bars = False  # there is one already
        resources = ray.cluster_resources()
        self.device: str | None = "cuda" if resources.get("GPU", 0) else "cpu"
        self._threads = max(1, int(resources.get("CPU", 1)) // workers)

    def close(self) -> None:
        self._ray.shutdown()

    def answers(self, setup: Setup, jobs: Iterator[Job]) -> Generator[tuple[str, Answer]]:
        """Digest and answer of each of ``jobs``, block by block, in the order in which blocks end. Raises BatchError if
        the workers give up, ConfigError for a device_map."""
        if setup.options.get("device_map") is not None:
            raise ConfigError("device_map: with --workers each has one device; leave one of the two out")
        ray = self._ray
        device = setup.options["device"].partition(":")[0]  # a worker sees the GPU that is its own, and no other
        own = {"threads": max(1, given // self.workers)} if (given := setup.options.get("threads")) else {}
        setup = dataclasses.replace(setup, options={**setup.options, "device": device, **own})
        starts = ray.remote(num_cpus=0)(_Starts).remote(self.workers * (1 + _RESTARTS))
        data = ray.data.from_arrow_refs(self._blocks(setup, jobs))
        answered = data.map_batches(
            _Worker,
            fn_constructor_args=(setup, self._threads, starts),
            batch_size=None,  # a block as it is
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=self.workers,
                max_tasks_in_flight_per_actor=_BLOCKS_AT_ONCE,
                max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_cpus=0 if device == "cuda" else 1,
            num_gpus=1 if device == "cuda" else 0,
        )
        try:
            for row in answered.iter_rows():
                yield row["digest"], json.loads(row["answer"])
        except ray.exceptions.RayError as error:
            kept = "what is done is kept: run the same command again"
            raise BatchError(f"the workers gave up: {reason(str(error))}; {kept}") from error

    def _blocks(self, setup: Setup, jobs: Iterator[Job]) -> list[Any]:
        """References to blocks of jobs in Ray's object store, which moves to disk what does not fit its memory."""
        import pyarrow

        size = 4 * int(setup.options.get("max_batch") or DEFAULT_MAX_BATCH)
        blocks = []
        while block := list(itertools.islice(jobs, size)):
            columns = {"digest": [job.digest for job in block], "raw": [job.raw for job in block]}
            blocks.append(self._ray.put(pyarrow.table(columns)))
        return blocks


def reason(told: str) -> str:
    """The last error in what Ray ``told`` of a failure: that of the worker, below the stacks of both processes."""
    lines = told.strip().splitlines()
    return next((line.partition("Error: ")[2] for line in reversed(lines) if "Error: " in line), lines[-1])


class _Starts:
    """Counts starts of workers. Ray starts a worker that dies again without end; ``most`` starts are enough."""

    def __init__(self, most: int) -> None:
        self._left = most

    def begin(self) -> bool:
        """Whether one more worker may start."""
        self._left -= 1
        return self._left >= 0


class _Worker:
    """One engine, in a separate process."""

    def __init__(self, setup: Setup, threads: int, starts: Any) -> None:
        import torch

        from gpt_fast.checkpoint.fingerprint import fingerprint
        from gpt_fast.foreign.checkpoint import open_checkpoint

        if not import_ray().get(starts.begin.remote()):
            raise BatchError("the workers died too often: do they have enough memory? Fewer workers need less")
        opened = open_checkpoint(setup.checkpoint).with_adapters(setup.options.get("lora"))
        if (found := fingerprint(opened)) != setup.weights:
            digests = f"digest {found[:12]}, not {setup.weights[:12]}"
            raise BatchError(f"{setup.checkpoint} holds other files on a worker than where the batch began ({digests})")
        torch.set_num_threads(threads)
        self._answerer = Answerer(open_llm(setup), setup.names)

    def __call__(self, block: Any) -> dict[str, list[str]]:
        """Answers of a block of jobs. Called from several threads, which share the engine's batch."""
        jobs = map(Job, block["digest"].to_pylist(), block["raw"].to_pylist())
        answers = list(self._answerer.answers(jobs))
        return {"digest": [d for d, _ in answers], "answer": [json.dumps(answer) for _, answer in answers]}
