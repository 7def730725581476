"""``generation_config.json``: what a checkpoint says about generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.errors import CheckpointError, RequestError
from gpt_fast.params import SamplingParams


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generation, for requests that leave it open."""

    eos_token_ids: tuple[int, ...]  # any of them ends a completion
    bos_token_id: int | None
    sampling: SamplingParams  # fields the checkpoint does not set are None


def read_generation_defaults(
    directory: Path | None, raw: Mapping[str, Any], usual: Mapping[str, Any]
) -> GenerationDefaults:
    """From ``generation_config.json`` of ``directory`` where both exist, else from ``raw``, its ``config.json``.

    Token ids missing from the first are taken from the second, then from ``usual``, the family's. Sampling defaults
    count only with ``do_sample`` true, and then an unwritten temperature is 1.0, as in transformers; unlike there
    an unwritten top_k stays off. ``repetition_penalty`` counts always, as there. Raises CheckpointError for a value of
    the wrong type.
    """
    path = (directory or Path()) / "generation_config.json"
    generation = read_json(path) if directory is not None and path.exists() else {}
    where, chosen = (str(path), generation) if generation else (str(path.with_name("config.json")), raw)
    said = {**usual, **raw, **{key: value for key, value in generation.items() if value is not None}}
    eos, bos = (_token_ids(key, said.get(key), where) for key in ("eos_token_id", "bos_token_id"))
    return GenerationDefaults(eos, bos[0] if bos else None, _sampling(chosen, where))


def _token_ids(key: str, value: object, where: str) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(i for i in ids if i >= 0)  # -1 is an old way to write none


def _sampling(raw: Mapping[str, Any], where: str) -> SamplingParams:
    drawn = ("temperature", "top_k", "top_p", "min_p") if raw.get("do_sample") else ()
    given = {key: raw[key] for key in (*drawn, "repetition_penalty") if raw.get(key) is not None}
    try:
        return SamplingParams(**({"temperature": 1.0} if drawn else {}) | given)
    except RequestError as e:
        raise CheckpointError(f"{where}: {e.message}") from None
