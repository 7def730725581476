#!/usr/bin/env python3
"""Train the bundled demo pair: a small target, a draft of about a tenth of it, one SentencePiece vocabulary.

What it is: corpus, tokenizer, training loop, Hugging Face export and model card in one file, over
``Transformer.forward``. What it is not: a trainer for anything bigger; one CPU core is enough.

    python scripts/train_demo.py --text DIR_OR_FILES...                   # 90 minutes -> model_store/demo/
    python scripts/train_demo.py --text DIR_OR_FILES... --resume          # go on after an interruption
    python scripts/train_demo.py --text DIR_OR_FILES... --write-heldout F # only write the held-out stories

``--text`` takes text files of TinyStories (Eldan & Li 2023, arXiv 2305.07759), or folders of them. Stories are
separated by ``<|endoftext|>``, or else split by their openings ("Once upon a time ..."). Lower-cased files are
re-cased by what the cased ones do with the same words. About 3 % of the stories never reach the models.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import random
import re
import shlex
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.model.describing import describe
from gpt_fast.model.transformer import Transformer

SEPARATOR = "<|endoftext|>"
UNK, BOS, EOS = 0, 1, 2
IGNORE = -100  # F.cross_entropy's mark for positions without a loss
CONTEXT = 512  # tokens
VOCAB = 2048
PROMPTS = ("Once upon a time", "Lily and Tom went to the park", "The little dog was sad because")


# --- Corpus -----------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    train: list[str]
    heldout: list[str]
    num_duplicates: int  # stories left out because an earlier one has most of their words
    num_recased: int  # stories of ``train`` that came lower-cased


_PLAIN = {"[“”«»]": '"', "[‘’`]": "'", "[–—]": "-", "…": "..."}
# UTF-8 that was read as Windows-1252 on its way here; the lone pair is a closing quote that lost its third byte.
_MOJIBAKE = (("â€œ", '"'), ("â€™", "'"), ("â€˜", "'"), ("â€“", "-"), ("â€”", "-"), ("â€¦", "..."), ("â€", '"'))
# How a story begins: 90 % of the beginnings of stories with true separators, 2 % of their other paragraphs.
_OPENING = re.compile(
    r"once upon|once,? (?:there|a|in)\b|one (?:\w+ )?day,? (?:an?|there|two|three)\b|there (?:once )?(?:was|were|lived)"
    r"|long ago|\w+ and \w+ (?:are|were|liked?|loved?|lived?|had)\b"
    r"|\w+ (?:is|are|was|were|likes?|liked|loves?|loved|lived?|had) (?:an? (?!idea)|to |friends|twins|playing)",
    re.IGNORECASE,
)
_SINGLE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The ``.txt`` files of ``paths``, folders opened (a SOURCE.txt in them says where they come from: no story)."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.glob("*.txt") if p.name != "SOURCE.txt") if path.is_dir() else [path]
        if not inside:
            raise SystemExit(f"--text: no .txt file in {path}")
        files += inside
    return files


def normalise(text: str) -> str:
    """Plain quotes, dashes and spaces, so that the vocabulary is not spent on their variants; one break a paragraph."""
    for wrong, right in _MOJIBAKE:
        text = text.replace(wrong, right)
    for odd, plain in _PLAIN.items():
        text = re.sub(odd, plain, text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def split_stories(text: str) -> list[str]:
    """Raw text -> raw stories, the first and last of which may be cut by the ends of the file."""
    if SEPARATOR in text:
        return text.split(SEPARATOR)
    breaks = _SINGLE_BREAK.split(text)
    if sum(bool(_OPENING.match(part)) for part in breaks[1:]) * 2 > len(breaks):  # a single break parts stories
        starts = [bool(_OPENING.match(part)) or "\n\n" in part for part in breaks]
        pieces, glue = breaks, "\n"
    else:
        pieces, glue = text.split("\n\n"), "\n\n"
        starts = [bool(_OPENING.match(part)) for part in pieces]
    stories: list[str] = []
    for piece, start in zip(pieces, starts, strict=True):
        if start or not stories:
            stories.append(piece)
        else:
            stories[-1] += glue + piece
    return stories


def _position(before: str) -> str:
    """What stands before a word: the key under which :class:`Caser` counts."""
    if not before or before[-1] == "\n":
        return "start"
    if before[-1] in "\"'" and (len(before) == 1 or before[-2].isspace()):
        return "speech"
    tail = before.rstrip(" ")
    if tail != before and tail[-1:] in "\"'" and tail[-2:-1] in tuple(".!?"):
        return "after speech"
    return "sentence" if tail != before and tail[-1:] in tuple(".!?") else "inside"


class Caser:
    """Puts capitals back into lower-cased text: each word as cased text has it most often in the same position."""

    def __init__(self, cased: Iterable[str]) -> None:
        self.votes: Counter[tuple[str, str]] = Counter()  # capitals minus small letters
        for text in cased:
            for match in _WORD.finditer(text):
                key = _position(text[max(0, match.start() - 3) : match.start()]), match[0].lower()
                self.votes[key] += 1 if match[0][0].isupper() else -1

    def __call__(self, text: str) -> str:
        def recase(match: re.Match[str]) -> str:
            position = _position(text[max(0, match.start() - 3) : match.start()])
            vote = self.votes[position, match[0]]
            capital = vote > 0 if vote else position in ("start", "speech", "sentence")
            return match[0].capitalize() if capital else match[0]

        return _WORD.sub(recase, text)


def _shingles(story: str, width: int = 8) -> set[int]:
    words = re.findall(r"[a-z0-9]+", story.lower())
    return {zlib.crc32(" ".join(words[i : i + width]).encode()) for i in range(max(1, len(words) - width + 1))}


def is_heldout(story: str, per_mille: int = 30) -> bool:
    """Decided by the story's own text (SHA-256), so that it does not move when other stories come or go."""
    return int.from_bytes(hashlib.sha256(story.encode()).digest()[:4], "big") % 1000 < per_mille


def read_corpus(files: Sequence[Path], num_words: range = range(30, 800)) -> Corpus:
    """Stories of ``files``, each once (half of its 8-word runs unseen), split into train and held out.

    Stories outside ``num_words`` are fragments, or several whose bounds were not found. Held out are only stories that
    came cased and between separators: neither their text nor their bounds are guessed.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    lowered = [sum(map(str.isupper, text)) * 200 < len(text) for text in texts]
    parts = [[normalise(story) for story in split_stories(text)[1:-1]] for text in texts]
    caser = Caser(story for stories, lower in zip(parts, lowered, strict=True) if not lower for story in stories)
    corpus, seen, num_duplicates, num_recased = Corpus([], [], 0, 0), set[int](), 0, 0
    for i in sorted(range(len(files)), key=lambda i: lowered[i]):  # of two copies the cased one is kept
        for story in parts[i]:
            shingles = _shingles(story)
            if len(story.split()) not in num_words or story[-1] not in ".!?\"'":
                continue
            if len(shingles & seen) * 2 > len(shingles):
                num_duplicates += 1
                continue
            seen |= shingles
            if not lowered[i] and SEPARATOR in texts[i] and is_heldout(story):
                corpus.heldout.append(story)
            else:
                corpus.train.append(caser(story) if lowered[i] else story)
                num_recased += lowered[i]
    return corpus._replace(num_duplicates=num_duplicates, num_recased=num_recased)


def heldout_text(corpus: Corpus) -> str:
    """The held-out stories as one text, a separator line after each."""
    return "".join(f"{story}\n{SEPARATOR}\n" for story in corpus.heldout)


# --- Tokenizer and batches --------------------------------------------------------------------------------------------


def train_tokenizer(stories: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece model as Llama 2's: BPE, byte fallback, digits alone, identity normalisation, space in front."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(stories),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        required_chars="".join(map(chr, range(33, 127))),
        character_coverage=0.9998,
        max_sentence_length=1 << 20,  # bytes; a story is one "sentence", so that its paragraph breaks are seen
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def encode(tokenizer: sentencepiece.SentencePieceProcessor, stories: Iterable[str]) -> list[list[int]]:
    """Each story's tokens from BOS to EOS."""
    return [[BOS, *tokenizer.encode(story), EOS] for story in stories]


def pack(stories: Iterable[list[int]], row_len: int, num_open: int = 512) -> Iterator[list[int]]:
    """Whole stories, first fit, into rows of at most ``row_len`` tokens: every row begins as a prompt does, at BOS.

    Only a story longer than a row is cut. At most ``num_open`` rows are kept open; the fullest leaves first.
    """
    rows: list[list[int]] = []
    for story in stories:
        piece = story[:row_len]
        row = next((r for r in rows if len(r) + len(piece) <= row_len), None)
        if row is None:
            if len(rows) == num_open:
                yield rows.pop(max(range(num_open), key=lambda i: len(rows[i])))
            rows.append(list(piece))
        else:
            row.extend(piece)
    yield from rows


def to_tensors(rows: Sequence[list[int]], row_len: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens -> inputs and their next tokens, [B, row_len - 1] int64; padding is EOS in, IGNORE out."""
    tokens = torch.full((len(rows), row_len), EOS)
    targets = torch.full((len(rows), row_len), IGNORE)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = targets[i, : len(row)] = torch.tensor(row)
    return tokens[:, :-1], targets[:, 1:].contiguous()


def batches(stories: list[list[int]], batch_rows: int, row_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled epochs; the same seed gives the same batches, so a resumed run skips to its place."""
    for epoch in itertools.count():
        rng = random.Random(seed * 1000 + epoch)
        rows = list(pack(rng.sample(stories, len(stories)), row_len))
        rng.shuffle(rows)
        for i in range(0, len(rows) - batch_rows + 1, batch_rows):
            yield to_tensors(rows[i : i + batch_rows], row_len)


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How one model of the pair is made. ``distill``: weight of the target's distribution in the draft's loss."""

    name: str
    config: ModelConfig
    num_steps: int
    batch_rows: int
    lr: float = 6e-3  # of AdamW, at its peak
    muon_lr: float = 0.02
    weight_decay: float = 0.1
    warmup: int = 50  # steps
    decay: float = 0.4  # share of the steps, the last ones
    distill: float = 0.0
    eval_every: int = 250  # steps


def shape(dim: int, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, ffn_dim: int) -> ModelConfig:
    """A Llama with tied embeddings, for the pair's vocabulary and context."""
    return ModelConfig(
        "llama", VOCAB, dim, num_layers, num_heads, num_kv_heads, head_dim, ffn_dim, CONTEXT, tie_embeddings=True
    )


# Every matrix is a multiple of 32 wide, also when it is shared among four ranks.
TARGET = Recipe("target", shape(256, 4, 8, 4, 32, 640), num_steps=2200, batch_rows=6)
DRAFT = Recipe("draft", shape(96, 2, 4, 2, 32, 192), num_steps=3000, batch_rows=6, distill=0.9)


@dataclass
class Progress:
    """What an interrupted run needs to go on, and the card afterwards."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)  # step, held-out loss


def build(config: ModelConfig, seed: int) -> Transformer:
    """Normal weights, small enough that the first logits are near zero; what writes to the residual is scaled down."""
    torch.manual_seed(seed)
    model = Transformer(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.02 if name == "embed.tokens.weight" else 0.7 * weight.shape[1] ** -0.5
            residual = name.endswith(("wo.weight", "w2.weight"))
            torch.nn.init.normal_(weight, std=std / math.sqrt(2 * config.num_layers) if residual else std)
    return model


class Objective(torch.nn.Module):
    """Mean loss over next tokens: cross-entropy, mixed with that against the teacher's distribution (Hinton 2015)."""

    def __init__(self, model: Transformer, teacher: Transformer | None, distill: float) -> None:
        super().__init__()
        self.model, self.teacher, self.distill = model, teacher, distill

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits, flat = self.model(tokens).flatten(0, 1), targets.flatten()
        loss = F.cross_entropy(logits, flat, ignore_index=IGNORE)
        if self.teacher is None or not self.distill:
            return loss
        with torch.no_grad():
            soft = self.teacher(tokens).flatten(0, 1).softmax(-1)
        real = (flat != IGNORE).float()
        distance = -(soft * logits.log_softmax(-1)).sum(-1)
        apart: Tensor = (distance * real).sum() / real.sum()
        return (1 - self.distill) * loss + self.distill * apart


class Muon(torch.optim.Optimizer):
    """Momentum with nearly orthogonal updates, for hidden matrices (Jordan et al. 2024, kellerjordan.github.io).

    On this corpus it needs about half of AdamW's steps. ``torch.optim.Muon`` computes in bfloat16, which costs a CPU
    without such instructions twenty times the time of float32. ``sections``: rows of the matrices fused in a weight.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight by its gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                average = state.setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"])
                update = torch.cat([orthogonal(part) for part in update.split(group["sections"] or len(update))])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def orthogonal(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Singular values pushed to about 1 by Newton-Schulz steps, times sqrt(rows / columns) where that is above 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.T if tall else x) * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))


def optimizers_for(model: Transformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms; each group keeps its peak rate."""
    c = recipe.config
    sections = {"wqkv.weight": [c.q_dim, c.kv_dim, c.kv_dim], "w13.weight": [c.ffn_dim, c.ffn_dim]}
    blocks = {name: w for name, w in model.named_parameters() if w.dim() == 2 and name.startswith("layers.")}
    matrices = [{"params": [w], "sections": sections.get(".".join(n.split(".")[-2:]))} for n, w in blocks.items()]
    others = [w for name, w in model.named_parameters() if name not in blocks]
    out = [
        Muon(matrices, recipe.muon_lr, recipe.weight_decay),
        torch.optim.AdamW(others, recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for group in itertools.chain.from_iterable(o.param_groups for o in out):
        group["peak"] = group["lr"]
    return out


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate as a share of its peak: a linear warm-up, then constant, then linear down to zero.

    Until the decay begins nothing depends on ``num_steps``, so a resumed run may be made longer or shorter.
    """
    return min(1.0, (step + 1) / recipe.warmup, (recipe.num_steps - step) / (recipe.decay * recipe.num_steps))


@torch.no_grad()
def evaluate(model: Transformer, stories: list[list[int]], batch_rows: int = 8) -> float:
    """Held-out loss in nats per token, each story by itself from its BOS to its EOS (cut at the context)."""
    row_len = model.config.max_seq_len + 1
    rows = sorted((story[:row_len] for story in stories), key=len)
    total, count = 0.0, 0
    for i in range(0, len(rows), batch_rows):
        tokens, targets = to_tensors(rows[i : i + batch_rows], len(rows[min(i + batch_rows, len(rows)) - 1]))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        total, count = total + loss.item(), count + int((targets != IGNORE).sum())
    return total / max(1, count)


@torch.no_grad()
def agreement(target: Transformer, draft: Transformer, stories: list[list[int]]) -> tuple[float, float]:
    """How often the target would accept the draft's next token on held-out text: greedy, and at temperature 1."""
    same, overlap, count = 0.0, 0.0, 0
    for story in stories:
        tokens = torch.tensor([story[: target.config.max_seq_len]])
        p, q = target(tokens)[0], draft(tokens)[0]
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
        count += tokens.numel()
    return same / max(1, count), overlap / max(1, count)


@torch.no_grad()
def sample(
    model: Transformer,
    tokenizer: sentencepiece.SentencePieceProcessor,
    prompt: str,
    temperature: float,
    seed: int = 0,
    max_tokens: int = 300,
) -> str:
    """Prompt and continuation up to EOS; every token recomputes the whole sequence, which is good enough here."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [BOS, *tokenizer.encode(prompt)]
    while len(tokens) < min(max_tokens, model.config.max_seq_len):
        logits = model(torch.tensor([tokens]))[0, -1]
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == EOS:
            break
        tokens.append(token)
    text: str = tokenizer.decode(tokens)
    return text


@dataclass(frozen=True)
class Setting:
    """What both runs share."""

    tokenizer: sentencepiece.SentencePieceProcessor
    train: list[list[int]]
    heldout: list[list[int]]
    state_dir: Path
    seed: int = 0
    resume: bool = False
    compile: bool = True


def train(recipe: Recipe, setting: Setting, teacher: Transformer | None = None) -> tuple[Transformer, Progress]:
    """Train by ``recipe``; returns the model with the least held-out loss, in evaluation mode, and its history."""
    model = build(recipe.config, setting.seed)
    optimizers = optimizers_for(model, recipe)
    progress, best = Progress(), {k: v.clone() for k, v in model.state_dict().items()}
    state_file = setting.state_dir / f"{recipe.name}.pt"
    if setting.resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        check_same(recipe, state, state_file)
        model.load_state_dict(state["model"])
        for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        progress, best = Progress(**state["progress"]), state["best"]
    objective: Any = Objective(model, teacher, recipe.distill)
    if setting.compile:
        objective.compile()  # in place; evaluation and samples call the plain model
    row_len = recipe.config.max_seq_len + 1
    data = itertools.islice(batches(setting.train, recipe.batch_rows, row_len, setting.seed), progress.step, None)
    bar = tqdm(total=recipe.num_steps, initial=progress.step, desc=recipe.name, mininterval=10, unit="step")
    clock, smooth = time.monotonic(), math.nan
    while progress.step < recipe.num_steps:
        for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
            group["lr"] = group["peak"] * rate(recipe, progress.step)
        loss = objective(*next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.3f}", heldout=f"{progress.best_loss:.3f}", refresh=False)
        bar.update()
        if progress.step % recipe.eval_every and progress.step != recipe.num_steps:
            continue
        heldout = evaluate(model, setting.heldout)
        progress.history.append((progress.step, heldout))
        if heldout < progress.best_loss:
            progress.best_loss, progress.best_step = heldout, progress.step
            best = {k: v.clone() for k, v in model.state_dict().items()}
        bar.write(f"{recipe.name} step {progress.step}: loss {smooth:.3f}, held out {heldout:.4f}", file=sys.stderr)
        bar.write(sample(model, setting.tokenizer, PROMPTS[0], 0.8, progress.step, max_tokens=80), file=sys.stderr)
        progress.seconds += time.monotonic() - clock
        clock = time.monotonic()
        save_state(state_file, recipe, model, optimizers, progress, best)
    bar.close()
    model.load_state_dict(best)
    return model.eval().requires_grad_(False), progress


def check_same(recipe: Recipe, state: dict[str, Any], file: Path) -> None:
    """Raise SystemExit unless a run of ``recipe`` from the start would have passed through ``state``."""
    shortest = min(recipe.num_steps, state["num_steps"])
    longer = recipe.num_steps != state["num_steps"] and state["progress"]["step"] > shortest * (1 - recipe.decay)
    if longer or state["recipe"] != repr(replace(recipe, num_steps=0)):
        raise SystemExit(f"{file} is of another recipe; train again without --resume")


def save_state(
    file: Path,
    recipe: Recipe,
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
    best: dict[str, Tensor],
) -> None:
    """Replace ``file`` in one move, so that an interruption leaves the old or the new state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    identity = {"recipe": repr(replace(recipe, num_steps=0)), "num_steps": recipe.num_steps, "progress": vars(progress)}
    weights = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "best": best}
    torch.save(identity | weights, partial)
    partial.replace(file)


# --- Export -----------------------------------------------------------------------------------------------------------


TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "model_max_length": CONTEXT,
    "add_bos_token": True,
    "add_eos_token": False,
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "clean_up_tokenization_spaces": False,
    "legacy": False,
}


def export(model: Transformer, tokenizer_model: bytes, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``folder`` as Hugging Face's LlamaForCausalLM, and round the weights of ``model`` itself to ``dtype``."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    ends = {"bos_token_id": BOS, "eos_token_id": EOS}
    save_checkpoint(model, folder, dtype, ends)
    (folder / "tokenizer.model").write_bytes(tokenizer_model)
    for name, content in (("generation_config.json", ends), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


# --- Model card -------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """One trained model with the numbers of its exported (rounded) weights."""

    recipe: Recipe
    model: Transformer
    progress: Progress
    loss: float  # held out, nats per token


def results_table(results: Sequence[Result], heldout: list[list[int]], num_chars: int) -> str:
    """Markdown: a row for each model; ``num_chars`` counts the held-out text."""
    num_targets = sum(min(len(story), CONTEXT + 1) - 1 for story in heldout)
    columns = "model", "parameters", "layers", "dim", "heads (KV)", "FFN", "loss", "perplexity", "bits/char", "training"
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in results:
        c, p = r.recipe.config, r.progress
        tokens = r.recipe.num_steps * r.recipe.batch_rows * CONTEXT / 1e6
        bits = r.loss * num_targets / num_chars / math.log(2)
        lines.append(
            f"| {r.recipe.name} | {describe(c).num_parameters:,} | {c.num_layers} | {c.dim} "
            f"| {c.num_heads} ({c.num_kv_heads}) "
            f"| {c.ffn_dim} | {r.loss:.4f} | {math.exp(r.loss):.3f} | {bits:.3f} "
            f"| {r.recipe.num_steps} steps, {tokens:.1f} M tokens, {p.seconds / 60:.0f} min |"
        )
    return "\n".join(lines)


def samples(results: Sequence[Result], tokenizer: sentencepiece.SentencePieceProcessor) -> str:
    """Markdown: what each model writes after each prompt, greedy and sampled."""
    out = []
    for r in results:
        for prompt, temperature in itertools.product(PROMPTS, (0.0, 0.8)):
            how = f"temperature {temperature}, seed 0" if temperature else "greedy"
            text = sample(r.model, tokenizer, prompt, temperature)
            quoted = "\n>\n".join(f"> {paragraph}" for paragraph in text.split("\n"))
            out.append(f'**{r.recipe.name}, {how}**, prompt "{prompt}"\n\n{quoted}\n')
    return "\n".join(out)


def model_card(
    results: Sequence[Result], setting: Setting, corpus: Corpus, command: str, machine: str, rates: tuple[float, float]
) -> str:
    """The README.md of the pair; ``rates`` is what :func:`agreement` measured."""
    num_chars = sum(map(len, corpus.heldout))
    train_mb = sum(len(s.encode()) for s in corpus.train) / 1e6
    first = results[0].recipe
    recipes = "; ".join(
        f"{r.recipe.name} {r.recipe.num_steps} steps of {r.recipe.batch_rows} x {CONTEXT} tokens"
        + (f", {r.recipe.distill:.0%} of the loss against the target's distribution" if r.recipe.distill else "")
        for r in results
    )
    curves = "\n".join(
        f"{r.recipe.name} (kept: step {r.progress.best_step}): "
        + ", ".join(f"{step}: {loss:.3f}" for step, loss in r.progress.history)
        for r in results
    )
    return f"""# The demo pair

Two Llama models that share one SentencePiece vocabulary of {setting.tokenizer.vocab_size()} tokens, made by
`scripts/train_demo.py`: a target, and a draft of about a tenth of it for speculative decoding. They make the
quickstart and the tests real without a download. They write simple English children's stories and nothing else:
they know no facts, follow no instructions, mix up who did what, repeat themselves and lose the thread of longer
stories. Use them to see an engine work; do not give their stories to children unread.

## Results on held-out stories

Nats per token over {len(corpus.heldout)} stories ({sum(map(len, setting.heldout)):,} tokens), each by itself from its
beginning-of-sequence to its end-of-sequence token; the exported bfloat16 weights, computed in float32. The step whose
weights are kept was chosen by the same stories, so the figures are slightly kind. Times are wall time, evaluation and
whatever else the machine did included.

{results_table(results, setting.heldout, num_chars)}

Along the held-out text the draft's likeliest next token is the target's at {rates[0]:.1%} of the positions. At
temperature 1 the target would accept a token sampled from the draft with probability {rates[1]:.1%}.

## How they were made

```
{command}
```

`--text` is a folder of TinyStories text files (Eldan & Li 2023, arXiv 2305.07759; data set `roneneldan/TinyStories`,
licence CDLA-Sharing-1.0): excerpts of its training and validation parts, {len(corpus.train):,} distinct stories
({train_mb:.1f} MB, {sum(map(len, setting.train)):,} tokens) for training after {corpus.num_duplicates:,} duplicates
were dropped. {corpus.num_recased:,} of them came lower-cased and got their capitals from what the cased stories do
with the same words. The held-out stories are chosen by a hash of their text; `--write-heldout FILE` writes them.

Seed {setting.seed}, on {machine}: {recipes}.

Muon for the matrices of the blocks (peak learning rate {first.muon_lr}, weight decay {first.weight_decay}), AdamW for
the embedding and the norms ({first.lr}, betas 0.9 and 0.95); rates up in {first.warmup} steps and down to zero over the
last {first.decay:.0%}; gradients clipped to norm 1; float32; whole stories packed into rows.

Held-out loss by step:

```
{curves}
```

## Samples, verbatim

{samples(results, setting.tokenizer)}"""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files, or folders of them")
    parser.add_argument("--out", type=Path, default=Path("model_store/demo"), help="gets target/, draft/ and README.md")
    parser.add_argument("--write-heldout", type=Path, metavar="FILE", help="write the held-out stories and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    parser.add_argument("--state-dir", type=Path, default=Path(tempfile.gettempdir()) / "gpt_fast_train_demo")
    parser.add_argument("--target-steps", type=int, default=TARGET.num_steps)
    parser.add_argument("--draft-steps", type=int, default=DRAFT.num_steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads of torch; default: torch's own")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--machine", default="a CPU", help="what the model card says it was trained on")
    return parser.parse_args(argv)


def main(
    argv: Sequence[str] | None = None, target: Recipe = TARGET, draft: Recipe = DRAFT, vocab_size: int = VOCAB
) -> None:
    """Corpus, tokenizer, target, draft, card; the recipes are arguments for the tests' sake."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = read_corpus(find_files(args.text))
    if args.write_heldout:
        args.write_heldout.write_text(heldout_text(corpus), encoding="utf-8")
        return
    tokenizer_model = train_tokenizer(corpus.train, vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model)
    setting = Setting(
        tokenizer, encode(tokenizer, corpus.train), encode(tokenizer, corpus.heldout),
        args.state_dir, args.seed, args.resume, args.compile,
    )  # fmt: skip
    recipes = replace(target, num_steps=args.target_steps), replace(draft, num_steps=args.draft_steps)
    results: list[Result] = []
    for recipe in recipes:
        model, progress = train(recipe, setting, teacher=results[0].model if results else None)
        export(model, tokenizer_model, args.out / recipe.name)
        results.append(Result(recipe, model, progress, evaluate(model, setting.heldout)))
        print(f"{recipe.name}: held-out loss {results[-1].loss:.4f}, {progress.seconds / 60:.1f} min")
    rates = agreement(results[0].model, results[1].model, setting.heldout)
    command = "python scripts/train_demo.py " + shlex.join(a for a in (argv or sys.argv[1:]) if a != "--resume")
    card = model_card(results, setting, corpus, command, args.machine, rates)
    (args.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
