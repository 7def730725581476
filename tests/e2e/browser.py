"""A headless Chromium for tests, driven by its own DevTools protocol over a pair of pipes: nothing but the browser is
needed (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import HANG_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox: tests often run as root or in a container. The page under test is this project's own.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
FLAGS += ("--no-first-run", "--disable-extensions", "--disable-background-networking", "--force-device-scale-factor=1")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


def find_chromium() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with one page; made by :func:`browse`. ``complaints``: exceptions of the page's script, and errors
    in its console, such as what its policy forbids; not the statuses of answers."""

    def __init__(self, program: str, profile: Path) -> None:
        into, self._out = os.pipe()
        self._in, out = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4. Ours must not be one of these.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (into, out)]
        places = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        places += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        arguments = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(program, arguments, dict(os.environ), file_actions=places, setpgroup=0)
        for fd in (into, out, *high):
            os.close(fd)
        self._number, self._read = 0, b""
        self.complaints: list[str] = []
        self._headers: dict[str, str] = {}
        self._session: str | None = None
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = self._post(method, **params)
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _post(self, method: str, **params: Any) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_S
        while b"\0" not in self._read:
            ready = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "Chromium says nothing"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Fetch.requestPaused":
            headers = {**params["request"]["headers"], **self._headers}
            entries = [{"name": name, "value": value} for name, value in headers.items()]
            self._post("Fetch.continueRequest", requestId=params["requestId"], headers=entries)
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def send_with_documents(self, headers: dict[str, str]) -> None:
        """Add ``headers`` to the request for a page, as a reverse proxy does, and not to what the page asks for."""
        self._headers = headers
        self.call("Fetch.enable", patterns=[{"urlPattern": "http*", "resourceType": "Document"}])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it resolves to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until the expression is true; its value."""
        deadline = time.monotonic() + HANG_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"it did not happen: {script}\n{self.complaints}"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Go to ``url`` and wait for its load event."""
        self.call("Page.navigate", url="about:blank")  # else another #fragment of the same page would not load it
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url.split('#')[0])})")

    def type(self, text: str) -> None:
        """Write where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, ctrl: bool = False) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 2 if ctrl else 0}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **common)

    def point_at(self, selector: str, click: bool = False) -> None:
        """Move the mouse to the middle of the first element that ``selector`` finds."""
        find = f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}});"
        where = (
            f"(() => {{ {find} const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        )
        x, y = self.evaluate(where)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and what the user's system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browse(program: str) -> Iterator[Browser]:
    """A Chromium with a new profile; it ends with everything it started."""
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)
