"""The page for people: page.html as it lies beside this file, and the headers that let nothing else into it.

A model's text must never act as HTML. The page writes it by textContent alone, and the browser is told to hold to that:
only the style and the script of this file run, found by their SHA-256, they may talk to this server alone, and trusted
types refuse every string that would be parsed as HTML (https://www.w3.org/TR/CSP3, https://www.w3.org/TR/trusted-types).
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from gpt_fast.serve.protocol.request import Piece

HTML = Path(__file__).with_name("page.html")
HTML_TYPE = "text/html; charset=utf-8"


@cache
def page() -> Piece:
    """The answer to ``GET page``."""
    html = HTML.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    return Piece(html, HTML_TYPE, headers=tuple(headers.items()))


def policy(html: str) -> str:
    """The content security policy of ``html``: its own ``<style>`` and ``<script>`` elements, and nothing else."""
    allowed = {
        "default-src": "'none'",
        "script-src": " ".join(_hashes(html, "script")),
        "style-src": " ".join(_hashes(html, "style")),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon, without which browsers ask for /favicon.ico
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _hashes(html: str, element: str) -> list[str]:
    """The contents of each ``<element>`` without attributes, as the policy names them. One with attributes holds data
    or is refused by the browser."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in contents]
