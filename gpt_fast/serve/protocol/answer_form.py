"""The form of a chat's answer: which functions it may call, whether it thinks first, the grammar, and who reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.answer_parts import AnswerReader
from gpt_fast.serve.protocol.chat_grammar import MAY_THINK, NO_THINKING, THINKS, answer_grammar
from gpt_fast.serve.protocol.tool_fields import ToolChoice
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat_formats import Dialect, special_in

_TAIL = 32  # tokens at the end of a prompt, in which a template may have begun the thinking


@dataclass(frozen=True)
class AnswerForm:
    """``tools``: those that the answer may call, as ``choice`` says. ``thinking``: one of chat_grammar.py's words."""

    dialect: Dialect
    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]]
    choice: ToolChoice
    thinking: str = NO_THINKING

    def behind(self, prompt: Sequence[int]) -> AnswerForm:
        """The form of an answer to ``prompt``, which a template has ended: it may have begun the thinking already, or
        begun and ended it, so that there is none."""
        form = self.dialect.thinking
        if form is None:
            return self
        tail = self.tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        begun, ended = tail.endswith(form.opening), tail.endswith(form.closing) and not form.answer
        return dataclasses.replace(self, thinking=THINKS if begun else NO_THINKING if ended else MAY_THINK)

    def hold(self, params: SamplingParams, several: bool) -> SamplingParams:
        """``params`` that hold the answer to this form, with ``several`` calls or one. Raises RequestError."""
        params = dataclasses.replace(params, shown_special_tokens=self._special())
        if self.choice.mode == "none" and (params.grammar_field is None or self.thinking == NO_THINKING):
            return params
        if params.grammar is not None:
            raise RequestError("grammar has no place beside tools or thinking", "grammar")
        grammar = answer_grammar(
            self.dialect, self.tokenizer, self.tools, self.choice, several, params, self.thinking
        )  # fmt: skip
        return dataclasses.replace(params, grammar=grammar, json_schema=None, regex=None, choice=None)

    def reader(self) -> AnswerReader:
        """A reader for one answer."""
        names = [tool["function"]["name"] for tool in self.tools]
        return AnswerReader(self.dialect, names, self.thinking == THINKS)

    def _special(self) -> tuple[int, ...]:
        """Special tokens that the reader has to see."""
        thinking, calls = self.dialect.thinking, self.dialect.calls
        texts = [calls.marker, *calls.before, calls.opening, calls.closing, calls.after] if self.tools else []
        if thinking is not None:
            texts += [thinking.opening, thinking.closing, thinking.answer, *thinking.others]
        return special_in(self.tokenizer, texts)
