"""lm-evaluation-harness: against the server by completions and by chat, and in process; all find the same."""

from __future__ import annotations

import json
from typing import Any

import lm_eval
import pytest
import torch
from conftest import CHECKPOINT
from lm_eval.tasks import TaskManager

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.evaluate import Scorer, evaluate_tasks
from gpt_fast.placement import pick_dtype

LINES: list[dict[str, Any]] = [
    {"start": "Once upon a time, there was a little", "ends": [" girl", " zebra", " engine"], "right": 0},
    {"start": "The cat said", "ends": [" of", " hello to"], "right": 1},
    {"start": "Tom was very happy. He", "ends": [" smiled", " the"], "right": 0},
    {"start": "They played in the", "ends": [" am", " park"], "right": 1},
]
CHOICES = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: ends
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WRITING = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{ends[right]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The YAML files of two tasks over local lines."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    files = {}
    for name, form in {"choices": CHOICES, "writing": WRITING}.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(form.format(name=name, data=data))
    return {name: str(path) for name, path in files.items()}


def evaluated(model: str, arguments: dict[str, Any], task: str, **more: Any) -> dict[str, Any]:
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=manager, bootstrap_iters=0, **more
    )
    assert found is not None
    return found


def accuracy(found: dict[str, Any]) -> float:
    return float(found["choices"]["acc,none"])


def test_the_server_scores_as_the_process_does(base_url: str, tasks: dict[str, str]) -> None:
    arguments = {"model": "gpt-fast", "base_url": f"{base_url}/completions", "tokenizer_backend": "huggingface"}
    arguments |= {"tokenizer": str(CHECKPOINT), "add_bos_token": True}  # as the scorer here does
    served = evaluated("local-completions", arguments, tasks["choices"])
    opened = Checkpoint.open(CHECKPOINT)
    dtype = pick_dtype("auto", torch.device("cpu"), num_parameters=1)  # as the server does
    scorer = Scorer(opened.build(dtype), opened.tokenizer)
    assert accuracy(served["results"]) == accuracy(evaluate_tasks(scorer, [tasks["choices"]])) == 1.0
    for line, sample in zip(LINES, served["samples"]["choices"], strict=True):
        found = scorer.loglikelihood([(line["start"], end) for end in line["ends"]])
        assert [each.log_prob for each in found] == pytest.approx([resp[0][0] for resp in sample["resps"]], abs=1e-2)


def test_the_server_s_own_vocabulary_will_do(base_url: str, tasks: dict[str, str]) -> None:
    """By tokenizer_info and tokenize. The harness puts no token in front of such prompts, so scores are others."""
    arguments = {"model": "gpt-fast", "base_url": f"{base_url}/completions"}  # it finds out by itself
    assert accuracy(evaluated("local-completions", arguments, tasks["choices"])["results"]) > 0.5


def test_completions_and_chats_are_generated(base_url: str, tasks: dict[str, str]) -> None:
    arguments = {"model": "gpt-fast", "base_url": f"{base_url}/completions", "tokenizer_backend": "remote"}
    texts = evaluated("local-completions", arguments, tasks["writing"])["samples"]["writing"]
    assert all(sample["resps"][0][0] for sample in texts)
    arguments = {"model": "gpt-fast", "base_url": f"{base_url}/chat/completions"}
    chats = evaluated("local-chat-completions", arguments, tasks["writing"], apply_chat_template=True)
    assert len(chats["samples"]["writing"]) == len(LINES)
    assert all(isinstance(sample["resps"][0][0], str) for sample in chats["samples"]["writing"])
