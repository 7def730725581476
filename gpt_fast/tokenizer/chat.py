"""Chat templates: messages to the prompt a checkpoint was tuned on, by the Jinja template that it carries. Templates
come from strangers: they run in Jinja's immutable sandbox, without access to Python objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpt_fast.errors import MAX_SHOWN, RequestError, TokenizerError
from gpt_fast.gguf import is_gguf
from gpt_fast.tokenizer.gguf_vocabulary import tokenizer_config
from gpt_fast.tokenizer.settings import read_json_object, token_text

log = logging.getLogger(__name__)


class _Generation(Extension):
    """transformers' ``{% generation %}``, which marks for training what an assistant said. Here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_EXTENSIONS = (LoopControlExtension, _Generation)
# transformers' names of templates. The second is for requests with tools, where it is another one.
DEFAULT, TOOL_USE = "default", "tool_use"
# What they say of templates and their tokens counts in this order, the last most.
_FILES = ("chat_template.json", "special_tokens_map.json", "tokenizer_config.json")


class ChatTemplate:
    """A compiled template. ``special`` holds the token strings that templates refer to (``bos_token`` ...). One that
    does not parse is a warning in the log, for it keeps nobody from completions that are no chats."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.source, self._special, self._wrong = source, dict(special), ""
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja turns it into Python, whose compiler has other limits
            self._wrong = f"does not parse: {str(error)[:MAX_SHOWN]}"
            log.warning("the chat template in %s %s; chats are refused", where, self._wrong)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt for ``messages`` (role and content each), special tokens written out; ``encode_chat`` turns it to
        ids. Raises RequestError when the template refuses the messages (a role out of turn, say), or does not parse."""
        if self._wrong:
            raise RequestError(f"this checkpoint takes no chats: its chat template {self._wrong}", "messages")
        said = [_in_parts(message) for message in messages] if self._wants_parts else list(messages)
        variables = {"messages": said, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**variables, **self._special, **extra)
        except Exception as error:  # a template is a program: what these messages make it raise may be anything
            message = f"the chat template refuses these messages: {str(error)[:MAX_SHOWN]}"
            raise RequestError(message, "messages") from None

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether it writes contents that are lists of parts and no others: templates of models that also read images
        go through that list, and of a text they may write nothing, without an error."""
        message = {"role": "user", "content": "a text"}
        return not self._writes(message) and self._writes(_in_parts(message))

    def _writes(self, message: Mapping[str, Any]) -> bool:
        try:
            return "a text" in self._template.render(messages=[message], add_generation_prompt=True, **self._special)
        except Exception:  # as in render()
            return False


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """``message`` with its content as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def variables_of(source: str) -> set[str]:
    """The variables that a template with this text asks for; none where it does not parse."""
    try:
        return meta.find_undeclared_variables(Environment(extensions=_EXTENSIONS).parse(source))
    except Exception:  # as in ChatTemplate
        return set()


def load_templates(checkpoint: str | Path) -> dict[str, ChatTemplate]:
    """The templates in chat_template.jinja, tokenizer_config.json or chat_template.json of a directory, or in a GGUF
    file: DEFAULT, and TOOL_USE where the checkpoint has several named ones. Empty where there is none. Raises
    TokenizerError for a file that cannot be read."""
    where, alone = Path(checkpoint), Path(checkpoint, "chat_template.jinja")
    said = [tokenizer_config(where)] if is_gguf(where) else [read_json_object(where / name) for name in _FILES]
    config = {key: value for each in said for key, value in each.items() if value is not None}
    given = config.get("chat_template")
    listed = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    sources = {str(each.get("name")): (each.get("template"), where) for each in listed if isinstance(each, Mapping)}
    if alone.is_file():
        sources[DEFAULT] = _text_of(alone), alone
    tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    special = {name: token for name, token in tokens.items() if token is not None}
    found = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
    return {name: ChatTemplate(text, special, str(at)) for name, (text, at) in found.items() if isinstance(text, str)}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}); fetch the file again") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter. Jinja's own escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
