"""Answers on disk: each is safe from the moment it is there, and the output is whole or not there at all.

While a run is under way, answers are appended to a journal beside the output (``out.jsonl.part``), one line each with
the digest of its row. At the end the rows are written in order to ``out.jsonl.new``, which then takes the place of the
output, and the journal goes. So the output of an earlier run stays until the new one is finished, and a run that was
killed loses at most the line that it was writing. Rows of the output carry their digests, so they are answers too.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpt_fast.batch.rows import Answer, is_final, read_row, to_bytes
from gpt_fast.errors import BatchError


class _Place(NamedTuple):
    """Where an answer stands: file descriptor, offset and length in bytes."""

    file: int
    offset: int
    length: int


def beside(output: Path) -> tuple[Path, Path]:
    """The journal of ``output``, and the file of its rows until they are all there. Neither stays."""
    return output.with_name(output.name + ".part"), output.with_name(output.name + ".new")


class Journal:
    """The answers that are known for ``output``, by digest: those of a finished output and of the journal. Only one
    process at a time may have it. Raises BatchError if another one does, and for an output that is none of ours."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path, self._new = beside(output)
        self._places: dict[str, _Place] = {}
        self._finished: int | None = None
        self._file = _locked(self.path)  # before the output is opened: who has the lock may replace it
        try:
            if output.exists():
                self._finished = os.open(output, os.O_RDONLY)
                self._read_finished(self._finished)
            self._end = self._read_journal()
        except BaseException:
            self.close()
            raise

    def __contains__(self, digest: str) -> bool:
        return digest in self._places

    def add(self, digest: str, answer: Answer) -> None:
        """Keep ``answer``. Raises BatchError when it cannot be written."""
        raw = to_bytes({"digest": digest, "answer": answer})
        try:
            _write(self._file, raw)
        except OSError as error:
            raise self._unwritable(self.path, error) from None
        self._places[digest] = _Place(self._file, self._end, len(raw))
        self._end += len(raw)

    def get(self, digest: str) -> Answer:
        """The answer of a row. Raises KeyError."""
        place = self._places[digest]
        raw = os.pread(place.file, place.length, place.offset)
        return dict(json.loads(raw)["answer"]) if place.file == self._file else read_row(raw)[1]

    def finish(self, rows: Iterable[bytes]) -> None:
        """Make ``rows`` the output, and remove the journal. Raises BatchError when they cannot be written, and what
        ``rows`` raises."""
        try:
            with open(self._new, "wb") as file:
                file.writelines(rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._new, self.output)
        except OSError as error:
            raise self._unwritable(self._new, error) from None
        finally:
            self._new.unlink(missing_ok=True)  # whatever went wrong: there is none once it has become the output
        self.path.unlink()

    def close(self) -> None:
        """Let another process have it. A journal without a line is removed."""
        if os.fstat(self._file).st_size == 0 and os.fstat(self._file).st_nlink:
            self.path.unlink()
        os.close(self._file)
        if self._finished is not None:
            os.close(self._finished)

    def _read_finished(self, file: int) -> None:
        offset = 0
        with open(file, "rb", closefd=False) as stream:
            for number, raw in enumerate(stream, 1):
                try:
                    digest, answer = read_row(raw)
                except ValueError as error:
                    todo = "choose another --output, or move this file away"
                    raise BatchError(f"{self.output} would be replaced; its line {number} is {error}: {todo}") from None
                self._note(digest, answer, _Place(file, offset, len(raw)))
                offset += len(raw)

    def _read_journal(self) -> int:
        """Find the answers, and cut off a last line that was not written to its end. Returns the length in bytes."""
        end = 0
        with open(self._file, "rb", closefd=False) as stream:
            for raw in stream:
                if not raw.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(raw)
                    self._note(entry["digest"], entry["answer"], _Place(self._file, end, len(raw)))
                except (ValueError, KeyError, TypeError):
                    pass  # a machine that stops may leave anything in a file; such a row is computed again
                end += len(raw)
        os.ftruncate(self._file, end)
        return end

    def _note(self, digest: str, answer: Answer, place: _Place) -> None:
        if is_final(answer):
            self._places[digest] = place

    def _unwritable(self, path: Path, error: OSError) -> BatchError:
        todo = "what is done is kept: run the same command again when this is mended"
        return BatchError(f"{path} cannot be written ({error.strerror}); {todo}")


def _locked(path: Path) -> int:
    """The file ``path``, made if need be, locked until it is closed or the process ends in any way."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BatchError(f"another run writes {path}: wait for it, or choose another --output") from None
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # the run that had it has finished and removed it meanwhile


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
