"""The model that guesses tokens for another one: which checkpoint it is, and whether their vocabularies are one."""

from __future__ import annotations

from typing import NamedTuple

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import DRAFTS, EngineConfig
from gpt_fast.errors import CheckpointError, ConfigError, TokenizerMissing
from gpt_fast.foreign.checkpoint import ForeignCheckpoint
from gpt_fast.tokenizer import Tokenizer


class Draft(NamedTuple):
    """A checkpoint, and the mode that its weights are rounded to while loading."""

    checkpoint: Checkpoint
    quantize: str | None


def open_draft(
    target: Checkpoint | ForeignCheckpoint, tokenizer: Tokenizer | None, options: EngineConfig
) -> Draft | None:
    """The draft model that ``options`` ask for beside ``target``; None for none, and for ``lookup``.

    Raises ConfigError for one that cannot draft for this target, CheckpointError for one that cannot be read.
    """
    if options.drafter in (None, "lookup"):
        return None
    if options.drafter in DRAFTS:
        if not target.format.has_values or options.quantize == options.drafter:
            raise ConfigError(f"draft: {options.drafter} is the target in fewer bits, but the target is quantized too")
        assert isinstance(target, Checkpoint)  # ForeignCheckpoint.check has refused the others
        return Draft(target, options.drafter)
    try:
        draft = Checkpoint.open(options.drafter)
    except CheckpointError as error:
        raise CheckpointError(f"draft: {error}") from None
    _check_vocabulary(target, tokenizer, draft)
    return Draft(draft, None)


def _check_vocabulary(target: Checkpoint | ForeignCheckpoint, tokenizer: Tokenizer | None, draft: Checkpoint) -> None:
    """Raise ConfigError unless both models mean the same by every token id. Their ends may be filled up differently."""
    where = f"draft: {draft.directory} has another vocabulary than {target.directory}"
    try:
        other: Tokenizer | None = draft.tokenizer
    except TokenizerMissing:
        other = None
    if tokenizer is None or other is None:
        if draft.config.vocab_size != target.config.vocab_size:
            sizes = f"{draft.config.vocab_size} tokens, not {target.config.vocab_size}"
            lacking = draft if other is None else target
            todo = f"If that is only how embeddings are filled up, put the tokenizer's files into {lacking.directory}"
            raise ConfigError(f"{where}: {sizes}. {todo}")
        return
    if tokenizer.vocab_size != other.vocab_size:
        raise ConfigError(f"{where}: {other.vocab_size} tokens, not {tokenizer.vocab_size}")
    for i in range(tokenizer.vocab_size):
        ours, theirs = (t.token_bytes(i, skip_special=False) for t in (tokenizer, other))
        if ours != theirs:
            raise ConfigError(f"{where}: token {i} is {theirs!r} there and {ours!r} here")
