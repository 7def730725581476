"""SentencePiece vocabularies: Llama 1 and 2, CodeLlama, Mistral, OpenLLaMA, llama2.c.

Kudo and Richardson 2018 (https://arxiv.org/abs/1808.06226); https://github.com/google/sentencepiece.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from gpt_fast.errors import TokenizerError
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.settings import AddedToken, AddedTokenSplitter, Settings

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space within a piece
# Protocol buffers merge a repeated message field by field, so these bytes behind a model (ModelProto field 3,
# NormalizerSpec field 3, the number 0) are the same model with add_dummy_prefix switched off.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model plus the added tokens of the files beside it.

    Control and unknown pieces are special. ``prefix_every_segment`` says whether text that follows an added token
    gets the dummy-prefix space as the start of a text does. Meta's and Mistral's own code encode every message
    separately, so there it does; transformers' ``legacy: false`` says it does not."""

    def __init__(self, model: bytes, settings: Settings, *, source: str, prefix_every_segment: bool = True) -> None:
        """Raises TokenizerError, naming ``source``, if ``model`` is not a serialized SentencePiece model."""
        self._processor = _load(model, source)
        self._bare_processor = _load(model + _NO_DUMMY_PREFIX, source)
        self._prefix_every_segment = prefix_every_segment
        sp = self._processor
        base_size = sp.vocab_size()
        names: list[str] = sp.id_to_piece(list(range(base_size)))
        by_name = {name: id for id, name in enumerate(names)}
        added = _added_tokens(sp, names, by_name, settings, source)
        size = max([base_size, *(id + 1 for id in added)])
        pieces = [_piece_bytes(sp, id, name) for id, name in enumerate(names)] + [b""] * (size - base_size)
        for id, token in added.items():
            pieces[id] = token.content.encode()
        special = {id: token.content for id, token in added.items() if token.special}
        self._all_tokens = AddedTokenSplitter(added.values())
        self._text_tokens = AddedTokenSplitter(token for token in added.values() if not token.special)
        # A piece that the settings call special, but the model does not (Gemma's turns), would be found in any text.
        forgeable = [added[id].content for id in special if id < base_size and not _is_control(sp, id)]
        self._forgeable = _cut_pattern(forgeable)
        special |= {id: "" for id in range(base_size, size) if id not in added}  # ids that no file names
        bos = by_name.get(settings.bos_token or "", sp.bos_id())
        ids = by_name | {token.content: id for id, token in reversed(added.items())}
        eos = dict.fromkeys(id for id in (sp.eos_id(), ids.get(settings.eos_token or "", -1)) if id >= 0)
        add_bos = settings.add_bos_token if settings.add_bos_token is not None else bos >= 0
        super().__init__(
            pieces,
            special,
            bos_token_id=bos if bos >= 0 else None,
            eos_token_ids=tuple(eos),
            prefix_ids=(bos,) if add_bos and bos >= 0 else (),
            leading_spaces_dropped=_leading_spaces_dropped(sp),
        )

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        splitter = self._all_tokens if allow_special else self._text_tokens
        ids: list[int] = []
        start_of_text = True
        for part in splitter.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part, start_of_text or self._prefix_every_segment)
            start_of_text = False
        return ids

    def _encode_plain(self, text: str, dummy_prefix: bool) -> list[int]:
        first, *rest = self._forgeable.split(text) if self._forgeable else (text,)
        ids: list[int] = (self._processor if dummy_prefix else self._bare_processor).encode(first)
        for part in rest:
            ids += self._bare_processor.encode(part)
        return ids


def _load(model: bytes, source: str) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise TokenizerError(f"{source} is not a readable SentencePiece model; fetch the file again") from error


def _is_control(sp: Any, id: int) -> bool:
    return bool(sp.is_control(id) or sp.is_unknown(id))


def _piece_bytes(sp: Any, id: int, name: str) -> bytes:
    return bytes.fromhex(name[3:5]) if sp.is_byte(id) else name.replace(_SPACE, " ").encode()  # "<0xE4>"


def _added_tokens(
    sp: Any, names: list[str], by_name: dict[str, int], settings: Settings, source: str
) -> dict[int, AddedToken]:
    """Every token that is matched as a whole, by id: the model's control pieces and the settings' added tokens."""
    tokens = {id: AddedToken(id, name, special=True) for id, name in enumerate(names) if _is_control(sp, id)}
    for token in settings.added:
        if by_name.get(token.content, token.id) != token.id:
            ids = f"id {token.id} in the JSON files beside it, but {by_name[token.content]} in the model"
            raise TokenizerError(f"{source}: the added token {token.content!r} has {ids}; they do not belong together")
        special = token.special or token.id in tokens or token.content in settings.special_names
        tokens[token.id] = AddedToken(token.id, token.content, special, token.lstrip, token.rstrip, token.single_word)
    for name in settings.special_names & by_name.keys():
        tokens.setdefault(by_name[name], AddedToken(by_name[name], name, special=True))
    return tokens


def _cut_pattern(names: list[str]) -> re.Pattern[str] | None:
    # Splits behind a name's first character: the pieces on both sides spell the name without being it.
    cuts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names if len(name) > 1]
    return re.compile("|".join(cuts)) if cuts else None


def _leading_spaces_dropped(sp: Any) -> int:
    # The normalizer's flags are not in the library's interface, but its decoder obeys them: without a dummy prefix it
    # keeps all spaces, with one it drops the first, and where extra white space is removed it drops them all.
    space = sp.piece_to_id(_SPACE)
    if sp.is_unknown(space):
        return 0
    kept = len(sp.decode([space] * 3))
    return sys.maxsize if kept == 0 else 3 - kept
