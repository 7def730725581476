"""The page without a browser: what it is served with, and that it asks for what the server takes."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from fake_llm import FakeLLM
from test_handler import CONTINUOUS, Worker

from gpt_fast.fields import Real, Whole
from gpt_fast.params import MAX_LOGPROBS, SamplingParams
from gpt_fast.serve.page import HTML, page, policy
from gpt_fast.serve.protocol import openai_fields
from gpt_fast.serve.protocol.request import SAMPLING

SOURCE = HTML.read_text(encoding="utf-8")
LARGEST = 2**53 - 1  # JavaScript counts on to here without a gap


class Reader(html.parser.HTMLParser):
    """``tags``: name and attributes of each; ``texts``: the text of each <script> and <style>."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("script", "style") and data.strip():
            self.texts.append(data)


@pytest.fixture(scope="module")
def read() -> Reader:
    return Reader(SOURCE)


# ---- how it is served ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuous", [False, True])
def test_the_route_answers_with_the_page_and_its_policy(tmp_path: Path, continuous: bool) -> None:
    worker = Worker(FakeLLM(), tmp_path, CONTINUOUS if continuous else {})
    [(_, [answer])] = worker.predict(b"", headers={"url_path": "page"})
    _, content_type, status, headers, body = answer
    assert (status, content_type, body.decode()) == (200, "text/html; charset=utf-8", SOURCE)
    assert headers["Content-Security-Policy"] == policy(SOURCE)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "ts_stream_next" not in headers
    [(_, [after])] = worker.predict(b"", headers={"url_path": "stats"})
    assert "Content-Security-Policy" not in after[3]


def test_the_policy_allows_this_files_style_and_script_and_nothing_else(read: Reader) -> None:
    rules = dict(rule.split(" ", 1) for rule in policy(SOURCE).split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy(SOURCE)
    style, _, script = read.texts  # in the middle: the fields, which are data
    for rule, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert policy(SOURCE.replace("use strict", "use  strict")) != policy(SOURCE)


def test_the_file_loads_nothing_and_has_no_place_where_text_becomes_html(read: Reader) -> None:
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", SOURCE)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|srcdoc", SOURCE)
    for tag, attributes in read.tags:
        blocked = [name for name in attributes if name == "style" or name.startswith("on") or name == "src"]
        assert not blocked, f"<{tag}> has {blocked}, which the policy blocks"


def test_every_control_has_a_label(read: Reader) -> None:
    labelled = {attributes.get("for") for tag, attributes in read.tags if tag == "label"}
    for tag, attributes in read.tags:
        if tag in ("textarea", "input") and attributes.get("type") != "radio":
            assert attributes["id"] in labelled


def test_the_page_is_read_once() -> None:
    assert page() is page()


# ---- its fields ------------------------------------------------------------------------------------------------------


def fields(read: Reader) -> dict[str, dict[str, Any]]:
    return {field["name"]: field for group in json.loads(read.texts[1]) for field in group["fields"]}


def kind_of(name: str) -> Any:
    hint = inspect.get_annotations(SamplingParams, eval_str=True)[name]
    return get_args(hint)[1] if get_origin(hint) is Annotated else hint


def test_the_page_has_every_field_of_sampling_that_its_routes_take(read: Reader) -> None:
    taken = set(openai_fields.COMPLETION) & set(openai_fields.CHAT) - set(openai_fields.UNSUPPORTED)
    assert set(SAMPLING) <= taken
    assert set(SAMPLING) == set(fields(read))


def test_ranges_and_defaults_are_those_of_the_server(read: Reader) -> None:
    defaults = SamplingParams()
    for name, field in fields(read).items():
        kind = kind_of(name)
        if isinstance(kind, (Whole, Real)):
            assert field["kind"] == "number"
            assert (field["least"], field["most"]) == (max(kind.least, -LARGEST), min(kind.most, LARGEST)), name
            assert field.get("above", False) == getattr(kind, "above", False), name
        else:
            assert "least" not in field, name
        if name in ("min_tokens", "n", "presence_penalty", "frequency_penalty"):
            assert float(field["default"]) == getattr(defaults, name), name
    assert fields(read)["logprobs"]["most"] == fields(read)["prompt_logprobs"]["most"] == MAX_LOGPROBS


# ---- how it looks ----------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Of #rrggbb, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_edges_can_be_seen(scheme: int) -> None:
    colours = dict(
        re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", re.findall(r":root \{(.*?)\}", SOURCE, re.DOTALL)[scheme])
    )
    for behind in ("paper", "raised", "accepted", "corrected", "bonus", "cached"):
        assert contrast(colours["ink"], colours[behind]) >= 7
    for behind in ("paper", "raised"):
        assert contrast(colours["faint"], colours[behind]) >= 4.5
        assert contrast(colours["wrong"], colours[behind]) >= 4.5
        assert contrast(colours["edge"], colours[behind]) >= 3
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for origin in ("accepted", "corrected", "bonus", "cached"):
        assert contrast(colours[f"{origin}-line"], colours["raised"]) >= 3
