"""Which device holds which layers of a model that one device cannot hold (``device_map`` of EngineConfig).

The embedding, the head and a draft model are on the first device: there tokens go in and logits come out, so what comes
back from the last layer is a row of the model's width and not one of its vocabulary, and a tied head is not copied.
Layers follow in order, as many on each device as fit there beside their share of the KV cache. Every layer has as many
pages as any other, so the device with the least room for them decides how many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from gpt_fast import memory
from gpt_fast.config import EngineConfig, ModelConfig, num_bytes_of
from gpt_fast.errors import ConfigError
from gpt_fast.memory import CachePlan, gigabytes
from gpt_fast.model.transformer import Transformer, weight_bytes
from gpt_fast.placement import pick_device

COMFORT = 2048  # tokens of each sequence: a cache with room for that is not made larger by slower devices
_UNLIMITED = 2**62  # bytes


class Room(NamedTuple):
    """A device, and the bytes that weights, KV cache and steps may take there. ``limit``: what was asked for."""

    device: torch.device
    free: int
    limit: int | None = None

    def __str__(self) -> str:
        return f"{self.device} ({gigabytes(self.free)}{' of its limit' if self.limit == self.free else ''} free)"


class Weights(NamedTuple):
    """Bytes of each layer, and of ``first``: all that is on the first device whatever the plan."""

    layers: tuple[int, ...]
    first: int
    smaller_modes: tuple[str, ...] = ()  # of ``quantize``

    @classmethod
    def of(cls, model: Transformer, draft_bytes: int = 0, smaller_modes: tuple[str, ...] = ()) -> Weights:
        """Those of ``model``, which may be on the meta device, and of a draft model."""
        layers = tuple(map(weight_bytes, model.layers))
        return cls(layers, weight_bytes(model) - sum(layers) + draft_bytes, smaller_modes)


class Span(NamedTuple):
    """Consecutive layers on one device, and the bytes of all weights there."""

    room: Room
    num_layers: int
    weights: int

    @property
    def device(self) -> torch.device:
        return self.room.device


class Shapes(NamedTuple):
    """What the KV cache depends on: the model, the draft model, how it is run, and the dtype of the weights."""

    config: ModelConfig
    draft: ModelConfig | None
    options: EngineConfig
    dtype: torch.dtype

    def cache(self, device: torch.device, num_layers: int, free: int, first: bool) -> CachePlan:
        """For ``num_layers`` on ``device``, with ``free`` bytes beside the weights. Raises ConfigError."""
        config = replace(self.config, num_layers=num_layers, windows=(), unrotated=())
        if not first:
            config = replace(config, vocab_size=1)  # logits are made on the first device alone
        options, draft = self.options, self.draft if first else None
        if num_layers < self.config.num_layers:
            options = replace(options, kernels=False)
        return memory.plan_cache(config, options, dtype=self.dtype, free=free, device_type=device.type, draft=draft)


def named_devices(options: EngineConfig) -> list[torch.device]:
    """The devices of ``device_map`` in order. ``auto``: all of CUDA, then the CPU. Raises ConfigError for one that is
    not there, one that is named twice, and a limit of one that is not in the map."""
    names: list[str]
    if options.device_map == "auto":
        names = [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]
    else:
        names = list(options.device_map or ())
    devices = [pick_device(name, "device_map") for name in names]
    for device in devices:
        if devices.count(device) > 1:
            raise ConfigError(f"device_map names {device} twice")
    for name in options.device_memory or ():
        if pick_device(name, "device_map") not in devices:
            raise ConfigError(f"device_memory: {name} is not in device_map, which has {', '.join(map(str, devices))}")
    return devices


def rooms(options: EngineConfig) -> list[Room]:
    """The devices of ``device_map``, none where it is None, and what is free on them now, within the limits of
    ``device_memory``. Raises ConfigError as :func:`named_devices`."""
    devices = named_devices(options)
    limits = {
        pick_device(name, "device_map"): num_bytes_of(text) for name, text in (options.device_memory or {}).items()
    }
    found = []
    for device in devices:
        free, limit = _free(device, devices), limits.get(device)
        found.append(Room(device, free if limit is None else min(free, limit), limit))
    return found


def _free(device: torch.device, devices: Sequence[torch.device]) -> int:
    """Bytes free on ``device``. Names of the CPU with an index all mean the same one, and share it evenly."""
    return memory.free_bytes(device) // (sum(d.type == "cpu" for d in devices) if device.type == "cpu" else 1)


def plan_spans(places: Sequence[Room], weights: Weights, shapes: Shapes) -> list[Span]:
    """Spread the layers: over as many devices as ``device_map`` gives numbers for, else over as few as have room for
    the weights and ``COMFORT``, else over all with the least cache that the options allow. Devices of one kind then
    share the layers so that the cache becomes as large as it can. Raises ConfigError when nothing fits."""
    if isinstance(shapes.options.device_map, Mapping):
        counts = list(shapes.options.device_map.values())
        if sum(counts) != len(weights.layers):
            raise ConfigError(f"device_map has {sum(counts)} layers, and the model has {len(weights.layers)}")
        return _spans(places, counts, weights)
    wished = shapes.cache(places[0].device, len(weights.layers), _UNLIMITED, True).num_pages
    comfort = min(wished, -(-COMFORT // shapes.options.page_size) * shapes.options.num_slots)
    for used in range(1, 1 + len(places)):
        if found := _fill(places[:used], weights, shapes, comfort):
            if len({room.device.type for room in places[:used]}) == 1:
                found = _most_cache(places[:used], weights, shapes, comfort, wished)
            return _spans(places, found, weights)
    if found := _fill(places, weights, shapes, 1):
        return _spans(places, found, weights)
    raise ConfigError(_refusal(places, weights))


def _fill(places: Sequence[Room], weights: Weights, shapes: Shapes, pages: int) -> list[int] | None:
    """How many layers each device takes, the first ones as many as they can beside ``pages`` of cache; None when some
    layers are left."""
    counts: list[int] = []
    for i, room in enumerate(places):
        begin, count = sum(counts), 0
        held = 0 if i else weights.first
        if i == 0 and not _fits(room, held, 0, shapes, pages, True):
            return None
        for size in weights.layers[begin:]:
            held += size
            if not _fits(room, held, count + 1, shapes, pages, i == 0):
                break
            count += 1
        counts.append(count)
    return counts if sum(counts) == len(weights.layers) else None


def _fits(room: Room, held: int, num_layers: int, shapes: Shapes, pages: int, first: bool) -> bool:
    try:
        return held <= room.free and shapes.cache(room.device, num_layers, room.free - held, first).num_pages >= pages
    except ConfigError:
        return False


def _most_cache(places: Sequence[Room], weights: Weights, shapes: Shapes, fits: int, wished: int) -> list[int]:
    """As :func:`_fill`, with as many pages as there can be from ``fits``, which do fit, to ``wished``."""
    too_many = wished + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if _fill(places, weights, shapes, middle) else (fits, middle)
    found = _fill(places, weights, shapes, fits)
    assert found is not None
    return found


def _spans(places: Sequence[Room], counts: Sequence[int], weights: Weights) -> list[Span]:
    spans: list[Span] = []
    begin = 0
    for room, count in zip(places, counts, strict=False):
        held = sum(weights.layers[begin : begin + count]) + (0 if spans else weights.first)
        if count or not spans:
            spans.append(Span(room, count, held))
        begin += count
    return spans


def _refusal(places: Sequence[Room], weights: Weights) -> str:
    layers = f"{len(weights.layers)} layers, of {gigabytes(max(weights.layers))} at most"
    need = f"embedding and head, {gigabytes(weights.first)}, and {layers}"
    quantize = memory.set_quantize(weights.smaller_modes)
    todo = f"{quantize}set a smaller max_seq_len, raise device_memory, or add a device"
    return f"device_map: {need}, do not fit with the least KV cache on {', '.join(map(str, places))}; {todo}"


def of_layers(spans: Sequence[Span]) -> list[torch.device]:
    """The device of each layer."""
    return [span.device for span in spans for _ in range(span.num_layers)]


def plan_cache(spans: Sequence[Span], shapes: Shapes, *, loaded: bool) -> CachePlan:
    """The KV cache of all layers: what the device with the least room for it can hold. ``loaded``: the weights are in
    their places, so that what is free now is free beside them. Raises ConfigError that names the device."""
    plans = []
    for span in spans:
        free = span.room.free - span.weights
        if loaded:
            now = _free(span.device, [span.device for span in spans])
            free = now if span.room.limit is None else min(now, span.room.limit - span.weights)
        elif free < 0:
            has = f"{gigabytes(span.weights)} of weights on {span.room}"
            raise ConfigError(f"device_map: {span.num_layers} layers are {has}; give it fewer, or raise device_memory")
        try:
            plans.append(shapes.cache(span.device, span.num_layers, free, span is spans[0]))
        except ConfigError as error:
            raise ConfigError(f"{span.device}: {error}") from None
    tightest = min(plans, key=lambda plan: plan.num_pages)
    pages = tightest.num_pages + 1  # there is a page 0 as well
    size = sum(plan.num_bytes // (plan.num_pages + 1) * pages for plan in plans)
    chunk = min(plan.prefill_chunk for plan in plans)
    return tightest._replace(num_bytes=size, free=sum(plan.free for plan in plans), prefill_chunk=chunk)
