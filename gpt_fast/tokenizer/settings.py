"""What tokenizer_config.json, special_tokens_map.json and added_tokens.json (of Hugging Face's transformers) say about
the vocabulary beside them. ``auto_map`` and anything else that names code is ignored."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt_fast.errors import TokenizerError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
# What the tokenizers library takes for white space: without four control characters that Python counts among it.
_WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")
MAX_IDS = 2**24  # far above every vocabulary; a table has a row for each id below the largest


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as a whole before the vocabulary's own splitting."""

    id: int
    content: str
    special: bool  # a control token: not text, never matched in a user's text
    lstrip: bool = False  # swallows the white space before it
    rstrip: bool = False
    single_word: bool = False  # only where no letter or digit touches it
    normalized: bool = False  # matched after the text's normalization


@dataclass(frozen=True)
class Settings:
    """The files' facts; None or empty where they are silent."""

    added: tuple[AddedToken, ...] = ()  # in the order of their ids
    unflagged: frozenset[int] = frozenset()  # ids of those whose file says no more of them; see ``beside``
    special_names: frozenset[str] = frozenset()  # every string that is named as a BOS, EOS, padding ... token
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    add_prefix_space: bool | None = None  # a text is taken to begin behind a space; byte-level vocabularies: if true
    legacy: bool | None = None
    tokenizer_class: str | None = None

    def beside(self, listed: Iterable[AddedToken]) -> tuple[AddedToken, ...]:
        """The added tokens of these files, without those that tokenizer.json has ``listed`` with flags and these
        without any."""
        known = self.unflagged & {token.id for token in listed}
        return tuple(token for token in self.added if token.id not in known)

    def prefix(self, bos: int | None, usual: tuple[int, ...]) -> tuple[int, ...]:
        """What goes in front of a text: the ``usual`` ids, unless the files say whether to add ``bos``."""
        if self.add_bos_token:
            return usual or (() if bos is None else (bos,))
        return usual if self.add_bos_token is None else ()


def read_settings(directory: Path) -> Settings:
    """Reads what is there of the three files. Raises TokenizerError if one is not what it should be."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    config, special, added = (read_json_object(directory / name) for name in names)
    return settings_of(config, special, added, directory)


def settings_of(
    config: Mapping[str, Any], special: Mapping[str, Any], extra: Mapping[str, Any], source: object
) -> Settings:
    """The facts in the objects ``config``, ``special`` and ``extra`` of the three files. Raises TokenizerError, naming
    ``source``."""
    names = {**special, **config}
    # added_tokens.json has no flags. What is added beyond a vocabulary is mostly markup of chats.
    bare = _added_tokens(lambda: [(id, {"content": name, "special": True}) for name, id in extra.items()], source)
    flagged = _added_tokens(lambda: [*config.get("added_tokens_decoder", {}).items()], source)
    added = {token.id: token for token in (*bare, *flagged)}
    strings = [token_text(names.get(name)) for name in _NAMED_TOKENS]
    further = names.get("additional_special_tokens") or []
    if not isinstance(further, list):
        raise TokenizerError(f"{source}: additional_special_tokens must be a list, not {further!r:.40}")
    strings += map(token_text, further)
    return Settings(
        added=tuple(added[id] for id in sorted(added)),
        unflagged=frozenset(added) - {token.id for token in flagged},
        special_names=frozenset(name for name in strings if name),
        bos_token=token_text(names.get("bos_token")),
        eos_token=token_text(names.get("eos_token")),
        add_bos_token=config.get("add_bos_token"),
        add_prefix_space=config.get("add_prefix_space"),
        legacy=config.get("legacy"),
        tokenizer_class=config.get("tokenizer_class"),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object, empty if there is no such file. Raises TokenizerError if it is not JSON or no object."""
    return parse_json_object(path.read_bytes(), path) if path.exists() else {}


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """The object in ``data``, the content of ``path``. Raises TokenizerError if it is not JSON or no object."""
    try:
        value = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a JSON {type(value).__name__} where an object is expected")
    return value


def read_added_tokens(spec: Mapping[str, Any], source: str) -> tuple[AddedToken, ...]:
    """The added tokens of a tokenizer.json object. Raises TokenizerError, naming ``source``, if malformed."""
    return _added_tokens(lambda: [(entry["id"], entry) for entry in spec.get("added_tokens") or ()], source)


def _added_tokens(entries: Callable[[], list[tuple[Any, Any]]], source: object) -> tuple[AddedToken, ...]:
    """In the order of their ids; of several with one id the last."""
    found: dict[int, AddedToken] = {}
    try:
        for id, entry in entries():
            if not 0 <= (number := int(id)) < MAX_IDS:
                raise ValueError(f"id {id!r:.40}")
            found[number] = AddedToken(number, str(entry["content"]), *(bool(entry.get(flag)) for flag in _FLAGS))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:  # the last for infinity
        raise TokenizerError(f"{source}: its added tokens are malformed: {error!r}") from error
    return tuple(found[id] for id in sorted(found))


def merge_added_tokens(
    *layers: Iterable[AddedToken], vocab: Mapping[str, int], special_names: frozenset[str]
) -> dict[int, AddedToken]:
    """The tokens of all layers, and those that ``special_names`` picks from ``vocab``, by id. The first layer's flags
    count; a token is special if one layer or its name says so."""
    named = [AddedToken(vocab[name], name, special=True) for name in sorted(special_names & vocab.keys())]
    tokens: dict[int, AddedToken] = {}
    for token in itertools.chain(*layers, named):
        first = tokens.setdefault(token.id, token)
        if token.special or first.content in special_names:
            tokens[token.id] = replace(first, special=True)
    return tokens


def token_text(token: Any) -> str | None:
    """The string of a token, which is written as that or as an object with the flags of an added token; or None."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


class AddedTokenSplitter:
    """Cuts added tokens out of a text, the longest first where several match, with their white-space flags."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = sorted(tokens, key=lambda token: -len(token.content))
        self._pattern = re.compile("|".join(map(_pattern, self._tokens))) if self._tokens else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text's parts in order: an id for each added token, a string, perhaps empty, for what is between."""
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            assert match.lastindex is not None  # every alternative is one group
            token, before = self._tokens[match.lastindex - 1], text[start : match.start()]
            yield before.rstrip(_WHITE_SPACE) if token.lstrip else before
            yield token.id
            start = match.end()
        yield text[start:]


def _pattern(token: AddedToken) -> str:
    content = re.escape(token.content)
    if token.single_word:
        content = rf"(?<!\w){content}(?!\w)"
    # White space before it is left to split(): looked for from here it would be read again at every place.
    return f"({content})" + (f"[{_WHITE_SPACE}]*" if token.rstrip else "")
