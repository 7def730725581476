"""Frozen dataclasses for everything that is configured, and the one way to build them from outside.

``ModelConfig`` describes a model's mathematics and is read from a checkpoint (families.py). ``EngineConfig`` describes
how a model is run; the command line, ``LLM(...)`` and model_config.yaml all build it through :func:`from_mapping`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from gpt_fast.errors import ConfigError, RequestError
from gpt_fast.fields import Kind, OneOf, Real, Text, Whole, check_fields, kinds_of, refuse, unknown

T = TypeVar("T")

MAX_EXPERTS = 2**17  # of all layers: far above every model, and few enough to describe each


@dataclass(frozen=True)
class RopeScaling:
    """Rotary-embedding scaling, as in a checkpoint's ``rope_scaling`` (``rope_parameters`` since transformers 5).

    ``linear``: positions divided by ``factor`` (kaiokendev 2023). ``dynamic``: NTK-aware base that grows with the
    sequence once it is longer than ``original_max_seq_len``. ``llama3``: per-frequency interpolation of Llama 3.1
    (``low_freq_factor``, ``high_freq_factor``). ``yarn`` (Peng et al. 2023, arXiv 2309.00071): interpolation between
    ``beta_fast`` and ``beta_slow`` rotations. ``longrope`` (Ding et al. 2024, arXiv 2402.13753): a divisor for each
    frequency, ``long`` for sequences of more than ``original_max_seq_len`` tokens, else ``short``."""

    type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: whole dimensions as bounds
    attention_factor: float = 1.0  # what cosines and sines are multiplied by
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether a token's frequencies depend on the length of its sequence."""
        return self.type in ("dynamic", "longrope")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538) in the place of a feed-forward layer."""

    num_experts: int
    top_k: int  # experts of a token
    ffn_dim: int  # inner width of one expert
    renormalize: bool = True  # the weights of a token's experts add up to 1
    shared_ffn_dim: int = 0  # an expert that every token goes through, behind a sigmoid gate; 0: none
    layers: tuple[bool, ...] = ()  # which layers have experts; (): all


class VocabShare(NamedTuple):
    """What one of several ranks holds of the vocabulary: ``num_rows`` from row ``first`` on, as many as any other rank.

    Where the ranks do not divide the vocabulary, the last ones begin earlier, with rows that others have too. A row
    counts as the first one's who has it: this rank's begin at ``own``.
    """

    num_rows: int
    first: int
    own: int

    @classmethod
    def of(cls, vocab_size: int, rank: int, num_ranks: int) -> VocabShare:
        num_rows = -(-vocab_size // num_ranks)
        return cls(num_rows, min(rank * num_rows, vocab_size - num_rows), rank * num_rows)


@dataclass(frozen=True)
class ModelConfig:
    """The shape and mathematics of one decoder-only transformer. model/describing.py makes operations of it."""

    family: str  # a row of family_table.FAMILIES
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int  # positions the model was made for, in tokens
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to every norm's weight
    norms: Literal["before", "after", "both"] = "before"  # of attention and feed-forward
    parallel: Literal["no", "one norm", "two norms"] = "no"  # feed-forward beside attention instead of behind it
    activation: str = "silu"
    gated: bool = True  # activation(gate) * up instead of activation(up)
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of layers with a window, unscaled; None: as the others
    rotary_dim: int | None = None  # dimensions of a head that rotate, the first ones; None: all
    unrotated: tuple[bool, ...] = ()  # layers without rotation; (): none
    learned_positions: int | None = None  # rows of a position table before position 0; None: no table
    alibi: bool = False  # Press et al. 2021, arXiv 2108.12409
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    logits_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logits_scale: float = 1.0
    tie_embeddings: bool = False
    embedding_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    router_bias: bool = False
    qk_norm: Literal["no", "head", "row"] = "no"  # of each head, or of all heads together
    sinks: bool = False  # a learned score for each head that takes weight from the keys
    windows: tuple[int, ...] = ()  # per layer: keys a query sees, itself included; 0 or missing: all of them
    experts: ExpertsConfig | None = None
    vocab_rows: int | None = None  # of the vocabulary, those that one of several ranks holds; None: all

    def __post_init__(self) -> None:
        heads = f"num_attention_heads ({self.num_heads})"
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{heads} is not a multiple of num_key_value_heads ({self.num_kv_heads})")
        if self.head_dim < 1:
            raise ConfigError(f"{heads} is more than hidden_size ({self.dim}): heads would be empty")
        if self.rotary % 2:
            what = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ConfigError(f"{what} ({self.rotary}) is odd; rotary embeddings need an even one")
        if self.rope_scaling is not None and self.rope_scaling.type == "longrope":
            for name in ("short", "long"):
                given = getattr(self.rope_scaling, name)
                if len(given) != self.rotary // 2:
                    raise ConfigError(f"{name}_factor has {len(given)} numbers for {self.rotary // 2} rotary pairs")
        for name in ("windows", "unrotated"):
            given = getattr(self, name)
            if given and len(given) != self.num_layers:
                raise ConfigError(f"{name} has {len(given)} entries for {self.num_layers} layers")
        if self.experts is not None:
            count, chosen = self.experts.num_experts, self.experts.top_k
            if chosen > count:
                raise ConfigError(f"num_experts_per_tok ({chosen}) is more than the number of experts ({count})")
            if count * self.num_layers > MAX_EXPERTS:
                raise ConfigError(f"{count} experts in {self.num_layers} layers are more than {MAX_EXPERTS}")

    def window(self, layer: int) -> int:
        """Sliding window of ``layer`` in tokens; 0 means full attention."""
        return self.windows[layer] if self.windows else 0

    @property
    def rotary(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: float) -> int:
        """Bytes that one token occupies in the KV cache, over all layers; ``itemsize`` with a share of its scale."""
        return round(2 * self.num_layers * self.kv_dim * itemsize)


DEFAULT_MAX_BATCH = 8
# Tokens; beside decodes a quarter of it. The first one for which memory is not scarce (memory.py), else the last.
PREFILL_CHUNKS = {"cpu": (256,), "cuda": (2048, 512)}
MAX_POSITIONS = 2**30  # tokens; more than any model has, and few enough for every integer that counts them

MODES = ("int8", "int4", "fp8")  # of quantization: quantize/scheme.py
DRAFTS = ("lookup", "int8", "int4")  # drafters that need no other checkpoint
# How many drafts a step gets: as many as pay, up to speculate_k; speculate_k always; none. ``auto`` without a draft
# looks them up.
SPECULATE = ("auto", "always", "never")
THREADS = Whole(1, 2**20)  # of these as many run as there are cores: placement.usable_threads
DTYPE = OneOf(("auto", "float32", "bfloat16", "float16"))


def device_name(value: Any, name: str) -> str:
    """``auto``, or a device as torch names it, with or without an index."""
    if isinstance(value, str) and re.fullmatch("auto|(cpu|cuda)(:(0|[1-9][0-9]?))?", value):
        return value
    refuse(name, "one of auto, cpu, cuda, cuda:N", value)


def devices_of_layers(value: Any, name: str) -> str | tuple[str, ...] | dict[str, int]:
    """``auto``, device names in order, or those and how many layers each has, in order."""
    takes = "auto, a list of devices, or devices with a number of layers for each, such as {cuda:0: 20, cpu: 12}"
    if value == "auto":
        return "auto"
    if not isinstance(value, (Mapping, list, tuple)) or not value or "auto" in value:
        refuse(name, takes, value)
    names = tuple(device_name(each, name) for each in value)
    counts = Whole(0, 2**20)
    return {k: counts(value[k], f"{k} of {name}") for k in names} if isinstance(value, Mapping) else names


_MEMORY = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([MGT]i?)B")
_UNITS = {prefix + i: base**n for n, prefix in enumerate("MGT", 2) for i, base in (("", 1000), ("i", 1024))}


def num_bytes_of(text: str) -> int:
    """Of a size such as ``20GiB`` (2^30 bytes) or ``1.5 GB`` (10^9 bytes)."""
    found = _MEMORY.fullmatch(text)
    assert found
    return int(float(found[1]) * _UNITS[found[2]])


def memory_of_devices(value: Any, name: str) -> dict[str, str]:
    """Devices, and a size for each."""
    if not isinstance(value, Mapping) or "auto" in value:
        refuse(name, "devices with a size for each, such as {cuda:0: 20GiB}", value)
    for device, size in value.items():
        device_name(device, name)
        if not isinstance(size, str) or not _MEMORY.fullmatch(size):
            refuse(f"{device} of {name}", "a size such as 20GiB or 500MB", size)
    return dict(value)


def folders_of_adapters(value: Any, name: str) -> dict[str, float]:
    """A folder, several in order, or folders with a weight for each."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (Mapping, list, tuple)) or not given or not all(isinstance(n, str) and n for n in given):
        refuse(name, "a folder, a list of folders, or folders with a weight for each, such as {style: 0.5}", value)
    weight = Real(-100, 100)
    each = given if isinstance(given, Mapping) else dict.fromkeys(given, 1)
    return {folder: weight(each[folder], f"{folder} of {name}") for folder in each}


def drafter_name(value: Any, name: str) -> str:
    """One of DRAFTS, or a path."""
    if isinstance(value, str) and value.strip():
        return Text()(value, name)
    refuse(name, f"a checkpoint's folder, or one of {', '.join(DRAFTS)}", value)


def when_to_speculate(value: Any, name: str) -> str:
    """One of SPECULATE."""
    if isinstance(value, bool):
        words, meant = ("on and yes", "auto") if value else ("off and no", "never")
        takes = f"one of {', '.join(SPECULATE)}"
        raise RequestError(f"{name} must be {takes}, not {value}, which is how YAML reads {words}: write {meant}", name)
    return OneOf(SPECULATE)(value, name)


_Positions = Annotated[int | None, Whole(1, MAX_POSITIONS)]


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Field names are the keyword arguments of ``LLM`` and the keys of model_config.yaml."""

    device: Annotated[str, device_name] = "auto"  # auto | cpu | cuda | cuda:N
    # Devices that share the layers: auto | their names in order | each with its number of layers; None: ``device``.
    device_map: Annotated[str | tuple[str, ...] | dict[str, int] | None, devices_of_layers] = None
    device_memory: Annotated[dict[str, str] | None, memory_of_devices] = None  # the most of each, such as 20GiB
    dtype: Annotated[str, DTYPE] = "auto"  # auto | float32 | bfloat16 | float16
    quantize: Annotated[str | None, OneOf(MODES)] = None  # round the weights to this while loading
    # LoRA adapters: their folders, each with the weight that it is added with.
    lora: Annotated[dict[str, float] | None, folders_of_adapters] = None
    kv_cache_dtype: Annotated[str, OneOf((*DTYPE.choices, "int8"))] = "auto"  # auto: as the weights
    compile: bool = True  # torch.compile, where the kernels do not run whole steps
    compile_cache: str | None = None  # file that keeps what was compiled; None: in the user's cache folder
    kernels: bool = True  # steps by own kernels, C++ on a CPU, Triton on a GPU; False: by plain torch
    max_seq_len: _Positions = None  # tokens, prompt and completion together; None: the model's, if memory has room
    max_batch: Annotated[int | None, Whole(1, 4096)] = None  # sequences decoded together; None: DEFAULT_MAX_BATCH
    max_waiting: Annotated[int | None, Whole(1, 2**20)] = None  # requests that may queue; None: any number
    prefill_chunk: Annotated[int | None, Whole(1, 2**16)] = None  # prompt tokens per step; None: see PREFILL_CHUNKS
    page_size: Annotated[int, Whole(1, 4096)] = 16  # tokens per KV-cache page
    num_pages: _Positions = None  # None: room for max_batch sequences of max_seq_len, if memory has it (memory.py)
    memory_share: Annotated[float | None, Real(0.01, 1)] = None  # of free memory, for the KV cache; None: see memory.py
    prefix_cache: bool = True
    # Who guesses tokens ahead: a checkpoint's directory | lookup | int8 | int4; None: nobody.
    draft: Annotated[str | None, drafter_name] = None
    speculate: Annotated[str | None, when_to_speculate] = None  # None: auto with a draft, else never
    speculate_k: Annotated[int, Whole(1, 15)] = 4  # tokens guessed for each step and sequence, at most
    lookup_history: Annotated[int, Whole(0, 2**20)] = 0  # tokens of finished answers that lookup remembers
    threads: Annotated[int | None, THREADS] = None  # on a CPU; None: one for a model that fits a cache, else torch's

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except RequestError as error:
            raise ConfigError(error.message) from None
        if self.device_map is not None and self.device != "auto":
            raise ConfigError("device: device_map says where the layers are; leave one of the two out")
        if self.device_memory is not None and self.device_map is None:
            raise ConfigError("device_memory: limits of the devices of device_map, and there is none")
        if self.lookup_history and self.drafter != "lookup" and self.speculate != "never":
            instead = "there is no draft" if self.draft is None else f"draft is {self.draft}"
            raise ConfigError(f"lookup_history: only lookup remembers answers, and {instead}")

    @property
    def drafter(self) -> str | None:
        """Who guesses tokens ahead, ``draft`` or what it is by default; None: nobody."""
        return self.draft or ("lookup" if self.speculate else None) if self.speculate != "never" else None

    @property
    def num_slots(self) -> int:
        """``max_batch``, or what it is by default."""
        return self.max_batch or DEFAULT_MAX_BATCH

    def chunks(self, device_type: str) -> tuple[int, ...]:
        """``prefill_chunk``, or what it may be by default on such a device."""
        return (self.prefill_chunk,) if self.prefill_chunk else PREFILL_CHUNKS[device_type]


def read_key(kind: Kind, value: object, name: str) -> Any:
    """``value`` as ``kind`` reads it. Raises ConfigError with ``name``: the key, and where it stands."""
    try:
        return kind(value, name)
    except RequestError as error:
        raise ConfigError(error.message) from None


def read_keys(kinds: Mapping[str, Kind], values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """``values``, each as its kind of ``kinds`` reads it. ``where`` names the source in errors. Raises ConfigError for
    a key without a kind (with the closest known one, and all of them) and for a value that its kind does not take."""
    for key in values:
        if key not in kinds:
            names = sorted(kinds)
            message = unknown(str(key), names, "key", f" in {where}")
            raise ConfigError(f"{message}; known keys: {', '.join(names)}")
    return {key: read_key(kinds[key], value, f"{key} in {where}") for key, value in values.items()}


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass ``cls`` from ``values``, as :func:`read_keys` reads them by the kinds of its fields. Ints are
    accepted for floats, nothing else is converted."""
    return cls(**read_keys(kinds_of(cls), values, where))  # type: ignore[arg-type]
