"""allowed_token_ids and bad_words: what they forbid, alone, with a grammar, behind drafts and after a preemption."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import EOS, VOCAB_SIZE, FakeModelLLM

from gpt_fast import LLM, RequestError, SamplingParams
from gpt_fast.engine.token_rules import TokenRules
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.loading import load_tokenizer


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(Path(__file__).resolve().parents[1] / "model_store" / "demo" / "target")


def rules(tokenizer: Tokenizer | None, **fields: Any) -> TokenRules:
    found = TokenRules.of(SamplingParams(**fields), tokenizer, 2048)
    assert found is not None
    return found


def test_without_such_fields_there_are_no_rules() -> None:
    assert TokenRules.of(SamplingParams(), None, 10) is None


def test_only_allowed_tokens_are_left_of_what_a_grammar_allows() -> None:
    own = rules(None, allowed_token_ids=[5, 9])
    assert own.mask([], None).nonzero().flatten().tolist() == [5, 9]
    grammar = torch.zeros(2048, dtype=torch.bool)
    grammar[[9, 11]] = True
    assert own.mask([1, 2], grammar).nonzero().flatten().tolist() == [9]
    assert grammar.sum() == 2


def test_a_bad_word_is_forbidden_where_its_last_token_would_complete_it(demo: Tokenizer) -> None:
    start = demo.encode("\n", bos=False)
    word = demo.encode("\n zebra", bos=False)[len(start) :]
    assert len(word) > 1
    own = rules(demo, bad_words=["zebra"])
    *beginning, last = word
    assert not own.mask([7, *beginning], None)[last]
    assert own.mask([*beginning, 7], None)[last]
    assert own.mask(beginning[1:], None)[last] or len(beginning) == 1
    (single,) = demo.encode("\n the", bos=False)[len(start) :]
    assert not rules(demo, bad_words=["the"]).mask([], None)[single]


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        rules(None, bad_words=["a"])


def test_answers_keep_to_the_rules() -> None:
    few = tuple(range(97, 101))  # abcd
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, allowed_token_ids=few, bad_words=("d", "ab", "cca"))
    with FakeModelLLM() as llm:
        text = llm.generate([70, 71], params).text
        loose = llm.generate([70, 71], dataclasses.replace(params, bad_words=())).text
    assert set(text) == set("abc")
    assert set(loose) == set("abcd")
    assert not [word for word in ("ab", "cca") if word in text]
    assert all(word in loose for word in ("ab", "d"))


def test_a_preempted_request_goes_on_by_its_rules() -> None:
    few = tuple(range(97, 101))
    params = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=i, allowed_token_ids=few, bad_words=("ab", "cd", "ddd"))
        for i in range(4)
    ]
    prompts = [[70 + i] * 20 for i in range(4)]
    with FakeModelLLM() as llm:
        alone = [llm.generate(prompt, each).token_ids for prompt, each in zip(prompts, params, strict=True)]
    with FakeModelLLM(num_pages=12) as llm:
        done = llm.generate(prompts, params)
        assert llm.engine.scheduler.num_preemptions > 0
    assert [each.token_ids for each in done] == alone


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": "ab"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["aa"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "regex": "b+"}, "allowed_token_ids"),
    ],
)
def test_contradictions_cost_their_request_alone(fields: dict[str, Any], param: str) -> None:
    with FakeModelLLM() as llm:
        other = llm.submit([70, 71], SamplingParams(max_tokens=30))
        with pytest.raises(RequestError) as caught:
            llm.generate([70, 71], SamplingParams(max_tokens=9, temperature=1.0, **fields))
        assert caught.value.param == param
        assert other.wait(30) is not None
        llm.engine.scheduler.check_integrity()


def test_what_ends_a_text_may_be_part_of_it(data_dir: Path) -> None:
    with LLM(data_dir / "models" / "stories260K_hf", dtype="float32", compile=False) as llm:
        plain = llm.generate("Once", SamplingParams(max_tokens=40))
        word = plain.text.split()[3]
        params = SamplingParams(max_tokens=40, stop=(word,))
        without = llm.generate("Once", params)
        whole = llm.generate("Once", dataclasses.replace(params, include_stop_str_in_output=True))
        assert whole.text == without.text + word
        ended = SamplingParams(max_tokens=40, stop_token_ids=(plain.token_ids[9],), include_stop_str_in_output=True)
        assert plain.text.startswith(llm.generate("Once", ended).text)
        special = SamplingParams(max_tokens=3, allowed_token_ids=(1,), ignore_eos=True, skip_special_tokens=False)
        assert llm.generate("Once", special).text == "<s><s><s>"
        assert llm.generate("Once", dataclasses.replace(special, skip_special_tokens=True)).text == ""
