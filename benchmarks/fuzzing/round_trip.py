"""The tokens that ``tokenize`` makes of a text, sent to ``detokenize``: it must be the same text again."""

from __future__ import annotations

import json

from fuzzing.client import Answer, fire
from fuzzing.judge import asked
from fuzzing.shot import Shot, Target, message
from fuzzing.values import dump


async def lost(target: Target, shot: Shot, answer: Answer) -> str:
    """How the text of ``shot``, a right request for tokens, comes back from those of ``answer``; empty if as it was,
    and for every other request. In front of it there may be the name of the token that begins a text."""
    if shot.route != "tokenize" or not shot.served or answer.status != 200 or "prompt" not in asked(shot):
        return ""
    text = asked(shot)["prompt"]
    tokens = json.loads(answer.body).get("tokens")
    data = message(target, f"{target.versioned}/detokenize", dump({"tokens": tokens}))
    back = await fire(target.host, target.port, Shot(shot.index, "back", "detokenize", data))
    if back.refused or (back.status == 200 and json.loads(back.body)["prompt"].endswith(text)):
        return ""
    return f"{text[:100]!r} came back as {back.status} {back.fault or back.body[:200]!r}"
