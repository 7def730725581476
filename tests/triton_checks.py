"""What the tests of the Triton kernels share: how they run, cases, small models.

Triton decides when it is imported whether it compiles or interprets, so checks (``check_*``, ``compile_*``) run in a
separate process, which a test of the same file starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import dequantized
from torch import Tensor

from gpt_fast.config import ExpertsConfig, ModelConfig, RopeScaling
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.model.attention import Scoring
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import quantize_rows
from gpt_fast.quantize.scheme import Scheme, quant_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from gpu import reference

plain = reference  # twins of single kernels
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = os.environ.get("GPT_FAST_TEST_COMPILE") == "1"
RUNNING = INTERPRETED or COMPILING or torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED or COMPILING or not torch.cuda.is_available() else "cuda"
# The interpreter cuts bfloat16 results off where a GPU rounds them.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)
WEIGHT_KINDS = ("dense", "int8", "fp8", "int4-32", "int4-64", "int4-128")
SCALE = 0.125
MODES = (None, "int8", "int4", "fp8")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
if INTERPRETED:
    # A program that finds nothing to do takes milliseconds here.
    pytest.importorskip("gpt_fast.kernels.gpu.attention").num_splits = lambda _: 2
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    dot = interpreter.InterpreterBuilder.create_dot

    def dot_in_any_place(builder: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
        """Products of float32 are summed in float64 and rounded once: NumPy's library adds a row's products in an order
        that depends on the CPU and on where the row stands, which a GPU's units do not."""
        if total.data.dtype != "float32":
            return dot(builder, a, b, total, *precision)
        zeros = interpreter.TensorHandle(interpreter.np.zeros(total.data.shape), interpreter.tl.float64)
        products = dot(builder, a, b, zeros, *precision).data
        return interpreter.TensorHandle(products.astype("float32") + total.data, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot_in_any_place


def run_checks(file: str, what: str = "check", **env: str) -> None:
    """Those of ``file`` whose names begin with ``what``."""
    command = [sys.executable, "-m", "pytest", file, "-o", f"python_functions={what}_*", "-p", "no:cacheprovider"]
    env = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """By the norm of the difference, and so that no element is lost in it."""
    got, wanted = got.double(), wanted.double()
    assert torch.isfinite(got).all()
    assert ((got - wanted).norm() / wanted.norm()).item() < TOLERANCE[dtype]
    assert (got - wanted).abs().max() < 20 * TOLERANCE[dtype] * wanted.abs().max()


def weights(kind: str, n: int, k: int, dtype: torch.dtype, bias: bool = False, seed: int = 0) -> tuple[Any, Tensor]:
    """Random weights as the kernel takes them, and their values in float32."""
    from gpt_fast.kernels.gpu import linear

    w = noise(n, k, seed=seed) / k**0.5
    b = noise(n, seed=seed + 1).to(dtype) if bias else None
    if kind == "dense":
        return linear.prepare(w.to(dtype), bias=b), w.to(dtype).float()
    name, _, size = kind.partition("-")
    scheme = Scheme(name, int(size or 0))  # type: ignore[arg-type]
    module = QuantizedLinear(k, n, scheme, None if b is None else torch.nn.Parameter(b), DEVICE)
    module.store(0, quantize_rows(w.cpu(), scheme))
    values = dequantized(module)
    made = module.gpu_weights(dtype)
    if name == "int4":  # the layer keeps the kernels' copy of its codes alone, and computes the same from it
        assert module.weight is made.data
        assert torch.equal(module._columns(slice(1, n)), values[1:])
    return made, values


def layout_of(num_tokens: int, num_real: int) -> StepLayout:
    """Of ``num_tokens`` rows those of two sequences; the others only pad."""
    ends = torch.tensor([0, min(3, num_real), num_real], dtype=torch.int32, device=DEVICE)
    return StepLayout(ends, ends[1:], torch.zeros(2, 4, dtype=torch.int32, device=DEVICE), ends[:0].long())


class Case:
    """A cache with other sequences' leftovers in it, and one step's new tokens."""

    def __init__(
        self,
        counts: list[int],
        contexts: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        page: int = 4,
        pages: int = 24,
    ) -> None:
        slots, total = len(counts), sum(counts)
        g = torch.Generator().manual_seed(1)
        table = 1 + torch.randperm(slots * pages, generator=g).view(slots, pages).int()
        self.k_cache, self.v_cache = (noise(slots * pages + 1, page, kv_heads, dim, seed=s) for s in (1, 2))
        self.q, self.k, self.v = (noise(total, h, dim, seed=7 + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        start = torch.tensor([0, *counts]).cumsum(0).int()
        write = [
            int(table[s, p // page]) * page + p % page
            for s, (count, context) in enumerate(zip(counts, contexts, strict=True))
            for p in range(context - count, context)
        ]
        # What lies past a context may be anything.
        for s, context in enumerate(contexts):
            for p in range(context, pages * page):
                self.k_cache[table[s, p // page], p % page] = torch.inf
                self.v_cache[table[s, p // page], p % page] = torch.nan
        self.layout = StepLayout(
            *(t.to(DEVICE) for t in (start, torch.tensor(contexts).int(), table, torch.tensor(write)))
        )

    def run(self, attend: Callable[..., Tensor], window: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tensor:
        q, k, v = (t.to(dtype) for t in (self.q, self.k, self.v))
        cache = LayerCache(self.k_cache.to(cache_dtype), self.v_cache.to(cache_dtype))
        return attend(q, k, v, cache, self.layout, Scoring(window, 0.9 * q.shape[-1] ** -0.5))


def config(**more: Any) -> ModelConfig:
    keys: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 40,
        "dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "ffn_dim": 48,
        "max_seq_len": 64,
    }
    return ModelConfig(**(keys | more))


CONFIGS = {
    "plain": config(),
    "biases": config(qkv_bias=True, out_bias=True, mlp_bias=True, num_heads=4, num_kv_heads=2, head_dim=20),
    "norms": config(qk_norm="head", tie_embeddings=True, windows=(2, 0), num_layers=2),
    "constants": config(
        embedding_scale=5.5, residual_scale=0.3, logits_scale=0.25, attention_scale=0.4, norm_offset=1.0
    ),
    "rotations": config(
        num_layers=3,
        windows=(2, 0, 0),
        local_rope_theta=3.0,
        unrotated=(False, True, False),
        rotary_dim=6,
        qk_norm="head",
    ),
    "dynamic": config(rope_scaling=RopeScaling("dynamic", 2.0, 2)),
    "experts": config(family="mixtral", num_layers=2, experts=ExpertsConfig(5, 2, 24), residual_scale=0.3),
    "shared": config(
        family="qwen2_moe", num_layers=2, experts=ExpertsConfig(6, 3, 24, False, 32, (True, False)), qkv_bias=True
    ),
    "sinks": config(
        family="gpt_oss", sinks=True, experts=ExpertsConfig(4, 2, 32), activation="clamped_swiglu", router_bias=True,
        mlp_bias=True, windows=(3,),
    ),
    "caps": config(
        family="gemma2", norms="both", num_layers=2, attention_cap=0.7, logits_cap=1.5, activation="gelu_tanh",
        norm_offset=1.0,
    ),
    "layer norms": config(
        family="gpt2", norm="layer", gated=False, activation="gelu", learned_positions=2, rotary_dim=0, mlp_bias=True,
        head_bias=True, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
    ),
    "alibi": config(
        family="bloom", norm="layer", gated=False, activation="relu", alibi=True, rotary_dim=0, embedding_norm=True,
        parallel="one norm",
    ),
    "rows": config(family="olmo2", norms="after", qk_norm="row", num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2),
}  # fmt: skip


def model_of(c: ModelConfig, mode: str | None, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(c).requires_grad_(False)
    for name, p in model.named_parameters():
        p.data = p + 0.1 * torch.randn(p.shape) if "norm" in name or "bias" in name else torch.randn(p.shape) / 8
    model.tie()
    model.to(DEVICE, dtype)
    if mode:
        quantize_model(model, quant_config(mode))
    return model


def empty_cache(c: ModelConfig, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    shape = (9, 4, c.num_kv_heads, c.head_dim)
    return [LayerCache.zeros(shape, dtype, torch.device(DEVICE)) for _ in range(c.num_layers)]


def step_of(table: list[list[int]], seen: list[int], counts: list[int]) -> dict[str, Any]:
    """``counts`` new tokens of each sequence, whose first ``seen`` tokens are in pages of 4."""
    where = [(s, seen[s] + i) for s in range(len(counts)) for i in range(counts[s])]
    numbers = {
        "tokens": [(5 * p + s) % 40 for s, p in where],
        "positions": [p for _, p in where],
        "lengths": [max(3, p + 1) for _, p in where],
    }
    layout = StepLayout(
        torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
        torch.tensor([n + count if count else 0 for n, count in zip(seen, counts, strict=True)]).int().to(DEVICE),
        torch.tensor(table).int().to(DEVICE),
        torch.tensor([table[s][p // 4] * 4 + p % 4 for s, p in where]).to(DEVICE),
    )
    return {name: torch.tensor(values).to(DEVICE) for name, values in numbers.items()} | {"layout": layout}


def steps() -> list[dict[str, Any]]:
    """Two sequences on pages 3 1 .. and 2 5 ..: a prompt of each, a decode of both, a verify of one."""
    table = [[3, 1, 7, 6], [2, 5, 4, 8]]
    return [step_of(table, *case) for case in (([0, 0], [3, 1]), ([3, 1], [1, 1]), ([4, 2], [0, 3]))]


def plain_step(model: Transformer, step: dict[str, Any], cache: Any) -> Tensor:
    rows = torch.arange(len(step["tokens"]), device=DEVICE)
    return model.step(step["tokens"], step["positions"], step["lengths"], cache, step["layout"], rows)


def fast_step(run: Any, step: dict[str, Any]) -> Tensor:
    out: Tensor = run.step(step["tokens"], step["positions"], step["lengths"], step["layout"])
    return out
