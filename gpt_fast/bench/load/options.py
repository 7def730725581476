"""What a load level is: which endpoint, which requests, when they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PROTOCOLS = ("native", "openai-completions", "openai-chat")


@dataclass(frozen=True)
class LoadOptions:
    """One load level against one endpoint. Raises ValueError naming the option that is wrong."""

    url: str
    protocol: str = "native"
    model: str = "gpt-fast"  # the name that OpenAI requests carry
    max_new_tokens: int = 128
    temperature: float | None = 0.0
    ignore_eos: bool = False
    stream: bool = True
    num_prompts: int = 100  # requests to send
    duration_s: float | None = None  # instead: send for this many seconds, then wait for those under way
    request_rate: float = math.inf  # requests per second; inf: all at once
    burstiness: float = 1.0  # shape of the gamma distribution of the gaps; 1: Poisson, less: bursts, more: regular
    max_concurrency: int | None = None
    abort_fraction: float = 0.0  # share of requests that hang up after the first piece of text
    seed: int = 0  # of arrivals and hang-ups; request i samples with seed + i
    timeout_s: float = 600.0  # for one whole request
    keep_alive: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol {self.protocol!r} is not one of {', '.join(PROTOCOLS)}")
        whole = ("num_prompts", "max_new_tokens", "max_concurrency")
        for name in (*whole, "request_rate", "burstiness", "timeout_s", "duration_s"):
            value = getattr(self, name)
            if value is not None and (value < 1 if name in whole else not value > 0):
                raise ValueError(f"{name} must be {'at least 1' if name in whole else 'more than 0'}, not {value}")
        for name in ("burstiness", "duration_s"):
            if math.isinf(getattr(self, name) or 0):
                raise ValueError(f"{name} must be finite")
        if not 0 <= self.abort_fraction <= 1:
            raise ValueError(f"abort_fraction must be between 0 and 1, not {self.abort_fraction}")
        if self.abort_fraction and not self.stream:
            raise ValueError("abort_fraction needs a stream: a whole answer has no first piece to hang up after")
        if self.duration_s is not None and self.max_concurrency is None and math.isinf(self.request_rate):
            raise ValueError("duration needs a request rate or a concurrency; else nothing limits the requests")
