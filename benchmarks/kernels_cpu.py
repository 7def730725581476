"""The C++ kernels on this machine: bytes per second of each product, and whole steps of a model's shape.

    python benchmarks/kernels_cpu.py [--shape tinyllama-1.1b] [--kinds bfloat16,int8,int4] [--rows 1,4,8,16,256]
        [--threads N] [--repeats 5] [--products] [--steps] [--attention] [--contexts 128,2048] [--cache bfloat16]
        [--torch]

Products: every matrix of the shape in turn, each call with another copy of the weights, so that nothing comes out of a
cache; ``--torch`` alternates with ``F.linear`` on the plain weights (float32 and bfloat16). Steps: the whole model with
random weights, or attention alone (``--attention``). Up to 64 rows are new tokens of as many sequences; more rows are
one prompt, which is also timed at the end of each longer context. The steps are timed in turns. Shares are of the
bandwidth that ``gpt_fast.kernels.roofline`` measures. Medians; the last line is JSON. Unless OMP_WAIT_POLICY says
otherwise, torch's own threads sleep while they wait: those that drew the inputs would spin on the kernels' cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gpt_fast.config import ModelConfig
from gpt_fast.kernels.cache import LayerCache, StepLayout, padded
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.library import available
from gpt_fast.kernels.cpu.program import Program
from gpt_fast.kernels.cpu.translation import PackedWeights, Weights
from gpt_fast.kernels.huge_pages import empty
from gpt_fast.kernels.roofline import read_bandwidth
from gpt_fast.model import description as d
from gpt_fast.model.describing import describe
from gpt_fast.model.rope import Rope
from gpt_fast.model.shapes import shape
from gpt_fast.placement import usable_threads

_STREAM_BYTES = 200e6  # several times any cache here
_GROUP = 32
_PAGE = 16


def random_weights(kind: str, n: int, k: int) -> PackedWeights:
    """Packed random weights; a few tiles are drawn and repeated, since drawing billions takes minutes."""
    rows = min(n, 64)
    if kind in ("float32", "bfloat16"):
        data = packing.pack_dense((torch.randn(rows, k) * 0.02).to(getattr(torch, kind)))
    elif kind == "int8":
        data = packing.pack_int8(torch.randint(-127, 128, (rows, k), dtype=torch.int8))
    else:
        scale = torch.full((rows, k // _GROUP), 255, dtype=torch.uint8)
        zero = torch.full_like(scale, 64)
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        data = packing.pack_int4(packing.nibbles(codes), scale, zero)
    tiles = -(-n // 16)
    whole = empty((tiles, *data.shape[1:]), data.dtype)
    for begin in range(0, tiles, data.shape[0]):
        part = whole[begin : begin + data.shape[0]]
        part.copy_(data[: part.shape[0]])
    scales = {"int8": torch.full((n,), 0.02 / 73), "int4": torch.full((n,), 0.005 / 255)}.get(kind)
    return PackedWeights(kind, whole, n, k, scales, _GROUP if kind == "int4" else 0)


def streamed_bytes(w: PackedWeights) -> int:
    """Bytes that one product reads of ``w``."""
    return w.data.nbytes + (0 if w.scale is None else w.scale.nbytes)


def random_pieces(kind: str, m: d.Matrix, c: ModelConfig) -> list[PackedWeights]:
    """As quantize/scheme.py stores the matrix: in int4 the head, and keys and values that queries share, are int8."""
    if kind == "int4" and m.name == "output":
        kind = "int8"
    sizes = [(kind, m.outputs // max(1, m.num_experts))] * max(1, m.num_experts)
    if kind == "int4" and m.name == "wqkv" and c.kv_dim < c.q_dim:
        sizes = [(kind, c.q_dim), ("int8", 2 * c.kv_dim)]
    return [random_weights(kind, n, m.inputs) for kind, n in sizes]


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of each matrix of a block, and the head's."""
    return {
        "wqkv": (c.q_dim + 2 * c.kv_dim, c.dim),
        "wo": (c.dim, c.q_dim),
        "w13": (2 * c.ffn_dim, c.dim),
        "w2": (c.dim, c.ffn_dim),
        "output": (c.vocab_size, c.dim),
    }


def products(c: ModelConfig, args: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """One row per kind, matrix and number of rows."""
    found = []
    for kind in args.kinds:
        for name, (n, k) in matrices(c).items():
            first = random_weights(kind, n, k)
            count = max(2, round(_STREAM_BYTES / streamed_bytes(first)))
            copies = [first] + [first._replace(data=clone(first.data)) for _ in range(count - 1)]
            compared = args.torch and kind.endswith("16")
            plain = [torch.full((n, k), 0.02, dtype=first.data.dtype) for _ in copies] if compared else []
            for rows in args.rows:
                x = torch.randn(rows, k)
                programs = [product_program(w) for w in copies]
                ours, theirs = [], []
                for i in range(max(args.repeats, count if rows <= 16 else 2)):
                    r = torch.arange(rows)
                    run = functools.partial(programs[i % count].run, r, r, [], None, r, x)
                    ours.append(median_s(run, 1))
                    if plain:
                        p, xn = plain[i % count], x.to(plain[0].dtype)
                        theirs.append(median_s(functools.partial(F.linear, xn, p), 1))
                seconds = statistics.median(ours)
                row = {
                    "kind": kind,
                    "matrix": name,
                    "rows": rows,
                    "ms": seconds * 1e3,
                    "gb_s": streamed_bytes(first) / seconds / 1e9,
                    "share": streamed_bytes(first) / seconds / bandwidth,
                    "gflops": 2e-9 * rows * n * k / seconds,
                    "torch_ms": statistics.median(theirs) * 1e3 if theirs else None,
                }
                found.append(row)
                beside = f"   F.linear {row['torch_ms']:8.2f} ms" if theirs else ""
                print(
                    f"{kind:9} {name:7} {n:6} x {k:5} {rows:4} rows {row['ms']:8.2f} ms {row['gb_s']:6.1f} GB/s "
                    f"{row['share']:5.0%} {row['gflops']:7.1f} GFLOPS{beside}",
                    flush=True,
                )
    return found


def clone(data: Tensor) -> Tensor:
    """A copy on huge pages, as packing makes them."""
    out = empty(tuple(data.shape), data.dtype)
    out.copy_(data)
    return out


def product_program(w: PackedWeights) -> Program:
    """A program of this product alone."""
    return Program([([d.Product("in", "out", "w")], Weights({"w": [w]}))], "out", input=("in", w.in_features))


class Steps:
    """A model of random weights and the steps to time on it. ``most``: (sequences, context) that its caches hold."""

    def __init__(self, c: ModelConfig, kind: str, most: Iterable[tuple[int, int]], cache_dtype: torch.dtype) -> None:
        self.config = c
        most = list(most)
        description = describe(c)
        blocks, self.weight_bytes = [], 0
        for block in description.blocks:
            found = {m.name: random_pieces(kind, m, c) for m in block.matrices}
            self.weight_bytes += sum(streamed_bytes(w) for pieces in found.values() for w in pieces)
            vectors = {v.name: (torch.ones(v.size), torch.zeros(v.size) if v.bias else None) for v in block.vectors}
            tables = {t.name: (torch.randn(t.num_rows, t.dim) * 0.02).bfloat16() for t in block.tables}
            heads = any(isinstance(op, d.Heads) for op in block.ops)
            cache = empty_cache(c, most, cache_dtype) if heads else None
            blocks.append((block.ops, Weights(found, vectors, tables, cache)))
        self.program = Program(blocks, "logits", rows_before=len(blocks) - 1)
        # As in the engine: torch's cosine in a step would wake its threads, which then wait on the kernels' cores.
        every = torch.arange(max(context for _, context in most))
        self.angles = [Rope(table)(every, every) for table in description.ropes]

    def run(self, sequences: int, new_tokens: int, context: int) -> Tensor:
        """One step of ``new_tokens`` each, the last of which is token ``context`` of its sequence."""
        slots = range(sequences)
        positions = torch.arange(context - new_tokens, context).repeat(sequences)
        pages = torch.arange(sequences * -(-context // _PAGE), dtype=torch.int32).view(sequences, -1) + 1
        slot = torch.arange(sequences).repeat_interleave(new_tokens)
        places = pages[slot, positions // _PAGE].long() * _PAGE + positions % _PAGE
        tokens = (positions * 7919 + slot) % self.config.vocab_size
        starts = torch.arange(sequences + 1, dtype=torch.int32) * new_tokens
        lengths = torch.full((sequences,), context, dtype=torch.int32)
        rows = torch.tensor([(s + 1) * new_tokens - 1 for s in slots])
        layout = StepLayout(starts, lengths, pages, places)
        return self.program.run(tokens, positions, self.angles, layout, rows, self.input(len(tokens)), by_position=True)

    def seconds(self, sequences: int, new_tokens: int, context: int) -> float:
        """Of that step; the median of three where each sequence has one token."""
        return median_s(functools.partial(self.run, sequences, new_tokens, context), 3 if new_tokens == 1 else 1)

    def input(self, num_tokens: int) -> Tensor | None:
        """What the program reads beside tokens."""
        return None


class AttentionAlone(Steps):
    """The same with nothing but attention, of all layers one behind the other."""

    def __init__(self, c: ModelConfig, most: Iterable[tuple[int, int]], cache_dtype: torch.dtype) -> None:
        self.config, self.weight_bytes, self.angles = c, 0, []
        most, self.width = list(most), c.q_dim + 2 * c.kv_dim
        ops = (
            d.Heads("x", "q", "k", "v", c.num_heads, c.num_kv_heads, c.head_dim),
            d.Attention("q", "k", "v", "out", c.head_dim**-0.5),
        )
        blocks = [(ops, Weights({}, {}, cache=empty_cache(c, most, cache_dtype))) for _ in range(c.num_layers)]
        self.program = Program(blocks, "out", input=("x", self.width))

    def input(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self.width)


def empty_cache(c: ModelConfig, most: Iterable[tuple[int, int]], dtype: torch.dtype) -> LayerCache:
    """A layer's cache for the largest of ``most``, (sequences, context)."""
    num_pages = max(sequences * -(-context // _PAGE) for sequences, context in most)
    return LayerCache.zeros((num_pages + 1, _PAGE, c.num_kv_heads, padded(c.head_dim)), dtype, torch.device("cpu"))


def steps_for(c: ModelConfig, kind: str, work: Iterable[tuple[int, int, int]], cache_dtype: torch.dtype) -> Steps:
    """To run ``work`` on: (sequences, new tokens, context) each. ``kind``: of the weights, or ``attention`` alone."""
    most = [(sequences, context) for sequences, _, context in work]
    return AttentionAlone(c, most, cache_dtype) if kind == "attention" else Steps(c, kind, most, cache_dtype)


def steps(c: ModelConfig, args: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """One row per kind, step and context. The steps of a kind are timed in turns."""
    found = []
    work = [(rows, 1, args.contexts[0]) if rows <= 64 else (1, rows, rows) for rows in args.rows]
    prompts = [rows for rows in args.rows if rows > 64]
    work += [(1, n, context) for context in args.contexts[1:] for n in (1, *prompts) if n <= context]
    for kind in ["attention"] if args.attention else args.kinds:
        dtype = getattr(torch, args.cache or ("float32" if kind == "float32" else "bfloat16"))
        model = steps_for(c, kind, work, dtype)
        times: list[list[float]] = [[] for _ in work]
        for i in tqdm(range(args.repeats + 1), desc=kind, leave=False, disable=None):
            for step, each in zip(work, times, strict=True):
                each.append(model.seconds(*step))
            times = [each[1:] for each in times] if i == 0 else times
        for (sequences, new_tokens, context), all_seconds in zip(work, times, strict=True):
            seconds = statistics.median(all_seconds)
            read = model.weight_bytes + sequences * context * c.kv_bytes_per_token(dtype.itemsize)
            row = {
                "kind": kind,
                "sequences": sequences,
                "new_tokens": new_tokens,
                "context": context,
                "ms": seconds * 1e3,
                "of_the_first": seconds / statistics.median(times[0]),
                "tokens_per_second": sequences * new_tokens / seconds,
                "gb_s": read / seconds / 1e9,
                "share": read / seconds / bandwidth,
            }
            found.append(row)
            print(
                f"{kind:9} step: {sequences:2} sequences x {new_tokens:3} new tokens, context {context:5}: "
                f"{row['ms']:8.1f} ms {row['of_the_first']:6.2f} of the first {row['tokens_per_second']:7.1f} tok/s "
                f"{row['gb_s']:6.1f} GB/s {row['share']:5.0%}",
                flush=True,
            )
    return found


def main() -> None:
    """See the module's docstring."""

    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--kinds", default="bfloat16,int8,int4", type=lambda text: text.split(","))
    parser.add_argument("--rows", default="1,4,8,16,256", type=integers)
    parser.add_argument("--contexts", default="128,2048", type=integers)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--products", action="store_true", help="only these")
    parser.add_argument("--steps", action="store_true", help="only these")
    parser.add_argument("--attention", action="store_true", help="only steps, and of them attention alone")
    parser.add_argument("--torch", action="store_true", help="F.linear beside the products")
    parser.add_argument("--cache", choices=("float32", "bfloat16", "int8"), help="else bfloat16, or as float32 weights")
    args = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:  # which is read when torch is loaded
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_WAIT_POLICY": "passive"})
    if args.threads:
        torch.set_num_threads(usable_threads(args.threads))
    if not available():
        raise SystemExit("the C++ kernels do not run here")
    c = shape(args.shape)
    bandwidth = read_bandwidth("cpu", torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s read")
    result: dict[str, Any] = {
        "shape": args.shape,
        "threads": torch.get_num_threads(),
        "bandwidth_gb_s": bandwidth / 1e9,
    }
    if not args.steps and not args.attention:
        result["products"] = products(c, args, bandwidth)
    if not args.products:
        result["steps"] = steps(c, args, bandwidth)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
