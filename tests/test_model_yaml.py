"""model_config.yaml as a file: what is not YAML, what is there twice, and TorchServe's keys, each with its line."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt_fast.errors import ConfigError
from gpt_fast.fields import ListOf, OneOf, Text, Whole
from gpt_fast.serve.model_yaml import TORCHRUN, TORCHSERVE, check_torchserve_keys, read_model_yaml
from gpt_fast.serve.settings import check_file

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (ROOT / "model_config.yaml").read_text()


def refusal(tmp_path: Path, text: str | bytes) -> str:
    """What is said of a file with this content."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        check_file(path)
    message = str(caught.value)
    assert message.startswith(str(path)), "the file is not named"
    assert "\n" not in message
    return message.removeprefix(str(path))


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [ROOT / "model_config.yaml", *(ROOT / "configs").glob("model_config*.yaml")])
def test_the_shipped_files_are_fine(path: Path) -> None:
    assert check_file(path).config == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("text", ["", "\n\n", "# minWorkers: 1\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text) == " is empty: it holds no key"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("minWorkers: 1\nmaxWorkers: [\n", 3, "flow node"),
        ("minWorkers: 1\n\tmaxWorkers: 1\n", 2, "cannot start any token"),
        ("minWorkers: 1: 2\n", 1, "mapping values are not allowed"),
        ("minWorkers: 1\n---\nmaxWorkers: 1\n", 2, "expected a single document"),
        ("minWorkers: *other\n", 1, "undefined alias"),
        ("minWorkers: 1\nuseVenv: !!python/object/apply:os.getcwd []\n", 2, "python/object/apply:os.getcwd"),
        ("- minWorkers\n", 1, "must be keys and values"),
        ("# keys\nminWorkers\n", 2, "must be keys and values"),
        ("minWorkers: 1\nx: \0\n", 2, "special characters are not allowed"),
        ("minWorkers: 1\nmaxWorkers: 1\nminWorkers: 1\n", 3, "minWorkers is there twice; line 1 has it too"),
        ("handler:\n    stream: true\n    stream: false\n", 3, "stream is there twice; line 2 has it too"),
        ("torchrun: {nnodes: 1,\n  nnodes: 2}\n", 2, "nnodes is there twice; line 1 has it too"),
        ("handler:\n  stream: true\nminWorkers: 1\nhandler:\n  max_batch: 1\n", 4, "handler is there twice"),
    ],
)
def test_what_cannot_be_meant_is_named_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f", line {line}: ")
    assert says in message


@pytest.mark.parametrize("text", [b"\x80\x81", b"[" * 100_000, b"minWorkers: " + b"9" * 5000, b"#" * 2_000_000])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: bytes) -> None:
    refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("jobQueueSize: -5", "jobQueueSize in model_config.yaml must be a whole number from 1 to 1000000, not -5"),
        ("jobQueueSize: abc", "not 'abc'"),
        ("jobQueueSize: 1.5", "not 1.5"),
        ("jobQueueSize: true", "not True"),
        ("jobQueueSize:", "not None"),
        ("jobQueueSiz: 5", "unknown key 'jobQueueSiz' in model_config.yaml (did you mean 'jobQueueSize'?)"),
        ("torchrun: {nproc-per-node: 0}", "nproc-per-node in the torchrun block"),
        ("torchrun: {max-restarts: 1}", "unknown key 'max-restarts' in the torchrun block"),
        ("torchrun: 2", "torchrun in model_config.yaml must be a block of keys"),
        ("max_new_tokens: 5", "belongs under 'handler:'"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    message = refusal(tmp_path, SHIPPED + line + "\n")
    assert message.startswith(f", line {SHIPPED.count(chr(10)) + 1}: ")
    assert says in message


def test_a_key_of_the_handler_is_named_with_its_line(tmp_path: Path) -> None:
    lines = SHIPPED.splitlines()
    at = lines.index("    max_body_bytes: 1048576")
    message = refusal(tmp_path, "\n".join([*lines[:at], "    max_body_bytes: 0", *lines[at + 1 :]]))
    assert message.startswith(f", line {at + 1}: max_body_bytes in the handler block")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "speculate: off",
            "must be one of auto, always, never, not False, which is how YAML reads off and no: write never",
        ),
        ("speculate: no", "write never"),
        ("speculate: on", "not True, which is how YAML reads on and yes: write auto"),
        ("speculate: often", "must be one of auto, always, never, not 'often'"),
        ("speculate_k: 0", "must be a whole number from 1 to 15, not 0"),
        ("draft: off", "must be a checkpoint's folder, or one of lookup, int8, int4, not False"),
        ("draft_checkpoint_path: [a]", "must be a checkpoint's folder, or one of lookup, int8, int4, not a list"),
    ],
)
def test_what_speculation_cannot_be_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    message = refusal(tmp_path, f"minWorkers: 1\nhandler:\n    stream: true\n    {line}\n")
    assert message.startswith(f", line 4: {line.partition(':')[0]} in the handler block")
    assert message.endswith(says)


def test_keys_that_are_wrong_only_together_are_refused(tmp_path: Path) -> None:
    assert "minWorkers" in refusal(tmp_path, "minWorkers: 3\nmaxWorkers: 2\n")


@pytest.mark.parametrize("workers", ["minWorkers: 2\nmaxWorkers: 2", "minWorkers: 1", "maxWorkers: 1", ""])
def test_one_worker_is_asked_for_by_name_where_it_batches(tmp_path: Path, workers: str) -> None:
    # TorchServe starts one for each core where minWorkers or maxWorkers is missing, and they stall each other.
    assert "minWorkers: 1 and maxWorkers: 1" in refusal(tmp_path, f"continuousBatching: true\n{workers}\n")


# ---- TorchServe's keys ----------------------------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (None, "abc", "", "1", 1.5, float("nan"), [], [1.5], [None], {}, {"a": 1}, -1, 2**31, 10**30)


@pytest.mark.parametrize("name", [*TORCHSERVE, *(f"torchrun.{name}" for name in TORCHRUN)])
def test_every_key_refuses_what_it_cannot_be(name: str) -> None:
    """TorchServe's own numbers are Java's ints: 2**31 is none of them."""
    block, _, key = name.rpartition(".")
    kind = (TORCHRUN if block else TORCHSERVE)[key]
    text = isinstance(kind, Text)
    for value in JUNK:
        if text and isinstance(value, str) and value:
            continue
        with pytest.raises(ConfigError, match=f"^{key} in "):
            check_torchserve_keys({"torchrun": {key: value}} if block else {key: value})


@pytest.mark.parametrize("name", TORCHSERVE)
def test_every_key_takes_its_limits_and_nothing_beyond(name: str) -> None:
    kind = TORCHSERVE[name]
    whole = kind.item if isinstance(kind, ListOf) else kind
    if not isinstance(whole, Whole):
        good: list[Any] = [True, False] if not isinstance(whole, OneOf) else [*whole.choices, whole.choices[0].upper()]
        bad: list[Any] = []
    else:
        good, bad = [whole.least, whole.most], [whole.least - 1, whole.most + 1]
    if isinstance(kind, ListOf):
        good, bad = [[value] for value in good], [[value] for value in bad]
    for value in good:
        check_torchserve_keys({"maxWorkers": 256, name: value})
    for value in bad:
        with pytest.raises(ConfigError, match=f"^{name} in "):
            check_torchserve_keys({name: value})


def test_the_tables_hold_keys_that_torchserve_reads() -> None:
    """Its own program says which: the names are in the class that reads the file."""
    ts = pytest.importorskip("ts", reason="torchserve is not installed")
    jar = zipfile.ZipFile(Path(ts.__path__[0]) / "frontend" / "model-server.jar")
    folder = "org/pytorch/serve/archive/model/"
    for table, name in ((TORCHSERVE, "ModelConfig"), (TORCHRUN, "ModelConfig$TorchRun")):
        code = jar.read(f"{folder}{name}.class")
        # A string in a class file: its length in two bytes, then its text.
        absent = [key for key in table if len(key).to_bytes(2, "big") + key.encode() not in code]
        assert not absent


def test_lines_are_those_of_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# a comment\nminWorkers: 1\n\nhandler:\n    stream: true\n")
    assert read_model_yaml(path).lines == {("minWorkers",): 2, ("handler",): 4, ("handler", "stream"): 5}
