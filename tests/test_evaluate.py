"""Perplexity and log-likelihoods: against plain arithmetic, a published figure, and the engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from current_device import watch_current
from fake_model import Bytes
from hypothesis import given
from hypothesis import strategies as st

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.errors import ConfigError
from gpt_fast.evaluate import Example, Scorer, documents, evaluate_tasks, perplexity, read_examples
from gpt_fast.evaluate.perplexity import Window, score, windows
from gpt_fast.llm import LLM
from gpt_fast.model.building import random_model
from gpt_fast.model.steps import Served, serve
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(data_dir: Path) -> Path:
    return data_dir / "models" / "stories260K_hf"


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[Served, Tokenizer]:
    return serve(Checkpoint.open(checkpoint).build(torch.float32), compile=False), load_tokenizer(checkpoint)


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_windows_score_every_token_once_with_enough_before_it(count: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    tokens = list(range(count))
    scored = []
    for window in windows(tokens, context, stride):
        assert len(window.tokens) <= context
        first = len(window.tokens) - window.num_scored
        scored += window.tokens[first:]
        assert first >= min(context - stride, window.tokens[first])
    assert scored == tokens[1:]


def test_documents_are_split_at_the_separator() -> None:
    assert documents("One.\n<|endoftext|>\n\nTwo.\n<|endoftext|>\n") == ["One.", "Two."]
    assert documents("One.<|endoftext|>", separator="") == ["One.<|endoftext|>"]


def test_a_published_figure(data_dir: Path, loaded: tuple[Served, Tokenizer]) -> None:
    reference = json.loads((data_dir / "golden" / "llama2c_numpy_reference.json").read_text())["stories260K"]["nll"]
    text = (data_dir / reference["text_file"]).read_text()[: reference["chars"]]
    tokens = reference["tokens"]
    [found] = score(loaded[0], [Window(tokens, len(tokens) - 1)])
    assert -found.log_prob / (len(tokens) - 1) == pytest.approx(reference["mean_nll_nats"], abs=1e-4)
    whole = perplexity(*loaded, text)
    assert whole.num_documents == 1
    assert whole.bits_per_byte == pytest.approx(whole.mean_nll * whole.num_tokens / math.log(2) / whole.num_bytes)
    assert whole.perplexity == pytest.approx(math.exp(whole.mean_nll))


def test_batches_do_not_change_a_score() -> None:
    model = random_model(ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 64), torch.float32)
    generator = torch.Generator().manual_seed(0)
    pieces = [
        Window(torch.randint(0, 64, (n,), generator=generator).tolist(), max(1, n - 5)) for n in (2, 30, 7, 30, 12)
    ]
    pieces += [Window(piece.tokens, 1) for piece in pieces]
    for piece, found in zip(pieces, score(model, pieces), strict=True):
        logits = model(torch.tensor([piece.tokens]))[0].log_softmax(-1)
        expected = logits[range(len(piece.tokens) - 1), piece.tokens[1:]][-piece.num_scored :]
        assert found.log_prob == pytest.approx(expected.sum().item(), abs=1e-5 * piece.num_scored)
        greedy = logits[:-1].argmax(-1).tolist()[-piece.num_scored :]
        assert found.is_greedy == (greedy == piece.tokens[-piece.num_scored :])


@pytest.mark.parametrize("kernels", [True, False])
def test_keys_and_values_through_a_cache(kernels: bool) -> None:
    model = random_model(ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 64), torch.float32)
    served = serve(model, kernels=kernels, compile=False)
    generator = torch.Generator().manual_seed(0)
    pieces = [Window(torch.randint(0, 64, (n,), generator=generator).tolist(), 1) for n in (2, 30, 17, 33)]
    exact = [found.log_prob for found in score(served, pieces)]
    cached = [found.log_prob for found in score(served, pieces, torch.float32)]
    assert cached == pytest.approx(exact, abs=1e-5)
    rounded = [found.log_prob for found in score(served, pieces, torch.int8)]
    assert rounded == pytest.approx(exact, abs=0.02)
    assert max(abs(a - b) for a, b in zip(rounded, exact, strict=True)) > 1e-4, "nothing was rounded"


def test_all_is_computed_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, which may be another one than the model's."""
    module = sys.modules[score.__module__]
    inside = watch_current(module, monkeypatch)

    def logits(model: Any, tokens: torch.Tensor, cache_dtype: torch.dtype | None) -> torch.Tensor:
        assert inside == [model.device]
        return torch.zeros(*tokens.shape, model.vocab_size)

    monkeypatch.setattr(module, "_logits", logits)
    model = serve(random_model(ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 64), torch.float32), compile=False)
    assert score(model, [Window([1, 2, 3], 2)])[0].log_prob == pytest.approx(-2 * math.log(64))
    assert not inside


def test_a_model_that_is_not_served_keeps_its_weights() -> None:
    model = random_model(ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 64), torch.float32)
    pieces = [Window([first, 2, 3, 4], 2) for first in range(20)]  # more than one batch
    found = score(model, pieces, torch.float32)
    assert [a.log_prob for a in found] == pytest.approx([a.log_prob for a in score(model, pieces)], abs=1e-5)


def test_settings_are_checked_and_kept(loaded: tuple[Served, Tokenizer]) -> None:
    text = "Once upon a time there was a little girl. She liked to play.\n<|endoftext|>\nTom ran home."
    assert perplexity(*loaded, text).num_documents == 2
    assert perplexity(*loaded, text, max_tokens=10).num_tokens == 10
    short = perplexity(*loaded, text, context=8, stride=2)
    assert short.num_tokens == perplexity(*loaded, text).num_tokens
    assert short.perplexity != perplexity(*loaded, text).perplexity, "windows see less"
    for settings, message in (({"context": 1000}, "context"), ({"context": 8, "stride": 8}, "stride")):
        with pytest.raises(ConfigError, match=message):
            perplexity(*loaded, text, **settings)
    with pytest.raises(ConfigError, match="no token"):
        perplexity(*loaded, "")


class WithoutBos(Tokenizer):
    """``tokenizer`` without a token in front of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.bos_token_id, self.eos_token_ids = tokenizer, None, ()

    def encode(self, text: str, bos: bool = True, allow_special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, bos=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def test_without_bos_the_first_token_of_a_document_counts_in_no_way(loaded: tuple[Served, Tokenizer]) -> None:
    model, tokenizer = loaded
    text, bare = "Once upon a time.<|endoftext|>Tom ran home.", WithoutBos(tokenizer)
    found, first = perplexity(model, bare, text), [bare.encode(document)[0] for document in documents(text)]
    assert found.num_tokens == perplexity(model, tokenizer, text).num_tokens - 2
    assert found.num_bytes == len("Once upon a time.Tom ran home.") - len("".join(bare.decode([id]) for id in first))


def test_what_nothing_stands_before_is_not_scored(loaded: tuple[Served, Tokenizer]) -> None:
    model, tokenizer = loaded
    [nothing] = Scorer(model, tokenizer).loglikelihood([("", "")])
    assert nothing == (0.0, True)
    first, second = Scorer(model, WithoutBos(tokenizer)).loglikelihood([("", "Once upon"), ("Once", " upon")])
    assert first == second


def test_likelihoods_of_parts_make_that_of_the_whole(loaded: tuple[Served, Tokenizer]) -> None:
    scorer = Scorer(*loaded)
    first, second = "Once upon a time, there was", " a little girl named Lily."
    [rolling] = scorer.loglikelihood_rolling([first + second])
    start, rest = scorer.loglikelihood([("", first), (first, second)])
    assert start.log_prob + rest.log_prob == pytest.approx(rolling, abs=1e-3)
    shifted = scorer.loglikelihood([(first + " ", second.lstrip())])[0]
    assert shifted.log_prob == pytest.approx(rest.log_prob, abs=1e-4), "white space belongs to the continuation"


def test_white_space_belongs_to_the_continuation_where_a_token_may_end_in_it() -> None:
    model = random_model(ModelConfig("llama", 260, 32, 2, 4, 2, 8, 48, 64), torch.float32)
    first, second = Scorer(model, Bytes()).loglikelihood([("one ", "two"), ("one", " two")])
    assert first == second


def test_greedy_continuations_are_known_as_such(loaded: tuple[Served, Tokenizer]) -> None:
    scorer = Scorer(*loaded)
    prompt = "Lily and Tom went to the"
    [text] = scorer.generate_until([(prompt, {"max_gen_toks": 6})])
    with LLM.from_model(loaded[0], tokenizer=loaded[1], compile=False) as llm:
        assert llm.generate(prompt, SamplingParams(max_tokens=6, temperature=0.0)).text == text
    greedy, other = scorer.loglikelihood([(prompt, text), (prompt, " zebra")])
    assert greedy.is_greedy
    assert not other.is_greedy
    [stopped] = scorer.generate_until([(prompt, {"until": [text[3:5]], "max_gen_toks": 6})])
    assert stopped == text[: text.index(text[3:5])]


def test_long_questions_lose_their_beginning(loaded: tuple[Served, Tokenizer]) -> None:
    scorer = Scorer(*loaded, context=32)
    [found] = scorer.loglikelihood([("Once upon a time. " * 50, "The end.")])
    assert math.isfinite(found.log_prob)
    assert len(scorer.loglikelihood_rolling(["Once upon a time. " * 50])) == 1
    with pytest.raises(ConfigError, match="context"):
        Scorer(*loaded, context=100_000)


def test_examples_are_read_and_answered(tmp_path: Path, loaded: tuple[Served, Tokenizer]) -> None:
    path = tmp_path / "examples.jsonl"
    lines: list[dict[str, Any]] = [
        {"query": "Once upon a", "choices": ["time", "xylophone"], "gold": 0},
        {"context_options": ["Once upon", "Purple quartz"], "continuation": "a time", "gold": 0},
        {"context": "Once upon a time, there", "continuation": "was"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    examples = read_examples(path)
    assert examples[0] == Example((("Once upon a", " time"), ("Once upon a", " xylophone")), 0)
    assert Scorer(*loaded).accuracy(examples) == {"accuracy": 1.0, "accuracy_per_byte": 1.0, "num_examples": 3}
    assert len(read_examples(path, limit=2)) == 2
    path.write_text('{"context": "a\u2028b", "continuation": "c\u0085"}\n', encoding="utf-8")
    assert read_examples(path) == [Example((("a\u2028b", " c\u0085"),), 0)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"what": 1}', ":1: not an example"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold is 2, and the 2 texts are counted from 0"),
        ('{"query": "a", "choices": ["b", "c"], "gold": -1}', "gold is -1, and the 2 texts"),
        ('{"query": "a", "choices": [], "gold": 0}', "gold is 0, and the 0 texts"),
        ('{"query": "a", "choices": "bc", "gold": 0}', "'bc' is no list of texts"),
        ('{"context_options": "bc", "continuation": "a", "gold": 0}', "'bc' is no list of texts"),
        ("", " holds no examples"),
    ],
)
def test_what_is_no_example_is_told(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=rf"examples\.jsonl.*{told}"):
        read_examples(tmp_path / "examples.jsonl")


# lm-evaluation-harness, of which a stand-in is enough to see what it asks and is told


@pytest.fixture
def fake_harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def simple_evaluate(model: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
        request = types.SimpleNamespace(args=("Once upon a", " time"))
        text = types.SimpleNamespace(args=("Once upon a time",))
        ask = types.SimpleNamespace(args=("Once upon a", {"until": ["."], "max_gen_toks": 4}))
        found = {
            "loglikelihood": model.loglikelihood([request]),
            "rolling": model.loglikelihood_rolling([text]),
            "generated": model.generate_until([ask]),
            "limit": limit,
        }
        return {"results": dict.fromkeys(tasks, found)}

    package, api, module = (types.ModuleType(n) for n in ("lm_eval", "lm_eval.api", "lm_eval.api.model"))
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    module.LM = object  # type: ignore[attr-defined]
    for made in (package, api, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return


@pytest.mark.usefixtures("fake_harness")
def test_the_harness_gets_answers_in_its_own_form(loaded: tuple[Served, Tokenizer]) -> None:
    scorer = Scorer(*loaded)
    found = evaluate_tasks(scorer, ["task"], limit=3)["task"]
    assert found["limit"] == 3
    [(log_prob, is_greedy)] = found["loglikelihood"]
    assert (log_prob, is_greedy) == tuple(scorer.loglikelihood([("Once upon a", " time")])[0])
    assert found["rolling"] == scorer.loglikelihood_rolling(["Once upon a time"])
    assert isinstance(found["generated"][0], str)


def test_tasks_without_the_harness_are_refused(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[Served, Tokenizer]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match=r"lm-evaluation-harness: pip install 'gpt-fast-serve\[eval\]'"):
        evaluate_tasks(Scorer(*loaded), ["task"])


def test_the_command(tmp_path: Path, checkpoint: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. She liked to play with her dog.")
    arguments = ["--checkpoint", str(checkpoint), "--perplexity", str(text), "--quantize", "int8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "gpt_fast", "eval", *arguments, "--dtype", "float32", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 < found["perplexity"] < 10
    assert found["quantize"] == "int8"
    assert found["bytes_per_token"] < 400_000
