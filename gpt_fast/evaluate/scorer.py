"""Log-likelihoods of texts and continuations, and completions, in batches: what evaluation tasks are made of.

``Scorer`` has the three questions of EleutherAI's lm-evaluation-harness under their names there
(https://github.com/EleutherAI/lm-evaluation-harness), and answers files of examples by itself: jsonl, in the forms of
MosaicML's llm-foundry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.errors import ConfigError
from gpt_fast.evaluate.perplexity import Window, score, windows
from gpt_fast.llm import LLM
from gpt_fast.model.steps import Served, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import Tokenizer

_MAX_NEW_TOKENS = 256  # of a completion whose request does not say


class LogLikelihood(NamedTuple):
    """Of a continuation: its log-probability in nats, and whether greedy decoding gives exactly it."""

    log_prob: float
    is_greedy: bool


@dataclass(frozen=True)
class Example:
    """Texts of which ``gold`` is the right one, each a context and a continuation; a single one must be greedy."""

    texts: tuple[tuple[str, str], ...]
    gold: int


class Scorer:
    """Answers about ``model``. ``context``: tokens that a question may have; longer ones lose their beginning."""

    def __init__(self, model: Transformer | Served, tokenizer: Tokenizer, context: int | None = None) -> None:
        self.model, self.tokenizer = serve(model, compile=False), tokenizer
        self.context = context or model.config.max_seq_len
        if not 2 <= self.context <= model.config.max_seq_len:
            raise ConfigError(f"context: {self.context} is not between 2 and the model's {model.config.max_seq_len}")

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[LogLikelihood]:
        """Of each pair's second text after its first. White space between them belongs to the continuation, where
        tokenizers expect it."""
        out = [LogLikelihood(0.0, True)] * len(pairs)
        for index, scores in score(self.model, [self._window(*pair) for pair in pairs]):
            out[index] = LogLikelihood(scores.log_probs.double().sum().item(), bool(scores.is_greedy.all()))
        return out

    def _window(self, before: str, continuation: str) -> Window:
        stripped = before.rstrip()
        start = self._encode(stripped)
        tokens = self._encode(before + continuation)
        num_scored = max(1, len(tokens) - len(start))
        return Window(tokens[-self.context :], min(num_scored, self.context - 1))

    def _encode(self, text: str) -> list[int]:
        """With something in front to predict the first token from: BOS, or as in the harness EOS."""
        tokens = self.tokenizer.encode(text)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_ids
        front = [bos] if bos is not None else list(eos[:1])
        return tokens if tokens[:1] == front else [*front, *tokens]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text, in windows that share one token, as the harness cuts them."""
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            for window in windows(self._encode(text), self.context, self.context - 1):
                pieces.append(window)
                owners.append(owner)
        out = [0.0] * len(texts)
        for index, scores in score(self.model, pieces):
            out[owners[index]] += scores.log_probs.double().sum().item()
        return out

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Completions of prompts, each with ``until`` (texts that end it), ``max_gen_toks`` and ``temperature``. The
        engine runs them together; a prompt that leaves no room loses its beginning."""
        # A context that nobody chose may become shorter where memory is short.
        chosen = self.context if self.context < self.model.config.max_seq_len else None
        with LLM.from_model(self.model, tokenizer=self.tokenizer, compile=False, max_seq_len=chosen) as llm:
            handles = []
            for prompt, settings in requests:
                until = settings.get("until") or ()
                max_tokens = min(int(settings.get("max_gen_toks", _MAX_NEW_TOKENS)), llm.max_seq_len - 1)
                params = SamplingParams(
                    max_tokens=max_tokens,
                    temperature=float(settings.get("temperature", 0.0)),
                    stop=(until,) if isinstance(until, str) else tuple(until),
                )
                handles.append(llm.submit(self._encode(prompt)[-(llm.max_seq_len - max_tokens) :], params))
            return ["".join(delta.text for delta in handle) for handle in handles]

    def accuracy(self, examples: Sequence[Example]) -> dict[str, float | int]:
        """Share of examples answered right: by log-probability, and by log-probability per byte of the continuation."""
        found = iter(self.loglikelihood([text for example in examples for text in example.texts]))
        right = right_per_byte = 0
        for example in examples:
            answers = [next(found) for _ in example.texts]
            sums = [answer.log_prob for answer in answers]
            means = [s / max(1, len(text[1].encode())) for s, text in zip(sums, example.texts, strict=True)]
            alone = answers[0].is_greedy if len(answers) == 1 else True
            right += alone and sums.index(max(sums)) == example.gold
            right_per_byte += alone and means.index(max(means)) == example.gold
        count = max(1, len(examples))
        shares = {"accuracy": right / count, "accuracy_per_byte": right_per_byte / count}
        return {**shares, "num_examples": len(examples)}


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Lines of ``context`` and ``continuation``; of ``query``, ``choices`` and ``gold``; or of ``context_options``,
    ``continuation`` and ``gold``. Raises ConfigError naming the line."""
    out: list[Example] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if limit is not None and len(out) == limit:
            break
        if line.strip():
            try:
                out.append(_example(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{number}: not an example that is understood: {error!r}") from None
    return out


def _example(raw: Mapping[str, Any]) -> Example:
    if "choices" in raw:
        return Example(tuple(_spaced(raw["query"], choice) for choice in raw["choices"]), int(raw["gold"]))
    if "context_options" in raw:
        return Example(tuple(_spaced(o, raw["continuation"]) for o in raw["context_options"]), int(raw["gold"]))
    return Example((_spaced(raw["context"], raw["continuation"]),), 0)


def _spaced(before: str, continuation: str) -> tuple[str, str]:
    """With a space between, unless there is white space already."""
    apart = not before or before[-1].isspace() or continuation[:1].isspace()
    return before, continuation if apart else " " + continuation


def evaluate_tasks(scorer: Scorer, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Metrics of each task of lm-evaluation-harness: names, or paths of its YAML files, which may name local jsonl
    data. Raises ConfigError when lm_eval is not installed."""
    try:
        import lm_eval
        from lm_eval.api.model import LM
    except ImportError:
        raise ConfigError("tasks need lm-evaluation-harness: pip install 'gpt-fast-serve[eval]'") from None

    class Adapter(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[LogLikelihood]:
            return scorer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return scorer.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate_until([request.args for request in requests])

    return dict(lm_eval.simple_evaluate(model=Adapter(), tasks=list(tasks), limit=limit)["results"])
