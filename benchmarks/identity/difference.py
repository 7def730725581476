"""What two answers to one request differ in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gpt_fast import Completion, SamplingParams
from identity.mixed import Ask
from identity.serving import Answer


def difference(expected: Answer, found: Answer) -> str:
    """The first thing in which ``found`` is not ``expected``, to the last bit; empty when they are the same. An answer
    that was cancelled must be the beginning of the expected one."""
    done, truth = found.completion, expected.completion
    if done is None or truth is None:
        return "" if found.error == expected.error else f"error {found.error!r}, not {expected.error!r}"
    pieces = (found.text, tuple(found.token_ids), tuple(found.logprobs))
    if pieces != (done.text, done.token_ids, done.logprobs or ()):
        return f"the pieces are not the completion: {pieces} and {done}"
    if done.finish_reason != "abort":
        if done.finish_reason != truth.finish_reason:
            return _first(truth, done) or f"finish_reason {done.finish_reason}, not {truth.finish_reason}"
        whole = _first(truth, done) or ("" if done.text == truth.text else f"text {done.text!r}, not {truth.text!r}")
        return whole or ("" if done.prompt_logprobs == truth.prompt_logprobs else "prompt_logprobs differ")
    return _first(truth, done) or ("" if truth.text.startswith(done.text) else f"text {done.text!r} of {truth.text!r}")


def _first(truth: Completion, done: Completion) -> str:
    """The first token or log probability that differs."""
    gone = done.finish_reason == "abort"
    rows: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("token", truth.token_ids, done.token_ids),
        ("logprobs", truth.logprobs or (), done.logprobs or ()),
    )
    for name, wanted, got in rows:
        for i, (a, b) in enumerate(zip(wanted, got, strict=False)):
            if a != b:
                origin = done.origins[i] if done.origins else "plain"
                return f"{name} {i} of {len(wanted)} is {b}, not {a} (origin: {origin})"
        if len(got) > len(wanted) or (len(got) < len(wanted) and not gone):
            return f"{len(got)} {name}s, not {len(wanted)}"
    return ""


def described(which: int, ask: Ask) -> str:
    """Request ``which`` in a line: what is not as by default."""
    given = {
        f.name: value
        for f in dataclasses.fields(SamplingParams)
        if (value := getattr(ask.params, f.name)) != getattr(SamplingParams(), f.name)
    }
    return f"request {which}, prompt of {len(ask.prompt)} tokens, {given}"
