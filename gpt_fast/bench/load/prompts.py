"""What a load test asks: prompts from a file, or drawn at random."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.text_files import read_text

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


class Prompt(NamedTuple):
    """``content``: text or token ids. ``max_new_tokens``: the limit of this prompt alone, where the file gives one."""

    content: str | list[int]
    max_new_tokens: int | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, in its order. Raises ValueError naming file and line for what is none.

    ``.txt``: one a paragraph where there are empty lines, else one a line. ``.jsonl``: an object a line; ``.json``: a
    list of them. An object has ``prompt`` (text or token ids), or ``turns`` as in MT-bench, or ``conversations`` as in
    ShareGPT; of those the first turn counts. ``max_new_tokens`` beside it, if there, overrides the general one."""
    path = Path(path)
    text = read_text(path)
    lines = text.split("\n")  # not splitlines: JSON may have U+2028 and its like inside a string
    entries: list[tuple[str, Any]]
    if path.suffix == ".txt":
        paragraphs = text.strip().split("\n\n")
        pieces = paragraphs if len(paragraphs) > 1 else lines
        entries = [(str(path), {"prompt": piece.strip("\n")}) for piece in pieces if piece.strip()]
    elif path.suffix == ".jsonl":
        named = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
        entries = [(where, _parse(line, where)) for where, line in named]
    elif path.suffix == ".json":
        listed = _parse(text, str(path))
        if not isinstance(listed, list):
            raise ValueError(f"{path} is not a JSON list")
        entries = [(f"{path}: entry {n}", entry) for n, entry in enumerate(listed)]
    else:
        raise ValueError(f"{path}: a dataset must end in .jsonl, .json or .txt")
    if not entries:
        raise ValueError(f"{path} holds no prompts")
    return [_prompt(entry, where) for where, entry in entries]


def synthetic_prompts(input_len: int, vocab_size: int, seed: int, as_text: bool = False) -> Iterator[Prompt]:
    """Prompts without end, of ``input_len`` token ids drawn from 3 to ``vocab_size`` - 1; the same for the same seed.
    Ids below 3 are special tokens almost everywhere. ``as_text``: ``input_len`` common words instead, for protocols
    without token ids; how many tokens that makes is up to the server. Raises ValueError."""
    if input_len < 1 or vocab_size < 4:
        raise ValueError("synthetic prompts need at least one token and a vocabulary of at least 4")
    rng = random.Random(seed)
    if as_text:
        return (Prompt(" ".join(rng.choices(_WORDS, k=input_len))) for _ in itertools.count())
    return (Prompt(rng.choices(range(3, vocab_size), k=input_len)) for _ in itertools.count())


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _prompt(entry: Any, where: str) -> Prompt:
    match entry:
        case {"prompt": content} if content is not None:
            pass
        case {"turns": [content, *_]} | {"conversations": [{"value": content}, *_]}:
            pass
        case _:
            content = None
    is_ids = isinstance(content, list) and all(type(i) is int for i in content)
    if not content or not (isinstance(content, str) or is_ids):
        raise ValueError(f"{where} has no prompt: one of prompt, turns or conversations is needed")
    limit = entry.get("max_new_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"{where}: max_new_tokens must be a whole number of at least 1")
    return Prompt(content, limit)
