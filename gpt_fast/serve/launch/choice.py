"""What is to be served: a model, perhaps a draft, and the configuration. Found first, then fetched and packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.checkpoint.download import find, find_local
from gpt_fast.config import DRAFTS
from gpt_fast.errors import ConfigError
from gpt_fast.serve.archive import build_archive
from gpt_fast.serve.model_yaml import NAME
from gpt_fast.serve.repository import DEMO, ROOT


class Choice(NamedTuple):
    """``checkpoint``, ``draft``: an absolute path, or a name of the Hub. ``config``: a model_config.yaml. ``keys``: of
    the handler block, in the place of those in ``config``."""

    checkpoint: str
    draft: str | None
    config: Path
    keys: Mapping[str, Any]

    def __str__(self) -> str:
        draft = [f"the draft model {self.draft}"] if self.draft else []
        return " and ".join(
            [f"{self.checkpoint} with {self.config}", *draft, *(f"{key} {value}" for key, value in self.keys.items())]
        )


def choose(checkpoint: str | None, speculative: bool, config: Path | None, keys: Mapping[str, Any]) -> Choice:
    """A choice of things that are there, or may be on the Hub. ``checkpoint``: None is the demo model. ``speculative``:
    the demo model with its draft. Raises ConfigError and DownloadError; fetches nothing yet."""
    drafter = keys.get("draft")
    draft = None if drafter in (None, *DRAFTS) else str(drafter)
    if speculative and (checkpoint or drafter):
        raise ConfigError("--speculative is for the demo models; for others give --checkpoint and --draft")
    if checkpoint is None and not DEMO.is_dir():
        raise ConfigError(
            f"the demo model is not at {DEMO}; name a model: --checkpoint, a folder or owner/name of the Hub"
        )
    config = config or ROOT / ("configs/model_config_speculative.yaml" if speculative else NAME)
    if not config.is_file():
        raise ConfigError(f"{config} {'is not a file' if config.exists() else 'does not exist'}")
    named = (checkpoint or str(DEMO / "target"), str(DEMO / "draft") if speculative else draft)
    checkpoint, draft = (name and str(find_local(name) or name) for name in named)
    assert checkpoint is not None
    rest = {key: value for key, value in keys.items() if draft is None or key != "draft"}
    if adapters := keys.get("lora"):
        rest["lora"] = {str(_folder(adapter)): weight for adapter, weight in adapters.items()}
    return Choice(checkpoint, draft, config.absolute(), rest)


def _folder(adapter: str) -> Path:
    """The absolute path: the worker starts in another folder. Raises ConfigError."""
    folder = Path(adapter).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"lora: {folder} is not a folder")
    return folder


def fetch(choice: Choice) -> Choice:
    """``choice`` with its models on this machine: those of the Hub are fetched. Raises DownloadError."""
    draft = choice.draft and str(find(choice.draft))
    return choice._replace(checkpoint=str(find(choice.checkpoint)), draft=draft)


def pack(choice: Choice, name: str, store: Path, startup_s: int) -> None:
    """The archive ``name`` in the folder ``store``: handler, package and configuration. The models, which are fetched,
    stay where they are. ``startup_s``: the seconds to load that the configuration must give, at least. Raises
    ConfigError."""
    build_archive(
        choice.checkpoint,
        draft=choice.draft,
        name=name,
        config=choice.config,
        keys=choice.keys,
        output=store,
        by_reference=True,
        startup_s=startup_s,
    )
