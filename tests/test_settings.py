"""The handler block of model_config.yaml: keys, types, aliases, and where a checkpoint is looked for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt_fast.config import EngineConfig
from gpt_fast.errors import ConfigError
from gpt_fast.serve.settings import KNOWN, check_file, read_settings

ROOT = Path(__file__).resolve().parent.parent
SPECULATIVE = Path("configs", "model_config_speculative.yaml")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An unpacked archive with a checkpoint in it."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").touch()
    return tmp_path


def read(archive: Path, **keys: Any) -> Any:
    return read_settings({"handler": keys}, archive)


EXAMPLE = sorted((ROOT / "tests" / "example_configs").glob("*.yaml"))
SHIPPED = [ROOT / "model_config.yaml", *sorted((ROOT / "configs").glob("model_config*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid_and_says_every_engine_key_it_has(path: Path, archive: Path) -> None:
    (archive / "draft").mkdir()
    config = yaml.safe_load(path.read_text())
    settings = read_settings(config, archive)
    assert settings.checkpoint == archive / "checkpoint"
    assert settings.warnings == ()
    assert settings.engine.keys() <= {f.name for f in dataclasses.fields(EngineConfig)}
    assert config["continuousBatching"] is True
    assert config["maxWorkers"] == 1
    # The handler must see the request that it has no room for, to refuse it in its own words.
    assert config["batchSize"] > settings.engine["max_batch"] + settings.engine["max_waiting"]


def test_the_configuration_for_drafts_differs_in_their_keys_alone(archive: Path) -> None:
    plain, own = (yaml.safe_load(path.read_text()) for path in (SHIPPED[0], ROOT / SPECULATIVE))
    changed = {key: own["handler"][key] for key in own["handler"] if own["handler"][key] != plain["handler"].get(key)}
    assert changed == {"draft": "draft", "speculate": "auto"}
    assert own["handler"].keys() == plain["handler"].keys()
    assert own == plain | {"handler": own["handler"]}
    (archive / "draft").mkdir()
    assert read_settings(own, archive).engine["draft"] == str(archive / "draft")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_configuration_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    commented = False  # keys in a row share the comment above the first
    for line in lines:
        if ":" in line and not line.lstrip().startswith("#"):
            assert commented, f"no comment above {line!r}"
        commented = line.lstrip().startswith("#") or (commented and bool(line.strip()))


@pytest.mark.parametrize("config", [None, {}, {"handler": None}, {"minWorkers": 1}])
def test_nothing_configured_is_fine(config: dict[str, Any] | None, archive: Path) -> None:
    settings = read_settings(config, archive)
    assert (settings.max_new_tokens, settings.stream, settings.engine) == (None, True, {})


def test_an_unknown_key_is_refused_with_the_known_ones(archive: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'max_new_token' .*did you mean 'max_new_tokens'") as caught:
        read(archive, max_new_token=5)
    for key in KNOWN:
        assert key in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"compile": "yes"},
        {"max_seq_len": "512"},
        {"stream": 1},
        {"max_new_tokens": 1.5},
        {"checkpoint": 5},
        {"dtype": 16},
        {"draft": False},
        {"draft_checkpoint_path": 7},
        {"speculate": 1},
        {"speculate_k": "4"},
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(keys: dict[str, Any], archive: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        read(archive, **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**9},
        {"max_body_bytes": 0},
        {"max_body_bytes": 2**40},
        {"dtype": "float8"},
        {"max_batch": 0},
        {"device": "tpu"},
        {"draft": ""},
        {"speculate": "sometimes"},
        {"speculate_k": 16},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(keys: dict[str, Any], archive: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        read(archive, **keys)


def test_our_key_outside_the_block_is_refused(archive: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile in model_config\.yaml belongs under 'handler:'"):
        read_settings({"compile": False}, archive)
    with pytest.raises(ConfigError, match="did you mean 'handler'"):
        read_settings({"handlers": {"compile": False}}, archive)
    with pytest.raises(ConfigError, match="must be a block of keys"):
        read_settings({"handler": "compile"}, archive)


@pytest.mark.parametrize("path", EXAMPLE, ids=lambda path: path.stem)
def test_the_files_of_torchserves_example_work(path: Path, archive: Path) -> None:
    config = check_file(path).config
    block = config["handler"]
    models = {key: archive / block[key] for key in ("converted_ckpt_dir", "draft_checkpoint_path") if key in block}
    for file in models.values():
        file.parent.mkdir(parents=True)
        file.touch()
    settings = read_settings(config, archive)
    assert settings.checkpoint == models["converted_ckpt_dir"]
    draft = {"draft": str(models["draft_checkpoint_path"])} if "draft_checkpoint_path" in models else {}
    assert settings.engine == {"compile": True, **draft}
    assert (settings.max_new_tokens, settings.stream) == (50, block.get("stream", True))
    assert settings.profile is block.get("profile", False)
    warned = ["fx_graph_cache in the handler block"] if "fx_graph_cache" in block else []
    assert [warning.partition(" of ")[0] for warning in settings.warnings] == warned


def test_a_file_that_was_never_made_names_the_folder_that_is_there(archive: Path) -> None:
    folder = archive / "checkpoints" / "Llama-2-7b"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    with pytest.raises(ConfigError, match=r"does not exist; tried .*Llama-2-7b exists: name that folder"):
        read(archive, converted_ckpt_dir="checkpoints/Llama-2-7b/model.pth")
    with pytest.raises(ConfigError, match=r"profile .* must be true or false"):
        read(archive, profile="x")


def test_an_alias_and_its_key_together_are_refused(archive: Path) -> None:
    with pytest.raises(ConfigError, match="converted_ckpt_dir and checkpoint"):
        read(archive, checkpoint="a", converted_ckpt_dir="b")
    with pytest.raises(ConfigError, match="draft_checkpoint_path and draft"):
        read(archive, draft="lookup", draft_checkpoint_path="b")


def test_where_a_draft_is_looked_for(archive: Path) -> None:
    assert read(archive, draft="lookup").engine == {"draft": "lookup"}
    for name in ("auto", "nowhere"):  # "auto" is a name for the checkpoint alone
        with pytest.raises(
            ConfigError, match=f"draft '{name}' in the handler block .* does not exist; tried .*{archive}"
        ):
            read(archive, draft=name)
    (archive / "small").mkdir()
    (archive / "small" / "pytorch_model.bin").touch()
    for name in ("small", "small/pytorch_model.bin"):
        assert read(archive, draft_checkpoint_path=name).engine == {"draft": str(archive / name)}


def test_where_a_checkpoint_is_looked_for(
    archive: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_in = tmp_path_factory.mktemp("started_in")
    (started_in / "elsewhere").mkdir()
    monkeypatch.setenv("PWD", str(started_in))
    assert read(archive, checkpoint=str(started_in)).checkpoint == started_in
    assert read(archive, checkpoint="elsewhere").checkpoint == started_in / "elsewhere"
    (archive / "elsewhere").mkdir()
    assert read(archive, checkpoint="elsewhere").checkpoint == archive / "elsewhere", "the archive comes first"
    with pytest.raises(ConfigError) as caught:
        read(archive, checkpoint="nowhere")
    assert str(archive / "nowhere") in str(caught.value)
    assert str(started_in / "nowhere") in str(caught.value)


def test_a_checkpoint_in_the_archives_root_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        read(tmp_path, checkpoint="auto")
    (tmp_path / "pytorch_model.bin").touch()
    assert read(tmp_path).checkpoint == tmp_path


def test_config_properties_is_for_this_machine_only() -> None:
    """Loopback addresses, no URL to load models from, no model API, and authorisation left on."""
    lines = (line.partition("=") for line in (ROOT / "config.properties").read_text().splitlines())
    properties = {key: value for key, _, value in lines if not key.startswith("#")}
    addresses = {key: value for key, value in properties.items() if key.endswith("address")}
    assert len(addresses) == 5
    assert all("127.0.0.1" in value for value in addresses.values())
    assert not re.fullmatch(properties["allowed_urls"], "file:///tmp/model.mar")
    assert properties["enable_model_api"] == "false"
    assert "disable_token_authorization" not in properties
