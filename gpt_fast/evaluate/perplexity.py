"""Perplexity of a text, and the scores of windows of tokens that it is made of.

It uses the model's plain ``forward`` over whole windows, not the engine. Every token of a text is scored once, given at
least ``context - stride`` tokens before it or all there are; BOS is context and never scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.errors import ConfigError
from gpt_fast.model.steps import Served
from gpt_fast.model.transformer import Transformer
from gpt_fast.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"  # between documents of a text file
_LOGITS_BYTES = 128 * 2**20  # of a batch of windows
_BATCH = 16  # windows


class Window(NamedTuple):
    """Tokens to run together, of which the last ``num_scored`` are scored."""

    tokens: list[int]
    num_scored: int


class Scores(NamedTuple):
    """Of one window: for each scored token its log-probability, float32, and whether greedy decoding gives it."""

    log_probs: Tensor
    is_greedy: Tensor


@dataclass(frozen=True)
class Perplexity:
    """``perplexity`` is per token, so it compares models of one vocabulary only; ``bits_per_byte`` compares any."""

    perplexity: float
    mean_nll: float  # nats per token
    bits_per_byte: float
    num_tokens: int
    num_bytes: int
    num_documents: int


def documents(text: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of ``text``, without the separators and the white space around them."""
    return [piece.strip() for piece in text.split(separator) if piece.strip()] if separator else [text]


def windows(tokens: Sequence[int], context: int, stride: int, first: int = 1) -> Iterator[Window]:
    """Cover ``tokens`` from index ``first`` on by windows of at most ``context`` tokens that score each token once.
    Every window but the first scores ``stride`` new tokens. ``first`` >= 1: the token before it is needed."""
    begin, scored = 0, first
    while scored < len(tokens):
        end = min(begin + context, len(tokens))
        yield Window(list(tokens[begin:end]), end - scored)
        scored = end
        begin = max(0, min(end + stride, len(tokens)) - context)


def perplexity(
    model: Transformer | Served,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    separator: str = SEPARATOR,
) -> Perplexity:
    """Perplexity of ``text``, document by document, each after BOS where the tokenizer has one. ``context``: tokens of
    a window, at most and by default the model's own. ``stride``: tokens by which windows move on; by default half the
    context. ``max_tokens``: stop after so many scored tokens. Raises ConfigError."""
    context = context or model.config.max_seq_len
    stride = stride or max(1, context // 2)
    if not 2 <= context <= model.config.max_seq_len:
        raise ConfigError(f"context: {context} is not between 2 and the model's {model.config.max_seq_len}")
    if not 1 <= stride < context:
        raise ConfigError(f"stride: {stride} is not between 1 and context - 1 ({context - 1})")
    left = math.inf if max_tokens is None else max_tokens
    pieces: list[Window] = []
    num_bytes, num_documents = 0, 0
    for document in documents(text, separator):
        if left < 1:
            break
        tokens = tokenizer.encode(document)
        if len(tokens) - 1 > left:
            tokens = tokens[: int(left) + 1]
            num_bytes += len(tokenizer.decode(tokens).encode())
        else:
            num_bytes += len(document.encode())
        left -= max(0, len(tokens) - 1)
        num_documents += 1
        pieces += windows(tokens, context, stride)
    num_tokens = sum(window.num_scored for window in pieces)
    if not num_tokens:
        raise ConfigError("perplexity: the text has no token to score")
    total = sum(scores.log_probs.double().sum().item() for _, scores in score(model, pieces))
    nll = -total / num_tokens
    bits_per_byte = -total / math.log(2) / max(1, num_bytes)
    return Perplexity(math.exp(nll), nll, bits_per_byte, num_tokens, num_bytes, num_documents)


@torch.inference_mode()
def score(model: Transformer | Served, pieces: Iterable[Window]) -> Iterator[tuple[int, Scores]]:
    """Index and scores of every window, those of similar length in one batch, so not in their order."""
    pieces = list(pieces)
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i].tokens))
    device = model.device
    # A shorter sequence in a batch would be computed with the longest one's frequencies.
    scaling = model.config.rope_scaling
    alone = scaling is not None and scaling.grows
    at = 0
    while at < len(order):
        longest = len(pieces[order[at]].tokens)
        size = max(1, min(_BATCH, _LOGITS_BYTES // (4 * longest * model.config.vocab_size)))
        batch = order[at : at + (1 if alone else size)]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, index in enumerate(batch):
            tokens[row, : len(pieces[index].tokens)] = torch.tensor(pieces[index].tokens)
        logits = model.forward(tokens.to(device))
        for row, index in enumerate(batch):
            end, start = len(pieces[index].tokens), len(pieces[index].tokens) - pieces[index].num_scored
            rows = logits[row, start - 1 : end - 1].float()
            targets = torch.tensor(pieces[index].tokens[start:], device=device)
            log_probs = -F.cross_entropy(rows, targets, reduction="none")
            yield index, Scores(log_probs.cpu(), (rows.argmax(-1) == targets).cpu())
        at += len(batch)
