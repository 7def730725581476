"""Log-likelihoods of texts and continuations, and completions, in batches: what evaluation tasks are made of. There are
the three questions of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) under
their names there, and files of examples: jsonl, in the forms of MosaicML's llm-foundry."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt_fast.errors import ConfigError
from gpt_fast.evaluate.perplexity import LogLikelihood, Window, checked_context, score, windows
from gpt_fast.llm import LLM
from gpt_fast.model.steps import Served, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.params import SamplingParams
from gpt_fast.text_files import read_text
from gpt_fast.tokenizer import Tokenizer

_MAX_NEW_TOKENS = 256  # of a completion whose request does not say


class Example(NamedTuple):
    """Texts of which ``gold`` is the right one, each a context and a continuation; a single one must be greedy."""

    texts: tuple[tuple[str, str], ...]
    gold: int


class Scorer:
    """Answers about ``model``. ``context``: tokens that a question may have; longer ones lose their beginning.
    ``cache_dtype``: of the keys and values; None: as the model has them."""

    def __init__(
        self,
        model: Transformer | Served,
        tokenizer: Tokenizer,
        context: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.tokenizer, self.cache_dtype = serve(model, compile=False), tokenizer, cache_dtype
        self.context = checked_context(model, context)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[LogLikelihood]:
        """Of each pair's second text after its first. White space between them belongs to the continuation, where
        tokenizers expect it."""
        return score(self.model, [self._window(*pair) for pair in pairs], self.cache_dtype)

    def _window(self, before: str, continuation: str) -> Window:
        tokens = self._encode(before + continuation)
        num_scored = max(1, len(tokens) - len(self._encode(before.rstrip())))
        tokens = tokens[-self.context :]
        return Window(tokens, min(num_scored, len(tokens) - 1))  # nothing predicts the first one

    def _encode(self, text: str) -> list[int]:
        """With something in front to predict the first token from: BOS, or as in the harness EOS."""
        tokens = self.tokenizer.encode(text)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_ids
        front = [bos] if bos is not None else list(eos[:1])
        return tokens if tokens[:1] == front else [*front, *tokens]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text, in windows that share one token, as the harness cuts them."""
        pieces = [list(windows(self._encode(text), self.context, self.context - 1)) for text in texts]
        found = iter(score(self.model, list(itertools.chain.from_iterable(pieces)), self.cache_dtype))
        return [math.fsum(next(found).log_prob for _ in of_text) for of_text in pieces]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Completions of prompts, each with ``until`` (texts that end it), ``max_gen_toks`` and ``temperature``. The
        engine runs them together; a prompt that leaves no room loses its beginning."""
        # A context that nobody chose may become shorter where memory is short.
        chosen = self.context if self.context < self.model.config.max_seq_len else None
        settings: dict[str, Any] = {"tokenizer": self.tokenizer, "compile": False, "max_seq_len": chosen}
        if self.cache_dtype is not None:
            settings["kv_cache_dtype"] = str(self.cache_dtype).removeprefix("torch.")
        with LLM.from_model(self.model, **settings) as llm:
            parts = []
            for prompt, wanted in requests:
                max_tokens = min(int(wanted.get("max_gen_toks", _MAX_NEW_TOKENS)), llm.max_seq_len - 1)
                temperature, stop = float(wanted.get("temperature", 0.0)), wanted.get("until") or ()
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop)
                parts.append((self._encode(prompt)[-(llm.max_seq_len - max_tokens) :], params))
            return ["".join(delta.text for delta in handle) for handle in llm.submit_all(parts)]

    def accuracy(self, examples: Sequence[Example]) -> dict[str, float | int]:
        """Share of examples answered right: by log-probability, and by log-probability per byte of the continuation."""
        found = iter(self.loglikelihood([text for example in examples for text in example.texts]))
        right = right_per_byte = 0
        for example in examples:
            answers = [next(found) for _ in example.texts]
            if len(answers) == 1 and not answers[0].is_greedy:
                continue
            sums = [answer.log_prob for answer in answers]
            means = [s / max(1, len(text[1].encode())) for s, text in zip(sums, example.texts, strict=True)]
            right += sums.index(max(sums)) == example.gold
            right_per_byte += means.index(max(means)) == example.gold
        n = len(examples)
        return {"accuracy": right / max(1, n), "accuracy_per_byte": right_per_byte / max(1, n), "num_examples": n}


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Lines of ``context`` and ``continuation``; of ``query``, ``choices`` and ``gold``; or of ``context_options``,
    ``continuation`` and ``gold``. Raises ConfigError naming the line."""
    out: list[Example] = []
    # Not splitlines: JSON may have U+2028 and its like inside a string.
    lines = enumerate(read_text(path).split("\n"), 1)
    for number, line in itertools.islice((pair for pair in lines if pair[1].strip()), limit):
        try:
            out.append(_example(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not an example that is understood: {error!r}") from None
    if not out:
        raise ConfigError(f"{path} holds no examples")
    return out


def _example(raw: Mapping[str, Any]) -> Example:
    """Raises KeyError, TypeError or ValueError for what is none."""
    if "choices" in raw:
        pairs, gold = [(raw["query"], choice) for choice in _listed(raw["choices"])], int(raw["gold"])
    elif "context_options" in raw:
        pairs, gold = [(o, raw["continuation"]) for o in _listed(raw["context_options"])], int(raw["gold"])
    else:
        pairs, gold = [(raw["context"], raw["continuation"])], 0
    if not 0 <= gold < len(pairs):
        raise ValueError(f"gold is {gold}, and the {len(pairs)} texts are counted from 0")
    return Example(tuple(_spaced(*pair) for pair in pairs), gold)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list of texts")
    return value


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
