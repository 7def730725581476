"""What drafts cost in memory: weights and pages, and nothing that grows with the number of requests.

    python benchmarks/draft_memory.py --target model_store/demo/target --draft model_store/demo/draft
        [--requests 10000] [--dtype float32] [--quantize int8] [--json]

First the target is loaded without and with the draft, each in a separate process, and all pages are written once:
the difference in resident memory beside the bytes of the draft's weights and pages, as memory.py plans them. Then
``--requests`` short requests (no two alike, some cancelled) are answered with the draft; at twenty moments the resident
memory is read and, with nothing running, what the drafter still knows of requests and pages.

Exit status: 1 if the memory at the end is more than 2 % above that after the first quarter, if anything is known of
requests that have ended, or if pages are in use.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [folder for folder in (str(ROOT / "benchmarks"), str(ROOT)) if folder not in sys.path]

import psutil  # noqa: E402
from identity.mixed import Ask  # noqa: E402
from identity.serving import Serving  # noqa: E402
from tqdm import tqdm  # noqa: E402

from gpt_fast import LLM, SamplingParams, memory  # noqa: E402
from gpt_fast.checkpoint.checkpoint import Checkpoint  # noqa: E402
from gpt_fast.checkpoint.draft import open_draft  # noqa: E402
from gpt_fast.engine.speculate.model import ModelDrafter  # noqa: E402

MOMENTS = 20
GROWTH = 0.02
REST_S = 1.0  # until the engine's thread has left its last step
MB = 2**20


class Loaded(NamedTuple):
    """Megabytes of a process that has loaded an engine. ``pages``: of all caches, as allocated."""

    resident: float
    weights: float
    pages: float
    planned: float  # for the pages, by memory.plan_cache


class Moment(NamedTuple):
    """The state after ``requests`` when nothing runs. ``known``: requests that the drafter remembers."""

    requests: int
    resident: float  # MB
    known: int
    pages_noted: int
    pages_used: int


def main() -> int:
    """Measure and print; the exit status is the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, help="a checkpoint's folder")
    parser.add_argument("--draft", required=True, help="a checkpoint's folder, lookup, int8 or int4")
    parser.add_argument("--requests", type=int, default=10_000, help="0: only what loading takes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = {"dtype": arguments.dtype, "quantize": arguments.quantize, "max_seq_len": arguments.max_seq_len}
    drafting = options | {"draft": arguments.draft, "speculate": "always"}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        alone, both = (pool.apply(loaded, (arguments.target, own)) for own in (options, drafting))
    for name, own in (("without", alone), ("with", both)):
        print(f"{name:8}" + "  ".join(f"{key} {value:.1f} MB" for key, value in own._asdict().items()))
    costs = both.weights - alone.weights + both.pages - alone.pages
    print(f"the draft: {costs:.1f} MB of weights and pages; resident {both.resident - alone.resident:.1f} MB more")
    moments = requests(arguments.target, drafting, arguments.requests) if arguments.requests else []
    if arguments.json:
        print(json.dumps({"without": alone._asdict(), "with": both._asdict(), "moments": [*map(list, moments)]}))
    return int(not flat(moments))


def loaded(target: str, options: dict[str, Any]) -> Loaded:
    """Load, write every page once, and say what it takes."""
    with LLM(target, **options) as llm:
        llm.generate([3, 4, 5], SamplingParams(max_tokens=20, ignore_eos=True))
        drafter = llm.engine.speculation.drafter if llm.engine.speculation is not None else None
        runners = [llm.engine.runner, *([drafter.runner] if isinstance(drafter, ModelDrafter) else [])]
        for tensor in (t for runner in runners for layer in runner.cache for t in layer if t is not None):
            tensor.zero_()
        gc.collect()
        resident, pages = psutil.Process().memory_info().rss, sum(runner.cache_bytes for runner in runners)
        checkpoint = Checkpoint.open(target)  # not before: the file is mapped while it is open
        draft = open_draft(checkpoint, llm.tokenizer, llm.engine_config)
        weights = checkpoint.num_bytes(llm.dtype, llm.engine_config.quantize)
        weights += draft.checkpoint.num_bytes(llm.dtype, draft.quantize) if draft else 0
        plan = memory.plan_cache(
            llm.config, llm.engine_config, dtype=llm.dtype, free=memory.free_bytes(llm.device),
            device_type=llm.device.type, draft=draft.checkpoint.config if draft else None,
        )  # fmt: skip
        return Loaded(resident / MB, weights / MB, pages / MB, plan.num_bytes / MB)


def requests(target: str, options: dict[str, Any], count: int) -> list[Moment]:
    """Answer ``count`` requests in twenty parts, and look at the state between them."""
    moments, draw, process = list[Moment](), random.Random(0), psutil.Process()
    with LLM(target, **options) as llm, tqdm(total=count, disable=not sys.stderr.isatty()) as bar:
        for part in range(MOMENTS):
            asks = [ask(draw, llm.config.vocab_size) for _ in range(count // MOMENTS)]
            Serving(llm, asks, at_once=12, troubled=True, tick=bar.update).run()
            time.sleep(REST_S)
            gc.collect()
            drafter = vars(llm.engine.speculation.drafter) if llm.engine.speculation is not None else {}
            known = sum(len(drafter.get(name, ())) for name in ("_known", "_automata"))
            used, noted = llm.engine.scheduler.pages.num_used, len(drafter.get("_contents", ()))
            done = (part + 1) * (count // MOMENTS)
            moments.append(Moment(done, process.memory_info().rss / MB, known, noted, used))
            print(", ".join(f"{key} {value:g}" for key, value in moments[-1]._asdict().items()), flush=True)
    return moments


def ask(draw: random.Random, vocab_size: int) -> Ask:
    """A short request that no other one equals."""
    begin = [draw.randrange(3, vocab_size) for _ in range(draw.randrange(1, 9))]
    temperature, seed = draw.choice((0.0, 1.0)), draw.getrandbits(60)
    params = SamplingParams(max_tokens=draw.randrange(1, 24), temperature=temperature, seed=seed)
    return Ask(begin * draw.randrange(1, 6), params, None, 3 if draw.random() < 0.1 else None)


def flat(moments: list[Moment]) -> bool:
    """Whether nothing grew."""
    if not moments:
        return True
    growth = moments[-1].resident / moments[MOMENTS // 4 - 1].resident - 1
    print(f"resident memory from the first quarter to the end: {growth:+.2%}")
    return growth <= GROWTH and not any(moment.known or moment.pages_used for moment in moments)


if __name__ == "__main__":
    sys.exit(main())
