"""The GPU programme on one machine, in less than ten minutes: see benchmarks/gpu.sh.

    benchmarks/gpu.sh [--quick] [--smoke] [--tune] [--gpt-fast CHECKOUT] [--budget SECONDS] [--out FILE] [--plot FILE]

In this order, each part within its own limit: correctness of every kernel against float32 on fresh random numbers; the
ceilings, by a large copy and a large product; whole decode steps of published shapes with random weights, replayed from
CUDA graphs, with one new token for each sequence and with drafts to verify, and prompts; gpt-fast's own decode on the
same machine where a checkout is given; a profile of one step. Tokens per second are rows of the step alone: sampling
and scheduling come on top, and wrong drafts go off. A step's time is also given in those of a step of one row.
``--smoke`` runs the same on a CPU by Triton's interpreter, with toy sizes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [folder for folder in (str(ROOT / "benchmarks"), str(ROOT)) if folder not in sys.path]

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from gpt_fast.bench import plots  # noqa: E402
from gpt_fast.config import ExpertsConfig, ModelConfig  # noqa: E402
from gpt_fast.kernels.gpu import attention  # noqa: E402
from gpt_fast.kernels.gpu.program import GpuProgram  # noqa: E402
from gpt_fast.model.shapes import shape  # noqa: E402
from gpu import pictures, selfcheck, tune  # noqa: E402
from gpu.selfcheck import Checks  # noqa: E402
from gpu.synthetic import PAGE, PRECISIONS, layer_weights, prompt_step, random_program, recorded_step  # noqa: E402

SMOKE = "--smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE else "cuda")
CAPTURE = (lambda run: run) if SMOKE else None
if SMOKE:
    vars(attention)["num_splits"] = lambda _: 2  # a program that finds nothing to do takes milliseconds here
TOY = ModelConfig("llama", 64, 64, 1, 2, 1, 32, 64, 64)
TOYS = {"toy": TOY, "toy experts": replace(TOY, family="mixtral", experts=ExpertsConfig(4, 2, 64))}
PROMPTS = (5, 20) if SMOKE else (40, 256, 512, 2048)  # tokens


class Budget:
    """What is left of the time, in seconds; a part that finds too little is skipped and says so."""

    def __init__(self, seconds: float) -> None:
        self.begin, self.end = time.perf_counter(), time.perf_counter() + seconds

    def left(self) -> float:
        """Seconds to the end."""
        return self.end - time.perf_counter()

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", flush=True)


def noise(*size: int) -> Tensor:
    """bfloat16 on the device."""
    return torch.randn(*size, device=DEVICE).bfloat16()


# --- whole steps ---------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], most: float) -> float:
    """Median time of one run, by device events; some hundred milliseconds in all, at most ``most`` seconds."""
    if SMOKE:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def timed(count: int) -> float:
        events[0].record()
        for _ in range(count):
            run()
        events[1].record()
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3 / count

    one = max(timed(3), 1e-6)
    count = max(1, int(min(0.1, most / 5) / one))
    return statistics.median(timed(count) for _ in range(5))


def ceilings(budget: Budget) -> tuple[float, float]:
    """Bytes per second of a copy, read and written counted, and operations per second of a bf16 product."""
    size = 2**20 if SMOKE else 2**32
    source = torch.randint(0, 127, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * size / seconds(lambda: target.copy_(source), 2)
    n = 64 if SMOKE else 8192
    a, b = noise(n, n), noise(n, n)
    product = 2 * n**3 / seconds(lambda: a @ b, 2)
    budget.say(f"copy {copy / 1e9:.0f} GB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    return copy, product


Plan = list[tuple[str, str, list[tuple[int, int, int]]]]  # shape, precision, (batch, context, new tokens of each)


def plan(quick: bool) -> Plan:
    """The rows to measure: every shape and precision at batch 1, and the 8B model's batches, drafts and contexts. The
    first point of each is one row."""
    if SMOKE:
        plain: Plan = [("toy", p, [(1, 20, 1), (4, 20, 5)][: 1 + (p == "int4")]) for p in PRECISIONS]
        return [*plain, ("toy experts", "int8", [(1, 20, 1)])]
    one = [(1, 128, 1)]
    verify = [(1, 128, each) for each in (2, 3, 5, 9)] + [(8, 128, each) for each in (2, 3, 4, 5)]
    sweep = [(b, 128, 1) for b in (2, 4, 8, 16, 32, 64)] + [(1, c, 1) for c in (1024, 2048, 8192)] + [(16, 2048, 1)]
    more = {} if quick else dict.fromkeys(("bf16", "int8", "int4"), verify + sweep)
    rows: Plan = [("llama-3.1-8b", p, one + more.get(p, [])) for p in PRECISIONS]
    if not quick:
        rows.append(("mixtral-8x7b", "int4", one + [(b, 128, 1) for b in (4, 8, 32, 64)]))
        rows += [(name, p, one) for name in ("tinyllama-1.1b", "llama-2-7b") for p in PRECISIONS]
    return rows


def steps(
    budget: Budget, rows: Plan, copy: float, product: float, reserve: float, checks: Checks
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of the plan that there is time for, as "decode", and prompts of each precision, as "prompts"."""
    for name, precision, points in rows:
        if budget.left() < reserve:
            budget.say(f"skipped for lack of time: {name} {precision}")
            continue
        config = TOYS[name] if SMOKE else shape(name)
        room = max(PROMPTS[-1], *(batch * (context + PAGE) for batch, context, _ in points))
        program, streamed = random_program(config, precision, room, DEVICE)
        one = 0.0
        for point in points:
            batch, context, each = point
            replay, logits = recorded_step(program, batch, context, CAPTURE, each)
            title = f"{name} {precision} batch {batch}, {each} each"
            check_logits(checks, title, program, context, logits[each - 1])
            per_step = seconds(replay, 1.0)
            one = one or per_step
            num_bytes = streamed.bytes_of(batch * each) + batch * context * config.kv_bytes_per_token(2)
            row = {
                "shape": name,
                "precision": precision,
                "batch": batch,
                "context": context,
                "each": each,
                "milliseconds": 1e3 * per_step,
                "times_one_row": per_step / one,
                "tokens_per_second": batch * each / per_step,
                "gigabytes": num_bytes / 1e9,
                "bandwidth": num_bytes / per_step,
                "share_of_copy": num_bytes / per_step / copy,
            }
            budget.say(line(row))
            yield "decode", row
        for row in prompts(program, checks, f"{name} {precision}", product / (2 * layer_weights(config))):
            budget.say(prompt_line(row))
            yield "prompts", {"shape": name, "precision": precision} | row
        if precision == "int4" and name in ("llama-3.1-8b", "toy"):
            profile(budget, recorded_step(program, 1, points[0][1], CAPTURE)[0])
        del program, replay
        if not SMOKE:
            torch.cuda.empty_cache()


def check_logits(checks: Checks, title: str, program: GpuProgram, context: int, logits: Tensor) -> None:
    """``logits`` [V] of the first sequence's last token are finite, and those of a step of this token alone."""
    checks.true(f"{title}: finite logits", bool(logits.isfinite().all()))
    checks.same(title, recorded_step(program, 1, context, CAPTURE)[1][0], logits)


def prompts(program: GpuProgram, checks: Checks, title: str, limit: float) -> Iterator[dict[str, Any]]:
    """Whole prompts, the host's part included. A token's logits are the same in all of them. ``limit``: tokens a second
    if nothing but the layers' products took time, in bfloat16."""
    first: Tensor | None = None
    for length in PROMPTS:
        run = prompt_step(program, length, PROMPTS[0] - 1, CAPTURE)
        logits = run()
        checks.true(f"{title} prompt of {length}: finite logits", bool(logits.isfinite().all()))
        first = logits if first is None else first
        checks.same(f"{title} prompt of {length}", logits, first)
        took = seconds(run, 1.0)
        row = {"tokens": length, "milliseconds": 1e3 * took, "tokens_per_second": length / took}
        yield row | {"share_of_product": length / took / limit}


def prompt_line(row: dict[str, Any]) -> str:
    """One prompt, as a line."""
    speed, share = row["tokens_per_second"], 100 * row["share_of_product"]
    return f"prompt of {row['tokens']:>5} tokens {row['milliseconds']:>9.3f} ms {speed:>9.0f} tok/s {share:>5.1f} %"


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"{row['shape']:<15}{row['precision']:>5}{row['batch']:>4} x{row['each']:>2}{row['context']:>6}"
        f"{row['milliseconds']:>9.3f} ms{row['times_one_row']:>6.2f} of one row{row['tokens_per_second']:>9.1f} tok/s"
        f"{row['bandwidth'] / 1e9:>7.0f} GB/s{100 * row['share_of_copy']:>6.1f} %"
    )


def profile(budget: Budget, replay: Callable[[], Tensor]) -> None:
    """Where the time of one step goes, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU if SMOKE else torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        replay()
        if not SMOKE:
            torch.cuda.synchronize()
    budget.say("one step, by kernel:")
    table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=40)
    print(table, flush=True)


# --- others, and tuning ---------------------------------------------------------------------------------------------


def gpt_fast(checkout: str, precision: str) -> None:
    """In a separate process: gpt-fast's generate on random weights of the 8B shape; prints tokens per second."""
    sys.path.insert(0, checkout)
    generate: Any = importlib.import_module("generate")
    model_file: Any = importlib.import_module("model")
    c = shape("llama-3.1-8b")
    sizes = {"n_layer": c.num_layers, "n_head": c.num_heads, "n_local_heads": c.num_kv_heads, "dim": c.dim}
    sizes |= {"vocab_size": c.vocab_size, "intermediate_size": c.ffn_dim, "block_size": 2048}
    with torch.device("meta"):
        model = model_file.Transformer(model_file.ModelArgs(**sizes, rope_base=500000))
    model = model.to_empty(device="cuda").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    if precision == "int8":
        handler = importlib.import_module("quantize").WeightOnlyInt8QuantHandler(model)
        state = handler.create_quantized_state_dict()
        model = handler.convert_for_runtime()
        model.load_state_dict(state, assign=True)
    model = model.cuda().eval()
    compiled = torch.compile(generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
    vars(generate)["decode_one_token"] = compiled  # as its main() rebinds it
    prompt = torch.randint(c.vocab_size, (6,), device="cuda", dtype=torch.int)
    speeds = []
    for _ in range(4):
        stamps: list[float] = []

        def stamp(_: object, stamps: list[float] = stamps) -> None:
            if not stamps:  # once: waiting for every token would slow it down
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

        generate.generate(
            model, prompt, 130, 1, interactive=False, draft_model=None, callback=stamp, temperature=0.8, top_k=200
        )
        torch.cuda.synchronize()
        speeds.append((len(stamps) - 1) / (time.perf_counter() - stamps[0]))
    print(max(speeds))


def others(budget: Budget, checkout: str | None) -> dict[str, float]:
    """gpt-fast's tokens per second by precision; each in what is left of the time."""
    found: dict[str, float] = {}
    for precision in ("int8", "bf16") if checkout else ():
        if budget.left() < 60:
            budget.say(f"skipped for lack of time: gpt-fast {precision}")
            continue
        command = [sys.executable, __file__, "--gpt-fast", str(checkout), "--gpt-fast-precision", precision]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=budget.left() - 10, check=False)
        except subprocess.TimeoutExpired:
            budget.say(f"gpt-fast {precision}: out of time")
            continue
        if done.returncode:
            budget.say(f"gpt-fast {precision} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            continue
        found[precision] = float(done.stdout.strip().splitlines()[-1])
        budget.say(f"gpt-fast {precision}: {found[precision]:.1f} tok/s")
    return found


def compare_divisions(budget: Budget) -> None:
    """The products of the 8B shape, in what is left of the time."""
    c = shape("llama-3.1-8b")
    sizes = {"w13": (2 * c.ffn_dim, c.dim), "w2": (c.dim, c.ffn_dim), "wo": (c.dim, c.q_dim)}
    for precision, (name, (n, k)) in ((p, item) for p in ("int4", "int8", "bf16", "fp8") for item in sizes.items()):
        for tried in tune.compare(precision, n, k, name == "w13", seconds):
            result = tried.error or f"{tried.rate / 1e9:.0f} GB/s"
            budget.say(f"{precision} {name} {tuple(tried.division)}{' (used)' if tried.used else ''}: {result}")
            if budget.left() < 20:
                return


def main() -> int:
    """The parts in order; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the 8B shape at batch 1 only")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on a CPU, interpreted")
    parser.add_argument("--tune", action="store_true", help="compare divisions of the products instead")
    parser.add_argument("--gpt-fast", metavar="CHECKOUT", help="run its generate on this machine too")
    parser.add_argument("--gpt-fast-precision", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default 570)")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps (.png, .svg, .pdf; needs matplotlib)")
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="with --plot: draw this earlier report, run nothing"
    )
    args = parser.parse_args()
    if args.plot:
        plots.check(args.plot)  # not after ten minutes
    if args.report:
        if not args.plot:
            parser.error("--report draws an earlier report: name the picture with --plot")
        pictures.draw(json.loads(args.report.read_text(encoding="utf-8")), args.plot)
        return 0
    if args.gpt_fast_precision:
        gpt_fast(args.gpt_fast, args.gpt_fast_precision)
        return 0
    budget = Budget(args.budget)
    name = "the interpreter" if SMOKE else torch.cuda.get_device_name()
    budget.say(f"torch {torch.__version__}, Triton {triton.__version__}, {name}")
    torch.manual_seed(int(time.time()))
    with torch.inference_mode():
        copy, product = ceilings(budget)
        if args.tune:
            compare_divisions(budget)
            return 0
        checks = Checks(DEVICE, budget.say, lambda: budget.left() < args.budget * 0.6)
        selfcheck.check_products(checks, [(32, 512)] if SMOKE else [(4096, 4096), (1024, 11008)])
        contexts, head_dims = ([70, 3], [32]) if SMOKE else ([1000, 1, 70, 3000], [64, 80, 96, 128, 256])
        selfcheck.check_attention(checks, contexts, head_dims, 1 if SMOKE else 50)
        found = list(steps(budget, plan(args.quick), copy, product, 200 if args.gpt_fast else 30, checks))
    rows, long = ([row for kind, row in found if kind == wanted] for wanted in ("decode", "prompts"))
    peers = others(budget, args.gpt_fast)
    print("\n" + "\n".join(line(row) for row in rows))
    print("\n".join(f"{row['shape']:<15}{row['precision']:>5} {prompt_line(row)}" for row in long))
    print(
        *(f"gpt-fast, 8B, {precision}, sampling included: {speed:.1f} tok/s" for precision, speed in peers.items()),
        sep="\n",
    )
    print(f"{checks.count} checks, {len(checks.failed)} failed", *checks.failed, sep="\n  ")
    report = {"device": name, "copy": copy, "product": product, "checks": checks.count, "failed": checks.failed}
    report |= {"decode": rows, "prompts": long, "gpt_fast": peers}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.plot:
        pictures.draw(report, args.plot)
    print(json.dumps(report))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
