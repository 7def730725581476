"""``gpt-fast batch`` in this process: what lines mean and rows say, which answers are kept and which are made anew."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpt_fast_files import meta_state

from gpt_fast import LLM, SamplingParams, cli
from gpt_fast.batch import answering, journal, setup
from gpt_fast.batch.answering import derived_seed
from gpt_fast.batch.journal import Journal
from gpt_fast.batch.lines import MAX_LINE_BYTES, read_line
from gpt_fast.batch.pipeline import import_ray, reason
from gpt_fast.batch.progress import Progress
from gpt_fast.batch.rows import error_in, is_final, read_row, refusal_of, to_bytes, write_row
from gpt_fast.batch.setup import WITHOUT_EFFECT, Setup
from gpt_fast.batch.source import Source
from gpt_fast.checkpoint import fingerprint as fingerprints
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.fingerprint import fingerprint
from gpt_fast.config import EngineConfig
from gpt_fast.errors import BatchError, MissingPackageError, RequestError, try_later

MODEL = Path(__file__).parent / "data" / "models" / "stories260K_hf"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests may change."""
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("batch") / "small"))


@pytest.fixture
def work(tmp_path: Path, model: Path) -> Work:
    return Work(tmp_path, model)


class Work:
    """A folder with an input, and the command that answers it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.input, self.output, self.model = folder / "in.jsonl", folder / "out.jsonl", model
        self.part = folder / "out.jsonl.part"

    def write(self, *lines: Any) -> None:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.input.write_text("".join(text + "\n" for text in texts), encoding="utf-8")

    def run(self, *more: str, stdin: bytes = b"") -> tuple[int, dict[str, Any], str]:
        """Exit status, what --json says, and stderr."""
        out, err = io.StringIO(), io.StringIO()
        command = ["batch", "--checkpoint", self.model, "--input", self.input, "--output", self.output]
        words = [*map(str, command), "--dtype", "float32", "--json", *more]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
            status = cli.main(words)
        return status, json.loads(out.getvalue() or "{}"), err.getvalue()

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text(encoding="utf-8").splitlines()]


def batch_line(name: str, body: dict[str, Any], url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-fast", **body}}


GOOD = (
    {"prompt": "Once upon a time", "max_new_tokens": 8, "id": "first"},
    {"prompt": [1, 403, 407], "max_new_tokens": 4, "temperature": 0.9},
    batch_line("a", {"prompt": "The dog", "max_tokens": 5}),
    batch_line("b", {"prompt": ["One day", "The cat"], "max_tokens": 3, "n": 2, "temperature": 1, "logprobs": 1}),
    batch_line("c", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, "/v1/chat/completions"),
)


def same(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` without what tells about the run: the time, and tokens that another row had put into the cache."""
    for row in rows:
        body = (row.get("response") or {}).get("body", {})
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return rows


# --- answers -------------------------------------------------------------------------------------------------------


def test_rows_are_what_the_engine_and_the_server_answer(work: Work) -> None:
    work.write(*GOOD)
    status, done, _ = work.run()
    assert status == 0
    assert (done["rows"], done["answered"], done["known_before"], done["errors"]) == (5, 5, 0, 0)
    plain, sampled, one, several, chat = work.rows()
    with LLM(work.model, dtype="float32") as llm:
        alone = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
        seed = derived_seed(sampled["digest"], 0)
        drawn = llm.generate([1, 403, 407], SamplingParams(max_tokens=4, temperature=0.9, seed=seed))
        dog = llm.generate(
            "The dog", SamplingParams(max_tokens=5, temperature=1.0, seed=derived_seed(one["id"][10:], 0))
        )
    assert list(plain) == ["line", "id", "digest", "text", "token_ids", "finish_reason", "usage", "error"]
    assert (plain["line"], plain["id"], plain["error"]) == (1, "first", None)
    assert (plain["text"], tuple(plain["token_ids"])) == (alone.text, alone.token_ids)
    num = alone.num_prompt_tokens
    assert plain["usage"] == {"prompt_tokens": num, "completion_tokens": 8, "total_tokens": num + 8}
    assert (sampled["id"], tuple(sampled["token_ids"])) == (None, drawn.token_ids)
    assert list(one) == ["id", "custom_id", "response", "error"]
    digest = one["id"].removeprefix("batch_req_")
    assert (one["custom_id"], one["error"], one["response"]["status_code"]) == ("a", None, 200)
    assert one["response"]["request_id"] == f"req_{digest}"
    body = one["response"]["body"]
    assert (body["id"], body["object"], body["choices"][0]["text"]) == (f"cmpl-{digest}", "text_completion", dog.text)
    assert [choice["index"] for choice in several["response"]["body"]["choices"]] == [0, 1, 2, 3]
    assert chat["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert done["new_tokens"] == 8 + 4 + 5 + 12 + 4
    assert not work.part.exists()


def test_one_bad_row_is_an_error_row_and_not_the_end(work: Work) -> None:
    work.write(
        "{broken",
        {"prompt": "The", "max_new_tokens": 2, "id": 7},
        {"prompt": "The", "max_new_tokns": 2},
        "",
        {"prompt": "The", "temperature": "hot"},
        {"prompt": "dog " * 600},
        {"prompt": "The", "stream": True},
        {"prompt": "The", "id": [1]},
        batch_line("other model", {"prompt": "x", "model": "gpt-9"}),
        batch_line("long", {"prompt": "x", "max_tokens": 100_000}),
        batch_line("route", {"input": "x"}, "/v1/embeddings"),
        {"custom_id": "no body", "method": "POST", "url": "/v1/completions"},
        "[1, 2]",
        '{"prompt": "x", "\\ud800": 1}',
    )
    status, done, _ = work.run()
    rows = work.rows()
    assert (status, done["rows"], done["errors"]) == (0, 13, 12)
    assert [row.get("line") for row in rows] == [1, 2, 3, 5, 6, 7, 8, None, None, None, None, 13, 14]
    assert rows[0]["response"] is None
    assert "not JSON" in rows[0]["error"]["message"]
    assert (rows[1]["id"], rows[1]["error"]) == (7, None)
    params = {row["line"]: row["error"]["param"] for row in rows if row.get("line") and row["error"]}
    assert params == {
        1: None,
        3: "max_new_tokns",
        5: "temperature",
        6: "prompt",
        7: "stream",
        8: "id",
        13: None,
        14: "\ud800",
    }
    by_name = {row["custom_id"]: row for row in rows if row.get("custom_id")}
    assert by_name["other model"]["response"]["status_code"] == 404
    assert by_name["other model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert by_name["long"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert (by_name["route"]["response"], by_name["route"]["error"]["param"]) == (None, "line.url")
    assert by_name["no body"]["error"]["param"] == "line.body"


def test_a_name_for_the_model_and_input_from_stdin(work: Work) -> None:
    line = json.dumps(batch_line("x", {"prompt": "The", "model": "ours", "max_tokens": 2})) + "\n"
    status, done, _ = work.run("--input", "-", "--model", "ours", stdin=line.encode())
    assert (status, done["errors"]) == (0, 0)
    assert work.rows()[0]["response"]["body"]["model"] == "ours"


def test_an_empty_input_makes_an_empty_output(work: Work) -> None:
    work.write("", "")
    status, done, _ = work.run()
    assert (status, done["rows"], work.output.read_bytes()) == (0, 0, b"")


# --- what is kept --------------------------------------------------------------------------------------------------


def test_a_second_run_loads_no_model_and_changes_nothing(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.write(*GOOD, "{broken")
    work.run()
    before = work.output.read_bytes()
    monkeypatch.setattr(answering, "open_llm", None)
    status, done, _ = work.run()
    assert (status, done["answered"], done["known_before"]) == (0, 0, 6)
    assert work.output.read_bytes() == before


def test_only_what_has_changed_is_computed_again(work: Work) -> None:
    work.write(*GOOD)
    work.run()
    before = work.rows()
    changed = GOOD[0] | {"max_new_tokens": 9}
    renamed = GOOD[2] | {"custom_id": "new name"}
    work.write({"prompt": "More", "max_new_tokens": 1}, changed, GOOD[1], renamed, *GOOD[3:])
    _, done, _ = work.run()
    assert (done["rows"], done["answered"], done["known_before"]) == (6, 2, 4)
    after = work.rows()
    assert [row.get("line") for row in after] == [1, 2, 3, None, None, None]
    assert len(after[1]["token_ids"]) == 9
    assert after[2] == before[1] | {"line": 3}
    assert after[3] == before[2] | {"custom_id": "new name"}
    assert after[4:] == before[3:]


def test_another_order_of_fields_and_white_space_change_nothing() -> None:
    first = read_line(b'{"prompt": "x", "top_k": 3, "id": 1}')
    assert first.content == read_line(b' {"id":"other", "top_k":3,\t"prompt":"x"}\r\n').content
    assert first.content != read_line(b'{"prompt": "x", "top_k": 4}').content
    assert first.content != read_line(b'{"prompt": "x ", "top_k": 3}').content


@pytest.mark.parametrize(
    "options", [("--quantize", "int8"), ("--max-seq-len", "300"), ("--no-kernels", "--no-compile")]
)
def test_options_that_change_answers_make_all_rows_anew(work: Work, options: tuple[str, ...]) -> None:
    work.write(*GOOD[:2])
    work.run()
    assert work.run(*options)[1]["answered"] == 2


@pytest.mark.parametrize(
    ("digits", "whole"), [("9" * 39, True), ("-" + "9" * 38, True), ("9" * 40, False), ("-" + "9" * 39, False)]
)
def test_a_number_is_the_name_of_a_row_as_it_is_or_not_at_all(digits: str, whole: bool) -> None:
    line = read_line(f'{{"prompt": "The", "id": {digits}}}'.encode())
    assert line.name == (int(digits) if whole else None)
    assert (line.fault is None) == whole


def test_a_mended_id_is_another_line(work: Work) -> None:
    good, bad = ({"prompt": "The", "max_new_tokens": 2, "id": name} for name in ("x", 1.5))
    found = []
    for line in (bad, good, bad):
        work.write(line)
        work.run()
        found.append(work.rows()[0]["error"] is None)
    assert found == [False, True, False]


def test_options_that_change_no_answer_change_no_digest(work: Work) -> None:
    base = Setup(work.model, {"device": "cpu", "dtype": "float32"}, "weights", ())
    given = {"max_batch": 3, "threads": 2, "draft": "lookup", "device": "cpu"}
    assert Setup(work.model, {**base.options, **given}, "weights", ("x",)).digest == base.digest
    assert Setup(work.model, {**base.options, "dtype": "bfloat16"}, "weights", ()).digest != base.digest
    assert Setup(work.model, base.options, "other weights", ()).digest != base.digest
    assert Setup(work.model, {**base.options, "device": "cuda:1"}, "weights", ()).digest == (
        Setup(work.model, {**base.options, "device": "cuda"}, "weights", ()).digest
    )
    assert set(EngineConfig.__dataclass_fields__) > WITHOUT_EFFECT


def test_a_changed_weight_makes_all_rows_anew(tmp_path: Path, model: Path) -> None:
    own = Path(shutil.copytree(model, tmp_path / "model"))
    work = Work(tmp_path, own)
    work.write(*GOOD[:2])
    work.run()
    before = work.rows()
    file = next(own.glob("*.safetensors"))
    times = file.stat()
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 0x40  # one bit of the last number
    file.write_bytes(raw)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert work.run()[1]["answered"] == 2
    assert not {row["digest"] for row in before} & {row["digest"] for row in work.rows()}


def test_equal_lines_are_requests_of_their_own(work: Work) -> None:
    line = {"prompt": "Once upon", "max_new_tokens": 12, "temperature": 1.5}
    work.write(*[line] * 3)
    work.run()
    before = work.rows()
    assert len({row["text"] for row in before}) > 1
    assert len({row["digest"] for row in before}) == 3
    work.write(*[line] * 4)
    assert work.run()[1]["answered"] == 1
    assert work.rows()[:3] == before


def test_names_that_come_twice_are_told(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    work.write(
        batch_line("twin", {"prompt": "a", "max_tokens": 1}), batch_line("twin", {"prompt": "b", "max_tokens": 1})
    )
    assert work.run()[0] == 0
    assert [row["custom_id"] for row in work.rows()] == ["twin", "twin"]
    assert "such as 'twin'" in caplog.text


def test_what_the_server_failed_at_is_tried_again(work: Work) -> None:
    work.write({"prompt": "Once", "max_new_tokens": 400, "timeout_s": 1e-6}, GOOD[0])
    _, done, _ = work.run()
    assert (done["rows"], done["errors"], work.rows()[0]["error"]["code"]) == (2, 1, "timeout")
    _, done, _ = work.run()
    assert (done["answered"], done["known_before"]) == (1, 1)


def test_a_name_that_was_missing_is_tried_again(work: Work) -> None:
    work.write(batch_line("x", {"prompt": "The", "model": "ours", "max_tokens": 2}), {"prompt": "The", "top_k": "x"})
    assert work.run()[1]["errors"] == 2
    _, done, _ = work.run("--model", "ours")
    assert (done["answered"], done["known_before"], done["errors"]) == (1, 1, 1)


# --- the journal ---------------------------------------------------------------------------------------------------


def stopping(after: int) -> Any:
    """OneEngine.answers that is interrupted."""
    whole = answering.OneEngine.answers

    def answers(self: Any, *facts: Any) -> Iterator[Any]:
        for number, answered in enumerate(whole(self, *facts)):
            if number == after:
                raise KeyboardInterrupt
            yield answered

    return answers


def test_an_interrupted_run_is_gone_on_with(work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [{"prompt": f"Once {i} times", "max_new_tokens": 6, "temperature": 1} for i in range(12)]
    work.write(*lines, *GOOD, "{broken")
    with monkeypatch.context() as patch:
        patch.setattr(answering.OneEngine, "answers", stopping(7))
        status, _, err = work.run()
    assert (status, work.output.exists()) == (130, False)
    assert "the same command goes on from here" in err
    with open(work.part, "ab") as part:
        part.write(b'{"digest": "torn')
    _, done, _ = work.run()
    assert (done["known_before"], done["answered"]) == (7, 11)
    assert not work.part.exists()
    other = Work(tmp_path, work.model)
    other.output = tmp_path / "uninterrupted.jsonl"
    other.run()
    assert same(work.rows()) == same(other.rows())


def test_the_old_output_stays_until_the_new_one_is_whole(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.write(*GOOD[:2])
    work.run()
    before = work.output.read_bytes()
    work.write(*GOOD)
    monkeypatch.setattr(answering.OneEngine, "answers", stopping(1))
    work.run()
    assert work.output.read_bytes() == before
    assert len(work.part.read_bytes().splitlines()) == 1


def test_damage_inside_a_journal_costs_its_rows_only(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with contextlib.closing(Journal(output)) as kept:
        for digest in ("one", "two", "three"):
            kept.add(digest, {"text": digest, "error": None})
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(lines[0] + b"\0" * 30 + b"\n" + b'{"digest": 3}\n' + lines[2] + lines[1][:-5])
    with contextlib.closing(Journal(output)) as kept:
        assert [digest in kept for digest in ("one", "two", "three")] == [True, False, True]
        kept.add("two", {"text": "again", "error": None})
        assert [kept.get(digest)["text"] for digest in ("one", "two", "three")] == ["one", "again", "three"]


def test_rows_that_cannot_be_made_leave_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[bytes]:
        yield b"{}\n"
        raise BatchError("the file has changed")

    with contextlib.closing(Journal(tmp_path / "out")) as kept, pytest.raises(BatchError, match="has changed"):
        kept.finish(rows())
    assert list(tmp_path.iterdir()) == []


def test_the_output_is_opened_behind_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends just before our lock replaces the output."""
    output, real = tmp_path / "out", journal.fcntl.flock

    def flock(file: int, how: int) -> None:
        output.write_bytes(to_bytes({"line": 1, "id": None, "digest": "a" * 32, "text": "x", "error": None}))
        real(file, how)

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with contextlib.closing(Journal(output)) as kept:
        assert "a" * 32 in kept


def test_two_runs_on_one_output(work: Work) -> None:
    work.write(*GOOD)
    with contextlib.closing(Journal(work.output)):
        status, _, err = work.run()
    assert status == 1
    assert "another run writes" in err
    assert not work.part.exists()  # nothing was in it


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends between our open and our lock takes the file away."""
    real, calls = journal.fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not calls:
            (tmp_path / "out.part").unlink()
        calls.append(file)
        real(file, how)

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with contextlib.closing(Journal(tmp_path / "out")) as kept:
        kept.add("x", {"text": "x", "error": None})
        assert kept.path.exists()
    assert len(calls) == 2


def test_an_output_of_somebody_else_is_not_replaced(work: Work) -> None:
    work.write(*GOOD)
    work.output.write_text('{"text": "mine"}\n')
    status, _, err = work.run()
    assert status == 1
    assert "its line 1 is not a row of gpt-fast batch" in err
    assert work.output.read_text() == '{"text": "mine"}\n'


@pytest.mark.parametrize("written", ["part", "new"])
def test_a_full_disk(work: Work, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    work.write(*GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(*((journal, "_write", full) if written == "part" else (journal.os, "fsync", full)))
        status, _, err = work.run()
    assert status == 1
    assert f"out.jsonl.{written} cannot be written (No space left on device)" in err
    assert "run the same command again" in err
    assert not work.output.exists()
    assert not work.output.with_name("out.jsonl.new").exists()
    assert work.run()[1]["known_before"] == (0 if written == "part" else 5)


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "nowhere/out.jsonl"], "there is no folder"),
        (["--output", "."], "is not a file"),
        (["--output", "-"], "name a file"),
        (["--input", "absent.jsonl"], "there is no file absent.jsonl"),
        (["--input", "."], "--input: . is a folder"),
        (["--input", "/dev/null"], "/dev/null is not a regular file, which can be read twice; pipe it in"),
        (["--workers", "0"], "give at least 1"),
        (["--dtype", "float8"], "dtype"),
        (["--checkpoint", "absent"], "absent"),
    ],
)
def test_what_cannot_begin_says_why(work: Work, words: list[str], message: str) -> None:
    work.write(*GOOD)
    status, _, err = work.run(*words)
    assert status == 1
    assert message in err
    assert not work.part.exists()


def test_input_and_output_are_two_files(work: Work) -> None:
    work.write(*GOOD)
    status, _, err = work.run("--output", str(work.input))
    assert (status, "are the same file" in err) == (1, True)


@pytest.mark.parametrize("name", ["out.jsonl.part", "out.jsonl.new"])
def test_an_input_that_is_needed_on_the_way_to_the_output_stays_as_it_is(work: Work, name: str) -> None:
    work.write(*GOOD)
    work.input = work.input.rename(work.input.with_name(name))
    before = work.input.read_bytes()
    status, _, err = work.run()
    assert (status, "would be overwritten" in err) == (1, True)
    assert work.input.read_bytes() == before


def test_an_unwritable_folder(work: Work) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    work.write(*GOOD)
    work.output.parent.chmod(0o500)
    status, _, err = work.run()
    work.output.parent.chmod(0o700)
    assert (status, "Permission denied" in err) == (1, True)


def test_an_input_that_changes_under_the_run(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.write(*GOOD)
    opened = answering.open_llm

    def change(*facts: Any, **more: Any) -> LLM:
        work.write({"prompt": "another"}, *GOOD[1:])
        return opened(*facts, **more)

    monkeypatch.setattr(answering, "open_llm", change)
    status, _, err = work.run()
    assert (status, "line 1: the file has changed" in err) == (1, True)


def test_a_context_that_memory_has_cut_is_refused(work: Work) -> None:
    work.write(*GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "LLM", lambda *a, **o: LLM(*a, **o, num_pages=2, page_size=64, max_batch=1))
        status, _, err = work.run()
    assert status == 1
    assert "say --max-seq-len 128 or less" in err


def test_an_engine_that_stops_ends_the_run(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.write(*GOOD)
    opened = answering.open_llm

    def stopped(*facts: Any, **more: Any) -> LLM:
        llm = opened(*facts, **more)
        llm.close()
        return llm

    monkeypatch.setattr(answering, "open_llm", stopped)
    status, _, err = work.run()
    assert (status, "the engine has stopped" in err) == (1, True)
    assert not work.part.exists()


def test_workers_without_ray(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    work.write(*GOOD)
    status, _, err = work.run("--workers", "2")
    assert status == 1
    assert "pip install 'gpt-fast-serve[ray]'" in err
    with pytest.raises(MissingPackageError):
        import_ray()


def test_the_reason_of_a_failed_worker() -> None:
    stack = "ray.exceptions.RayTaskError: ray::f()\n  File x\ngpt_fast.errors.ConfigError: the weights need 9 GB\n\n"
    assert reason(stack) == "the weights need 9 GB"
    assert reason("The actor died unexpectedly.\n") == "The actor died unexpectedly."


# --- parts ---------------------------------------------------------------------------------------------------------


def test_few_requests_are_in_the_engine_at_once(model: Path) -> None:
    """Jobs are fetched as there is room, and never all of them."""
    fetched = ended = most = 0

    def jobs() -> Iterator[answering.Job]:
        nonlocal fetched, most
        for i in range(200):
            fetched += 1
            most = max(most, fetched - ended)
            raw = json.dumps({"prompt": f"Once {i}", "max_new_tokens": 1 + i % 5}).encode()
            yield answering.Job(f"{i:032x}", raw)

    with LLM(model, dtype="float32", max_batch=4) as llm:
        digests = []
        for digest, answer in answering.Answerer(llm, ("x",)).answers(jobs()):
            assert answer["error"] is None
            ended += 1
            digests.append(digest)
    assert len(set(digests)) == 200
    assert most <= 2 * 4 + 1


def test_a_request_that_must_wait_for_others_waits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As grammars do when those of running requests take all the memory for grammars; alone there is no hope."""
    jobs = [answering.Job(f"{i:032x}", json.dumps({"prompt": f"Once {i}"}).encode()) for i in range(6)]
    with LLM(model, dtype="float32") as llm:
        submit = llm.submit_all

        def one_at_a_time(parts: Any) -> Any:
            if llm.engine._handles or parts[0][0] == "Once 5":
                raise try_later("too many grammars")
            return submit(parts)

        monkeypatch.setattr(llm, "submit_all", one_at_a_time)
        found = list(answering.Answerer(llm, ("x",)).answers(iter(jobs)))
    assert [digest for digest, _ in found] == [job.digest for job in jobs]
    assert [error_in(answer) is None for _, answer in found] == [True] * 5 + [False]


def test_jobs_that_wait_again_and_again_leave_no_trace(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator around an iterator for each of them would be as deep in the end as Python's stack is."""

    def chains() -> int:
        return sum(type(each) is itertools.chain for each in gc.get_objects())

    raw = json.dumps({"prompt": "Once", "max_new_tokens": 1}).encode()
    with LLM(model, dtype="float32") as llm:
        submit, found = llm.submit_all, []

        def one_at_a_time(parts: Any) -> Any:
            if llm.engine._handles:
                raise try_later("too many grammars")
            return submit(parts)

        monkeypatch.setattr(llm, "submit_all", one_at_a_time)
        before = chains()
        for digest, _ in answering.Answerer(llm, ("x",)).answers(answering.Job(f"{i:032x}", raw) for i in range(40)):
            found.append(digest)
            assert chains() < before + 10
    assert found == [f"{i:032x}" for i in range(40)]


def test_leaving_early_cancels_what_runs(model: Path) -> None:
    raw = json.dumps({"prompt": "Once", "max_new_tokens": 400, "ignore_eos": True}).encode()
    short = json.dumps({"prompt": "Once", "max_new_tokens": 1}).encode()
    with LLM(model, dtype="float32") as llm:
        answers = answering.Answerer(llm, ("x",)).answers(
            iter([answering.Job(f"{i:032x}", raw if i else short) for i in range(4)])
        )
        next(answers)
        answers.close()
        assert all(handle.cancelled for handle in llm.engine._handles.values())


def test_a_failed_row_is_told_and_the_others_go_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = [json.dumps({"prompt": text, "max_new_tokens": 2}).encode() for text in ("good", "bad")]
    with LLM(model, dtype="float32") as llm:
        prepare = llm.prepare
        monkeypatch.setattr(llm, "prepare", lambda p, s, **how: prepare(p, s, **how) if p == "good" else [][1])
        jobs = [answering.Job(f"{i:032x}", raw) for i, raw in enumerate(raws)]
        found = dict(answering.Answerer(llm, ("x",)).answers(iter(jobs)))
    good, bad = (found[job.digest] for job in jobs)
    assert good["error"] is None
    assert (bad["error"]["code"], is_final(good), is_final(bad)) == ("internal_error", True, False)


def test_rows_are_read_back_as_they_were_written() -> None:
    for raw in (b'{"prompt": "x", "id": "n"}', b'{"custom_id": "n"}', b"{"):
        line = read_line(raw)
        answer = refusal_of(line, "0" * 32, RequestError("no\u2028\ud800", "p"))
        row = write_row(line, 3, "0" * 32, answer)
        assert row.count(b"\n") == 1
        assert read_row(row) == ("0" * 32, answer)
        assert error_in(answer) is not None
    named, request = "batch_req_" + "a" * 32, {"status_code": 200, "request_id": "b" * 32, "body": {"id": "cmpl-1"}}
    openai = {"id": named, "custom_id": "n", "response": request, "error": None}
    expired = {**openai, "response": None, "error": {"code": "batch_expired", "message": "This request expired."}}
    others = ({"digest": "a" * 32, "x": 1}, {"digest": "abc", "error": None}, openai, expired)
    for foreign in (b"{}", b"[1]", b'{"id": "cmpl-1"}', b"x", *map(to_bytes, others)):
        with pytest.raises(ValueError, match="not a row"):
            read_row(foreign)
    assert json.loads(to_bytes({"a": "\ud800"})) == {"a": "\ud800"}
    assert to_bytes({"a": "é\ud800"}) == '{"a": "é\\ud800"}\n'.encode()


def test_lines_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    with open(path, "wb") as file:
        file.write(b'{"prompt": "a"}\n')
        file.write(b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\r\n \n')
        file.write(b'{"prompt": "end"}')
    with contextlib.closing(Source(str(path), "base")) as source:
        rows = source.rows()
        assert [row.number for row in rows] == [1, 2, 4]
        first, long, last = (source.line(row) for row in rows)
    assert (first.body, last.body) == ({"prompt": "a"}, {"prompt": "end"})
    assert long.fault is not None
    assert long.fault.code == "line_too_long"


def test_the_fingerprint_sees_what_decides_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "REMEMBERED_BYTES", 1000)
    own = Path(shutil.copytree(MODEL, tmp_path / "model"))
    first = fingerprint(Checkpoint.open(own))
    assert fingerprint(Checkpoint.open(MODEL)) == first
    for name in ("README.md", "LICENSE", "params.json"):  # the last counts where there is no config.json
        (own / name).write_text("{}")
    assert fingerprint(Checkpoint.open(own)) == first
    (own / "generation_config.json").write_text('{"temperature": 0.5}')
    second = fingerprint(Checkpoint.open(own))
    (own / "generation_config.json").rename(own / "generic.jinja")
    assert len({first, second, fingerprint(Checkpoint.open(own))}) == 3


def test_the_fingerprint_of_files_without_a_config_json(tmp_path: Path) -> None:
    state = meta_state(Checkpoint.open(MODEL).build(torch.float32))
    plain, alone = tmp_path / "meta" / "consolidated.00.pth", tmp_path / "alone" / "ckpt.pt"
    for file in (plain, alone):
        file.parent.mkdir()
    torch.save(state, plain)
    params = plain.with_name("params.json")
    params.write_text('{"n_heads": 8, "n_kv_heads": 4}')
    first = fingerprint(Checkpoint.open(plain))
    params.write_text('{"n_heads": 8, "n_kv_heads": 4, "rope_theta": 500000.0}')
    assert fingerprint(Checkpoint.open(plain)) != first
    torch.save({"model": state, "model_args": {"n_heads": 8, "n_kv_heads": 4}}, alone)
    assert len(fingerprint(Checkpoint.open(alone))) == len(first)


def test_large_files_are_read_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "REMEMBERED_BYTES", 1000)
    own, read = Path(shutil.copytree(MODEL, tmp_path / "model")), []
    whole = fingerprints._read
    monkeypatch.setattr(fingerprints, "_read", lambda file, report: read.append(file.name) or whole(file, report))
    weights = next(own.glob("*.safetensors"))
    first = fingerprint(Checkpoint.open(own))
    assert weights.name in read
    read.clear()
    assert fingerprint(Checkpoint.open(own)) == first
    assert weights.name not in read
    times, raw = weights.stat(), bytearray(weights.read_bytes())
    raw[-2] ^= 0x40
    with open(weights, "r+b") as file:  # in place, and the time of modification as it was
        file.write(raw)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(Checkpoint.open(own)) != first
    note = next((tmp_path / "cache" / "digests").glob("*.json"))
    note.write_text("{")
    assert fingerprint(Checkpoint.open(own)) != first


def test_progress_says_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr("gpt_fast.batch.progress.time.monotonic", lambda: now)
    with Progress(100, 20) as progress:
        assert "? left" in progress.line(1.0)
        for _ in range(40):
            now += 1.0
            progress.add(5, failed=False)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "batch: 51 of 100 rows, errors: 0; 1.0 rows/s, 5 tokens/s; 00:47 left" in err


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(3, 1) as progress:
        progress.add(5, failed=True)
    assert "2/3" in terminal.getvalue()
