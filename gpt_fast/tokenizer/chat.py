"""Chat templates: messages to the prompt a checkpoint was tuned on, by the Jinja template that it carries. Templates
come from strangers: they run in Jinja's immutable sandbox, without access to Python objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpt_fast.errors import RequestError
from gpt_fast.gguf import is_gguf
from gpt_fast.params import MAX_SHOWN
from gpt_fast.tokenizer.gguf_vocabulary import tokenizer_config
from gpt_fast.tokenizer.settings import read_json_object, token_text


class Generation(Extension):
    """The tag ``generation`` of transformers: for training, templates mark with it what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = ("jinja2.ext.loopcontrols", Generation)


class ChatTemplate:
    """A compiled template. ``special`` holds the token strings that templates refer to (``bos_token`` ...)."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
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
    """The template in chat_template.jinja, tokenizer_config.json or chat_template.json of a directory, or in a GGUF
    file; None where there is none. Of several named ones, ``default``. Raises ValueError for a file that cannot be read
    and a template that does not parse."""
    where, alone = Path(checkpoint, "tokenizer_config.json"), Path(checkpoint, "chat_template.jinja")
    if is_gguf(Path(checkpoint)):
        config = tokenizer_config(Path(checkpoint))
    else:
        config = {**read_json_object(Path(checkpoint, "special_tokens_map.json")), **read_json_object(where)}
    source = config.get("chat_template")
    if source is None:
        source = read_json_object(Path(checkpoint, "chat_template.json")).get("chat_template")
    if isinstance(source, list):
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if alone.is_file():
        source, where = alone.read_text(encoding="utf-8"), alone
    if not isinstance(source, str):
        return None
    special = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(source, {k: v for k, v in special.items() if v is not None}, str(where))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it. Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
