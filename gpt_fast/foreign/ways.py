"""The ways to run steps of a model of transformers, and the check that one computes what the model does by itself.

Nobody says of a model which of them it can take: each is tried, and its logits are compared with the model's.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_fast.errors import ConfigError, UnsupportedError, first_line
from gpt_fast.kernels.cache import LayerCache, PagedLayer, StepLayout
from gpt_fast.model.attention import Scoring, attend

log = logging.getLogger(__name__)

_NAME = "gpt_fast_paged"  # our attention's in transformers' interface
_STEP = "gpt_fast_step"  # the attribute by which an attention layer finds the step that it is in
_SCORING = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
# What attention layers say beside these, and what changes nothing in a causal step without dropout.
_IDLE = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "position_embeddings"})
_CACHES = ("past_key_values", "cache_params")  # what ``forward`` may call the cache that it takes and returns
_WINDOWS = ("sliding_window", "attention_chunk_size")  # for which transformers' caches keep the last tokens alone


class Way(Protocol):
    """How steps run.

    ``paged``: through pages of the engine's cache, ``cache_layers``. ``takes_pieces``: a prompt may come in several
    steps. ``goes_back``: the last tokens of a sequence may be replaced by others.
    """

    description: str
    paged: bool
    takes_pieces: bool
    goes_back: bool
    cache_layers: Sequence[PagedLayer]

    def plain_attention(self) -> AbstractContextManager[object]:
        """While it is open, the model's attention is transformers' own."""

    def run(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[LayerCache], layout: StepLayout, rows: Tensor
    ) -> Tensor:
        """New tokens [N] at ``positions`` [N] -> logits [R, V] of those in ``rows`` [R], in ascending order."""


def first_that_agrees(model: Any, vocab_size: int) -> Way:
    """The best way that gives the logits of ``model`` itself. Raises ConfigError where none does."""
    kind, trial, reasons = type(model).__name__, _Trial(model, vocab_size), []
    plain = model.config._attn_implementation
    for make in _WAYS:
        try:
            way = make(model)
            trial.check(way)
        except Exception as why:  # transformers' models raise whatever they like
            reasons.append(first_line(why))
            log.info("%s: %s", kind, reasons[-1])
            if model.config._attn_implementation != plain:
                model.set_attn_implementation(plain)
            continue
        return way
    raise ConfigError(f"{kind} cannot be served: {'; '.join(dict.fromkeys(reasons))}")


class Paged:
    """Attention over our pages, through transformers' attention interface. Raises UnsupportedError."""

    paged = takes_pieces = goes_back = True
    description = "all sequences of a step go through it together, with our paged cache"

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedError("its attention does not go through transformers' interface")
        self._model, self._text = model, model.config.get_text_config(decoder=True)
        _refuse_rotation_by_company(self._text)
        self._parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in self._parameters:
            raise UnsupportedError("it takes no positions")
        self._plain = model.config._attn_implementation
        AttentionInterface.register(_NAME, _attention)
        model.set_attn_implementation(_NAME)
        self.cache_layers: Sequence[PagedLayer] = self._watch()

    def _watch(self) -> list[PagedLayer]:
        """What each layer caches, by what it asks for when it runs one token."""
        seen: dict[int, _Seen] = {}
        token = torch.zeros(1, 1, dtype=torch.int64, device=_device(self._model))
        self._enter(partial(_look, seen))
        with torch.inference_mode():
            self._model(input_ids=token, position_ids=token, use_cache=False)
        count = self._text.num_hidden_layers
        if sorted(seen) != list(range(count)):
            raise UnsupportedError(f"only {len(seen)} of its {count} layers keep nothing but keys and values")
        _check_windows(self._text, [seen[i].window for i in range(count)])
        return [PagedLayer(seen[i].num_kv_heads, seen[i].head_dim) for i in range(count)]

    def _enter(self, step: Callable[..., Tensor]) -> None:
        """Let the attention layers call ``step`` from now on."""
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, _STEP, step)

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        self._model.set_attn_implementation(self._plain)
        try:
            yield
        finally:
            self._model.set_attn_implementation(_NAME)

    def run(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[LayerCache], layout: StepLayout, rows: Tensor
    ) -> Tensor:
        self._enter(partial(_attend, cache, layout))
        short = {"logits_to_keep": rows} if "logits_to_keep" in self._parameters else {}
        out = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **short)
        logits: Tensor = out.logits[0]
        return logits if short else logits[rows]


class _Seen(NamedTuple):
    """What an attention layer keeps of a token. Values may have fewer numbers than keys: they are filled up."""

    num_kv_heads: int
    head_dim: int
    window: int


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **said: Any
) -> tuple[Tensor, None]:
    """Ours in transformers' interface: q [1, H, N, D], k and v [1, K, N, D] -> [1, N, H, D]."""
    step: Callable[..., Tensor] = getattr(module, _STEP)
    return step(module, q, k, v, {"attention_mask": attention_mask, **said}), None


def _look(seen: dict[int, _Seen], module: Any, q: Tensor, k: Tensor, v: Tensor, said: Mapping[str, Any]) -> Tensor:
    """Note what ``module`` asks for. Raises UnsupportedError for what :func:`_attend` does not do."""
    unknown = [name for name, value in said.items() if name not in _SCORING | _IDLE and value is not None]
    unknown = [name for name in unknown if not name.startswith(("output_", "return_", "past_key"))]
    if unknown:
        raise UnsupportedError(f"its attention is told {', '.join(unknown)}, which ours does not know")
    if v.shape[-1] > k.shape[-1]:
        raise UnsupportedError("its values are wider than its keys")
    seen[int(module.layer_idx)] = _Seen(k.shape[1], k.shape[-1], said.get("sliding_window") or 0)
    return torch.zeros_like(q)[..., : v.shape[-1]].transpose(1, 2)


def _attend(
    cache: Sequence[LayerCache],
    layout: StepLayout,
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    said: Mapping[str, Any],
) -> Tensor:
    """``model.attention.attend`` for one layer of a step."""
    width = v.shape[-1]
    v = F.pad(v, (0, k.shape[-1] - width))
    scale = said.get("scaling")
    scoring = Scoring(
        window=said.get("sliding_window") or 0,
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
        cap=said.get("softcap") or 0.0,
        sinks=said.get("s_aux"),
    )
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
    return attend(q, k, v, cache[int(module.layer_idx)], layout, scoring)[None, ..., :width]


def _refuse_rotation_by_company(text: Any) -> None:
    """Raise UnsupportedError where transformers' rotary angles depend on the longest sequence of a call."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in (found, *(value for value in found.values() if isinstance(value, dict))):
        if each.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedError(f"its rotation ({each['rope_type']}) depends on the other sequences of a step")


def _check_windows(text: Any, windows: Sequence[int]) -> None:
    """Raise UnsupportedError unless the layers ask for the windows that the configuration says: a short trial does not
    see a window that only a mask would have."""
    window = getattr(text, "sliding_window", None) or 0
    always = "sliding_attention" if window and getattr(text, "use_sliding_window", True) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [always] * len(windows)
    wanted = {"full_attention": 0, "sliding_attention": window}
    for i, (kind, found) in enumerate(zip(kinds, windows, strict=True)):
        if wanted.get(kind) != found:
            raise UnsupportedError(f"layer {i} is {kind}, and asks for a window of {found} tokens")


class _OneByOne:
    """Ways that call the model for each sequence of a step. ``state``: what a slot's sequence has so far."""

    paged = False
    cache_layers: Sequence[PagedLayer] = ()

    def __init__(self, model: Any) -> None:
        self._model = model
        self._short = "logits_to_keep" in inspect.signature(model.forward).parameters

    def plain_attention(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[LayerCache], layout: StepLayout, rows: Tensor
    ) -> Tensor:
        found = []
        lengths = layout.context_len.tolist()
        for slot, (begin, end) in enumerate(itertools.pairwise(layout.query_start.tolist())):
            if end > begin:
                own = rows[(rows >= begin) & (rows < end)] - begin
                found.append(self._run_one(slot, lengths[slot] - (end - begin), tokens[begin:end], own))
        return torch.cat(found)

    def _run_one(self, slot: int, start: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, V] of ``rows`` of ``tokens`` [n], which stand behind the first ``start`` of the slot's tokens."""
        raise NotImplementedError

    def _call(self, tokens: Tensor, rows: Tensor, **more: Any) -> tuple[Tensor, Any]:
        """Logits of ``rows``, and all that the model returned."""
        wanted = rows if len(rows) else torch.zeros_like(tokens[:1])
        short = {"logits_to_keep": wanted} if self._short else {}
        out = self._model(input_ids=tokens[None], **short, **more)
        logits: Tensor = out.logits[0] if self._short else out.logits[0][wanted]
        return logits[: len(rows)], out


class Cached(_OneByOne):
    """A cache by transformers for each slot. Raises UnsupportedError."""

    def __init__(self, model: Any, *, takes_pieces: bool = True, goes_back: bool = True) -> None:
        super().__init__(model)
        self.takes_pieces, self.goes_back = takes_pieces, goes_back
        names = [name for name in _CACHES if name in inspect.signature(model.forward).parameters]
        if not names:
            raise UnsupportedError("it takes no cache that is known")
        text = model.config.get_text_config(decoder=True)
        if goes_back and any(getattr(text, name, None) for name in _WINDOWS):
            raise UnsupportedError("its caches of windows lose tokens, and a short trial would not see that")
        self._name = names[0]
        self._states: dict[int, tuple[Any, int]] = {}  # of each slot: its cache, and how many tokens are in it
        pieces = "" if takes_pieces else ", prompts in one piece"
        self.description = f"one sequence after the other, with its own caches{pieces}"

    def _run_one(self, slot: int, start: int, tokens: Tensor, rows: Tensor) -> Tensor:
        cache, count = self._states.pop(slot, (None, 0))
        if start == 0:
            cache = None
        elif start < count:
            cache.crop(start - count)
        elif start > count:
            raise UnsupportedError("a sequence goes on that was not begun here")
        logits, out = self._call(tokens, rows, use_cache=True, **({self._name: cache} if cache is not None else {}))
        self._states[slot] = (getattr(out, self._name), start + len(tokens))
        return logits


class Recomputed(_OneByOne):
    """Every step computes its sequences from their first token on."""

    takes_pieces = goes_back = True
    description = "one sequence after the other, each from its first token on in every step, which is slow"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._tokens: dict[int, Tensor] = {}  # of each slot

    def _run_one(self, slot: int, start: int, tokens: Tensor, rows: Tensor) -> Tensor:
        before = self._tokens[slot][:start] if start else tokens[:0]
        self._tokens[slot] = every = torch.cat((before, tokens))
        return self._call(every, rows + start, use_cache=False)[0]


_WAYS: tuple[Callable[[Any], Way], ...] = (
    Paged,
    Cached,
    partial(Cached, goes_back=False),
    partial(Cached, goes_back=False, takes_pieces=False),
    Recomputed,
)

# New tokens of three sequences in each step of a trial. Before _AGAIN the last two of each sequence are taken back.
_AGAIN = (2, 0, 3)
_STEPS = ((5, 0, 3), (1, 4, 1), (3, 1, 2), (1, 1, 1), _AGAIN, (1, 1, 1))
_WHOLE_STEPS = ((5, 0, 3), (1, 4, 1), (1, 1, 1), (1, 1, 1))
_PAGE, _PAGES = 4, 5  # tokens of a page, pages of a sequence
# Of the logits' spread, how far two computations may be apart: 16 bits round each activation.
_ROUNDING = {torch.float32: 1e-3}
_ROUNDING_16 = 0.1


class _Trial:
    """Steps that mix prompts, pieces of them, and single tokens of three sequences, whose logits are known from
    ``model`` without cache. Raises ConfigError for one that computes something else each time."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model, self._device, self._dtype = model, _device(model), next(model.parameters()).dtype
        numbers = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(min(vocab_size, 1000), (3, 14), generator=numbers).to(self._device)
        self._wanted = self._whole()
        if not _close(self._whole(), self._wanted, self._dtype):
            raise ConfigError(f"{type(model).__name__} does not compute the same from the same tokens twice")

    @torch.inference_mode()
    def _whole(self) -> Tensor:
        """[3, T, V] float32."""
        return torch.cat([self._model(input_ids=own[None], use_cache=False).logits for own in self._tokens]).float()

    @torch.inference_mode()
    def check(self, way: Way) -> None:
        """Raise UnsupportedError unless steps of ``way`` give the logits of whole sequences."""
        sizes = (3, 1 + 3 * _PAGES, _PAGE, self._dtype, self._device)
        cache = [layer.allocate(*sizes) for layer in way.cache_layers]
        pages = 1 + torch.arange(3 * _PAGES, dtype=torch.int32, device=self._device).view(3, _PAGES)
        done = [0, 0, 0]
        for counts in _STEPS if way.takes_pieces else _WHOLE_STEPS:
            if counts == _AGAIN and way.goes_back:
                done = [count - 2 if new else count for count, new in zip(done, counts, strict=True)]
            ends = [begin + new for begin, new in zip(done, counts, strict=True)]
            here = [(s, p) for s in range(3) for p in range(done[s], ends[s])]
            slots, positions = torch.tensor(here, device=self._device).T
            starts, lengths = ([0, *itertools.accumulate(counts)], ends)
            query_start, context_len = (torch.tensor(each, dtype=torch.int32) for each in (starts, lengths))
            write_slots = pages[slots, positions // _PAGE].long() * _PAGE + positions % _PAGE
            layout = StepLayout(query_start.to(self._device), context_len.to(self._device), pages, write_slots)
            rows = torch.arange(len(here), device=self._device)
            found = way.run(self._tokens[slots, positions], positions, cache, layout, rows).float()
            wanted = self._wanted[slots, positions]
            if not _close(found, wanted, self._dtype):
                error = float((found - wanted).abs().max())
                raise UnsupportedError(f"{way.description}: logits differ from the model's by up to {error:.2g}")
            done = ends


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits are equal up to the rounding of ``dtype``."""
    allowed = _ROUNDING.get(dtype, _ROUNDING_16) * float(wanted.std().clamp(min=1e-6))
    return bool(((found - wanted).abs() <= allowed).all())


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
