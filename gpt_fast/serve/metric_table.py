"""The metrics and their names, which are vLLM's, so that dashboards made for vLLM show this engine as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpt_fast.outputs import FinishReason

# vLLM's bounds, so that its recording rules and alerts find every `le` they name, and finer ones below where a small
# model lives: vLLM's own start at 10 ms between tokens and at 300 ms for a request.
TOKEN_GAP_S: tuple[float, ...] = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
TOKEN_GAP_S += (0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_S: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
FIRST_TOKEN_S += (10, 20, 40, 80, 160, 640, 2560)
REQUEST_S: tuple[float, ...] = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
REQUEST_S += (120, 240, 480, 960, 1920, 7680)
TOKENS = (*(m * 10**e for e in range(5) for m in (1, 2, 5)), 100_000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Family:
    """A metric as it is declared."""

    name: str  # without vLLM's prefix
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = "Count"
    buckets: tuple[float, ...] = ()
    former: str | None = None  # the name vLLM had for it, which older dashboards ask for
    label: str | None = None  # the one that it has beside those of every metric
    label_values: tuple[str, ...] = ("",)


def _seconds(name: str, help: str, buckets: tuple[float, ...] = REQUEST_S, former: str | None = None) -> Family:
    return Family(name, "histogram", help, "Seconds", buckets, former)


_USED = "Part of the KV cache's pages that running requests hold; 1 is all."
ERRORS = ("invalid_request", "queue_full", "stopping", "timeout", "server_error")  # error_kind()
_ERRORS = "Requests that were answered with an error, or ended in one after their first piece, by its kind."
_ENDED = "Requests that ended, by the reason."
_STEP = "Since a step last ended, while there are requests; 0 without any."
_GAP = "Between one step that brought a request tokens and the next."
FAMILIES = (
    Family("num_requests_running", "gauge", "Requests that hold a place in the batch."),
    Family("num_requests_waiting", "gauge", "Requests that wait for a place in the batch."),
    Family("time_since_last_step_seconds", "gauge", _STEP, "Seconds"),
    Family("kv_cache_usage_perc", "gauge", _USED, "Percent", former="gpu_cache_usage_perc"),
    Family("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Family("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."),
    Family("prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token."),
    Family("generation_tokens_total", "counter", "Tokens generated."),
    Family("num_preemptions_total", "counter", "Times a running request had to give its pages to an older one."),
    Family("request_success_total", "counter", _ENDED, label="finished_reason", label_values=get_args(FinishReason)),
    Family("request_errors_total", "counter", _ERRORS, label="error", label_values=ERRORS),
    Family("iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=STEP_TOKENS),
    _seconds("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S),
    _seconds("inter_token_latency_seconds", _GAP, TOKEN_GAP_S, former="time_per_output_token_seconds"),
    _seconds("request_time_per_output_token_seconds", "A request's mean time per token after its first.", TOKEN_GAP_S),
    _seconds("e2e_request_latency_seconds", "From arrival to the end."),
    _seconds("request_queue_time_seconds", "From arrival to the first step, or to the end without one."),
    _seconds("request_inference_time_seconds", "From the first step to the last token."),
    _seconds("request_prefill_time_seconds", "From the first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
    Family("request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=TOKENS),
    Family("request_generation_tokens", "histogram", "Tokens generated for a request.", buckets=TOKENS),
)


def draft_families(most: int) -> tuple[Family, ...]:
    """What became of drafts, of which a step has at most ``most`` for each sequence. Without a drafter there are none
    of these series, as in vLLM."""
    at = "Drafts that were right, by their position in the step; 0 is the first."
    return (
        Family("spec_decode_num_drafts_total", "counter", "Times that a sequence had drafts in a step."),
        Family("spec_decode_num_draft_tokens_total", "counter", "Tokens that were drafted, and verified."),
        Family("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that were right."),
        Family(
            "spec_decode_num_accepted_tokens_per_pos_total", "counter", at, label="position",
            label_values=tuple(str(position) for position in range(most)),
        ),
    )  # fmt: skip
