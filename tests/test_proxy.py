"""configs/proxy/nginx.conf in a real nginx, with servers behind it whose every answer a test decides."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from nginx_proxy import HANG_S, WHY_NOT, Proxy
from waiting import free_port

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

KEYS = {name: f"{i}5eed" * 12 + "beef" for i, name in enumerate(("anna", "bob", "many", "fast"))}
CHAT = "/v1/chat/completions"


class Upstream:
    """One server behind the proxy. A POST is answered in two pieces; the second waits until ``go_on`` is set."""

    def __init__(self) -> None:
        self.port, self.status = free_port(), 200
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.go_on, self.hung_up = threading.Event(), threading.Event()
        up = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                up.seen.append((self.path, dict(self.headers), b""))
                self.answer(b"a page")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                up.seen.append((self.path, dict(self.headers), body))
                if up.status != 200:
                    self.answer(b'{"error": {"code": "stopping"}}')
                    return
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nfirst\r\n")
                while not up.go_on.wait(0.01):
                    try:
                        self.connection.setblocking(False)
                        gone = self.connection.recv(1) == b""
                    except BlockingIOError:
                        gone = False
                    finally:
                        self.connection.setblocking(True)
                    if gone:
                        up.hung_up.set()
                        return
                self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

            def answer(self, body: bytes) -> None:
                self.send_response(up.status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Upstream]]:
    found = [Upstream(), Upstream()]
    yield found
    for one in found:
        one.close()


@pytest.fixture(scope="module")
def proxy(servers: list[Upstream], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    found = Proxy(tmp_path_factory.mktemp("nginx"), [one.port for one in servers], KEYS)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def fresh(servers: list[Upstream]) -> None:
    for one in servers:
        one.status = 200
        one.seen.clear()
        one.go_on.set()
        one.hung_up.clear()


Ask = Callable[..., tuple[int, Any, dict[str, str]]]


@pytest.fixture
def ask(proxy: Proxy) -> Ask:
    def ask(
        method: str = "POST", path: str = CHAT, key: str | None = KEYS["anna"], body: bytes = b'{"a": 1}'
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers. ``key``: None sends no header."""
        connection = proxy.connect()
        try:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            connection.request(method, path, body if method == "POST" else None, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, text, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    return ask


def begun(proxy: Proxy, key: str) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
    """A stream whose first piece has come."""
    connection = proxy.connect()
    connection.request("POST", CHAT, b"{}", {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    assert (answer.status, answer.read(5)) == (200, b"first")
    return connection, answer


def seen(servers: list[Upstream]) -> list[tuple[str, dict[str, str], bytes]]:
    return [request for one in servers for request in one.seen]


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", "x", KEYS["anna"][:-1], KEYS["anna"] + "0", "0" * 64], ids=str)
@pytest.mark.parametrize("path", [CHAT, "/predictions/gpt-fast", "/predictions/gpt-fast/1.0/stats"])
def test_without_a_valid_key_nothing_is_asked(path: str, key: str | None, ask: Ask, servers: list[Upstream]) -> None:
    status, body, headers = ask(path=path, key=key)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert not seen(servers)


def test_another_scheme_is_no_key(proxy: Proxy, servers: list[Upstream]) -> None:
    for value in (f"Basic {KEYS['anna']}", KEYS["anna"], f"Bearer  {KEYS['anna']}", "Bearer"):
        connection = proxy.connect()
        connection.request("POST", CHAT, b"{}", {"Authorization": value})
        assert connection.getresponse().status == 401, value
        connection.close()
    assert not seen(servers)


def test_a_valid_key_is_let_in_and_not_passed_on(ask: Ask, servers: list[Upstream]) -> None:
    status, body, _ = ask(body=b'{"the": "body"}')
    assert (status, body) == (200, b"firstlast")
    [(_, headers, sent)] = seen(servers)
    assert sent == b'{"the": "body"}'
    assert "authorization" not in {name.lower() for name in headers}


def test_the_log_has_the_clients_name_and_neither_its_key_nor_its_words(ask: Ask, proxy: Proxy) -> None:
    ask(path=CHAT + "?secret=word", key=KEYS["bob"], body=b'{"prompt": "another secret"}')
    ask(path=CHAT, key="a wrong secret")
    log = proxy.logs()
    assert 'client="bob" POST /v1/chat/completions 200' in log
    assert "secret" not in log
    assert not any(key in log for key in KEYS.values())


# ---- routes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "passed"),
    [
        ("/v1/models", "/predictions/gpt-fast/1.0/v1/models"),
        ("/v1/models/owner/name", "/predictions/gpt-fast/1.0/v1/models/owner/name"),
        ("/predictions/gpt-fast", "/predictions/gpt-fast"),
        ("/predictions/gpt-fast/1.0/v1/models", "/predictions/gpt-fast/1.0/v1/models"),
        ("/predictions/gpt-fast/1.0/stats", "/predictions/gpt-fast/1.0/stats"),
    ],
)
def test_routes_of_inference_pass(path: str, passed: str, ask: Ask, servers: list[Upstream]) -> None:
    assert ask("GET", path)[0] == 200
    assert seen(servers)[0][0] == passed


@pytest.mark.parametrize("path", ["/ping", "/predictions/gpt-fast/1.0/page"])
def test_the_page_and_the_ping_need_no_key(path: str, ask: Ask) -> None:
    assert ask("GET", path, None)[:2] == (200, b"a page")
    assert ask("POST", path)[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/", "/models", "/models/gpt-fast", "/metrics", "/api-description", "/predictions/other", "/predictions",
        "/predictions/gpt-fast2", "/predictions/gpt-fast/2.0/v1/models", "/explanations/gpt-fast", "/workflows",
        "/v1/../models", "/v1/%2e%2e/models", "/predictions/gpt-fast/1.0/..%2f..%2f..%2fmodels", "/v2/models",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_management_and_all_else_is_not_there(method: str, path: str, ask: Ask, servers: list[Upstream]) -> None:
    status, body, _ = ask(method, path, KEYS["anna"])
    assert status in (400, 404)
    assert b"error" in body
    assert not seen(servers)


def test_it_is_not_reached_without_tls(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=HANG_S)
    connection.request("GET", "/ping")
    assert connection.getresponse().status == 400


# ---- streams and limits ---------------------------------------------------------------------------------------------


def test_an_answer_comes_piece_by_piece(proxy: Proxy, servers: list[Upstream]) -> None:
    """The second piece is written after the client has the first one."""
    for one in servers:
        one.go_on.clear()
    connection, answer = begun(proxy, KEYS["bob"])
    for one in servers:
        one.go_on.set()
    assert answer.read() == b"last"
    connection.close()


def test_a_client_that_goes_ends_its_request(proxy: Proxy, servers: list[Upstream]) -> None:
    for one in servers:
        one.go_on.clear()
    connection, answer = begun(proxy, KEYS["bob"])
    answer.close()
    connection.close()
    (asked,) = (one for one in servers if one.seen)
    assert asked.hung_up.wait(HANG_S)


def test_a_body_may_have_one_mebibyte(ask: Ask, servers: list[Upstream]) -> None:
    assert ask(body=b" " * 2**20)[0] == 200
    assert len(seen(servers)[0][2]) == 2**20
    status, body, _ = ask(body=b" " * (2**20 + 1))
    assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")
    assert len(seen(servers)) == 1


def test_a_client_has_so_many_requests_at_a_time(proxy: Proxy, ask: Ask, servers: list[Upstream]) -> None:
    for one in servers:
        one.go_on.clear()
    streams = [begun(proxy, KEYS["many"]) for _ in range(32)]
    status, body, headers = ask(key=KEYS["many"])
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit")
    assert headers["retry-after"] == "1"
    for one in servers:
        one.go_on.set()
    assert ask(key=KEYS["bob"])[0] == 200, "another client has its own places"
    assert all(answer.read() == b"last" for _, answer in streams)
    for connection, _ in streams:
        connection.close()


# ---- two servers ----------------------------------------------------------------------------------------------------


def test_what_one_server_refuses_the_other_one_answers(ask: Ask, servers: list[Upstream]) -> None:
    servers[0].status = 503
    assert {ask(key=KEYS["fast"])[0] for _ in range(6)} == {200}
    assert servers[0].seen, "it was never asked"


def test_what_both_refuse_is_told_with_the_time_to_come_back(ask: Ask, servers: list[Upstream]) -> None:
    servers[0].status = servers[1].status = 503
    status, body, headers = ask()
    assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (503, "stopping", "1")


def test_other_errors_are_the_models(ask: Ask, servers: list[Upstream]) -> None:
    for status in (400, 404, 413, 500):
        servers[0].status = servers[1].status = status
        assert ask()[:2] == (status, b'{"error": {"code": "stopping"}}')
    assert len(seen(servers)) == 4, "each was asked of one server alone"


def test_a_server_that_is_gone_is_passed_over_and_none_is_said_in_json(tmp_path: Path) -> None:
    only = Upstream()
    only.go_on.set()
    proxy = Proxy(tmp_path, [free_port(), only.port], KEYS)
    try:
        for expected in [200] * 4 + [503]:
            if expected == 503:
                only.close()
            connection = proxy.connect()
            connection.request("POST", CHAT, b"{}", {"Authorization": f"Bearer {KEYS['anna']}"})
            answer = connection.getresponse()
            assert answer.status == expected
            body = answer.read()
            connection.close()
        assert json.loads(body)["error"]["code"] == "no_server"
        assert answer.headers["Retry-After"]
    finally:
        proxy.close()
