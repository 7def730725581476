"""Whole steps by the Triton kernels, and their recordings, against the plain model and against themselves.

The checks run in their own process (triton_checks.py). By hand:

    TRITON_INTERPRET=1 python -m pytest tests/test_gpu_steps.py -o python_functions='check_*'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_checks import (
    CONFIGS,
    DEVICE,
    MODES,
    RUNNING,
    config,
    empty_cache,
    fast_step,
    model_of,
    needs_cuda,
    needs_triton,
    noise,
    plain_step,
    run_checks,
    step_of,
    steps,
)  # isort: skip

from gpt_fast.config import ModelConfig
from gpt_fast.engine import parts, sampling
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.kernels.race import Draw, race_key
from gpt_fast.model import steps as engine_steps
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.linear import QuantizedLinear

if RUNNING:
    graphs = pytest.importorskip("gpt_fast.kernels.gpu.graphs")
    race = pytest.importorskip("gpt_fast.kernels.gpu.race")
    gpu_model = pytest.importorskip("gpt_fast.model.gpu_model")


@needs_triton
@pytest.mark.slow
def test_the_checks_hold_interpreted() -> None:
    run_checks(__file__, TRITON_INTERPRET="1")


@needs_triton
@needs_cuda
def test_the_checks_hold_on_this_gpu() -> None:
    run_checks(__file__)


@needs_triton
@pytest.mark.slow
def test_the_benchmark_runs_from_end_to_end() -> None:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["failed"] == []
    assert report["checks"] > 5
    assert {row["precision"] for row in report["decode"]} == {"bf16", "int8", "int4", "fp8"}
    assert all(row["tokens_per_second"] > 0 and row["gigabytes"] > 0 for row in report["decode"])
    assert [row["times_one_row"] for row in report["decode"] if row["each"] == 1] == [1.0] * 5
    assert {row["batch"] * row["each"] for row in report["decode"]} == {1, 20}
    assert [row["tokens"] for row in report["prompts"]] == [5, 20] * 5


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("plain", mode) for mode in MODES),
        *((name, None) for name in ("norms", "dynamic", "rotations")),
        *((name, "int8") for name in ("biases", "constants", "experts", "shared", "sinks", "caps", "layer norms")),
        *((name, None) for name in ("experts", "shared", "sinks", "caps", "layer norms", "alibi", "rows")),
        *(("experts", mode) for mode in ("int4", "fp8")),
    ],
)
@torch.inference_mode()
def check_programs_equal_the_model(name: str, mode: str | None) -> None:
    model = model_of(CONFIGS[name], mode)
    cache, twin_cache = empty_cache(model.config), empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    for step in steps()[: {None: 3, "int4": 2}.get(mode, 1)]:
        torch.testing.assert_close(fast_step(fast, step), plain_step(model, step, twin_cache), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(cache[-1][0][1:], twin_cache[-1][0][1:], atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def check_a_program_in_bfloat16() -> None:
    model = model_of(CONFIGS["plain"], "int4", torch.bfloat16)
    wide = model_of(CONFIGS["plain"], "int4", torch.bfloat16).float()  # the same weights in float32 arithmetic
    cache, twin_cache = empty_cache(model.config, torch.bfloat16), empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    for step in steps()[:2]:
        got, wanted = fast_step(fast, step), plain_step(wide, step, twin_cache)
        assert (got - wanted).norm() < 0.04 * wanted.norm()


@torch.inference_mode()
def check_decoding_alone_or_together_gives_the_same_bits() -> None:
    model = model_of(CONFIGS["norms"], "int8")
    cache = empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    first, second = steps()[:2]
    fast_step(fast, first)
    together = fast_step(fast, second)
    layout = second["layout"]
    for s in range(2):
        start = torch.tensor([0, 1, 1] if s == 0 else [0, 0, 1]).int().to(DEVICE)
        alone = fast.step(
            *(second[k][s : s + 1] for k in ("tokens", "positions", "lengths")),
            layout._replace(query_start=start, write_slots=layout.write_slots[s : s + 1]),
        )
        assert torch.equal(alone, together[s : s + 1])


def check_what_a_program_refuses() -> None:
    model = model_of(CONFIGS["plain"], "int4")
    cache = empty_cache(model.config)
    fast = gpu_model.gpu_program(model, cache)
    many = torch.zeros(65, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="65 new tokens"):
        fast.step(many, many, many, steps()[0]["layout"])
    with pytest.raises(ValueError, match="shorter"):
        gpu_model.gpu_program(model, cache[:0])
    with pytest.raises(ValueError, match="no other, has scales"):
        gpu_model.gpu_program(model, [LayerCache(layer.k.to(torch.int8), layer.v.to(torch.int8)) for layer in cache])
    model.layers[0].wo.order = torch.arange(32)
    model.layers[0].wo._gpu_weights.clear()
    with pytest.raises(UnsupportedError, match="sorted columns"):
        gpu_model.gpu_program(model, cache)


# --- graphs --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def check_replays_equal_plain_calls() -> None:
    model = model_of(CONFIGS["plain"], "int8")
    plain_cache, cache = empty_cache(model.config), empty_cache(model.config)
    direct = gpu_model.gpu_program(model, plain_cache)
    recorded: list[Callable[[], Tensor]] = []

    def pretend(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded.append(run)
        return run

    table = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    held = graphs.CapturedProgram(
        gpu_model.gpu_program(model, cache),
        table,
        buckets=(4, 1),
        capture=pretend if DEVICE == "cpu" else None,
        prompt_buckets=(),
    )
    held.warm_up()
    assert DEVICE == "cuda" or len(recorded) == 2
    table.copy_(steps()[0]["layout"].page_table)  # after recording: a replay reads what is there then
    assert [held.bucket(n) for n in (1, 2, 3, 4)] == [1, 4, 4, 4]
    assert held.most == 4
    with pytest.raises(ValueError, match="the largest bucket holds 4"):
        held.bucket(5)
    kept = []
    for step in steps():
        count = len(step["tokens"])
        rows = torch.tensor([count - 1, 0], device=DEVICE)
        wanted = fast_step(direct, step)[rows]
        layout = step["layout"]._replace(page_table=table)
        got = held.step(step["tokens"], step["positions"], step["lengths"], layout, rows)
        assert torch.equal(got, wanted)
        kept.append((got, wanted))
    assert all(torch.equal(got, wanted) for got, wanted in kept)  # no later step writes into an earlier result
    for a, b in zip(cache, plain_cache, strict=True):
        assert torch.equal(a[0][1:], b[0][1:])  # padding went to page 0
        assert torch.equal(a[1][1:], b[1][1:])
    step = steps()[1]
    with pytest.raises(ValueError, match="recorded for"):
        held.step(step["tokens"], step["positions"], step["lengths"], step["layout"], rows)


@torch.inference_mode()
def check_verifying_equals_one_token_at_a_time() -> None:
    """Steps of 17 to 48 tokens, padded to a graph's: each row has the bits that it has alone."""
    model = model_of(config(qk_norm="head", windows=(9,)), "int4")
    cache = [LayerCache(*(noise(41, 4, 1, 16, seed=i) for i in range(2)))]
    table = [list(range(1 + 5 * s, 6 + 5 * s)) for s in range(8)]
    seen = [(5 * s) % 14 for s in range(8)]
    pages = torch.tensor(table).int().to(DEVICE)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    held = graphs.CapturedProgram(gpu_model.gpu_program(model, cache), pages, capture=capture, prompt_buckets=())
    held.warm_up()

    def logits(seen: list[int], counts: list[int]) -> Tensor:
        step = step_of(table, seen, counts)
        step["layout"] = step["layout"]._replace(page_table=pages)
        return held.step(*step.values(), torch.arange(sum(counts), device=DEVICE))

    alone = [[logits([n + i for n in seen], [int(s == t) for t in range(8)]) for i in range(6)] for s in range(8)]
    for counts in ([0, 6, 5, 0, 6, 0, 0, 0], [3] * 8, [5] * 8, [6] * 8):
        wanted = [row for rows, count in zip(alone, counts, strict=True) for row in rows[:count]]
        assert torch.equal(logits(seen, counts), torch.cat(wanted))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("norms", mode) for mode in MODES),
        ("experts", "int8"),
        *((name, None) for name in ("shared", "sinks", "caps", "layer norms", "alibi", "rows")),
    ],
)
@torch.inference_mode()
def check_prompts(name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model computes them, and each with the same bits in a replay, launched, alone and beside others."""
    model = model_of(CONFIGS[name], mode)
    cache, twin_cache = empty_cache(model.config), empty_cache(model.config)
    pages = steps()[0]["layout"].page_table.clone()
    capture = (lambda run: run) if DEVICE == "cpu" else None
    program = gpu_model.gpu_program(model, cache)
    held = graphs.CapturedProgram(program, pages, (2,), capture, prompt_buckets=(6,))
    monkeypatch.setattr(engine_steps, "_capture", lambda *_: held)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    fast = engine_steps.TorchModel(model, kernels=True, compile=False).make_step(cache, pages)
    counts: list[int] = []
    fast.warm_up(counts.append, longest=100)
    assert counts == [1, 100]
    assert (fast.path, fast.reads_host(), fast.apart.most) == ("kernels", True, 2)
    model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    passes: list[int] = []

    def logits(seen: list[int], counts: list[int], rows: list[int]) -> Tensor:
        step = step_of(pages.tolist(), seen, counts)
        layout = StepLayout(*(t.cpu() for t in step["layout"]))._replace(page_table=pages)
        numbers = [step[name].cpu() for name in ("tokens", "positions", "lengths")]
        return fast(*numbers, layout, torch.tensor(rows, dtype=torch.int64))

    together = logits([0, 0], [7, 4], [2, 6, 7, 10])  # launched
    assert not passes
    keys = [layer.k.clone() for layer in cache]
    first = logits([0, 0], [5, 0], [2])  # replayed
    assert torch.equal(torch.cat([first, logits([5, 0], [2, 0], [1])]), together[:2])
    assert torch.equal(logits([0, 0], [0, 4], [0, 3]), together[2:])
    for layer, wanted in zip(cache, keys, strict=True):
        assert torch.equal(layer.k[1:], wanted[1:])
    assert logits([4, 0], [1, 0], []).shape == (0, model.config.vocab_size)
    wanted = plain_step(model, step_of(pages.tolist(), [0, 0], [7, 4]), twin_cache)[[2, 6, 7, 10]]
    if mode in ("int8", "int4"):  # rows are rounded to bytes, here for some weights, there for most
        assert (together - wanted).norm() < 0.04 * wanted.norm()
    else:
        torch.testing.assert_close(together, wanted, atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def check_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Plain torch runs the model then, and a line says why."""
    model = model_of(CONFIGS["plain"], None)
    step, cache = steps()[0], empty_cache(model.config)
    table = step["layout"].page_table

    def fails(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("out of registers\n and more")

    held = graphs.CapturedProgram(gpu_model.gpu_program(model, cache), table, (2,), fails)
    monkeypatch.setattr(engine_steps, "_capture", lambda *_: held)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    fast = engine_steps.TorchModel(model, kernels=True, compile=False).make_step(cache, table)
    assert (fast.path, fast.reads_host()) == ("kernels", True)
    counts: list[int] = []
    fast.warm_up(counts.append, longest=4)
    assert (fast.path, fast.reads_host(), fast.apart, counts[-2:]) == ("eager", False, None, [4, 3])
    assert caplog.messages[-1:] == ["the GPU kernels failed, and plain torch runs this model, slower: out of registers"]
    rows = torch.arange(4, device=DEVICE)
    wanted = plain_step(model, step, empty_cache(model.config))
    assert torch.equal(fast(*step.values(), rows), wanted)


@torch.inference_mode()
def check_a_chain_of_replays_equals_a_step_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences four, one and three tokens are drawn by Triton's race; each goes into the next replay."""
    model = model_of(CONFIGS["plain"], None)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    monkeypatch.setattr(
        engine_steps,
        "_capture",
        lambda m, cache, table, _: graphs.CapturedProgram(
            gpu_model.gpu_program(m, cache), table, (1, 2, 4), capture, (8,)
        ),
    )
    served = engine_steps.TorchModel(model, kernels=True, compile=False)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    monkeypatch.setattr(sampling, "available", lambda: False)
    monkeypatch.setattr(sampling, "race", race.race)
    monkeypatch.setattr(parts, "FEW", 2)
    sizes = {"max_batch": 4, "max_seq_len": 16, "num_pages": 13, "page_size": 4, "prefill_chunk": 8}
    runners = [Runner(served, **sizes) for _ in range(2)]
    for runner in runners:
        runner.warm_up()
        assert runner.path == "kernels"
    prompts = {0: (3, 9, 27), 1: (30,), 3: (7, 7)}  # three of them are a prompt
    pages = {slot: tuple(range(1 + 4 * i, 5 + 4 * i)) for i, slot in enumerate(prompts)}
    kinds = [(Draw(0.0), 4), (Draw(1.0, top_k=9, top_p=0.8), 1), (Draw(0.7, min_p=0.01), 3)]
    draws = [
        [kind._replace(low=low, high=high) for low, high in (race_key(j, i) for i in range(count))]
        for j, (kind, count) in enumerate(kinds)
    ]
    plan = [SequencePlan(slot, tokens, 0, 0, pages[slot], 1, 0) for slot, tokens in prompts.items()]
    got = runners[0].chain(StepPlan(tuple(plan)), draws)

    wanted: list[list[int]] = [[], [], []]
    for i in range(4):
        going = [j for j, own in enumerate(draws) if len(own) > i]
        logits = runners[1].execute(StepPlan(tuple(plan[j] for j in going)))
        for j, token in zip(going, sampling.draw_tokens(logits, [draws[j][i] for j in going]).tolist(), strict=True):
            wanted[j].append(token)
            plan[j] = plan[j]._replace(tokens=(token,), start=plan[j].end, new_pages=())
    assert got == wanted
    assert len({*got[0], *got[2]}) > 3
    for chained, single in zip(*(runner.cache for runner in runners), strict=True):
        assert torch.equal(chained.k[1:], single.k[1:])
        assert torch.equal(chained.v[1:], single.v[1:])


@pytest.mark.parametrize(("name", "mode"), [("norms", None), ("norms", "int8"), ("shared", None)])
@torch.inference_mode()
def check_what_is_beside_a_token_has_no_part_in_its_bits(
    name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of generated tokens, drafts and prompts in one plan, and of each alone; a prompt in pieces, and whole."""
    model = model_of(CONFIGS[name], mode)
    capture = (lambda run: run) if DEVICE == "cpu" else None
    monkeypatch.setattr(
        engine_steps,
        "_capture",
        lambda m, cache, table, _: graphs.CapturedProgram(
            gpu_model.gpu_program(m, cache), table, (1, 16), capture, (8,)
        ),
    )
    served = engine_steps.TorchModel(model, kernels=True, compile=False)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    sizes = {"max_batch": 4, "max_seq_len": 16, "num_pages": 17, "page_size": 4, "prefill_chunk": 8}
    together, alone, whole = (Runner(served, **sizes) for _ in range(3))
    monkeypatch.setattr(parts, "FEW", 2)

    def part(slot: int, start: int, count: int, is_prompt: bool, num_logits: int = 1) -> SequencePlan:
        tokens = tuple((5 * p + slot) % 40 for p in range(start, start + count))
        pages = tuple(range(1 + 4 * slot, 5 + 4 * slot)) if start == 0 else ()
        return SequencePlan(slot, tokens, start, 0 if start == 0 else 4, pages, num_logits, 0, is_prompt)

    for runner in (together, alone, whole):
        runner.warm_up()
        assert runner.path == "kernels"
    plans = [
        [part(0, 0, 9, True, 2), part(2, 0, 5, True)],
        [part(0, 9, 1, False), part(1, 0, 6, True), part(2, 5, 2, False, 2), part(3, 0, 1, True)],
        [part(0, 10, 1, False), part(1, 6, 2, True), part(2, 7, 1, False), part(3, 1, 1, False)],
    ]
    for sequences in plans:
        got = together.execute(StepPlan(tuple(sequences)))
        wanted = torch.cat([alone.execute(StepPlan((own,))) for own in sequences])
        assert torch.equal(got, wanted)
    assert torch.equal(got[1:2], whole.execute(StepPlan((part(1, 0, 8, True),))))
    for ours, theirs in zip(together.cache, alone.cache, strict=True):
        assert torch.equal(ours.k[1:], theirs.k[1:])


def check_what_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_steps.gpu, "available", lambda: True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda: lambda run: run)

    def said(c: ModelConfig, max_batch: int) -> list[str]:
        caplog.clear()
        table = torch.zeros(max_batch, 4, dtype=torch.int32, device=DEVICE)
        found = engine_steps._capture(model_of(c, None), empty_cache(c), table)
        assert (found is None) == (c.head_dim > 256)
        return caplog.messages

    assert said(CONFIGS["plain"], 80) == []
    assert said(config(head_dim=300), 4) == [
        "the GPU kernels do not run Heads with head_dim 300: it must be even and at most 256: plain torch runs this "
        "model, and slower"
    ]


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
@torch.inference_mode()
def check_blocks_compile_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their products are the same as uncompiled, which plain torch's are not."""
    model = model_of(CONFIGS["biases"], mode, torch.bfloat16)
    table = torch.arange(1, 9, dtype=torch.int32, device=DEVICE)[None]

    def logits(count: int) -> Tensor:
        numbers = torch.arange(count, device=DEVICE)
        ends = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        step = {"tokens": numbers, "positions": numbers, "lengths": numbers + 1}
        step |= {"layout": StepLayout(ends, ends[1:], table, 4 + numbers)}
        return plain_step(model, step, empty_cache(model.config, torch.bfloat16))

    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: False)
    plain_logits = logits(30)
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: True)
    uncompiled, short = [logits(count) for count in (30, 17, 20)], logits(3)
    assert not torch.equal(uncompiled[0], plain_logits)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=True, backend="eager")
    assert all(torch.equal(logits(len(wanted)), wanted) for wanted in uncompiled)
    assert (logits(3) - short).norm() < 0.04 * short.norm()  # the kernel's products, and torch's


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8"])
@torch.inference_mode()
def check_experts_of_plain_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are the kernels', each with an expert's rows, where they lie."""
    model = model_of(CONFIGS["experts"], mode)
    model.layers[0].experts_w13.bias = torch.nn.Parameter(noise(5 * 48), requires_grad=False)
    tokens = torch.arange(20, device=DEVICE)[None]
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: False)
    wanted = model(tokens)
    monkeypatch.setattr(QuantizedLinear, "_on_gpu", lambda self, x: True)
    torch.testing.assert_close(model(tokens), wanted, atol=1e-4, rtol=1e-3)
