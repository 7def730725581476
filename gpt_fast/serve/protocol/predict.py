"""``POST predict {"prompt": ...}``: the request and the answer of LLMSpeculativeSampling's server, for its clients.

The answer is one JSON string, the prompt with its continuation. Sampling has that server's defaults; every field of
sampling of our own protocol (native.py) may say otherwise.
Source: https://github.com/feifeibear/LLMSpeculativeSampling, serving.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion
from gpt_fast.serve.protocol import native

DEFAULT_MAX_TOKENS = 40
DEFAULTS = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}


class PredictRequest(native.NativeRequest):
    """One prompt, answered by one string."""

    def write_end(self, completions: Sequence[Completion]) -> str:
        (prompt,), (completion,) = self.prompts, completions
        return json.dumps(f"{prompt}{completion.text}", ensure_ascii=False) + "\n"


def parse_predict(body: Mapping[str, Any]) -> PredictRequest:
    """``body``, understood. Raises RequestError, naming the field."""
    for name in ("stream", *native.MORE_THAN_TEXT):
        if body.get(name, False) is not False and body[name] is not None:
            raise RequestError(f"{name} is not possible here: the answer is one string", name)
    asked = {name: value for name, value in body.items() if value is not None}
    read = native.parse_request(DEFAULTS | asked, DEFAULT_MAX_TOKENS, default_stream=False)
    if not isinstance(read.prompts[0], str):
        raise RequestError("prompt must be a string here: the answer begins with it", "prompt")
    return PredictRequest(read.given, read.prompts, read.params, False)
