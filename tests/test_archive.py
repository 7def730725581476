"""Archives without a server: what is in them, what they replace, and what the configuration inside says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from gpt_fast.archive import ROOT, build_archive, set_checkpoint
from gpt_fast.config import ConfigError

needs_archiver = pytest.mark.skipif(
    not (Path(sysconfig.get_path("scripts")) / "torch-model-archiver").exists()
    and not shutil.which("torch-model-archiver"),
    reason="torch-model-archiver is not installed",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as the Hugging Face cache has it: links to blobs, and things that do not belong to it."""
    blobs, folder = tmp_path / "blobs", tmp_path / "my model"
    blobs.mkdir()
    (folder / "original").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_text(name)
        (folder / name).symlink_to(blobs / name)
    (folder / "original" / "consolidated.pth").touch()
    (folder / ".gitattributes").touch()
    return folder


def names(archive: Path) -> set[str]:
    """Files of an archive as the worker sees them, relative to its model_dir."""
    if archive.is_dir():
        return {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    if archive.suffix == ".mar":
        return {info.filename for info in zipfile.ZipFile(archive).infolist() if not info.is_dir()}
    with tarfile.open(archive) as tar:
        return {member.name.split("/", 1)[1] for member in tar.getmembers() if member.isfile()}


@needs_archiver
@pytest.mark.parametrize(
    ("archive_format", "file"),
    [("no-archive", "m"), ("default", "m.mar"), ("zip-store", "m.mar"), ("tgz", "m.tar.gz")],
)
def test_an_archive_holds_all_that_a_worker_needs(
    checkpoint: Path, tmp_path: Path, archive_format: str, file: str
) -> None:
    store = tmp_path / "store"
    path = build_archive(checkpoint, name="m", archive_format=archive_format, output=store)
    assert path == store / file
    assert [p.name for p in store.iterdir()] == [file], "nothing else is left behind"
    inside = names(path)
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "gpt_fast").rglob("*.py")}
    assert package <= inside
    assert {"handler.py", "model_config.yaml", "MAR-INF/MANIFEST.json"} <= inside
    assert {name for name in inside if name.startswith("checkpoint/")} == {
        "checkpoint/config.json", "checkpoint/model.safetensors",
    }  # fmt: skip
    assert not [name for name in inside if "__pycache__" in name]


@needs_archiver
def test_by_reference_names_the_absolute_path(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = build_archive("my model", name="m", output="store", by_reference=True)
    config = yaml.safe_load((path / "model_config.yaml").read_text())
    assert config["handler"]["checkpoint"] == str(checkpoint)
    assert not (path / "checkpoint").exists()


@needs_archiver
def test_a_new_archive_replaces_the_old_one_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    path = build_archive(checkpoint, name="m", output=tmp_path / "store")
    (path / "stale.txt").touch()
    build_archive(checkpoint, name="m", output=tmp_path / "store")
    assert not (path / "stale.txt").exists()
    (tmp_path / "store" / "precious").mkdir()
    (tmp_path / "store" / "precious" / "file").touch()
    with pytest.raises(ValueError, match="not an archive"):
        build_archive(checkpoint, name="precious", output=tmp_path / "store")


@needs_archiver
def test_a_file_stands_for_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    path = build_archive(checkpoint / "model.safetensors", name="m", output=tmp_path / "store")
    config = yaml.safe_load((path / "model_config.yaml").read_text())
    assert config["handler"]["checkpoint"] == "checkpoint/model.safetensors"
    assert (path / "checkpoint" / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint": "nowhere"}, "checkpoint: .*nowhere does not exist"),
        ({"config": "nowhere.yaml"}, r"config: nowhere\.yaml does not exist"),
        ({"name": "../x"}, "name: "),
        ({"archive_format": "rar"}, "format: 'rar' is not one of no-archive"),
    ],
)
def test_what_cannot_be_packed_is_refused(options: dict[str, str], says: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        build_archive(**{"checkpoint": checkpoint, "output": tmp_path / "never", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()


@needs_archiver
def test_the_script_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "archive.sh", "--checkpoint", "my model", "--output", "s", "--by-reference"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "s" / "gpt-fast")
    manifest = json.loads((tmp_path / "s" / "gpt-fast" / "MAR-INF" / "MANIFEST.json").read_text())
    assert manifest["model"]["configFile"] == "model_config.yaml"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("handler:\n    checkpoint: auto  # x\n    a: 1\n", 'handler:\n    checkpoint: "c"\n    a: 1\n'),
        ("handler:\n  converted_ckpt_dir: x/model.pth\n", 'handler:\n  checkpoint: "c"\n'),
        ("handler:\n  # note\n  a: 1\n", 'handler:\n  checkpoint: "c"\n  # note\n  a: 1\n'),
        ("handler:\n\n# checkpoint: x\nb: 1\n", 'handler:\n    checkpoint: "c"\n\n# checkpoint: x\nb: 1\n'),
        ("handler:\n  a: 1\nb:\n  checkpoint: x\n", 'handler:\n  checkpoint: "c"\n  a: 1\nb:\n  checkpoint: x\n'),
        ("minWorkers: 1\n", 'minWorkers: 1\nhandler:\n    checkpoint: "c"\n'),
        ("", 'handler:\n    checkpoint: "c"\n'),
    ],
)  # fmt: skip
def test_only_the_checkpoints_line_changes(before: str, after: str) -> None:
    assert set_checkpoint(before, "c") == after
    assert yaml.safe_load(after)["handler"]["checkpoint"] == "c"


def test_any_path_survives_the_yaml() -> None:
    path = "/a b/#c: 'd' \"e\" \\ é"
    assert yaml.safe_load(set_checkpoint("handler:\n", path))["handler"]["checkpoint"] == path
