"""The page in a real Chromium, from a real TorchServe with token authorisation: what people see, press and read.

``GPT_FAST_SCREENSHOTS=docs`` writes the pictures of the documents there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from brake import Brake
from browser import Browser, browse, find_chromium
from serving import ROOT, Reply, Server, serve, wait_for

from gpt_fast.serve.archive import build_archive

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian's package chromium)")

CONFIG = """\
minWorkers: 1
maxWorkers: 1
continuousBatching: true
batchSize: 32
maxBatchDelay: 1
responseTimeout: 300
startupTimeout: 300
handler:
    dtype: float32
    device: cpu
    threads: 1
    max_batch: 4
    speculate: always
    speculate_k: 3
"""
BASE = "/predictions/gpt-fast/1.0"
PROMPT = "Once upon a time, there was a little girl named Lily. She had a red ball and a big dog"
DESKTOP, PHONE = (1100, 860), (360, 740)
STATUS = "document.querySelector('#status').textContent"
ERROR = "document.querySelector('#error').textContent"
READY = "document.querySelector('#model').textContent.includes('tokens of context')"
DONE = f"{STATUS}.startsWith('Done')"


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("brake"), "gpt-fast")


class Page:
    """The page of a server, in a browser."""

    def __init__(self, server: Server, browser: Browser) -> None:
        self.server, self.browser = server, browser
        self.url = f"http://127.0.0.1:{server.port}{BASE}/page"
        self.key = ""

    def is_ready(self) -> bool:
        """Whether the server has written its keys and answers."""
        with contextlib.suppress(OSError, ValueError):
            self.key = json.loads((self.server.home / "key_file.json").read_text())["inference"]["key"]
            return self.ask("health").status == 200
        return False

    def ask(self, path: str, body: Any = None) -> Reply:
        """The same server without the page."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return self.server.request("GET" if body is None else "POST", f"{BASE}/{path}", data, headers)

    def open(self, fragment: str = "", with_token: bool = True) -> None:
        self.browser.open(self.url)
        self.browser.evaluate(f"sessionStorage.setItem('token', {json.dumps(self.key if with_token else '')})")
        self.browser.open(f"{self.url}{fragment}")
        if with_token:
            self.browser.until(READY)

    def write(self, selector: str, text: str) -> None:
        """Put ``text`` in the place of what a control holds, as a person does."""
        unfold = "if (e.closest('details')) e.closest('details').open = true"
        self.browser.evaluate(f"(() => {{ const e = document.querySelector('{selector}'); {unfold}; e.select() }})()")
        self.browser.type(text)

    def send(self, prompt: str | None = None, **fields: str) -> None:
        """Write and press Ctrl+Enter."""
        for name, value in fields.items():
            self.write(f"#field-{name}", value)
        if prompt is not None:
            self.write("#prompt", prompt)
        self.browser.press("Enter", ctrl=True)

    def texts(self, selector: str) -> list[str]:
        return list(self.browser.evaluate(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)"))


@pytest.fixture(scope="module")
def opened(checkpoint: Path, brake: Brake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A server with the demo pair, which wants a key, and a browser that gets one for the page, as from a proxy."""
    store = tmp_path_factory.mktemp("model_store")
    config = store.parent / "model_config.yaml"
    config.write_text(CONFIG)
    handler = brake.handler((ROOT / "handler.py").read_text())
    build_archive(checkpoint, draft=checkpoint.parent / "draft", config=config, handler=handler, output=store)
    assert CHROMIUM is not None
    with serve(store, {"gpt-fast": "gpt-fast"}, options=()) as server, browse(CHROMIUM) as browser:
        page = Page(server, browser)
        wait_for(page.is_ready)
        browser.send_with_documents({"Authorization": f"Bearer {page.key}"})
        yield page


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """Light, of a desktop's size. What the console complains about fails the test."""
    opened.browser.look(*DESKTOP)
    opened.browser.complaints.clear()
    yield opened
    assert opened.browser.complaints == []


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_what_is_typed_is_answered_token_by_token(page: Page) -> None:
    page.open()
    page.send(PROMPT, temperature="0", max_tokens="40")
    page.browser.until(DONE)
    asked = {"model": "gpt-fast", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "logprobs": 5}
    [choice] = page.ask("v1/completions", {**asked, "return_origins": True}).json()["choices"]
    assert "".join(page.texts("#answer .token")) == choice["text"]
    shown = page.browser.evaluate("[...document.querySelectorAll('#answer .token')].map((e) => e.token.origin)")
    assert len(shown) == 40
    assert set(shown) <= {"plain", "accepted", "corrected", "bonus"}
    assert "accepted" in shown
    colours = page.texts("#legend span")
    assert colours == ["accepted", "corrected", "bonus", "plain"]
    assert "40 tokens" in page.browser.evaluate(STATUS)


def test_the_prompts_part_from_the_prefix_cache_is_shaded(page: Page) -> None:
    page.open()
    for _ in range(2):
        page.send(PROMPT, max_tokens="2")
        page.browser.until(DONE)
        page.browser.evaluate("document.querySelector('#status').textContent = ''")
    assert "".join(page.texts("#answer details .cached, #answer details .computed")).strip() == PROMPT
    cached = "".join(page.texts("#answer details .cached")).strip()
    assert cached
    assert PROMPT.startswith(cached)
    assert page.texts("#answer summary") == ["Prompt: 23 tokens, 16 of them from the prefix cache (shaded)"]


def test_a_token_tells_its_probability_under_mouse_and_keyboard(page: Page) -> None:
    page.open()
    page.send(PROMPT, temperature="0", max_tokens="8", logprobs="3")
    page.browser.until(DONE)
    page.browser.point_at("#answer .token:nth-child(3)")
    page.browser.until("!document.querySelector('#card').hidden")
    body = {"model": "gpt-fast", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 3}
    [choice] = page.ask("v1/completions", body).json()["choices"]
    alternatives = choice["logprobs"]["top_logprobs"][2]
    assert page.texts("#card th") == [name.replace(" ", "␣") for name in alternatives]
    shares = [float(text.split()[0]) for text in page.texts("#card td:last-child")]
    assert shares == sorted(shares, reverse=True)
    page.browser.evaluate("document.querySelector('#answer .token').focus()")
    page.browser.press("End")
    assert page.browser.evaluate("document.activeElement === [...document.querySelectorAll('#answer .token')].at(-1)")
    page.browser.press("ArrowLeft")
    focused = page.browser.evaluate("document.activeElement.token.name").replace(" ", "␣")
    assert page.texts("#card code")[0] == focused
    assert page.browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "card"
    assert page.browser.evaluate("document.querySelectorAll('#answer .token[tabindex=\"0\"]').length") == 1
    page.browser.press("Escape")
    assert page.browser.evaluate("document.querySelector('#card').hidden")


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_prompts_tokens_tell_their_probability_when_asked(page: Page, mode: str) -> None:
    is_chat = mode == "chat"
    page.open(f"#mode={mode}&temperature=0&max_tokens=6")
    page.send(PROMPT, prompt_logprobs="3")
    page.browser.until(DONE)
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    body = {"model": "gpt-fast", **asked, "temperature": 0, "max_tokens": 6, "prompt_logprobs": 3}
    whole = page.ask("v1/chat/completions" if is_chat else "v1/completions", {**body, "return_token_ids": True}).json()
    [choice] = whole["choices"]
    places, ids = (whole if is_chat else choice)["prompt_logprobs"], (whole if is_chat else choice)["prompt_token_ids"]
    expected = [place and place[str(token)]["logprob"] for place, token in zip(places, ids, strict=True)]
    spans = ".turn:last-child details .token"
    shown = page.browser.evaluate(f"[...document.querySelectorAll('{spans}')].map((e) => e.token.logprob)")
    assert shown == pytest.approx(expected, abs=1e-4)
    assert shown[0] is None
    if not is_chat:
        assert "".join(page.texts(spans)).strip() == PROMPT
    answer = "".join(page.texts(".turn:last-child > .tokens .token"))
    assert answer == (choice["message"]["content"] if is_chat else choice["text"])
    assert "first token" not in page.browser.evaluate(STATUS), "nobody knows when it came"
    page.browser.evaluate(f"document.querySelector('{spans}').closest('details').open = true")
    page.browser.point_at(f"{spans}:nth-child(4)")
    page.browser.until("!document.querySelector('#card').hidden")
    top = sorted(places[3].values(), key=lambda one: -one["logprob"])
    assert page.texts("#card th") == [one["decoded_token"].replace(" ", "␣") for one in top]
    page.browser.evaluate(f"document.querySelector('{spans}').focus()")
    assert "nothing predicts" in page.texts("#card p")[0]
    page.browser.press("ArrowRight")
    assert page.browser.evaluate(f"document.activeElement === document.querySelectorAll('{spans}')[1]")
    page.browser.evaluate("document.querySelector('#share').open = true")
    assert "logprobs" not in "".join(page.texts("#share pre:not(#link)"))


def test_stop_ends_the_answer_here_and_in_the_engine(page: Page, brake: Brake) -> None:
    page.open()
    aborted = page.ask("stats").json()["request_success_total"]["abort"]
    page.write("#prompt", PROMPT)
    page.write("#field-max_tokens", "450")
    steps = itertools.count(7)
    with brake.held(6):
        page.browser.evaluate("document.querySelector('#send').focus(); document.activeElement.click()")
        assert page.browser.evaluate("document.activeElement.id") == "stop"
        page.browser.until("document.querySelectorAll('#answer .token').length > 0")
        page.browser.point_at("#stop", click=True)
        page.browser.until(f"{STATUS}.startsWith('Stopped')")
        assert page.browser.evaluate("document.activeElement.id") == "send"

        def is_cancelled() -> bool:
            brake.allow(next(steps))  # TorchServe notices a client that has gone when it sends something
            return bool(page.ask("stats").json()["request_success_total"]["abort"] == aborted + 1)

        wait_for(is_cancelled)
    assert page.ask("stats").json()["num_requests_running"] == 0
    assert 0 < len(page.texts("#answer .token")) < 450
    assert page.browser.evaluate(ERROR) == ""
    page.send(max_tokens="3")
    page.browser.until(DONE)


def test_a_chat_goes_on_where_it_was(page: Page) -> None:
    page.open("#mode=chat&max_tokens=12&temperature=0&system=Be+kind")
    page.send("What did Tom do?")
    page.browser.until(DONE)
    first = "".join(page.texts("#transcript .token"))
    page.browser.evaluate("document.querySelector('#status').textContent = ''")
    page.send("And then?")
    page.browser.until(DONE)
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "What did Tom do?"}]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    body = {"model": "gpt-fast", "messages": messages, "max_tokens": 12, "temperature": 0}
    second = page.ask("v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert page.texts("#transcript .assistant .tokens") == [first, second]
    assert page.browser.evaluate("conversation.length") == 4


def test_several_answers_are_shown_apart(page: Page) -> None:
    page.open("#n=3&max_tokens=4&temperature=1")
    page.send(PROMPT)
    page.browser.until(DONE)
    assert page.texts("#answer h2") == ["answer 1", "answer 2", "answer 3"]
    assert page.browser.evaluate("document.querySelectorAll('#answer .token').length") == 12


def test_a_models_text_is_text(page: Page) -> None:
    hostile = '<img src="x" onerror="document.title=1"><b id="bold">bold</b>&amp;'
    page.open()
    page.send(PROMPT, choice=hostile, max_tokens="200")
    page.browser.until(DONE)
    assert "".join(page.texts("#answer .token")) == hostile
    assert page.browser.evaluate("document.querySelector('#answer img, #bold')") is None
    assert page.browser.evaluate("document.title") == "gpt_fast"
    refused = "(() => { try { document.body.innerHTML = '<p>'; return false } catch { return true } })()"
    assert page.browser.evaluate(refused), "trusted types are off"
    page.browser.complaints.clear()  # of the last line


def told(page: Page, deltas: list[tuple[dict[str, str], list[bytes]]]) -> list[str]:
    """The text of each token after a chat's stream with these deltas, and the tokens that come with each."""
    choices = []
    for delta, tokens in deltas:
        entries = [{"token": "t", "bytes": list(t), "logprob": -1, "top_logprobs": []} for t in tokens]
        choices.append({"index": 0, "delta": delta, "logprobs": {"content": entries}})
    page.browser.evaluate("globalThis.shown = new Answer(document.querySelector('#answer'), 'answer'); 0")
    page.browser.evaluate(f"{json.dumps(choices)}.forEach((choice) => shown.take(choice))")
    return list(page.browser.evaluate("shown.tokens.map(({span}) => span.textContent)"))


def test_each_token_gets_its_part_of_the_text(page: Page) -> None:
    page.open()
    whole = [({"content": "Ab"}, [b" A", b"b"]), ({"content": ""}, [b"\xc3"]), ({"content": "é!"}, [b"\xa9", b"!"])]
    assert told(page, whole) == ["A", "b", "", "é", "!"], "without the space that the text does not begin with"
    assert told(page, [({"content": " A"}, [b" A"]), ({"content": "b"}, [b"b"])]) == [" A", "b"]
    held = [({"content": "a"}, [b"a"]), ({"content": ""}, [b"\nuser"]), ({"content": ""}, [b":"])]
    assert told(page, held) == ["a", "", ""], "a string that ends the answer is not part of it"
    thinking = [({"content": ""}, [b"<think>"]), ({"reasoning_content": "hm"}, [b"hm"]), ({"content": "yes"}, [b"yes"])]
    assert told(page, thinking) == ["<think>", "hm", "yes"]
    assert page.browser.evaluate("shown.text") == "yes"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_wrong_field_is_named_and_marked(page: Page) -> None:
    page.open()
    page.send(PROMPT, temperature="-1", max_tokens="3")
    page.browser.until(f"{ERROR} !== ''")
    assert page.browser.evaluate(ERROR) == "temperature must be a number from 0 to 100, not -1"
    assert page.browser.evaluate("document.activeElement.id") == "field-temperature"
    assert page.browser.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
    page.send(temperature="0.5", logit_bias="{")
    page.browser.until(f"{ERROR}.startsWith('logit_bias is not JSON')")
    page.send(logit_bias="", seed="some")
    page.browser.until(f"{ERROR}.startsWith('seed must be')")
    page.send(seed="7")
    page.browser.until(DONE)
    assert page.browser.evaluate(ERROR) == ""


def test_without_a_token_the_page_asks_for_it(page: Page) -> None:
    page.open(with_token=False)
    page.browser.until(f"{ERROR}.includes('Token')")
    assert page.browser.evaluate("document.activeElement.id") == "token"
    page.browser.type(page.key)
    page.browser.press("Tab")
    page.browser.until(READY)
    assert page.browser.evaluate(ERROR) == ""
    page.send(PROMPT, max_tokens="3")
    page.browser.until(DONE)
    assert page.key not in page.browser.evaluate("location.href + document.querySelector('#share').textContent")


# ---- the request elsewhere, the server's state, looks ----------------------------------------------------------------


def test_link_curl_and_python_are_the_request(page: Page) -> None:
    page.open()
    fields = {"temperature": "0.7", "seed": "3", "stop": "zebra\\n", "top_k": "40", "max_tokens": "6"}
    page.send('It\'s "quoted" & so on', **fields)
    page.browser.until(DONE)
    [link], [curl], [python] = page.texts("#link"), page.texts("#curl"), page.texts("#python")
    words = shlex.split(curl.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    numbers = {"temperature": 0.7, "seed": 3, "top_k": 40, "max_tokens": 6}
    asked = {"model": "gpt-fast", "prompt": 'It\'s "quoted" & so on', "stream": True, "stop": ["zebra\n"], **numbers}
    assert body == asked
    text = page.ask("v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
    assert "".join(page.texts("#answer .token")) == text
    compile(python, "the page", "exec")
    assert "temperature=0.7" in python
    assert 'extra_body={"top_k": 40}' in python
    page.browser.evaluate("document.querySelector('#share').open = true")
    clipboard = "Object.defineProperty(navigator, 'clipboard', {value: %s, configurable: true})"
    page.browser.evaluate(clipboard % "{writeText: async (text) => { window.copied = text }}")
    page.browser.point_at("[data-copy=python]", click=True)
    page.browser.until(f"{STATUS} === 'Copied: python'")
    assert page.browser.evaluate("copied") == python
    page.browser.evaluate(clipboard % "undefined")
    page.browser.point_at("[data-copy=curl]", click=True)
    page.browser.until(f"{STATUS}.includes('does not let the page copy')")
    assert page.browser.evaluate("getSelection().toString()") == curl
    page.open(link.removeprefix(page.url))
    assert page.texts("#link") == [link]
    assert page.texts("#curl") == [curl]
    assert page.browser.evaluate("document.querySelector('#answer').childElementCount") == 0, "a link sends nothing"


def others_ask(page: Page, brake: Brake) -> None:
    """Three requests of another client run while the page looks, and then end."""
    body = {"model": "gpt-fast", "prompt": PROMPT, "n": 3, "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with brake.held(20):
            asked = pool.submit(page.ask, "v1/completions", body)
            page.browser.until("document.querySelectorAll('.plot output')[2].textContent === '3 of 4'")
        assert asked.result().status == 200


def test_the_plots_show_the_server(page: Page, brake: Brake) -> None:
    page.open()
    page.browser.until("document.querySelectorAll('.plot path[d^=M]').length === 4")
    total = page.ask("stats").json()["pages_total"]
    assert page.texts(".plot output")[2:] == ["0 of 4", f"0 of {total}"]
    others_ask(page, brake)
    page.browser.until("document.querySelectorAll('.plot output')[2].textContent === '0 of 4'")
    first, rate, batch, pages = (int(text.removeprefix("most ")) for text in page.texts(".plot .hint"))
    assert page.texts(".plot output")[0].endswith(" ms")
    assert min(first, rate, pages) > 0
    assert batch == 3


@pytest.mark.parametrize("look", ["light", "dark", "phone", "phone_dark"])
def test_nothing_is_cut_off(page: Page, look: str, brake: Brake, tmp_path: Path) -> None:
    phone, dark = "phone" in look, "dark" in look
    size = PHONE if phone else DESKTOP
    page.browser.look(*size, dark=dark)
    page.open("#seed=3&temperature=0.9" if not dark else "#mode=chat&max_tokens=60&temperature=0.8&seed=3")
    others_ask(page, brake)
    for prompt in [PROMPT] * 2 if not dark else ["Tell me about Lily and her dog.", "And then?"]:
        page.browser.evaluate("document.querySelector('#status').textContent = ''")
        page.send(prompt)
        page.browser.until(DONE)
    page.browser.evaluate("document.querySelectorAll('details.group').forEach((e) => { e.open = true })")
    wide = "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
    inside = "!e.closest('pre, .unseen, svg')"
    assert page.browser.evaluate(f"{wide}.filter((e) => {inside}).map((e) => e.outerHTML.slice(0, 80))") == []
    assert page.browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.browser.evaluate("document.querySelectorAll('details.group').forEach((e) => { e.open = false })")
    page.browser.evaluate("document.querySelector('#settings details').open = innerWidth > 600; scrollTo(0, 0)")
    page.browser.until("document.querySelectorAll('.plot path[d^=M]').length === 4")
    page.browser.point_at(".turn:last-child .token:nth-child(12)", click=phone)
    page.browser.until("!document.querySelector('#card').hidden")
    card = page.browser.evaluate("document.querySelector('#card').getBoundingClientRect().toJSON()")
    assert card["left"] >= 0
    assert card["right"] <= size[0]
    folder = Path(os.environ.get("GPT_FAST_SCREENSHOTS") or tmp_path)
    picture = page.browser.screenshot()
    (folder / f"page_{look}.png").write_bytes(picture)
    assert len(picture) < 200_000, "the pictures lie in the repository"
