"""Grammars: what comes out matches, whatever the model would say; what cannot be compiled is refused by field."""

from __future__ import annotations

import functools
import gc
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import EOS, Bytes

from gpt_fast import LLM, RequestError, SamplingParams
from gpt_fast.engine.grammar import GrammarCompiler
from gpt_fast.serve.protocol import chat_grammar
from gpt_fast.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

DEMO = Path(__file__).parents[1] / "model_store" / "demo" / "target"


@pytest.fixture(scope="module")
def llm(data_dir: Path) -> Iterator[LLM]:
    with LLM(data_dir / "models" / "stories260K_hf", dtype="float32", compile=False) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_schema(llm: LLM, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    done = llm.generate("Lily", SamplingParams(max_tokens=200, temperature=temperature, seed=1, json_schema=schema))
    answer = json.loads(done.text)
    assert set(answer) == {"name", "age"}
    assert isinstance(answer["age"], int)
    assert done.finish_reason == "stop"


def test_regex_and_choice(llm: LLM) -> None:
    done = llm.generate("a", SamplingParams(max_tokens=50, temperature=1.0, seed=2, regex=r"[0-9]{3}-[a-f]+z"))
    assert re.fullmatch(r"[0-9]{3}-[a-f]+z", done.text)
    done = llm.generate("a", SamplingParams(max_tokens=50, temperature=1.0, seed=2, choice=("red fox", "blue\nfish")))
    assert done.text in ("red fox", "blue\nfish")


def test_a_space_at_the_beginning_is_there_also_where_no_text_is_before() -> None:
    """SentencePiece takes the first space of a text for its own."""
    with LLM(DEMO, dtype="float32", compile=False, max_seq_len=64, max_batch=1) as llm:
        for choice in (" the", "the", "  x"):
            assert llm.generate("", SamplingParams(choice=(choice,))).text == choice
        done = llm.generate("", SamplingParams(max_tokens=40, temperature=1.0, seed=1, regex="( [a-z]{1,3}){2}"))
        assert re.fullmatch("( [a-z]{1,3}){2}", done.text)
        assert not llm.generate("", SamplingParams(max_tokens=4)).text.startswith(" ")


def test_text_without_a_choice_is_spelled_as_the_tokenizer_spells_it() -> None:
    """The longest tokens from left to right are others, which no model has seen so."""
    tokenizer = load_tokenizer(DEMO)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    known = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    for text in ("compare", "that length", "therefore 1234 kernels"):
        own, spelled = compiler.compile(SamplingParams(choice=(text,))), list[int]()
        assert own is not None
        while not own.complete and (ids := own.allowed().nonzero()[:, 0].tolist()) != list(tokenizer.eos_token_ids):
            assert len(ids) == 1
            spelled += ids
            own.advance(ids[0])
        assert spelled == tokenizer.encode_inside(text)
        assert any(text[:end].encode() in known for end in range(len(tokenizer.token_bytes(spelled[0])) + 1, len(text)))


class _NamedEnd(Bytes):
    """A tokenizer to which the end of a text is a word, as where an added token is not marked as special."""

    def __init__(self) -> None:
        super().__init__()
        self._text[EOS] = self.special.pop(EOS)


def test_a_token_that_ends_a_text_comes_nowhere_within_it() -> None:
    """In a JSON string its name would be text: the answer ended there."""
    compiler = GrammarCompiler(_NamedEnd(), EOS + 1, (EOS,))
    own = compiler.compile(SamplingParams(json_schema={"type": "array", "items": {"type": "string"}}))
    assert own is not None
    for id in b'["a':
        assert not own.allowed()[EOS]
        own.advance(id)
    assert not own.allowed()[EOS]
    own = compiler.compile(SamplingParams(choice=("a", "ab")))
    assert own is not None
    own.advance(ord("a"))
    assert own.allowed().nonzero()[:, 0].tolist() == [ord("b"), EOS]


class _TextAlone(Bytes):
    """A tokenizer without special tokens."""

    def __init__(self) -> None:
        Tokenizer.__init__(self, {value: bytes([value]) for value in range(256)}, {})


@pytest.mark.parametrize(("tokenizer", "end"), [(Bytes(), 256), (_TextAlone(), 0)], ids=["special", "none"])
def test_where_nothing_says_what_ends_a_text_the_first_special_token_does(tokenizer: Bytes, end: int) -> None:
    own = GrammarCompiler(tokenizer, tokenizer.vocab_size, ()).compile(SamplingParams(choice=("a", "ab")))
    assert own is not None
    own.advance(ord("a"))
    assert set(own.allowed().nonzero()[:, 0].tolist()) == {ord("b"), end}


def test_constrained_and_free_requests_share_a_batch(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, temperature=0.0)
    alone = llm.generate("Once", free)
    handles = [llm.submit("Once", free), llm.submit("Once", SamplingParams(max_tokens=20, choice=("yes", "no")))]
    texts = ["".join(delta.text for delta in handle) for handle in handles]
    assert texts[0] == alone.text
    assert texts[1] in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"regex": "("}, "regex"), ({"json_schema": {"type": "nonsense"}}, "json_schema"), ({"choice": []}, "choice")],
)
def test_what_does_not_compile_is_refused_by_field(llm: LLM, fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.prepare("a", SamplingParams(**fields))  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json_schema": {"type": "string", "pattern": "(?!a)b"}}, "look-ahead"),
    ],
)
def test_what_is_wrong_with_a_regular_expression_is_told(llm: LLM, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        llm.prepare("a", SamplingParams(**fields))
    assert "\n" not in str(caught.value)


TOO_LARGE: dict[str, dict[str, Any]] = {
    "choices": {"choice": [f"choice number {i}" for i in range(90_000)]},
    "long choices": {"choice": ["x" * 60_000, "y" * 60_000]},
    "properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}}},
    "enum": {"json_schema": {"enum": [f"value {i}" for i in range(5000)]}},
    "nested": {"json_schema": {"a": functools.reduce(lambda inner, _: [inner], range(20_000), [])}},
    "regex": {"regex": "a?" * 40_000},
}


@pytest.mark.parametrize("fields", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_would_take_long_to_compile_is_refused_by_its_limit(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"\d{3,5}") as caught:
        SamplingParams(**fields)
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))
    assert len(str(caught.value)) < 200


UNUSABLE: dict[str, dict[str, Any]] = {
    "no character": {"regex": r"[^\s\S]"},
    "nothing in the end": {"regex": r"abc[^\s\S]"},
    "too complex": {"regex": "(a?){2000}a{2000}"},
    "one long text": {"regex": "a{100000}"},
    "a text of millions": {"regex": "((((a{50}){50}){50}){50})"},
    "one long value": {"json_schema": {"enum": ["x" * 60_000]}},
    "too complex unless empty": {"regex": "a?" * 3000},
    "a reference to itself": {"json_schema": {"$ref": "#"}},
    "only references": {"json_schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "endless": {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "nothing": {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
    "not supported": {"json_schema": {"not": {}}},
    "elsewhere": {"json_schema": {"$ref": "http://127.0.0.1:1/schema"}},
    "too deep": {"json_schema": {"items": functools.reduce(lambda inner, _: {"items": inner}, range(900), {})}},
}


@pytest.mark.parametrize("fields", UNUSABLE.values(), ids=UNUSABLE)
def test_what_nothing_satisfies_is_refused_every_time_in_the_same_words(llm: LLM, fields: dict[str, Any]) -> None:
    said = set()
    for _ in range(3):
        with pytest.raises(RequestError) as caught:
            llm.generate("a", SamplingParams(max_tokens=8, **fields))
        said.add(str(caught.value))
        assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))
    assert len(said) == 1
    assert len(said.pop()) < 400


def test_a_grammar_that_becomes_too_complex_fails_its_request_by_field_and_briefly(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=40, json_schema={"enum": ["a secret of the client " * 20 + c for c in "ab"]})
    request = llm.prepare("a", params)
    matcher = request.grammar._matcher  # type: ignore[union-attr]
    assert not matcher.consume_token(0)  # what llguidance does when a limit is met in mid-text: an error that stays
    with pytest.raises(RequestError) as caught:
        list(llm.engine.add_all([request])[0])
    assert (caught.value.status, caught.value.param) == (400, "json_schema")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("count", [3, 2000])
def test_choices_of_any_characters_and_number(llm: LLM, count: int) -> None:
    odd = [
        "a.b*",
        "c\nd",
        "naïve 🙂",
        "-",
        "#x y",
        "\\",
        "[x]",
        "&&~",
        "/",
        '"',
        "\x01",
        "(?i)a",
        "a|b",
        "$",
        " lead",
        "t ",
    ]
    choices = tuple((odd + [f"choice number {i}" for i in range(count)])[:2000])
    for only in odd:
        assert llm.generate("a", SamplingParams(max_tokens=60, choice=(only,))).text == only
    answers = [
        llm.generate("a", SamplingParams(max_tokens=60, temperature=1.0, seed=3, choice=choices)).text for _ in range(3)
    ]
    assert set(answers) <= set(choices)
    assert len(set(answers)) == 1


def test_what_a_grammar_takes_is_given_back_and_limited(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = llm._grammars
    params = SamplingParams(max_tokens=20, regex="[a-z]{3}")
    llm.generate("a", params)
    gc.collect()
    assert compiler.live_chars == 0
    one = llm.prepare("a", params)
    size = compiler.live_chars
    assert size > 0
    monkeypatch.setattr("gpt_fast.engine.grammar.MAX_LIVE_CHARS", 2 * size)
    two = llm.prepare("a", params)
    with pytest.raises(RequestError) as caught:
        llm.prepare("a", params)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    del one, two
    gc.collect()
    assert compiler.live_chars == 0
    with pytest.raises(RequestError, match="regex"):
        llm.prepare("a", SamplingParams(regex="("))
    assert compiler.live_chars == 0


def test_sequences_of_one_call_share_a_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled once, and takes its memory once; each sequence has its state."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=6, regex="[a-z]{3,9}", bad_words=("a",))
    parts = [("Once", sample) for sample in params.samples()]
    alone = [llm.generate("Once", sample).text for sample in params.samples()]
    gc.collect()
    assert llm._grammars.live_chars == 0
    requests = [llm.prepare("Once", params.samples()[0])]
    size = llm._grammars.live_chars
    requests += [llm.prepare("Once", sample, like=requests[0]) for sample in params.samples()[1:]]
    assert llm._grammars.live_chars == size
    assert len({id(request.rules) for request in requests}) == 1
    assert llm.prepare("Once", SamplingParams(regex="[a-z]{3,8}"), like=requests[0]).grammar is not None
    del requests[0]
    gc.collect()
    assert llm._grammars.live_chars == size, "while one of them is there"
    handles = llm.submit_all(parts)
    assert ["".join(delta.text for delta in handle) for handle in handles] == alone
    del requests, handles
    gc.collect()
    assert llm._grammars.live_chars == 0


def test_a_regular_expression_beside_tools_matches_the_same_line_ends() -> None:
    for regex, written in [
        (re.escape("yes\nno"), r"/yes\nno/"),
        ("a\nb", r"/a\nb/"),
        (r"a\nb", r"/a\nb/"),
        (r"1/2\/3", r"/1\/2\/3/"),
        (r"back\\" + "\n", r"/back\\\n/"),
    ]:
        assert chat_grammar._regex(regex) == written


def test_without_the_package_it_is_refused_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance"):
        llm.prepare("a", SamplingParams(regex="a"))


def test_what_is_rolled_back_leaves_no_trace(llm: LLM) -> None:
    request = llm.prepare("a", SamplingParams(choice=("red fox", "red ox")))
    grammar = request.grammar
    assert grammar is not None
    states = []
    while not grammar.complete:
        states.append(grammar.allowed())
        grammar.advance(int(states[-1].nonzero()[0, 0]))
    for back in (1, 2, len(states)):  # the first from the end, where nothing may follow
        grammar.rollback(back)
        assert not grammar.complete
        for i in range(len(states) - back, len(states)):
            assert grammar.allowed().equal(states[i])
            grammar.advance(int(states[i].nonzero()[0, 0]))
        assert grammar.complete
