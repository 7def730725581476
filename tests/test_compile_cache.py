"""What torch.compile made, kept for the next start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_fast.model import compile_cache
from gpt_fast.user_cache import why_untrusted

_START = """
import logging, sys, dataclasses, torch
from gpt_fast import LLM, SamplingParams
from gpt_fast.model.building import random_model
from gpt_fast.model.shapes import shape
from gpt_fast.model.compile_cache import keep_private
keep_private()  # as the engine does before the next line's import makes torch's folder
import torch._inductor.cpu_vec_isa
torch._inductor.cpu_vec_isa.valid_vec_isa_list = lambda: []  # to try each costs seconds, and changes nothing here
tiny = dataclasses.replace(shape("tinyllama-1.1b"), num_layers=1, dim=32, ffn_dim=64, num_heads=2, num_kv_heads=2,
                           head_dim=16, vocab_size=64, max_seq_len=32)
model = random_model(tiny, torch.float32)
file = sys.argv[1] if len(sys.argv) > 1 else None
with LLM.from_model(model, kernels=False, max_batch=1, prefill_chunk=1, compile_cache=file) as llm:
    assert llm.engine.runner.path == "compiled"
    answer = llm.generate([3, 1, 4], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)).token_ids
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], *answer)
"""


def start(folder: Path, number: int, *arguments: str) -> list[int]:
    """A process with empty caches, torch's own too; returns hits, misses and the answer."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"GPT_FAST_CACHE": str(folder / f"cache{number}"), "TMPDIR": str(folder / "tmp")}
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", _START, *arguments],
        env={**kept, **own, "GPT_FAST_KERNELS": "reference", "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_a_second_start_with_empty_caches_compiles_nothing(tmp_path: Path) -> None:
    file = tmp_path / "compiled.bin"
    first = start(tmp_path, 1, str(file))
    assert file.stat().st_mode & 0o077 == 0
    second = start(tmp_path, 2, str(file))
    assert first[0] == 0
    assert first[1] > 0
    assert second[:2] == [first[1], 0]
    assert second[2:] == first[2:]
    # And torch's own cache is not where everybody can guess it.
    assert not list((tmp_path / "tmp").glob("torchinductor*"))
    for number in (1, 2):
        folder = tmp_path / f"cache{number}" / "inductor"
        assert any(folder.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_damaged_file_costs_a_warning(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with compile_cache.kept(tmp_path / "a.bin", lambda: False):
        pass
    assert (tmp_path / "a.bin").read_bytes() == content


def test_a_file_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(_: bytes) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("torch.compiler.load_cache_artifacts", never)
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "a.bin").chmod(0o666)
    with caplog.at_level(logging.WARNING), compile_cache.kept(tmp_path / "a.bin", lambda: False):
        pass
    assert "not used" in caplog.text


@pytest.mark.parametrize(
    ("file", "folder", "wrong"),
    [
        (0o644, 0o755, ""), (0o664, 0o755, "file"), (0o646, 0o755, "file"), (0o644, 0o775, "folder"),
        (0o644, 0o757, "folder"),
        (0o644, 0o1777, ""),  # as of /tmp: there nobody can replace another one's file
        (0o1646, 0o1777, "file"),
    ],
)  # fmt: skip
def test_who_could_have_written_a_file(file: int, folder: int, wrong: str, tmp_path: Path) -> None:
    place = tmp_path / "folder" / "file"
    place.parent.mkdir()
    place.touch()
    place.chmod(file)
    place.parent.chmod(folder)
    named = {"file": place, "folder": place.parent}.get(wrong)
    assert why_untrusted(place) == (named and f"others may write {named} (chmod go-w)")


def test_a_file_in_a_folder_that_others_can_write_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.compiler.load_cache_artifacts", lambda _: pytest.fail("loaded"))
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "a.bin").write_bytes(b"x")
    (folder / "a.bin").chmod(0o600)
    with compile_cache.kept(folder / "a.bin", lambda: False):
        pass
    assert f"others may write {folder}" in caplog.text


@pytest.mark.parametrize(
    ("set_to", "used"), [(None, "inductor"), ("/tmp/torchinductor_me", "inductor"), ("/mine", "/mine")]
)
def test_torchs_cache_is_moved_unless_another_place_was_chosen(
    set_to: str | None, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sets the variable to its default by itself where it was imported before."""
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if set_to is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", set_to)
    compile_cache.keep_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / used)


def test_the_name_depends_on_what_was_compiled() -> None:
    assert compile_cache.default_file("a") == compile_cache.default_file("a")
    assert compile_cache.default_file("a") != compile_cache.default_file("b")
