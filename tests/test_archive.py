"""Archives without a server: what is in them, what they replace, and what the configuration inside says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.files import belongs, choose_files
from gpt_fast.errors import ConfigError
from gpt_fast.serve.archive import build_archive
from gpt_fast.serve.config_text import set_key
from gpt_fast.serve.repository import ROOT
from gpt_fast.serve.settings import read_settings

needs_archiver = pytest.mark.skipif(
    importlib.util.find_spec("model_archiver") is None, reason="torch-model-archiver is not installed"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with things beside it that do not belong to it, in a folder with a space in its name."""
    folder = tmp_path / "my model"
    (folder / "original").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    (folder / "original" / "consolidated.pth").touch()
    for name in (".gitattributes", "notes.txt", "id_rsa", "optimizer.pt", "modeling.py"):
        (folder / name).write_text("nobody's business")
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The same as the Hugging Face cache has it: links to blobs."""
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for name, digest in (("config.json", "11"), ("model.safetensors", "22")):
        (blobs / digest).write_text(name)
        (folder / name).symlink_to(Path("..", "..", "blobs", digest))
    return folder


def pack(checkpoint: Path, tmp_path: Path, **options: Any) -> Path:
    """The folder ``checkpoint`` of a new archive."""
    return build_archive(checkpoint, name="m", output=tmp_path / "store", **options) / "checkpoint"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


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


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft model beside the checkpoint."""
    folder = tmp_path / "small ones" / "draft 1"
    folder.mkdir(parents=True)
    for name in ("config.json", "pytorch_model.bin", "notes.txt"):
        (folder / name).write_text(name)
    return folder


def handler_of(archive: Path) -> Any:
    """The handler block of an archive that is a folder."""
    return yaml.safe_load((archive / "model_config.yaml").read_text())["handler"]


@needs_archiver
@pytest.mark.parametrize(("archive_format", "file"), [("no-archive", "m"), ("zip-store", "m.mar"), ("tgz", "m.tar.gz")])
def test_a_draft_is_packed_beside_the_checkpoint(
    checkpoint: Path, draft: Path, tmp_path: Path, archive_format: str, file: str
) -> None:
    (draft / "config.json").chmod(0o600)
    said: list[str] = []
    options = {"draft": draft, "archive_format": archive_format, "say": said.append}
    archive = build_archive(checkpoint, name="m", output=tmp_path / "store", **options)  # type: ignore[arg-type]
    assert archive == tmp_path / "store" / file
    models = {name for name in names(archive) if name.startswith(("checkpoint/", "draft/"))}
    assert models == {f"checkpoint/{name}" for name in ("config.json", "model.safetensors")} | {
        f"draft/{name}" for name in ("config.json", "pytorch_model.bin")
    }
    assert mode(archive / "draft" / "config.json" if archive.is_dir() else archive) == 0o600
    assert said[1] == "left out of draft: notes.txt"
    if archive.is_dir():
        assert (handler_of(archive)["checkpoint"], handler_of(archive)["draft"]) == ("checkpoint", "draft")


@needs_archiver
@pytest.mark.parametrize("key", ["draft", "draft_checkpoint_path"])
@pytest.mark.parametrize("start", ["the configuration", "the command"])
def test_a_draft_that_the_configuration_names_comes_along(
    checkpoint: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, start: str
) -> None:
    config = (draft.parent if start == "the configuration" else tmp_path) / "c.yaml"
    config.write_text(f"handler:\n    speculate_k: 3  # kept\n    {key}: draft 1\n")
    monkeypatch.chdir(draft.parent if start == "the command" else tmp_path)
    archive = build_archive(checkpoint, name="m", output=tmp_path / "store", config=config)
    assert (archive / "draft" / "pytorch_model.bin").is_file()
    assert handler_of(archive) == {"checkpoint": "checkpoint", "speculate_k": 3, "draft": "draft"}
    moved = archive.rename(tmp_path / "elsewhere")
    draft.rename(tmp_path / "gone")
    assert read_settings({"handler": handler_of(moved)}, moved).engine["draft"] == str(moved / "draft")


@needs_archiver
def test_a_draft_by_reference_and_drafts_that_need_no_packing(checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "m", "output": tmp_path / "store"}
    archive = build_archive(checkpoint, draft=draft, by_reference=True, **options)
    assert (handler_of(archive)["draft"], (archive / "draft").exists()) == (str(draft), False)
    for named in ("lookup", "int8", str(draft), "/on/the/other/machine"):
        config = tmp_path / "c.yaml"
        config.write_text(f"handler:\n    draft: {named}\n")
        archive = build_archive(checkpoint, config=config, **options)
        assert (handler_of(archive)["draft"], (archive / "draft").exists()) == (named, False)


def test_a_draft_that_is_nowhere_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    speculative = ROOT / "configs" / "model_config_speculative.yaml"
    with pytest.raises(
        ConfigError, match=r"draft 'draft' .* does not exist; tried .*Name the draft model with --draft"
    ):
        pack(checkpoint, tmp_path, config=speculative)
    with pytest.raises(ConfigError, match=r"^draft: .*nowhere does not exist"):
        pack(checkpoint, tmp_path, config=speculative, draft=tmp_path / "nowhere")
    assert not (tmp_path / "store").exists()


# ---- LoRA adapters --------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A folder of two adapters of the same name, beside what PEFT and others leave there."""
    for style in ("calm", "loud"):
        folder = tmp_path / "styles" / style / "adapter"
        (folder / "checkpoint-10").mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json", "notes.txt"):
            (folder / name).write_text(f"{style}: {name}")
    return tmp_path / "styles"


ADAPTER_FILES = ("README.md", "adapter_config.json", "adapter_model.safetensors")


@needs_archiver
@pytest.mark.parametrize(("archive_format", "file"), [("no-archive", "m"), ("zip-store", "m.mar"), ("tgz", "m.tar.gz")])
def test_adapters_are_packed_with_their_weights(
    checkpoint: Path, adapters: Path, tmp_path: Path, archive_format: str, file: str
) -> None:
    said: list[str] = []
    lora = {str(adapters / "loud" / "adapter"): 0.5, str(adapters / "calm" / "adapter"): 1.0}
    options: dict[str, Any] = {"lora": lora, "archive_format": archive_format, "say": said.append}
    archive = build_archive(checkpoint, name="m", output=tmp_path / "store", **options)
    assert archive == tmp_path / "store" / file
    inside = {name for name in names(archive) if name.startswith("lora/")}
    assert inside == {f"lora/{i}/{name}" for i in (1, 2) for name in ADAPTER_FILES}
    assert said[1:] == [f"left out of lora/{i}: checkpoint-10/, notes.txt, tokenizer.json" for i in (1, 2)]
    if archive.is_dir():
        shutil.rmtree(adapters)
        assert (archive / "lora" / "1" / "adapter_model.safetensors").read_text().startswith("loud")
        settings = read_settings({"handler": handler_of(archive)}, archive)
        assert settings.engine["lora"] == {str(archive / "lora" / "1"): 0.5, str(archive / "lora" / "2"): 1.0}


@needs_archiver
def test_an_adapter_that_the_configuration_names_by_a_relative_path_comes_along(
    checkpoint: Path, adapters: Path, tmp_path: Path
) -> None:
    config, options = adapters / "c.yaml", {"name": "m", "output": tmp_path / "store"}
    config.write_text("handler:\n    lora:\n        calm/adapter: 0.5\n        /on/the/other/machine: 2\n")
    archive = build_archive(checkpoint, config=config, **options)  # type: ignore[arg-type]
    assert handler_of(archive)["lora"] == {"lora/1": 0.5, "/on/the/other/machine": 2}
    assert (archive / "lora" / "1" / "adapter_config.json").is_file()
    archive = build_archive(checkpoint, config=config, by_reference=True, **options)  # type: ignore[arg-type]
    assert handler_of(archive)["lora"] == {str(adapters / "calm" / "adapter"): 0.5, "/on/the/other/machine": 2}
    assert not (archive / "lora").exists()
    config.write_text("handler:\n    lora:\n    - /on/the/other/machine\n")  # left as it was written
    archive = build_archive(checkpoint, config=config, **options)  # type: ignore[arg-type]
    assert handler_of(archive)["lora"] == ["/on/the/other/machine"]


def test_what_is_no_adapter_is_not_packed(checkpoint: Path, adapters: Path, tmp_path: Path) -> None:
    config, folder = tmp_path / "c.yaml", adapters / "calm" / "adapter"
    config.write_text("handler:\n    lora: nowhere\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: lora 'nowhere' .* does not exist.*Name the adapter with --lora"):
        pack(checkpoint, tmp_path, config=config)
    with pytest.raises(ConfigError, match=r"^lora: .*nowhere does not exist"):
        pack(checkpoint, tmp_path, lora={"nowhere": 1.0})
    (folder / "adapter_model.safetensors").unlink()
    for by_reference in (False, True):
        with pytest.raises(ConfigError, match=r"adapter has no adapter_model\.safetensors or adapter_model\.bin"):
            pack(checkpoint, tmp_path, lora={str(folder): 1.0}, by_reference=by_reference)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json; name the folder"):
        pack(checkpoint, tmp_path, lora={str(checkpoint): 1.0})
    assert not (tmp_path / "store").exists()


@needs_archiver
def test_the_command_packs_an_adapter_that_the_checkpoint_takes(tmp_path: Path) -> None:
    data = ROOT / "tests" / "data"
    arguments = ["--checkpoint", data / "models" / "stories260K_hf", "--output", tmp_path]
    done = archive_command(*arguments, "--lora", f"{data / 'adapters' / 'stories260K_peft'}=0.5")
    assert done.returncode == 0, done.stderr
    archive = Path(done.stdout.strip())
    settings = read_settings(yaml.safe_load((archive / "model_config.yaml").read_text()), archive)
    assert settings.engine["lora"] == {str(archive / "lora" / "1"): 0.5}
    opened = Checkpoint.open(settings.checkpoint).with_adapters(settings.engine["lora"])
    assert [adapter.weight for adapter in opened.adapters] == [0.5]


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
def test_a_signal_while_it_tidies_up_leaves_no_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, signals = shutil.rmtree, iter([KeyboardInterrupt])

    def interrupted(path: Any, *rest: Any, **more: Any) -> None:
        for kind in signals:
            raise kind
        remove(path, *rest, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_archive(checkpoint, name="m", output=tmp_path / "store")
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["m"]


@needs_archiver
def test_another_command_may_write_the_same_archive_meanwhile(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = build_archive(checkpoint, name="m", output=tmp_path / "store")
    other, replace = shutil.copytree(ours, tmp_path / "other"), os.replace
    (other / "other.txt").touch()
    faster = {ours: lambda: shutil.rmtree(ours), None: lambda: shutil.copytree(other, ours)}

    def replace_later(source: Path, target: Path) -> None:
        if act := faster.pop(source if source == ours else None, None):
            act()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_later)
    assert build_archive(checkpoint, name="m", output=tmp_path / "store") == ours
    assert not faster
    assert (ours / "MAR-INF" / "MANIFEST.json").is_file()
    assert not (ours / "other.txt").exists()
    assert list((tmp_path / "store").iterdir()) == [ours]


@needs_archiver
@pytest.mark.parametrize("folder", ["a,b", "a [1]", "a*", "a=b ü;%20#?"])
def test_an_archive_may_lie_in_a_folder_of_any_name(checkpoint: Path, tmp_path: Path, folder: str) -> None:
    inside = names(build_archive(checkpoint, name="m", output=tmp_path / folder, archive_format="zip-store"))
    assert {"gpt_fast/llm.py", "handler.py", "checkpoint/config.json"} <= inside


@needs_archiver
def test_a_file_stands_for_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    path = build_archive(checkpoint / "model.safetensors", name="m", output=tmp_path / "store")
    config = yaml.safe_load((path / "model_config.yaml").read_text())
    assert config["handler"]["checkpoint"] == "checkpoint/model.safetensors"
    assert (path / "checkpoint" / "config.json").is_file()


@needs_archiver
def test_a_file_of_gpt_fast_comes_without_the_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("model.pth", "model_int8.pth", "tokenizer.model"):
        (checkpoint / name).touch()
    path = build_archive(checkpoint / "model_int8.pth", name="m", output=tmp_path / "store")
    assert handler_of(path)["checkpoint"] == "checkpoint/model_int8.pth"
    inside = {file.name for file in (path / "checkpoint").iterdir()}
    assert inside == {"config.json", "model_int8.pth", "tokenizer.model"}


# ---- which files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "belong"),
    [
        ("config.json generation_config.json tokenizer_config.json quantize_config.json params.json", True),
        ("model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json", True),
        ("pytorch_model.bin model.pth stories15M.bin ckpt.pt", True),
        ("tokenizer.json tokenizer.model tok512.model qwen.tiktoken vocab.json merges.txt added_tokens.json", True),
        ("chat_template.jinja chat_template.json special_tokens_map.json", True),
        ("LICENSE LICENSE.txt README.md NOTICE USE_POLICY.md", True),
        ("notes.txt secrets.json .env id_rsa modeling_x.py model.onnx events.out .gitattributes", False),
        ("optimizer.pt scheduler.pt rng_state.pth rng_state_0.pth training_args.bin consolidated.safetensors", False),
    ],
)
def test_what_a_checkpoint_has(names: str, belong: bool) -> None:
    for name in names.split():
        assert belongs(name) is belong, name


@needs_archiver
def test_what_was_left_out_is_said(checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    inside = pack(checkpoint, tmp_path, say=said.append)
    assert {path.name for path in inside.iterdir()} == {"config.json", "model.safetensors"}
    assert said == ["left out of checkpoint: .gitattributes, id_rsa, modeling.py, notes.txt, optimizer.pt, original/"]


@needs_archiver
@pytest.mark.parametrize("archive_format", ["no-archive", "zip-store"])
def test_a_link_out_of_the_checkpoint_is_followed_only_when_asked(
    checkpoint: Path, tmp_path: Path, archive_format: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x")
    (checkpoint / "notes.txt").unlink()
    (checkpoint / "notes.txt").symlink_to(secret)  # not a file that a checkpoint has: left out
    archive = build_archive(checkpoint, name="m", archive_format=archive_format, output=tmp_path / "store")
    assert "checkpoint/notes.txt" not in names(archive)
    (checkpoint / "README.md").symlink_to(secret)  # one that it has
    with pytest.raises(ConfigError, match=r"README\.md is a link out of its folder, to .*secret.*--follow-links"):
        build_archive(checkpoint, name="n", archive_format=archive_format, output=tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [archive.name]
    options = {"archive_format": archive_format, "output": tmp_path / "store", "follow_links": True}
    assert "checkpoint/README.md" in names(build_archive(checkpoint, name="n", **options))  # type: ignore[arg-type]


@needs_archiver
def test_links_inside_the_folder_and_those_of_the_hub_cache_are_followed(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "copy.safetensors").symlink_to("model.safetensors")
    inside = pack(snapshot, tmp_path)
    assert (inside / "config.json").read_text() == "config.json"
    assert (inside / "copy.safetensors").read_text() == "model.safetensors"
    assert not any(path.is_symlink() for path in inside.iterdir())
    # A file of the cache stands for its snapshot, not for the folder of blobs that it links to.
    inside = pack(snapshot / "model.safetensors", tmp_path)
    assert (inside / "config.json").read_text() == "config.json"


def test_links_within_a_folder_are_files_of_it(snapshot: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "1").write_text("{}")
    (folder / "model.safetensors").symlink_to(Path("weights", "1"))
    os.mkfifo(folder / "LICENSE")  # to read it would take for ever
    assert choose_files(folder) == ((folder / "model.safetensors",), ["LICENSE", "weights/"])
    other = snapshot.parent.rename(snapshot.parent.with_name("versions"))  # beside blobs, and not the Hub's cache
    with pytest.raises(ConfigError, match="link out of its folder"):
        choose_files(other / snapshot.name)


def test_the_hub_caches_layout_opens_no_way_out(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x")
    blob = snapshot.parent.parent / "blobs" / "33"
    blob.symlink_to(tmp_path / "secret")
    (snapshot / "README.md").symlink_to(blob)
    with pytest.raises(ConfigError, match="link out of its folder"):
        pack(snapshot, tmp_path)
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="which does not exist"):
        pack(snapshot, tmp_path, follow_links=True)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"folder is no checkpoint: it holds no config\.json"):
        pack(tmp_path / "folder", tmp_path)


@needs_archiver
def test_nobody_may_read_in_the_archive_what_he_may_not_read_outside(checkpoint: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (checkpoint / "config.json").chmod(0o644)
        (checkpoint / "model.safetensors").chmod(0o600)
        checkpoint.chmod(0o750)
        inside = pack(checkpoint, tmp_path)
        assert [mode(inside / name) for name in ("config.json", "model.safetensors")] == [0o644, 0o600]
        assert mode(inside) == 0o750
        mar = build_archive(checkpoint, name="m", archive_format="default", output=tmp_path / "store")
        assert mode(mar) == 0o600
        config = tmp_path / "private.yaml"
        config.write_text("minWorkers: 1\n")
        config.chmod(0o600)
        assert mode(pack(checkpoint, tmp_path, config=config).parent / "model_config.yaml") == 0o600
    finally:
        os.umask(before)


# ---- refusals -------------------------------------------------------------------------------------------------------


def archive_command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``gpt-fast archive`` as a process."""
    command = [sys.executable, "-m", "gpt_fast", "archive", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


@needs_archiver
@pytest.mark.parametrize("limit", [1000, 1_000_000], ids=["copying the package", "in torch-model-archiver"])
def test_a_disk_that_is_full_is_told_in_one_line(checkpoint: Path, tmp_path: Path, limit: int) -> None:
    """A process that may write no larger files fails at the same places, with another number."""
    (checkpoint / "model.safetensors").write_bytes(bytes(3_000_000))

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    store = tmp_path / "store"
    done = archive_command(
        "--checkpoint", checkpoint, "--format", "zip-store", "--output", store, cwd=ROOT, preexec_fn=restrict
    )
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not line.startswith("left out")]
    assert len(told) == 1, done.stderr
    assert told[0] == f"gpt-fast archive: {store / 'gpt-fast.mar'} cannot be written: File too large"
    assert not list(store.iterdir()), "half an archive was left behind"


def test_no_space_left_is_told_with_the_place(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")] * 50)

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(ConfigError) as refused:
        pack(checkpoint, tmp_path)
    assert str(refused.value) == f"{tmp_path / 'store' / 'm'} cannot be written: No space left on device"
    assert not list((tmp_path / "store").iterdir())


@needs_archiver
def test_a_package_that_is_read_only_and_ships_files_makes_an_archive_that_can_be_replaced(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As an installed one of root: handler and configuration lie inside it, and do not go into the archive twice."""
    package = tmp_path / "site" / "gpt_fast"
    shutil.copytree(ROOT / "gpt_fast", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("handler.py", "model_config.yaml"):
        shutil.copy(ROOT / name, package / "serve" / "shipped" / name)
    folders = [Path(folder) for folder, _, _ in os.walk(package)]
    for folder in folders:
        folder.chmod(0o555)
    try:
        options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}}
        done = archive_command("--checkpoint", checkpoint, **options)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    archive = Path(done.stdout.strip())
    assert {"handler.py", "model_config.yaml", "gpt_fast/llm.py"} <= names(archive)
    assert not [name for name in names(archive) if "shipped" in name]
    assert all(mode(Path(folder)) & stat.S_IWUSR for folder, _, _ in os.walk(archive))


@needs_archiver
def test_keys_of_the_handler_replace_those_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    keys = {"quantize": "int4", "draft": "lookup", "device_map": ["cuda:0", "cpu"], "kernels": False, "max_batch": 3}
    block = handler_of(build_archive(checkpoint, name="m", output=tmp_path, keys=keys))
    assert {key: block[key] for key in keys} == keys
    assert block["checkpoint"] == "checkpoint"
    with pytest.raises(ConfigError, match="max_batch"):
        build_archive(checkpoint, name="m", output=tmp_path / "none", keys={"max_batch": 0})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("minWorkers: 1\nbatchSize: -5\n", r"c\.yaml, line 2: batchSize .* from 1 to 65536, not -5"),
        ("handler:\n  max_batch: 0\n", r"c\.yaml, line 2: max_batch"),
        ("handler: {stream: true}\n", "one key a line"),
        ("", "is empty"),
    ],
)
def test_a_wrong_configuration_is_not_packed(checkpoint: Path, tmp_path: Path, config: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(config)
    with pytest.raises(ConfigError, match=says):
        pack(checkpoint, tmp_path, config=file)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint": "nowhere"}, "checkpoint: .*nowhere does not exist"),
        ({"config": "nowhere.yaml"}, r"config: nowhere\.yaml does not exist"),
        ({"name": "../x"}, "name: "),
        ({"version": ""}, "version: '' must be letters"),
        ({"version": "1/2"}, "version: '1/2' must be letters"),
        ({"archive_format": "rar"}, "format: 'rar' is not one of no-archive"),
    ],
)
def test_what_cannot_be_packed_is_refused(options: dict[str, str], says: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        build_archive(**{"checkpoint": checkpoint, "output": tmp_path / "never", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()


@needs_archiver
def test_the_script_is_the_same(checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "archive.sh", "--checkpoint", "my model", "--output", "s", "--by-reference"]
    command += ["--draft", "small ones/draft 1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "s" / "gpt-fast")
    assert handler_of(tmp_path / "s" / "gpt-fast")["draft"] == str(draft)
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
        ("handler:\n  checkpoint:\n    x: 1\n\n  a: 1\n", 'handler:\n  checkpoint: "c"\n\n  a: 1\n'),
        ("handler:\n  a:\n    checkpoint: x\n", 'handler:\n  checkpoint: "c"\n  a:\n    checkpoint: x\n'),
        ("handler:\n  checkpoint:\n  - x\n  - y\n  a: 1\n", 'handler:\n  checkpoint: "c"\n  a: 1\n'),
        ("minWorkers: 1\n", 'minWorkers: 1\nhandler:\n    checkpoint: "c"\n'),
        ("", 'handler:\n    checkpoint: "c"\n'),
    ],
)  # fmt: skip
def test_only_the_checkpoints_line_changes(before: str, after: str) -> None:
    assert set_key(before, "checkpoint", "c") == after
    assert yaml.safe_load(after)["handler"]["checkpoint"] == "c"


def test_an_alias_gives_way_to_its_key() -> None:
    before = "handler:\n  draft_checkpoint_path: x/model.pth\n  checkpoint: y\n"
    assert set_key(before, "draft", "draft") == 'handler:\n  draft: "draft"\n  checkpoint: y\n'


def test_any_path_survives_the_yaml() -> None:
    path = "/a b/#c: 'd' \"e\" \\ \\u00e9 é \u2028 \U0001f642 \x7f"
    found = yaml.safe_load(set_key("handler:\n", "checkpoint", path))["handler"]["checkpoint"]
    assert ascii(found) == ascii(path)  # in ASCII, so that halves of a character can be shown


@needs_archiver
def test_the_documented_command_of_the_archiver_works(tmp_path: Path) -> None:
    """In a copy of the repository: the archive has the package's name, and must not end up in the package."""
    (line,) = re.findall(r"^.*torch-model-archiver .*$", (ROOT / "docs/serving.md").read_text(encoding="utf-8"), re.M)
    shutil.copytree(ROOT / "gpt_fast", tmp_path / "gpt_fast", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("handler.py", "model_config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    before = names(tmp_path / "gpt_fast")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}  # where gpt_fast would be deleted
    subprocess.run(line, shell=True, cwd=tmp_path, env=environment, check=True, timeout=120)
    assert names(tmp_path / "gpt_fast") == before
    assert {"handler.py", "llm.py", "model_config.yaml"} <= names(tmp_path / "model_store" / "gpt_fast")
