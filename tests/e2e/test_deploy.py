"""A server is replaced under load, behind the proxy, and nobody's words are in any log: docs/deploy.md."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nginx_proxy import WHY_NOT, Proxy
from serving import ROOT, base_port, java_home, wait_for

from gpt_fast.kernels.cpu.building import build
from gpt_fast.kernels.cpu.library import available

KEY = secrets.token_hex(32)
NATIVE, CHAT = "/predictions/gpt-fast", "/v1/chat/completions"
STORY = {"prompt": "Once upon a time", "max_new_tokens": 300, "ignore_eos": True}


class Served:
    """``gpt-fast serve`` in the foreground, which systemd would run."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.port = folder / "run", base_port()
        java = java_home()
        assert java is not None
        environment = os.environ | {"JAVA_HOME": java, "PYTHONPATH": str(ROOT), "GPT_FAST_CACHE": str(folder / "cache")}
        if available():  # its cache is empty at first
            environment["GPT_FAST_KERNEL_DIR"] = str(build().parent)
        command = [sys.executable, "-m", "gpt_fast", "serve", "--port", str(self.port), "--run-dir", str(self.run_dir)]
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = psutil.Popen([*command, "--threads", "1"], env=environment, stdout=output, stderr=output)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        return "Ctrl-C stops it" in self.output.read_text()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return bytes(answer.read())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(120)


class Site:
    """Two servers and nginx before them."""

    def __init__(self, folder: Path) -> None:
        (folder / "proxy").mkdir()
        self.servers = []
        for name in ("old", "new"):
            (folder / name).mkdir()
            self.servers.append(Served(folder / name))
        self.proxy = Proxy(folder / "proxy", [server.port for server in self.servers], {"a client": KEY})

    def begin(self, path: str, body: object) -> tuple[int, bytes]:
        """Status and body of a POST."""
        connection = self.proxy.connect()
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Authorization": f"Bearer {KEY}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def logs(self) -> dict[str, str]:
        """All that was written, of servers and proxy, by file."""
        found = {"proxy": self.proxy.logs()}
        for server in self.servers:
            files = [server.output, *server.run_dir.glob("*.log"), *server.run_dir.glob("logs/*")]
            found |= {f"{server.run_dir.parent.name}/{path.name}": path.read_text(errors="replace") for path in files}
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    found = Site(tmp_path_factory.mktemp("d"))
    try:
        for server in found.servers:
            wait_for(server.is_ready)
        yield found
    finally:
        for server in found.servers:
            server.close()
        found.proxy.close()


def test_no_log_has_what_a_client_wrote_or_was_answered(site: Site) -> None:
    """At the level that is there by default, in requests that are served and in requests that are refused."""
    word = "zanzibar"
    tool = {"type": "function", "function": {"name": word, "parameters": {"type": "object", "properties": {}}}}
    message = {"role": "user", "content": f"Say {word}."}
    requests: list[tuple[str, object, int]] = [
        (NATIVE, {"prompt": f"The {word} was", "max_new_tokens": 4}, 200),
        (NATIVE, {"prompt": "It was", "choice": [f"the {word}", f"a {word}"], "stream": False}, 200),
        (NATIVE, {"prompt": f"The {word}", "stop": word, "max_new_tokens": 4, "stream": False}, 200),
        (NATIVE, {"prompt": f"The {word}", word: 1}, 400),
        (NATIVE, {"prompt": f"The {word} " * 5000}, 400),
        (NATIVE, {"prompt": word, "temperature": word}, 400),
        (NATIVE, {"prompt": word, "regex": f"({word}"}, 400),
        (NATIVE, {"prompt": word, "json_schema": {"type": word}}, 400),
        (NATIVE, f'{{"prompt": "{word}'.encode(), 400),
        (NATIVE, word.encode(), 400),
        (f"{NATIVE}/1.0/predict", {"prompt": f"The {word}", "max_tokens": 4}, 200),
        ("/v1/completions", {"model": "gpt-fast", "prompt": f"The {word}", "max_tokens": 4, "logprobs": 1}, 200),
        ("/v1/completions", {"prompt": f"The {word}", "model": word}, 404),
        (CHAT, {"model": "gpt-fast", "messages": [message], "max_tokens": 4, "tools": [tool]}, 200),
        (CHAT, {"model": "gpt-fast", "messages": [{"role": word, "content": word}]}, 400),
    ]
    for path, body, status in requests:
        found, answer = site.begin(path, body)
        assert found == status, (body, answer)
    logs = site.logs()
    assert any("request id=" in text for text in logs.values()), "the model's log was not looked at"
    assert any("POST /predictions/gpt-fast" in text for text in logs.values()), "nor TorchServe's"
    assert not [name for name, text in logs.items() if word in text.lower() or KEY in text]


def test_a_browser_gets_the_page_and_needs_a_key_for_the_rest(site: Site) -> None:
    found = []
    for path, key in (("page", ""), ("v1/models", ""), ("v1/models", KEY), ("stats", KEY)):
        connection = site.proxy.connect()
        connection.request("GET", f"{NATIVE}/1.0/{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        found.append((answer.status, answer.headers["Content-Type"].split(";")[0]))
        answer.read()
        connection.close()
    assert found == [(200, "text/html"), (401, "application/json"), *[(200, "application/json")] * 2]


def test_a_server_is_replaced_and_no_request_is_lost(site: Site) -> None:
    """Clients ask all the time, one request after the other, streamed and in one piece. Some answers of both kinds are
    half made when the server is asked to end: its worker sleeps at that moment. Each client gets its whole answer."""
    old, new = site.servers
    worker = psutil.Process(json.loads(old.get("/predictions/gpt-fast/1.0/health"))["pid"])
    status, expected = site.begin(NATIVE, STORY)
    assert (status, len(expected) > 500) == (200, True)
    answers: list[tuple[int, bool]] = []
    enough = threading.Event()

    def client(stream: bool) -> None:
        while not enough.is_set():
            status, body = site.begin(NATIVE, STORY | {"stream": stream})
            text = body if stream else json.loads(body).get("text", "").encode()
            answers.append((status, text == expected))

    clients = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(6)]
    for one in clients:
        one.start()
    try:
        wait_for(lambda: len(answers) >= 6)
        worker.suspend()
        old.process.send_signal(signal.SIGTERM)
        time.sleep(3.0)  # long enough for a server that does not wait to be gone
        worker.resume()
        assert old.process.wait(120) == 0
        before = len(answers)
        wait_for(lambda: len(answers) >= before + 6)
    finally:
        enough.set()
        for one in clients:
            one.join(120)
    assert set(answers) == {(200, True)}, answers
    assert old.output.read_text().endswith("at most\nStopping\nStopped.\n"), old.output.read_text()
    assert new.process.is_running()
    ended = [
        sum(text.count("request id=") for name, text in site.logs().items() if name == f"{side}/model_log.log")
        for side in ("old", "new")
    ]
    assert min(ended) > 3, "the proxy did not ask both"


def test_without_another_server_new_requests_are_told_when_to_come_back(site: Site) -> None:
    """What runs ends well, and so does what is refused meanwhile: as an answer, not as a broken connection."""
    old, new = site.servers
    old.close()
    connection = site.proxy.connect()
    connection.request("POST", NATIVE, json.dumps(STORY).encode(), {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    first = answer.read1()
    new.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Finishing" in new.output.read_text())
    refused: list[int] = []

    def ask() -> bool:
        refused.append(site.begin(NATIVE, STORY | {"max_new_tokens": 1})[0])
        return refused[-1] == 503

    wait_for(ask)
    assert set(refused) <= {200, 503}
    assert len(first + answer.read()) > 500
    connection.close()
    assert new.process.wait(120) == 0


def test_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        wait_for(server.is_ready)
        command = ["curl", "-sN", f"http://127.0.0.1:{server.port}{NATIVE}", "-T", "-"]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(STORY | {"max_new_tokens": 500}).encode())
        client.stdin.close()
        assert client.stdout.read(1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
        assert "Finishing" not in server.output.read_text()
        client.kill()
        client.wait()
    finally:
        server.close()
