"""Sets keys of a model_config.yaml in its text, so that every other line and comment stays as it was."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from gpt_fast.errors import ConfigError
from gpt_fast.serve.model_yaml import parse_model_yaml
from gpt_fast.serve.settings import check, names_of


def with_keys(config: Path, before: Mapping[str, Any], keys: Mapping[str, Any], own: Mapping[str, int]) -> str:
    """The text of the file ``config``, which holds ``before``, with ``keys`` in its handler block and TorchServe's
    ``own``; ConfigError."""
    text, block = config.read_text(encoding="utf-8"), before.get("handler") or {}
    for key, value in keys.items():
        text = set_key(text, key, value)
        block = {k: v for k, v in block.items() if k not in names_of(key)} | {key: value}
    for key, value in own.items():
        text = _set_own_key(text, key, value)
    wanted = {**before, **own, "handler": block}
    check(wanted)
    with contextlib.suppress(ConfigError):
        if parse_model_yaml(text, str(config)).config == wanted:
            return text
    named = " and ".join([*own, *keys])
    raise ConfigError(f"{config}: write the handler block with one key a line, indented, so that {named} can be set")


def set_key(yaml_text: str, key: str, value: Any) -> str:
    """``yaml_text`` with ``key: value`` in its handler block, every other line and comment as it was."""
    lines, found = yaml_text.splitlines(), re.compile(rf"\s+(?:{'|'.join(names_of(key))})\s*:")
    start = next((i for i, line in enumerate(lines) if re.match(r"handler\s*:", line)), len(lines))
    if start == len(lines):
        lines.append("handler:")
    indent, place = "", slice(start + 1, start + 1)
    for i in range(start + 1, len(lines)):
        line = lines[i]
        if line.strip() and not line.lstrip().startswith("#"):
            if not line[0].isspace():
                break
            own = line[: len(line) - len(line.lstrip())]
            indent = indent or own  # what is further in belongs to the value of a key
            if own == indent and found.match(line):
                inside = re.compile(rf"{indent}(\s+|-\s)[^\s#]")  # of a list or a block that was the value
                place = slice(i, i + 1 + sum(1 for _ in takewhile(inside.match, lines[i + 1 :])))
                break
    lines[place] = [f"{indent or '    '}{key}: {_as_yaml(value)}"]
    return "\n".join(lines) + "\n"


def _set_own_key(yaml_text: str, key: str, value: int) -> str:
    """``yaml_text`` with ``key: value`` outside of its handler block, every other line and comment as it was."""
    lines, found = yaml_text.splitlines(), re.compile(rf"{key}\s*:")
    place = next((slice(i, i + 1) for i, line in enumerate(lines) if found.match(line)), None)
    first = next((i for i, line in enumerate(lines) if re.match(r"\w", line)), len(lines))
    lines[place or slice(first, first)] = [f"{key}: {value}"]
    return "\n".join(lines) + "\n"


def _as_yaml(value: Any) -> str:
    """JSON, which is YAML except for characters beyond U+FFFF: JSON escapes them in two parts, YAML in one."""
    return re.sub(r"[^\0-\x7e]", lambda found: rf"\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))
