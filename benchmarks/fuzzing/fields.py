"""The fields of each protocol as data: how a right value is drawn, and what is odd about this field in particular.

A field of the package that has no row here makes tests/test_fuzzing.py fail.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from fuzzing.grammars import (
    REGEXES,
    SCHEMAS,
    Draw,
    bad_choice,
    bad_flat_tools,
    bad_format,
    bad_regex,
    bad_schema,
    bad_text_format,
    bad_tool_choice,
    bad_tools,
    choices,
    flat_tools,
    response_format,
    text_format,
    tools,
)
from fuzzing.talk import FORGERIES, input_items, messages, odd_input, odd_messages
from fuzzing.values import INTEGERS, NAMES, WORDS, Raw, anything, deep, number, string, text
from gpt_fast.serve.protocol.openai_fields import UNSUPPORTED, WITHOUT_EFFECT

NUM_SAFE_IDS = 400  # token ids below it are in every vocabulary, and ordinary from 3 on


@dataclass(frozen=True)
class Field:
    """``right`` draws a value that is accepted (alone: fields may exclude each other), ``odd`` one that may not be."""

    right: Draw
    odd: Draw = anything


def pick(*values: Any) -> Draw:
    """One of ``values``."""
    return lambda rng: rng.choice(values)


def mostly(draw: Draw, share: float = 0.7) -> Draw:
    """``draw``, else anything."""
    return lambda rng: draw(rng) if rng.random() < share else anything(rng)


def whole(low: int, high: int) -> Field:
    """An integer of this range."""
    return Field(lambda rng: rng.randint(low, high), mostly(number))


def real(low: float, high: float, *special: float) -> Field:
    """A number of this range, spelled as an integer, as a float with a zero behind the point, or with an exponent."""

    def right(rng: random.Random) -> Any:
        value = rng.choice(special) if special and rng.random() < 0.4 else round(rng.uniform(low, high), 3)
        spelled = [value, Raw(f"{value:e}")]
        if float(value).is_integer():
            spelled += [int(value), float(value)]
        return rng.choice(spelled)

    return Field(right, mostly(number))


SWITCH = Field(pick(True, False))


def ids(rng: random.Random, count: int | None = None) -> list[int]:
    """Ordinary token ids."""
    return [rng.randrange(3, NUM_SAFE_IDS) for _ in range(count or rng.randrange(1, 40))]


def prompt(rng: random.Random) -> Any:
    """A short prompt: words, or token ids."""
    return ids(rng) if rng.random() < 0.3 else text(rng, rng.randrange(1, 30))


def prompts(rng: random.Random) -> Any:
    """What v1/completions takes: a prompt, or a few."""
    if rng.random() < 0.7:
        return prompt(rng)
    one = ids if rng.random() < 0.4 else lambda r: text(r, r.randrange(1, 12))
    return [one(rng) for _ in range(rng.randrange(2, 6))]


def odd_prompt(rng: random.Random) -> Any:
    """Prompts of odd characters, or of ids that are special, beyond the vocabulary, or none."""
    kind = rng.random()
    if kind < 0.4:
        return " ".join(string(rng) for _ in range(rng.randrange(1, 6)))
    if kind < 0.75:
        made: list[Any] = [*ids(rng)]
        made[rng.randrange(len(made))] = rng.choice((0, 1, 2, *INTEGERS, True, None, 5.0, "7", [8], Raw("1e2")))
        return made
    return [anything(rng), prompt(rng)] if kind < 0.85 else anything(rng)


def bias(rng: random.Random) -> dict[str, Any]:
    """A few tokens' biases, integers and floats mixed, as OpenAI documents them."""
    values = (-100, 100, -1, 1, 0, 5, -100.0, 0.5, -2.25, 1e-3)
    return {str(rng.randrange(3, NUM_SAFE_IDS)): rng.choice(values) for _ in range(rng.randrange(1, 6))}


def odd_bias(rng: random.Random) -> Any:
    """Biases of ids that are none, by values that are none, or that forbid everything."""
    kind = rng.random()
    if kind < 0.35:
        return {str(rng.choice(INTEGERS)): rng.choice((1, -100, 0.5))}
    if kind < 0.6:
        return {str(rng.randrange(3, NUM_SAFE_IDS)): number(rng), "7": rng.choice((-100, 100))}
    if kind < 0.7:
        return {str(i): -100 for i in range(rng.choice((512, 1024, 1025, 2048)))}
    return {string(rng): anything(rng)} if kind < 0.85 else anything(rng)


def stops(rng: random.Random) -> Any:
    """One stop string or a few."""
    few = [rng.choice((*WORDS, ".", "\n", "é", " the", "<s>")) for _ in range(rng.randrange(1, 5))]
    return few[0] if rng.random() < 0.4 else few


def odd_stops(rng: random.Random) -> Any:
    """Too many, too long, empty, or of odd characters."""
    made = ([string(rng) for _ in range(rng.choice((1, 2, 16, 17)))], string(rng), ["a", anything(rng)], anything(rng))
    return rng.choice(made)


def some_ids(rng: random.Random) -> Any:
    """Ids that are none here and there."""
    return rng.choice(([rng.choice(INTEGERS)], [1, 2, number(rng)], [anything(rng)], list(range(600)), anything(rng)))


def odd_kwargs(rng: random.Random) -> Any:
    """Variables that take the place of the template's own, or hold special tokens."""
    names = ("messages", "bos_token", "enable_thinking", "tools", "a b", "", "self", "loop", "raise_exception", "x")
    made = {rng.choice(names): rng.choice((*FORGERIES, True, [["<s>"]], {"</s>": 1}, anything(rng)))}
    return made if rng.random() < 0.85 else anything(rng)


def odd_stream_options(rng: random.Random) -> Any:
    """Switches that are none."""
    names = ("include_usage", "include_obfuscation", "continuous_usage_stats", "nope", "")
    made = {rng.choice(names): rng.choice((True, False, None, 1, "true", anything(rng)))}
    return made if rng.random() < 0.8 else anything(rng)


def odd_reasoning(rng: random.Random) -> Any:
    """Efforts that there are not."""
    made = {rng.choice(("effort", "summary", "generate_summary", "nope")): rng.choice(("high", None, anything(rng)))}
    return made if rng.random() < 0.8 else anything(rng)


def odd_note(rng: random.Random) -> Any:
    """What is hard to write as JSON once it has been read."""
    notes = (
        "\ud800",
        {"\udfff": "a"},
        Raw("NaN"),
        {"a": Raw("-Infinity")},
        [Raw("1e999")],
        {"\0": "\u2028"},
        deep(rng),
    )
    return rng.choice((*notes, string(rng), {string(rng): anything(rng)}))


_COMMON: dict[str, Field] = {
    "max_tokens": whole(1, 12),
    "temperature": real(0, 2, 0, 1, 2, 0.7, 1e-5),
    "top_k": whole(1, 60),
    "top_p": real(0.05, 1, 1, 0.9),
    "min_p": real(0, 1, 0, 1, 0.05),
    "seed": whole(0, 2**32),
    "stop": Field(stops, odd_stops),
    "stop_token_ids": Field(lambda rng: ids(rng, 3), some_ids),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), SWITCH),
    "bad_words": Field(lambda rng: [rng.choice(WORDS) for _ in range(rng.randrange(4))], odd_stops),
    "allowed_token_ids": Field(lambda rng: ids(rng, 30), some_ids),
    "min_tokens": whole(0, 12),
    "presence_penalty": real(-2, 2, -2, 2, 0, 1),
    "frequency_penalty": real(-2, 2, -2, 2, 0, 1),
    "repetition_penalty": real(0.5, 2, 1, 2),
    "logit_bias": Field(bias, odd_bias),
    "n": whole(1, 3),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), whole(0, 5)),
    "json_schema": Field(pick(*SCHEMAS), bad_schema),
    "regex": Field(pick(*REGEXES), bad_regex),
    "choice": Field(choices, bad_choice),
    "timeout_s": real(100, 1000, 100, 1000),
    "stream": SWITCH,
    **dict.fromkeys(("draft_counts", "return_origins", "return_token_ids"), SWITCH),
}

NATIVE: dict[str, Field] = _COMMON | {
    "prompt": Field(prompt, odd_prompt),
    "max_new_tokens": whole(1, 12),
    "n": Field(pick(1), mostly(number)),
}

# What changes nothing here, and what is refused unless it asks for nothing: the package's own lists.
_OPENAI: dict[str, Field] = (
    _COMMON
    | {name: Field(lambda rng: text(rng, 2)) for name in sorted(WITHOUT_EFFECT)}
    | {name: Field(pick(None, *values)) for name, values in sorted(UNSUPPORTED.items())}
    | {
        "stream_options": Field(pick({"include_usage": True}, {"include_usage": False}, {}), odd_stream_options),
        "response_format": Field(response_format, bad_format),
        "model": Field(pick("gpt-fast"), string),
        "guided_json": Field(pick(*SCHEMAS), bad_schema),
        "guided_regex": Field(pick(*REGEXES), bad_regex),
        "guided_choice": Field(choices, bad_choice),
        "guided_grammar": Field(pick('root ::= "yes" | "no"', 'start: "a" "b"?'), bad_regex),
        "structured_outputs": Field(pick({}, {"regex": "[ab]{2}"}, {"choice": ["a", "b"]}), bad_format),
        "truncate_prompt_tokens": Field(pick(-1, 1, 2, 30), mostly(number)),
        "return_tokens_as_token_ids": SWITCH,
    }
)
COMPLETION: dict[str, Field] = _OPENAI | {
    "prompt": Field(prompts, odd_prompt),
    **dict.fromkeys(("echo", "add_special_tokens"), SWITCH),
}
CHAT: dict[str, Field] = _OPENAI | {
    "messages": Field(messages, odd_messages),
    "max_completion_tokens": whole(1, 12),
    "logprobs": SWITCH,
    "top_logprobs": whole(0, 5),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), SWITCH),
    "chat_template_kwargs": Field(pick(None), odd_kwargs),
    "tools": Field(tools, bad_tools),
    "tool_choice": Field(pick("none", "auto"), bad_tool_choice),
    "parallel_tool_calls": SWITCH,
}

_UNLIKE = ("n", "logprobs", "prompt_logprobs", "max_tokens", "draft_counts", "return_origins", "return_token_ids")
RESPONSE: dict[str, Field] = {
    **{name: field for name, field in _COMMON.items() if name not in _UNLIKE},
    **{name: _OPENAI[name] for name in (*sorted(WITHOUT_EFFECT), "stream_options", "model")},
    "metadata": Field(pick({}, {"a": "é\u2028"}), odd_note),  # the answer quotes it
    "user": Field(pick("a", "é\u2028"), odd_note),  # and this
    **{name: CHAT[name] for name in ("chat_template_kwargs", "parallel_tool_calls")},
    "input": Field(input_items, odd_input),
    "instructions": Field(lambda rng: text(rng, 5), mostly(lambda rng: rng.choice(FORGERIES))),
    "max_output_tokens": whole(1, 12),
    "tools": Field(flat_tools, bad_flat_tools),
    "tool_choice": Field(pick("none", "auto"), bad_tool_choice),
    "text": Field(text_format, bad_text_format),
    "reasoning": Field(pick({}, {"effort": "none"}, {"summary": "auto"}, {"effort": None}), odd_reasoning),
    "include": Field(pick([], ["reasoning.encrypted_content"]), mostly(pick(["file_search_call.results"], [5]))),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), Field(pick(None), mostly(string))),
    **dict.fromkeys(("top_logprobs", "max_tool_calls"), Field(pick(0), mostly(number))),
    "background": Field(pick(False)),
    "truncation": Field(pick("disabled"), mostly(pick("auto", "none"))),
}
# One string is answered: nothing else can be asked for.
PREDICT: dict[str, Field] = NATIVE | {
    "prompt": Field(lambda rng: text(rng, rng.randrange(1, 30)), odd_prompt),
    **dict.fromkeys(("stream", "draft_counts", "return_origins", "return_token_ids"), Field(pick(False, None))),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), Field(pick(None), mostly(number))),
}
TOKENIZE: dict[str, Field] = {
    "prompt": Field(lambda rng: text(rng, rng.randrange(1, 30)), mostly(string)),
    **{name: CHAT[name] for name in ("model", "messages", "chat_template_kwargs", "tools")},
    **{name: CHAT[name] for name in ("add_generation_prompt", "continue_final_message")},
    **dict.fromkeys(("add_special_tokens", "return_token_strs"), SWITCH),
}
DETOKENIZE: dict[str, Field] = {"tokens": Field(ids, odd_prompt), "model": CHAT["model"]}

PROTOCOLS: dict[str, dict[str, Field]] = {
    "native": NATIVE,
    "v1/completions": COMPLETION,
    "v1/chat/completions": CHAT,
    "v1/responses": RESPONSE,
    "predict": PREDICT,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}
# The field without which there is nothing to answer, where it is not the prompt.
ASKED = {"v1/chat/completions": "messages", "v1/responses": "input", "detokenize": "tokens"}
# The names of the number of tokens to make.
LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens")
GRAMMARS = (
    *("json_schema", "regex", "choice", "response_format", "structured_outputs", "text"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
UNKNOWN: tuple[str, ...] = (*NAMES, "suffix_", "inputs", "parameters", "max_length", "do_sample", "guided_decoding")
