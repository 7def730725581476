"""Text files that a user names."""

from __future__ import annotations

from pathlib import Path

from gpt_fast.errors import ConfigError


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8. Raises OSError, and ConfigError where it is something else."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8: byte {error.start} is wrong") from None
