"""Chat templates: messages to the prompt a checkpoint was tuned on, by the Jinja template that it carries. Templates
come from strangers: they run in Jinja's immutable sandbox, without access to Python objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpt_fast.errors import RequestError
from gpt_fast.gguf import is_gguf
from gpt_fast.params import MAX_SHOWN
from gpt_fast.tokenizer.gguf_vocabulary import tokenizer_config
from gpt_fast.tokenizer.settings import read_json_object, token_text


class ChatTemplate:
    """A compiled template. ``special`` holds the token strings that templates refer to (``bos_token`` ...)."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.source, self._special = source, dict(special)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template in {where} does not parse: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt for ``messages`` (role and content each), special tokens written out; ``encode_chat`` turns it to
        ids. Raises RequestError when the template refuses the messages (a role out of turn, say)."""
        variables = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**variables, **self._special, **extra)
        except Exception as error:  # a template is a program: what these messages make it raise may be anything
            message = f"the chat template refuses these messages: {str(error)[:MAX_SHOWN]}"
            raise RequestError(message, "messages") from None


def load_template(checkpoint: str | Path) -> ChatTemplate | None:
    """The template in chat_template.jinja or tokenizer_config.json of a directory, or in a GGUF file; None where there
    is none. Of several named ones, ``default``. Raises ValueError for a file that cannot be read."""
    where, alone = Path(checkpoint, "tokenizer_config.json"), Path(checkpoint, "chat_template.jinja")
    config = tokenizer_config(Path(checkpoint)) if is_gguf(Path(checkpoint)) else read_json_object(where)
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if alone.is_file():
        source, where = alone.read_text(encoding="utf-8"), alone
    if not isinstance(source, str):
        return None
    special = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(source, {k: v for k, v in special.items() if v is not None}, str(where))


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
