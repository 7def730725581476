"""Quality of a model: perplexity of a text, log-likelihoods of continuations, evaluation harnesses."""

from gpt_fast.evaluate.perplexity import Perplexity, documents, perplexity
from gpt_fast.evaluate.scorer import Example, Scorer, evaluate_tasks, read_examples

__all__ = ["Example", "Perplexity", "Scorer", "documents", "evaluate_tasks", "perplexity", "read_examples"]
