"""EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) over a ``Scorer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpt_fast.errors import ConfigError
from gpt_fast.evaluate.scorer import Scorer


def harness_model(scorer: Scorer) -> Any:
    """``scorer`` as the harness' own ``LM``, for ``lm_eval.simple_evaluate(model=...)``. Raises ConfigError when
    lm_eval is not installed."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ConfigError("tasks need lm-evaluation-harness: pip install 'gpt-fast-serve[eval]'") from None

    class Adapter(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [(s.log_prob, s.is_greedy) for s in scorer.loglikelihood([r.args for r in requests])]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return scorer.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate_until([request.args for request in requests])

    return Adapter()


def evaluate_tasks(scorer: Scorer, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Metrics of each task: names of the harness, or paths of its YAML files, which may name local jsonl data. Raises
    ConfigError when lm_eval is not installed."""
    model = harness_model(scorer)
    import lm_eval

    results: dict[str, Any] = lm_eval.simple_evaluate(model=model, tasks=list(tasks), limit=limit)["results"]
    return results
