"""Perplexity of a text, and the log-likelihoods of the windows of tokens that it is made of, by the model's plain
``forward``, or by one step over a cache of some dtype, not the engine. Every token of a text is scored once, given at
least ``context - stride`` tokens before it or all there are; BOS is context and never scored."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt_fast.errors import ConfigError
from gpt_fast.kernels.cache import whole_sequences
from gpt_fast.model.split import current
from gpt_fast.model.steps import Served, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"  # between documents of a text file
_LOGITS_BYTES = 128 * 2**20  # of a batch of windows
_BATCH = 16  # windows
_PAGE = 16  # tokens


class Window(NamedTuple):
    """Tokens to run together, of which the last ``num_scored`` are scored."""

    tokens: list[int]
    num_scored: int


class LogLikelihood(NamedTuple):
    """Of the tokens that a window scores: their log-probability in nats, and whether greedy decoding gives them all."""

    log_prob: float
    is_greedy: bool


class Perplexity(NamedTuple):
    """``perplexity`` is per token, so it compares models of one vocabulary only; ``bits_per_byte`` compares any.
    ``num_tokens``, ``num_bytes``: of what is scored, so without a document's first token where there is no BOS."""

    perplexity: float
    mean_nll: float  # nats per token
    bits_per_byte: float
    num_tokens: int
    num_bytes: int
    num_documents: int


def documents(text: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of ``text``, without the separators and the white space around them."""
    return [piece.strip() for piece in text.split(separator) if piece.strip()] if separator else [text]


def windows(tokens: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``context`` tokens that score each of ``tokens`` once, except the first, which has none before
    it. Every window but the first scores ``stride`` new tokens."""
    begin, scored = 0, 1
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
    cache_dtype: torch.dtype | None = None,
) -> Perplexity:
    """Perplexity of ``text``, document by document, each after BOS where the tokenizer has one. ``context``: tokens of
    a window, at most and by default the model's own. ``stride``: tokens by which windows move on; by default half the
    context. ``max_tokens``: scored tokens, at most. ``cache_dtype``: see ``score``. Raises ConfigError."""
    context = checked_context(model, context)
    stride = stride or max(1, context // 2)
    if not 1 <= stride < context:
        raise ConfigError(f"stride: {stride} is not between 1 and context - 1 ({context - 1})")
    left = sys.maxsize if max_tokens is None else max_tokens
    pieces: list[Window] = []
    num_bytes = num_documents = 0
    for document in documents(text, separator):
        if left < 1:
            break
        tokens = tokenizer.encode(document)
        kept = tokens[: left + 1]
        text_of_all = document if kept == tokens else tokenizer.decode(kept)
        num_bytes += len(text_of_all.encode()) - len(tokenizer.decode(kept[:1]).encode())  # BOS has none
        left -= max(0, len(kept) - 1)
        num_documents += 1
        pieces += windows(kept, context, stride)
    num_tokens = sum(window.num_scored for window in pieces)
    if not num_tokens:
        raise ConfigError("perplexity: the text has no token to score")
    total = -sum(found.log_prob for found in score(model, pieces, cache_dtype))
    bits_per_byte = total / math.log(2) / max(1, num_bytes)
    nll = total / num_tokens
    return Perplexity(math.exp(nll), nll, bits_per_byte, num_tokens, num_bytes, num_documents)


def checked_context(model: Transformer | Served, context: int | None) -> int:
    """``context``, or the model's own if that is None. Raises ConfigError for one that the model has not."""
    context = context or model.config.max_seq_len
    if not 2 <= context <= model.config.max_seq_len:
        raise ConfigError(f"context: {context} is not between 2 and the model's {model.config.max_seq_len}")
    return context


@torch.inference_mode()
def score(
    model: Transformer | Served, pieces: Sequence[Window], cache_dtype: torch.dtype | None = None
) -> list[LogLikelihood]:
    """The log-likelihood of each window. Windows of similar length are run in one batch. ``cache_dtype``: keys and
    values are read back from a cache that holds them so; None: as ``model.forward`` has them."""
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i].tokens))
    # A shorter sequence in a batch would be computed with the longest one's frequencies.
    scaling = model.config.rope_scaling
    most = 1 if scaling is not None and scaling.grows else _BATCH
    found: dict[int, LogLikelihood] = {}
    while len(found) < len(order):
        longest = len(pieces[order[len(found)]].tokens)
        size = max(1, min(most, _LOGITS_BYTES // (4 * longest * model.config.vocab_size)))
        batch = order[len(found) : len(found) + size]
        tokens = [torch.tensor(pieces[index].tokens) for index in batch]
        with current(model.device):
            logits = _logits(model, pad_sequence(tokens, batch_first=True), cache_dtype)
        for index, row, sequence in zip(batch, logits, tokens, strict=True):
            start = len(sequence) - pieces[index].num_scored
            predictions, targets = row[start - 1 : len(sequence) - 1].float(), sequence[start:].to(model.device)
            log_probs = -F.cross_entropy(predictions, targets, reduction="none").cpu()
            is_greedy = bool((predictions.argmax(-1) == targets).all())
            found[index] = LogLikelihood(log_probs.double().sum().item(), is_greedy)
    return [found[index] for index in range(len(pieces))]


def _logits(model: Transformer | Served, tokens: Tensor, cache_dtype: torch.dtype | None) -> Tensor:
    """Of whole sequences [B, T] -> [B, T, vocab_size], as ``score`` wants them."""
    if cache_dtype is None:
        return model.forward(tokens.to(model.device))
    served = serve(model, kernels=False, compile=False)  # a model that is not served yet keeps its weights
    batch, length = tokens.shape
    positions, layout = whole_sequences(batch, length, _PAGE, served.device)
    pages = layout.page_table.numel()
    cache = [layer.allocate(batch, pages, _PAGE, cache_dtype, served.device) for layer in served.cache_layers]
    step = served.make_step(cache, layout.page_table)
    if step.reads_host():
        positions, layout = whole_sequences(batch, length, _PAGE, torch.device("cpu"))
        layout = layout._replace(page_table=layout.page_table.to(served.device))
    rows = torch.arange(tokens.numel(), device=served.device)
    lengths = torch.full_like(positions, length)
    return step(tokens.flatten().to(positions.device), positions, lengths, layout, rows).view(batch, length, -1)
