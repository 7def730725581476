"""Bytes to requests: what is understood, what is refused and which field the refusal names. No server, no torch."""

from __future__ import annotations

import contextlib
import gzip
import json
from typing import Any
from urllib.parse import unquote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, Origin, TokenLogprobs
from gpt_fast.serve.protocol import native
from gpt_fast.serve.protocol.body import parse_json, read_body
from gpt_fast.serve.protocol.predict import parse_predict
from gpt_fast.serve.protocol.request import as_written, error_body

LIMIT = 1000
GOOD = {"prompt": "Once upon a time", "max_new_tokens": 5}


def refusal(function: Any, *args: Any, **kwargs: Any) -> RequestError:
    """The RequestError that the call raises."""
    with pytest.raises(RequestError) as caught:
        function(*args, **kwargs)
    return caught.value


def as_form(text: bytes) -> dict[str, bytearray]:
    """What TorchServe 0.12 makes of a body that says it is a form; test_serve.py checks this against the real one."""
    fields = {}
    pieces = text.split(b"&")
    for i, piece in enumerate(pieces):
        if b"=" not in piece and i == len(pieces) - 1:
            break  # the last piece is dropped without a "="
        name, _, value = piece.partition(b"=")
        fields[unquote_plus(name.decode())] = bytearray(unquote_plus(value.decode()).encode())
    return fields


# ---- the body -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"body": json.dumps(GOOD).encode()}, id="curl -T"),
        pytest.param({"body": bytearray(json.dumps(GOOD), "utf-8")}, id="bytearray"),
        pytest.param({"body": json.dumps(GOOD)}, id="text/plain"),
        pytest.param({"body": GOOD}, id="application/json"),
        pytest.param({"data": json.dumps(GOOD).encode()}, id="multipart"),
        pytest.param({"data": GOOD}, id="multipart, application/json"),
        pytest.param({"body": b"\n " + json.dumps(GOOD, indent=4).encode() + b"\r\n"}, id="white space"),
    ],
)
def test_every_shape_of_a_body_is_understood(entry: dict[str, Any]) -> None:
    assert read_body(entry, LIMIT) == GOOD


@pytest.mark.parametrize("prompt", ["a=b", "a=b&c=d", "é=1", "a==b", "x&y=z", 'say "="'])
def test_json_taken_for_a_form_is_put_together_again(prompt: str) -> None:
    text = json.dumps({"prompt": prompt, "max_new_tokens": 5}, ensure_ascii=False).encode()
    assert read_body(as_form(text), LIMIT, len(text))["prompt"] == prompt


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"prompt": "Once"}', id="nothing arrives"),
        pytest.param('{"prompt": "a=b&c"}', id="the end is lost"),
        pytest.param('{"prompt": "a=b&x=1&x=2"}', id="a name twice"),
        pytest.param('{"prompt": "100%25=b"}', id="percent escape"),
        pytest.param("prompt=Once&max_new_tokens=5", id="a form indeed"),
    ],
)
def test_a_form_that_cannot_be_restored_is_refused_with_advice(text: str) -> None:
    error = refusal(read_body, as_form(text.encode()), LIMIT, len(text))
    assert (error.status, error.code) == (400, "form")
    assert "form" in error.message


def test_a_lost_form_is_told_from_a_body_that_was_never_there() -> None:
    assert [refusal(read_body, {}, LIMIT, length).code for length in (20, 0, None)] == ["form", *["empty_body"] * 2]


def test_a_form_field_beside_the_json_is_refused_by_name() -> None:
    assert "'extra'" in refusal(read_body, {"data": b"{}", "extra": b"1"}, LIMIT).message


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"", "empty_body", "empty"),
        (b" \n", "empty_body", "empty"),
        (b"hello", "invalid_json", "line 1 column 1"),
        (b'{"prompt": "a"', "invalid_json", "line 1"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "Extra data"),
        (b"{'prompt': 'a'}", "invalid_json", "double quotes"),
        (b'{"prompt": "a\nb"}', "invalid_json", "control character"),
        (b"[1, 2]", "invalid_type", "an array"),
        (b'[{"prompt": "a"}]', "invalid_type", "one object a request"),
        (b'"text"', "invalid_type", "a string"),
        (b"3", "invalid_type", "a number"),
        (b"true", "invalid_type", "a boolean"),
        (b"null", "invalid_type", "null"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_field", "'prompt'"),
        (b'{"x": {"seed": 1, "seed": 2}}', "duplicate_field", "'seed'"),
        (b"{%s}" % b",".join(b'"%d":1' % i for i in (*range(100_000), 99_999)), "duplicate_field", "'99999'"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_encoding", "byte order mark"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "invalid_encoding", "compressed by gzip"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_encoding", "UTF-16"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "invalid_encoding", "UTF-16"),
        ('{"prompt": "a"}'.encode("utf-32-be"), "invalid_encoding", "UTF-32"),
        ('{"prompt": "a"}'.encode("utf-32"), "invalid_encoding", "UTF-32"),
        (b'{"prompt": "\xff"}', "invalid_encoding", "byte 12"),
        ('{"prompt": "é"}'.encode("latin-1"), "invalid_encoding", "UTF-8"),
        (b"[" * 100_000, "invalid_json", "nested too deeply"),
        (b'{"a":' * 100_000, "invalid_json", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, code: str, says: str) -> None:
    error = refusal(parse_json, body)
    assert (error.status, error.code) == (400, code)
    assert says in error.message
    assert len(error.message) < 600


def test_size_limit_counts_bytes_of_every_shape() -> None:
    text = json.dumps({"prompt": "é" * 400}, ensure_ascii=False)
    assert len(text) < 500 < len(text.encode()) < 900
    for value in (text, text.encode()):
        assert refusal(read_body, {"body": value}, 500).status == 413
        assert read_body({"body": value}, 900)
    # A body that TorchServe parsed has no bytes left to count; the header tells.
    assert refusal(read_body, {"body": {"prompt": "x"}}, 800, content_length=801).code == "body_too_large"
    assert read_body({"body": {"prompt": "x"}}, 800, content_length=800)


# ---- the request ----------------------------------------------------------------------------------------------------


def test_fields_reach_the_parameters() -> None:
    body = {
        "prompt": [1, 2, 3], "max_tokens": 7, "min_tokens": 3, "stream": False, "return_token_ids": True,
        "temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**64 - 1,
        "stop": "end", "stop_token_ids": [2], "ignore_eos": True,
    }  # fmt: skip
    request = native.parse_request(body)
    assert request.prompts == [[1, 2, 3]]
    assert not request.stream
    p = request.params
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (7, 1, 5, 0.9, 0.1, 2**64 - 1)
    assert (p.stop, p.stop_token_ids, p.ignore_eos, p.min_tokens) == (("end",), (2,), True, 3)


def test_max_new_tokens_is_max_tokens() -> None:
    assert native.parse_request(GOOD).params.max_tokens == 5


def test_defaults_apply_to_what_is_not_given() -> None:
    request = native.parse_request({"prompt": "a"}, default_max_tokens=9, default_stream=False)
    assert (request.params.max_tokens, request.stream) == (9, False)
    given_ = native.parse_request({"prompt": "a", "max_tokens": 3, "stream": True}, 9, False)
    assert (given_.params.max_tokens, given_.stream) == (3, True)


def test_null_means_not_given() -> None:
    body = {"prompt": "a", "max_new_tokens": None, "temperature": None, "stop": None, "stream": None, "seed": None}
    request = native.parse_request(body, default_max_tokens=9)
    params = request.params
    assert (params.max_tokens, params.stop, request.stream) == (9, (), True)


def test_a_default_does_not_contradict_min_tokens() -> None:
    request = native.parse_request({"prompt": "a", "min_tokens": 20}, default_max_tokens=9)
    assert request.params.max_tokens == 20


def test_logit_bias_has_strings_for_ids() -> None:
    request = native.parse_request({"prompt": "a", "logit_bias": {"5": -1.5, "17": 2}})
    assert request.params.logit_bias == {5: -1.5, 17: 2}
    for bad in ({"a": 1}, {"-1": 1}, {"1.5": 1}, {"5": "x"}, {"5": 101}, [5]):
        assert refusal(native.parse_request, {"prompt": "a", "logit_bias": bad}).param == "logit_bias"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no prompt", {}, "prompt"),
    ("prompt null", {"prompt": None}, "prompt"),
    ("prompt number", {"prompt": 5}, "prompt"),
    ("prompt boolean", {"prompt": True}, "prompt"),
    ("prompt object", {"prompt": {"text": "a"}}, "prompt"),
    ("prompt empty list", {"prompt": []}, "prompt"),
    ("prompt list of strings", {"prompt": ["a", "b"]}, "prompt"),
    ("prompt nested list", {"prompt": [[1, 2]]}, "prompt"),
    ("prompt float id", {"prompt": [1, 2.0]}, "prompt"),
    ("prompt boolean id", {"prompt": [1, True]}, "prompt"),
    ("prompt null id", {"prompt": [1, None]}, "prompt"),
    ("prompt negative id", {"prompt": [1, -1]}, "prompt"),
    ("prompt huge id", {"prompt": [2**31]}, "prompt"),
    ("prompt lone surrogate", {"prompt": "a\ud800b"}, "prompt"),
    ("max_new_tokens zero", {"max_new_tokens": 0}, "max_new_tokens"),
    ("max_new_tokens negative", {"max_new_tokens": -5}, "max_new_tokens"),
    ("max_new_tokens huge", {"max_new_tokens": 10**12}, "max_new_tokens"),
    ("max_new_tokens enormous", {"max_new_tokens": 10**500}, "max_new_tokens"),
    ("max_new_tokens float", {"max_new_tokens": 5.5}, "max_new_tokens"),
    ("max_new_tokens string", {"max_new_tokens": "5"}, "max_new_tokens"),
    ("max_new_tokens boolean", {"max_new_tokens": True}, "max_new_tokens"),
    ("max_tokens under its other name", {"max_tokens": 0}, "max_tokens"),
    ("both names", {"max_tokens": 5, "max_new_tokens": 5}, "max_new_tokens"),
    ("temperature negative", {"temperature": -0.1}, "temperature"),
    ("temperature NaN", {"temperature": float("nan")}, "temperature"),
    ("temperature infinite", {"temperature": float("inf")}, "temperature"),
    ("temperature string", {"temperature": "0.8"}, "temperature"),
    ("temperature enormous", {"temperature": 10**400}, "temperature"),
    ("top_k float", {"top_k": 1.5}, "top_k"),
    ("top_p zero", {"top_p": 0}, "top_p"),
    ("top_p above 1", {"top_p": 2}, "top_p"),
    ("min_p above 1", {"min_p": 1.1}, "min_p"),
    ("seed float", {"seed": 1.5}, "seed"),
    ("seed too large", {"seed": 2**64}, "seed"),
    ("stop number", {"stop": 5}, "stop"),
    ("stop list of numbers", {"stop": [1]}, "stop"),
    ("stop empty string", {"stop": ""}, "stop"),
    ("stop too many", {"stop": ["x"] * 17}, "stop"),
    ("stop too long", {"stop": "x" * 1025}, "stop"),
    ("stop lone surrogate", {"stop": ["ok", "\udc00"]}, "stop"),
    ("stop_token_ids number", {"stop_token_ids": 2}, "stop_token_ids"),
    ("stop_token_ids strings", {"stop_token_ids": ["2"]}, "stop_token_ids"),
    ("stop_token_ids enormous", {"stop_token_ids": [10**400]}, "stop_token_ids"),
    ("ignore_eos string", {"ignore_eos": "true"}, "ignore_eos"),
    ("min_tokens above max_tokens", {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ("stream string", {"stream": "true"}, "stream"),
    ("stream number", {"stream": 1}, "stream"),
    ("return_token_ids number", {"return_token_ids": 1, "stream": False}, "return_token_ids"),
    ("return_origins number", {"return_origins": 1}, "return_origins"),
    ("draft_counts number", {"draft_counts": 1, "stream": False}, "draft_counts"),
    ("unknown field", {"max_token": 5}, "max_token"),
    ("unknown field of another API", {"messages": []}, "messages"),
    ("the empty field", {"": 1}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_field_that_cannot_be_served_is_named(body: dict[str, Any], field: str) -> None:
    if field != "prompt":
        body = {"prompt": "a", **body}
    error = refusal(native.parse_request, body)
    assert (error.status, error.param) == (400, field)
    assert field in error.message
    assert len(error.message) < 600


def test_an_unknown_field_comes_with_the_likely_one() -> None:
    assert "did you mean 'temperature'?" in refusal(native.parse_request, {"prompt": "a", "temprature": 1}).message
    hostile = refusal(native.parse_request, {"prompt": "a", "x" * 100_000: 1})
    assert len(hostile.message) < 500
    assert len(hostile.param or "") <= 100


def test_long_numbers_are_refused_by_the_fields_own_check() -> None:
    body = parse_json(b'{"prompt": "a", "seed": 1' + b"0" * 100_000 + b"}")
    assert refusal(native.parse_request, body).param == "seed"


# ---- answers --------------------------------------------------------------------------------------------------------


def test_completion_body() -> None:
    counts = {"num_prompt_tokens": 4, "num_cached_tokens": 2, "num_drafted": 8, "num_accepted": 1}
    done = Completion("é 🙂", (5, 6, 7), "stop", **counts)  # type: ignore[arg-type]
    request = native.parse_request({"prompt": "a", "stream": False})
    assert json.loads(request.write_end([done])) == {
        "text": "é 🙂",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "cached_tokens": 2},
    }
    request = native.parse_request({"prompt": "a", "stream": False, "return_token_ids": True})
    assert json.loads(request.write_end([done]))["token_ids"] == [5, 6, 7]
    request = native.parse_request({"prompt": "a", "stream": False, "draft_counts": True})
    usage = json.loads(request.write_end([done]))["usage"]
    assert (usage["cached_tokens"], usage["draft_n"], usage["draft_n_accepted"]) == (2, 8, 1)


def test_origins_are_one_a_token_also_where_nothing_is_drafted() -> None:
    request = native.parse_request({"prompt": "a", "stream": False, "return_origins": True})
    for origins, told in (((), ["plain", "plain"]), (("accepted", "bonus"), ["accepted", "bonus"])):
        assert json.loads(request.write_end([Completion("ab", (5, 6), "stop", origins=origins)]))["origins"] == told


MORE_THAN_TEXT = {"return_token_ids": True, "return_origins": True, "logprobs": 0, "prompt_logprobs": 1}


@pytest.mark.parametrize("field", [*MORE_THAN_TEXT, "draft_counts"])
def test_a_stream_with_more_than_text_is_one_of_json_lines(field: str) -> None:
    request = native.parse_request({"prompt": "a", field: MORE_THAN_TEXT.get(field, True)})
    assert request.content_type == "application/x-ndjson"
    assert native.parse_request({"prompt": "a", "return_origins": False}).content_type.startswith("text/plain")


def test_the_lines_joined_are_the_answer_in_one_piece() -> None:
    entries = tuple(TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in (5, 6, 7))
    origins: tuple[Origin, ...] = ("plain", "accepted", "corrected")
    done = Completion("a\u2028é", (5, 6, 7), "stop", entries, (None, entries[0]), 2, origins=origins)
    streaming = native.parse_request({"prompt": "a", **MORE_THAN_TEXT})
    deltas = [Delta("a\u2028", (5, 6), None, None, entries[:2], origins[:2])]
    deltas += [Delta("é", (7,), "stop", done, entries[2:], origins[2:])]
    written = "".join(streaming.write_delta(0, delta) for delta in deltas) + streaming.write_end([done])
    assert written.isascii(), "readers that know more line ends than one"
    joined: dict[str, Any] = {}
    for line in map(json.loads, written.splitlines()):
        joined |= {name: joined[name] + value if name in joined else value for name, value in line.items()}
    whole = native.parse_request({"prompt": "a", "stream": False, **MORE_THAN_TEXT})
    assert joined == json.loads(whole.write_end([done]))
    assert joined["origins"] == list(origins)
    error = RequestError("time is up", "timeout_s", "timeout", 504)
    assert json.loads(streaming.write_error(error))["error"]["code"] == "timeout"


def test_a_log_probability_of_minus_infinity_is_a_number_of_json() -> None:
    entry = TokenLogprobs(5, -float("inf"), ((5, -float("inf")), (6, -0.5)))
    request = native.parse_request({"prompt": "a", "stream": False, "logprobs": 2})
    written = request.write_end([Completion("a", (5,), "stop", (entry,))])
    found = json.loads(written, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["logprobs"]
    assert found == [{"token_id": 5, "logprob": -9999.0, "top": [
        {"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -0.5}
    ]}]  # fmt: skip


def test_predict_answers_as_the_server_whose_route_it_is() -> None:
    request = parse_predict({"prompt": "Once é"})
    assert request.prompts == ["Once é"]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (40, 1.0, 10, 0.9)
    assert request.content_type == "application/json"
    assert json.loads(request.write_end([Completion(" upon", (5,), "length")])) == "Once é upon"
    changed = parse_predict({"prompt": "a", "max_new_tokens": 3, "temperature": 0, "top_k": None, "stream": False})
    assert (changed.params.max_tokens, changed.params.temperature, changed.params.top_k) == (3, 0, 10)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "logprobs": 0}, "logprobs"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_predict_refuses_by_name(body: dict[str, Any], field: str) -> None:
    error = refusal(parse_predict, body)
    assert error.param == field
    assert field in error.message


def test_an_error_names_the_field_as_it_was_written() -> None:
    """Its name in the message too, where that begins with it."""
    given = {"messages": [], "max_completion_tokens": 3}
    for message, param, wanted in (
        ("prompt is empty", "prompt", ("messages is empty", "messages")),
        ("the prompt has 9 tokens", "prompt", ("the prompt has 9 tokens", "messages")),
        ("max_tokens is -1", "max_tokens", ("max_completion_tokens is -1", "max_completion_tokens")),
        ("top_p is 2", "top_p", ("top_p is 2", "top_p")),
    ):
        error = as_written(RequestError(message, param, "too_bad", 503, 7), given)
        assert (error.message, error.param) == wanted
        assert (error.code, error.status, error.retry_after_s) == ("too_bad", 503, 7)


def test_error_body_can_always_be_sent() -> None:
    body = error_body(RequestError("half a pair: \ud800 \n é", "prompt\udfff", "invalid_text"))
    assert body.isascii()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert json.loads(error_body(RequestError("x", None, "broken", 500)))["error"] == {
        "message": "x", "type": "server_error", "param": None, "code": "broken",
    }  # fmt: skip


# ---- anything at all ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode), JSON.map(lambda v: json.dumps(v).encode()))
)
def test_bytes_are_an_object_or_refused(raw: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(parse_json(raw), dict)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(native.FIELDS), JSON, max_size=4), JSON)
def test_an_object_is_a_request_or_refused(body: dict[str, Any], prompt: Any) -> None:
    with contextlib.suppress(RequestError):
        assert native.parse_request({"prompt": prompt, **body}).prompts
