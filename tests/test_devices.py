"""Layers on several devices: which goes where, and that a split model computes what the whole one does.

No second device is needed. A CPU with an index is the same CPU, so a map of several of them runs the split path with
moves that do nothing; the meta device, which has no numbers, shows whether an operation mixes devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt_fast import LLM, SamplingParams, devices, memory
from gpt_fast.batch.pipeline import Cluster
from gpt_fast.batch.setup import set_up
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import EngineConfig, ModelConfig, from_mapping, num_bytes_of
from gpt_fast.devices import Room, Shapes, Weights, plan_cache, plan_spans
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import ConfigError
from gpt_fast.memory import HostMemory
from gpt_fast.model.building import empty_model, random_model
from gpt_fast.model.split import SplitModel
from gpt_fast.model.steps import TorchModel, serve
from gpt_fast.model.transformer import weight_bytes

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "model_store" / "demo"
GPUS = [torch.device("cuda", i) for i in range(3)]
CPU, CPU_1, META = torch.device("cpu"), torch.device("cpu:1"), torch.device("meta")
MB, GB = 10**6, 10**9
CONFIG = ModelConfig("llama", 1000, 64, 8, 4, 2, 16, 96, 131072)
PAGE = 16 * 2 * 2 * 16 * 2  # bytes of a page of one layer of CONFIG in bfloat16
WEIGHTS = Weights((100 * MB,) * 8, 50 * MB)

pytestmark = pytest.mark.usefixtures("one_thread")


def shapes(draft: ModelConfig | None = None, **options: Any) -> Shapes:
    return Shapes(CONFIG, draft, EngineConfig(**{"device_map": "auto", **options}), torch.bfloat16)


def plan(rooms: dict[torch.device, int], weights: Weights = WEIGHTS, **options: Any) -> list[tuple[str, int]]:
    spans = plan_spans([Room(*room) for room in rooms.items()], weights, shapes(**options))
    assert sum(span.weights for span in spans) == sum(weights.layers) + weights.first
    return [(str(span.device), span.num_layers) for span in spans]


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_a_model_that_fits_the_first_device_is_there() -> None:
    assert plan({GPUS[0]: GB, GPUS[1]: GB, CPU: GB}) == [("cuda:0", 8)]


def test_as_few_devices_as_there_is_room_on_and_the_cpu_last() -> None:
    assert plan({GPUS[0]: 500 * MB, CPU: GB}) == [("cuda:0", 4), ("cpu", 4)]
    assert plan({GPUS[0]: 500 * MB, GPUS[1]: GB, CPU: GB})[-1][0] == "cuda:1"
    assert plan({GPUS[0]: 300 * MB, GPUS[1]: 300 * MB, CPU: GB}) == [("cuda:0", 2), ("cuda:1", 2), ("cpu", 4)]


def test_devices_of_one_kind_share_the_layers_for_the_sake_of_the_cache() -> None:
    """A layer's cache may have 134 MB."""
    rooms = {GPUS[0]: 850 * MB, GPUS[1]: 800 * MB}
    assert plan(rooms, max_batch=8) == [("cuda:0", 4), ("cuda:1", 4)]
    assert plan(rooms, max_batch=1, max_seq_len=256) == [("cuda:0", 7), ("cuda:1", 1)]


def test_a_device_without_room_is_left_out_and_the_first_may_hold_embeddings_alone() -> None:
    assert plan({GPUS[0]: GB // 2, GPUS[1]: 10 * MB, GPUS[2]: GB}) == [("cuda:0", 2), ("cuda:2", 6)]
    assert plan({GPUS[0]: 100 * MB, GPUS[1]: 2 * GB}) == [("cuda:0", 0), ("cuda:1", 8)]


def test_a_smaller_cache_where_there_is_no_room_for_a_comfortable_one() -> None:
    tight = {GPUS[0]: 456 * MB, CPU: 420 * MB}
    assert plan(tight, max_batch=1) == [("cuda:0", 4), ("cpu", 4)]
    with pytest.raises(ConfigError, match="least KV cache"):
        plan(tight, max_batch=8, max_seq_len=4096)


def test_numbers_of_layers_are_taken_as_they_are() -> None:
    assert plan({GPUS[0]: 2 * GB, CPU: GB}, device_map={"cuda:0": 3, "cpu": 5}) == [("cuda:0", 3), ("cpu", 5)]
    with pytest.raises(ConfigError, match="device_map has 9 layers, and the model has 8"):
        plan({GPUS[0]: GB, CPU: GB}, device_map={"cuda:0": 3, "cpu": 6})


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"0\.05 GB, and 8 layers, of 0\.1 GB at most.*cuda:0 \(0\.3 GB free\), cpu"):
        plan({GPUS[0]: 300 * MB, CPU: 400 * MB})
    with pytest.raises(ConfigError, match=r"cpu \(0\.4 GB of its limit free\)"):
        plan_spans([Room(CPU, 400 * MB, 400 * MB)], WEIGHTS, shapes())


def test_a_draft_model_is_on_the_first_device() -> None:
    rooms = [Room(GPUS[0], 500 * MB), Room(CPU, GB)]
    spans = plan_spans(rooms, WEIGHTS._replace(first=250 * MB), shapes(draft=CONFIG))
    assert [span.num_layers for span in spans] == [2, 6]


@pytest.mark.parametrize("rooms", [{GPUS[0]: 500 * MB, CPU: GB}, {GPUS[0]: 600 * MB, GPUS[1]: 600 * MB}])
def test_the_device_with_the_least_room_decides_how_many_pages_all_layers_have(rooms: dict[torch.device, int]) -> None:
    known = shapes(max_batch=64)
    spans = plan_spans([Room(*room) for room in rooms.items()], WEIGHTS, known)
    found = plan_cache(spans, known, loaded=False)
    each = [known.cache(s.device, s.num_layers, s.room.free - s.weights, s is spans[0]) for s in spans]
    assert found.num_pages == min(one.num_pages for one in each)
    assert found.num_bytes == (found.num_pages + 1) * PAGE * 8
    for span in spans:
        assert span.weights + (found.num_pages + 1) * PAGE * span.num_layers <= span.room.free


def test_a_limit_counts_the_weights_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(GB, GB, 0))
    known = shapes(max_batch=64)
    spans = plan_spans([Room(CPU, 900 * MB, 900 * MB)], WEIGHTS, known)
    before, after = (plan_cache(spans, known, loaded=loaded) for loaded in (False, True))
    assert before == after
    assert after.free == 50 * MB


def test_layers_that_were_asked_for_and_do_not_fit_are_refused_by_device() -> None:
    known = shapes(device_map={"cuda:0": 7, "cpu": 1})
    spans = plan_spans([Room(GPUS[0], 500 * MB), Room(CPU, GB)], WEIGHTS, known)
    with pytest.raises(ConfigError, match=r"7 layers are 0\.75 GB of weights on cuda:0 \(0\.5 GB free\)"):
        plan_cache(spans, known, loaded=False)
    spans = plan_spans([Room(GPUS[0], 751 * MB), Room(CPU, GB)], WEIGHTS, known)
    with pytest.raises(ConfigError, match=r"^cuda:0: the KV cache would need"):
        plan_cache(spans, known, loaded=False)


def test_weights_are_counted_once_and_by_layer() -> None:
    meta = Checkpoint.open(DEMO / "target").meta_model(torch.bfloat16)
    found = Weights.of(meta, draft_bytes=7)
    assert sum(found.layers) + found.first - 7 == weight_bytes(meta)
    assert len(found.layers) == 4
    assert found.first - 7 == 2048 * 256 * 2 + 256 * 2  # a tied table and the last norm


# ---- devices and limits ---------------------------------------------------------------------------------------------


def test_rooms_are_what_is_free_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * GB if device.type == "cuda" else 9 * GB)
    found = devices.rooms(EngineConfig(device_map="auto", device_memory={"cuda": "3GB", "cpu": "12GB"}))
    assert found == [Room(GPUS[0], 3 * GB, 3 * GB), Room(GPUS[1], 5 * GB), Room(CPU, 9 * GB, 12 * GB)]
    assert [room.free for room in devices.rooms(EngineConfig(device_map=("cpu", "cpu:1", "cuda:1")))] == [
        9 * GB // 2, 9 * GB // 2, 5 * GB,
    ]  # fmt: skip
    assert devices.rooms(EngineConfig()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": ["cuda:0", "cuda"]}, "device_map names cuda:0 twice"),
        ({"device_map": ["cuda:7"]}, "device_map: 'cuda:7' is asked for, but torch sees 2 CUDA devices"),
        ({"device_map": ["cpu"], "device_memory": {"cuda:1": "1GB"}}, "cuda:1 is not in device_map, which has cpu"),
    ],
)
def test_a_map_of_devices_that_are_not_there(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        devices.named_devices(from_mapping(EngineConfig, options, "LLM()"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "cuda:0"}, "device_map in yaml must be auto, a list of devices, or devices with a number"),
        ({"device_map": []}, "device_map in yaml must be auto, a list"),
        ({"device_map": ["cuda:0", "auto"]}, "device_map in yaml must be auto, a list"),
        ({"device_map": ["gpu"]}, "device_map in yaml must be one of auto, cpu, cuda, cuda:N, not 'gpu'"),
        ({"device_map": {"cuda:0": "20"}}, "cuda:0 of device_map in yaml must be a whole number"),
        ({"device_map": {"cuda:0": -1}}, "cuda:0 of device_map in yaml must be a whole number"),
        ({"device_map": "auto", "device_memory": "20GiB"}, "device_memory in yaml must be devices with a size"),
        ({"device_map": "auto", "device_memory": {"cpu": 20}}, "cpu of device_memory in yaml must be a size such as"),
        ({"device_map": "auto", "device_memory": {"cpu": "20"}}, "cpu of device_memory in yaml must be a size such as"),
        ({"device_map": "auto", "device_memory": {"tpu": "1GB"}}, "device_memory in yaml must be one of .* 'tpu'"),
        ({"device_map": "auto", "device": "cuda:1"}, "device: device_map says where the layers are"),
        ({"device_memory": {"cpu": "20GiB"}}, "device_memory: limits of the devices of device_map, and there is none"),
    ],
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(EngineConfig, options, "yaml")


def test_sizes() -> None:
    assert [num_bytes_of(text) for text in ("20GiB", "1.5 GB", "3MB", "1TiB", "2 MiB", "1TB")] == [
        20 * 2**30, 1_500_000_000, 3_000_000, 2**40, 2**21, 10**12,
    ]  # fmt: skip


# ---- execution ------------------------------------------------------------------------------------------------------

FAMILIES = ("llama-dynamic", "gemma3-linear", "qwen3-windows", "mixtral", "bloom", "opt")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantize": "int8"},
    "int4 weights": {"quantize": "int4"},
    "lookup": {"draft": "lookup", "speculate": "always"},
    "a draft model": {"draft": str(DEMO / "draft"), "speculate": "always"},
    "no prefix cache": {"prefix_cache": False},
}
SIZES = {"dtype": "float32", "max_seq_len": 64, "max_batch": 3, "prefill_chunk": 16, "page_size": 4, "threads": 1}
TWO = {"cpu": 1, "cpu:1": 3}


def answers(checkpoint: Path, prompts: Sequence[Any], **options: Any) -> list[Any]:
    """Everything that the prompts are answered with, and then the first one again, whose prompt is cached by then."""
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    with LLM(checkpoint, **{**SIZES, **options}) as llm:
        found = [*llm.generate(prompts, asked), llm.generate(prompts[0], asked)]
        split = isinstance(llm.model, SplitModel)
        assert split == (len(options.get("device_map", ())) > 1)
        assert llm.engine.runner.path == "eager"
    return [dataclasses.replace(each, timings=None) for each in found]  # type: ignore[type-var]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_split_model_answers_as_the_whole_one(name: str) -> None:
    prompts = ["The dog saw the dog saw the dog", "Once upon a time there was a little girl", "Tom"]
    plain = answers(DEMO / "target", prompts, device="cpu", kernels=False, compile=False, **OPTIONS[name])
    split = answers(DEMO / "target", prompts, device_map=TWO, **OPTIONS[name])
    assert split == plain
    assert bool(split[-1].num_cached_tokens) == (name != "no prefix cache")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer_can_be_on_a_device_of_its_own(name: str, tmp_path: Path) -> None:
    families_table.FAMILIES[name]().save_pretrained(tmp_path)
    prompts = families_table.prompts(3, 40)
    count = Checkpoint.open(tmp_path).config.num_layers
    each = {f"cpu:{i + 1}": 1 for i in range(count)}
    plain = answers(tmp_path, prompts, device="cpu", kernels=False, compile=False)
    assert answers(tmp_path, prompts, device_map={"cpu": 0, **each}) == plain


def test_logits_of_steps_and_of_whole_sequences_are_those_of_the_whole_model() -> None:
    model = random_model(CONFIG, torch.float32)
    places = [CPU_1] * 3 + [CPU] * 3 + [CPU_1] * 2
    whole, split = TorchModel(model, kernels=False, compile=False), serve(model, layer_devices=places)
    assert isinstance(split, SplitModel)
    sizes = {"max_batch": 2, "max_seq_len": 64, "num_pages": 9, "page_size": 16, "prefill_chunk": 32}
    runners = [Runner(each, **sizes) for each in (whole, split)]
    assert [layer.device for layer in split.cache_layers] == places
    tokens = torch.randint(1000, (40,)).tolist()
    steps = [
        StepPlan((SequencePlan(0, tuple(tokens[:30]), 0, 0, (1, 2), 2, 30),)),
        StepPlan((SequencePlan(0, (5,), 30, 2, (), 1, 31), SequencePlan(1, tuple(tokens[:9]), 0, 0, (3,), 1, 9))),
        StepPlan((SequencePlan(0, (7, 8), 31, 2, (4,), 2, 33), SequencePlan(1, (4,), 9, 1, (), 1, 10))),
    ]
    for step in steps:
        first, second = (runner.execute(step) for runner in runners)
        assert torch.equal(first, second)
    sequences = torch.tensor(tokens).view(2, 20)
    with torch.inference_mode():
        assert torch.equal(whole.forward(sequences), split.forward(sequences))


class OneDevice(TorchDispatchMode):
    """Fails for an operation that reads tensors of two devices; a number from the host may go anywhere. What is copied
    from the meta device becomes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        places = {each.device.type for each in tensors if each.dim() or each.device.type != "cpu"}
        assert len(places) < 2, f"{func} reads {places}"
        target = (kwargs or {}).get("device")
        copies = func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and target is not None
        if copies and places and target.type not in places:
            self.moves.append(f"{places.pop()} to {target.type} {list(tensors[0].shape)}")
            if tensors[0].is_meta:
                return torch.zeros(tensors[0].shape, dtype=tensors[0].dtype, device=target)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("last", [CPU, META], ids=str)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_no_operation_mixes_devices(quantize: str | None, last: torch.device) -> None:
    opened = Checkpoint.open(DEMO / "target")
    places = [CPU, META, META, last]
    model = opened.meta_model(torch.float32, quantize)
    if quantize is None:
        model = empty_model(opened.config, torch.float32, CPU, layer_devices=places)
        assert [next(layer.parameters()).device for layer in model.layers] == places
    else:
        here = [layer for layer, place in zip(model.layers, places, strict=True) if place == CPU]
        for layer in (model.embed, *here, model.head, model.ropes):
            layer.to_empty(device="cpu")
    split = serve(model, layer_devices=places)
    runner = Runner(split, max_batch=3, max_seq_len=64, num_pages=9, page_size=16, prefill_chunk=32)
    assert [layer.k.device for layer in runner.cache] == places
    step = StepPlan((SequencePlan(0, (5,), 3, 0, (1,), 1, 4), SequencePlan(1, (3,) * 9, 0, 0, (3,), 1, 9)))
    with OneDevice() as seen:
        logits = runner.execute(step)
    assert (logits.shape, logits.device) == ((2, 2048), CPU)
    assert seen.moves[0] == "cpu to meta [10, 256]"  # the hidden state, and with it once what all layers read
    assert seen.moves.count("meta to cpu [10, 256]") == 1
    assert seen.moves.count("cpu to meta [3, 4]") == 1  # the page table


# ---- the door -------------------------------------------------------------------------------------------------------


def test_a_list_is_filled_within_its_limits_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gpt_fast")
    total = Checkpoint.open(DEMO / "target").num_bytes(torch.float32)
    limits = {"cpu": f"{total * 0.7 / 2**20 + 2:.3f}MiB"}
    (plain,) = answers(DEMO / "target", ["The dog"], device="cpu", kernels=False, compile=False)[:1]
    (split,) = answers(DEMO / "target", ["The dog"], device_map=["cpu", "cpu:1"], device_memory=limits)[:1]
    assert split == plain
    assert "plain torch runs them, without graphs, torch.compile and the C++ program" in caplog.text


def test_a_map_of_one_device_is_that_device() -> None:
    paths = []
    for where in ({"device": "cpu"}, {"device_map": ["cpu"]}, {"device_map": {"cpu": 4}}):
        with LLM(DEMO / "target", compile=False, **{**SIZES, **where}) as llm:
            assert not isinstance(llm.model, SplitModel)
            assert llm.device == CPU
            paths.append((llm.engine.runner.path, llm.engine.scheduler.pages.num_pages))
    assert paths[0] == paths[1] == paths[2]


def test_what_does_not_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.checkpoint.checkpoint.Checkpoint.build", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ConfigError, match=r"embedding and head.*do not fit .*cpu \(0\.003 GB of its limit free\)"):
        LLM(DEMO / "target", device_map=["cpu"], device_memory={"cpu": "3MB"})


def test_ranks_and_models_in_memory_have_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device_map is the model's own here"):
        LLM.from_model(random_model(CONFIG, torch.float32), device_map=["cpu"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="device_map: 2 processes share this model already"):
        LLM(DEMO / "target", device_map=["cpu"])
    with pytest.raises(ConfigError, match="draft: int8 is the whole model, which no rank holds"):
        LLM(DEMO / "target", draft="int8")


def test_a_batch_on_several_devices_has_a_digest_of_its_own() -> None:
    split = set_up(DEMO / "target", {"device_map": {"cpu": 1, "cpu:1": 3}}, ())
    whole = set_up(DEMO / "target", {"device": "cpu"}, ())
    assert split.options["device"] == "auto"
    assert split.digest != whole.digest
    EngineConfig(**split.options)
    with pytest.raises(ConfigError, match="device_map: with --workers each has one device"):
        next(Cluster.answers(object.__new__(Cluster), split, iter(())))
