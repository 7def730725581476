"""The input file: which requests are in it, each with the digest that it is known by."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpt_fast.batch.journal import beside
from gpt_fast.batch.lines import MAX_LINE_BYTES, Line, read_line
from gpt_fast.errors import BatchError

_NO_FILE = "{} is not a regular file, which can be read twice; pipe it in and give --input -"


class Row(NamedTuple):
    """A line of the input that is not blank. ``number`` counts all lines from 1. ``offset`` and ``length`` in bytes.
    ``occurrence``: how many lines before it ask the same. ``digest``: 32 hexadecimal digits."""

    number: int
    offset: int
    length: int
    occurrence: int
    digest: str


class Source:
    """The lines of a file, of which one at a time is in memory. ``path`` "-": stdin, copied to a temporary file.

    ``base``: the digest of all that decides answers except the line itself. A request without a seed is sampled, so
    that two equal lines are two requests: the digest counts them."""

    def __init__(self, path: str, base: str) -> None:
        self.path, self._base = path, base
        self._file = _spooled() if path == "-" else open(path, "rb")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        self._file.close()

    def rows(self) -> list[Row]:
        """Every line's row; a few hundred bytes each."""
        seen: Counter[bytes] = Counter()
        found = []
        for number, offset, raw in self._lines():
            content = read_line(raw).content
            key = hashlib.blake2b(content.encode(), digest_size=16).digest()
            found.append(Row(number, offset, len(raw), seen[key], self._digest(content, seen[key])))
            seen[key] += 1
        return found

    def raw(self, row: Row) -> bytes:
        """The bytes of a line. Raises BatchError if the file has changed since :meth:`rows`."""
        raw = os.pread(self._file.fileno(), row.length, row.offset)
        if self._digest(read_line(raw).content, row.occurrence) != row.digest:
            raise BatchError(f"{self.path}, line {row.number}: the file has changed while it was worked on; run again")
        return raw

    def line(self, row: Row) -> Line:
        """The same, understood."""
        return read_line(self.raw(row))

    def _digest(self, content: str, occurrence: int) -> str:
        return hashlib.blake2b(f"{self._base}\n{occurrence}\n{content}".encode(), digest_size=16).hexdigest()

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, offset and bytes of each line that is not blank; of one that is too long the beginning."""
        self._file.seek(0)
        number = end = 0
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            number, offset, end, rest = number + 1, end, end + len(raw), raw
            while not rest.endswith(b"\n") and (rest := self._file.readline(MAX_LINE_BYTES)):
                end += len(rest)
            if raw.strip():
                yield number, offset, raw


def _spooled() -> BinaryIO:
    file = tempfile.TemporaryFile(prefix="gpt-fast-batch-")  # noqa: SIM115 - closed by Source.close
    shutil.copyfileobj(sys.stdin.buffer, file)
    return file


def check_files(input_path: str, output: Path) -> Path:
    """The output's path without links. Raises BatchError for one that cannot be an output of this input."""
    if str(output) == "-":
        raise BatchError("--output: stdout cannot be gone on with after an interruption; name a file")
    if input_path != "-" and not (given := Path(input_path)).is_file():
        told = "there is no file {}" if not given.exists() else "{} is a folder" if given.is_dir() else _NO_FILE
        raise BatchError(f"--input: {told.format(input_path)}")
    output = output.resolve()
    if not output.parent.is_dir():
        raise BatchError(f"--output: there is no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise BatchError(f"--output: {output} is not a file; a run that was interrupted goes on from a file")
    if input_path != "-" and Path(input_path).resolve() == output:
        raise BatchError(f"--input and --output are the same file, {output}")
    if input_path != "-" and any(each.exists() and each.samefile(input_path) for each in beside(output)):
        raise BatchError(f"--input: {input_path} would be overwritten on the way to {output}; rename one of the two")
    return output
