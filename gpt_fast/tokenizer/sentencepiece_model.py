"""SentencePiece vocabularies: Llama 1 and 2, CodeLlama, Mistral, OpenLLaMA, llama2.c. Kudo and Richardson 2018
(https://arxiv.org/abs/1808.06226); https://github.com/google/sentencepiece."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import TokenizerError
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.hf_json import MALFORMED, prefixes_every_segment
from gpt_fast.tokenizer.settings import AddedToken, AddedTokenSplitter, Settings, merge_added_tokens, read_added_tokens

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space within a piece
# Protocol buffers merge a repeated message field by field, so these bytes behind a model (ModelProto field 3,
# NormalizerSpec field 3, the number 0) are the same model with add_dummy_prefix switched off.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model plus the added tokens of the files beside it. Control and unknown pieces are special.

    ``converted``: the object of a tokenizer.json beside it, or empty. It says whether text behind an added token gets
    the dummy-prefix space as the start of a text does. Meta's and Mistral's own code encode every message separately,
    so without the file it does, unless transformers' ``legacy: false`` says that it does not. With ``add_prefix_space:
    false`` no text gets it, whatever the model says."""

    def __init__(self, model: bytes, settings: Settings, converted: Mapping[str, Any], *, source: str) -> None:
        """Raises TokenizerError, naming ``source``, if ``model`` is not a serialized SentencePiece model, or if the
        added tokens contradict it."""
        self._processor = sp = _load(model, source)
        self._bare_processor = _load(model + _NO_DUMMY_PREFIX, source)
        if settings.add_prefix_space is False:
            self._processor = self._bare_processor
        beside = f"the tokenizer.json beside {source}"
        try:
            every = prefixes_every_segment(converted) if converted else settings.legacy is not False
        except MALFORMED as error:
            raise TokenizerError(f"{beside}: its steps are malformed: {error!r}") from error
        self._prefix_every_segment = every
        names = _names(sp, source)
        vocab = {name: id for id, name in enumerate(names)}
        controls = {id: AddedToken(id, name, True) for id, name in enumerate(names) if _is_control(sp, id)}
        listed = read_added_tokens(converted, beside)
        declared = (*listed, *settings.beside(listed))
        layers = ({token.id: token for token in declared}.values(), controls.values())
        added = merge_added_tokens(*layers, vocab=vocab, special_names=settings.special_names)
        for id, token in added.items():
            if vocab.get(token.content, id) != id:
                ids = f"id {id} in the JSON files beside it, but {vocab[token.content]} in the model"
                why = f"the added token {token.content!r} has {ids}; they do not belong together"
                raise TokenizerError(f"{source}: {why}")
        special = {id: token.content for id, token in added.items() if token.special}
        self._all_tokens = AddedTokenSplitter(added.values())
        self._text_tokens = AddedTokenSplitter(token for token in added.values() if not token.special)
        # A piece that the settings call special, but the model does not (Gemma's turns), would be found in any text.
        self._forgeable = _cut_pattern([name for id, name in special.items() if id < len(names) and id not in controls])
        bos = vocab.get(settings.bos_token or "", sp.bos_id())
        ids_by_name = vocab | {token.content: id for id, token in reversed(added.items())}
        eos = dict.fromkeys((sp.eos_id(), ids_by_name.get(settings.eos_token or "", -1)))
        super().__init__(
            {id: _piece_bytes(sp, id, name) for id, name in enumerate(names)}
            | {id: token.content.replace(SPACE, " ").encode() for id, token in added.items()},
            special,
            bos_token_id=bos if bos >= 0 else None,
            eos_token_ids=tuple(id for id in eos if id >= 0),
            prefix_ids=settings.prefix(bos, (bos,)) if bos >= 0 else (),
            leading_spaces_dropped=_leading_spaces_dropped(self._processor),
        )

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._all_tokens if allow_special else self._text_tokens).split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            processor = self._processor if not ids or self._prefix_every_segment else self._bare_processor
            first, *rest = self._forgeable.split(part) if self._forgeable else (part,)
            ids += processor.encode(first)
            for piece in rest:
                ids += self._bare_processor.encode(piece)
        return ids


def _load(model: bytes, source: str) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter where a message of the former has a broken piece
        raise TokenizerError(f"{source} is not a readable SentencePiece model; fetch the file again") from error


def _names(sp: Any, source: str) -> list[str]:
    """The pieces by id."""
    try:
        return list(sp.id_to_piece(list(range(sp.vocab_size()))))
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{source} holds a piece that is no text ({error}); fetch the file again") from error


def _is_control(sp: Any, id: int) -> bool:
    return bool(sp.is_control(id) or sp.is_unknown(id))


def _piece_bytes(sp: Any, id: int, name: str) -> bytes:
    return bytes.fromhex(name[3:5]) if sp.is_byte(id) else name.replace(SPACE, " ").encode()  # "<0xE4>"


def _cut_pattern(names: list[str]) -> re.Pattern[str] | None:
    # Splits behind a name's first character: the pieces on both sides spell the name without being it.
    cuts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names if len(name) > 1]
    return re.compile("|".join(cuts)) if cuts else None


def _leading_spaces_dropped(sp: Any) -> int:
    # The normalizer's flags are not in the library's interface, but its decoder obeys them: without a dummy prefix it
    # keeps all spaces, with one it drops the first, and where extra white space is removed it drops them all.
    space = sp.piece_to_id(SPACE)
    if sp.is_unknown(space):
        return 0
    kept = len(sp.decode([space] * 3))
    return sys.maxsize if kept == 0 else 3 - kept
