"""Tool calls by random schemas: does every answer of ``required`` and by name parse, and hold to its schema?

    python benchmarks/tool_calls.py --calls 1000                           # in process, the bundled demo model
    python benchmarks/tool_calls.py --url http://127.0.0.1:8080/predictions/gpt-fast/1.0/v1 --model gpt-fast

Each request has one to three random functions and must be answered with one call. The arguments are judged by the
library jsonschema, with schemas closed as the server closes them. With --parallel a ``required`` answer may have more
calls. A weak model may then go on to the limit of tokens, which cuts off its last call; the others are judged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

from gpt_fast.engine.closed_schema import close_objects

DEMO = Path(__file__).resolve().parent.parent / "model_store" / "demo" / "target"
Ask = Callable[[dict[str, Any]], str]  # a request's body -> the answer's body

WORDS = ("cat", "dog", "sun", "ball", "tree", "car", "red", "big", "toy", "day", "hat", "cup")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short: each string, list and number gets a bound."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "pattern", "const"]
    kinds += ["object", "array", "anyOf"] if depth else []
    kind = rng.choice(kinds)
    least = rng.randrange(-50, 50)
    simple: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": rng.randrange(1, 9)},
        "enum": {"enum": rng.sample([*WORDS, 1, 2.5, True, None, 'a "b" \\'], 3)},
        "integer": {"type": "integer", "minimum": least, "maximum": least + rng.randrange(100)},
        "number": {"type": "number", "minimum": least, "maximum": least + 10, "multipleOf": 0.5},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "pattern": {"type": "string", "pattern": f"^[a-z]{{1,4}}-[0-9]{{{rng.randrange(1, 4)}}}$"},
        "const": {"const": rng.choice([*WORDS, 7, [1, "x"], {"a": None}])},
    }
    if kind in simple:
        return simple[kind]
    if kind == "object":
        return random_object(rng, depth - 1)
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randrange(1, 4)}
    return {"anyOf": [random_schema(rng, depth - 1), {"type": "null"}]}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of an object with up to three properties, some of them required."""
    names = rng.sample(WORDS, rng.randrange(1, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": rng.sample(names, rng.randrange(len(names) + 1))}


def random_tool(rng: random.Random, name: str) -> dict[str, Any]:
    """A function with random parameters, or none."""
    function: dict[str, Any] = {"name": name, "parameters": random_object(rng, 2)}
    if rng.random() < 0.1:
        del function["parameters"]  # it takes no arguments
    elif rng.random() < 0.2:  # what pydantic makes of a field that is a model itself
        function["parameters"]["$defs"] = {"Part": random_object(rng, 1)}
        function["parameters"]["properties"]["part"] = {"allOf": [{"$ref": "#/$defs/Part"}]}
    return {"type": "function", "function": function}


def random_request(seed: int, model: str, max_tools_chars: int, parallel: bool) -> dict[str, Any]:
    """A chat that must call: any function, or one by name. The same for everybody who gives the ``seed``."""
    rng = random.Random(seed)
    names = rng.sample(("find", "buy-it", "play_with", "go.home", "Sing2"), rng.randrange(1, 4))
    tools = [random_tool(rng, name) for name in names]
    while len(json.dumps(tools)) > max_tools_chars:
        tools = [random_tool(rng, name) for name in names[: max(1, len(tools) - 1)]]
    named = {"type": "function", "function": {"name": rng.choice(tools)["function"]["name"]}}
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"The {rng.choice(WORDS)} and the {rng.choice(WORDS)}."}],
        "tools": tools,
        "tool_choice": rng.choice(["required", named]),
        "parallel_tool_calls": parallel,
        "temperature": rng.choice([0, 0.7, 1.0, 1.5]),
        "seed": seed,
        "stream": rng.random() < 0.5,
    }


def judge(body: Mapping[str, Any], answer: str) -> str:
    """What became of one request: "valid", "cut off", or what is wrong with the answer."""
    calls, content, reason = read_stream(answer) if body["stream"] else read_whole(answer)
    choice, cut = body["tool_choice"], reason == "length"
    if reason not in ("tool_calls", "length") or not calls or content:
        return f"no call: {reason}"
    if len(calls) > 1 and (choice != "required" or not body["parallel_tool_calls"]):
        return "too many calls"
    schemas = {t["function"]["name"]: t["function"].get("parameters", {"properties": {}}) for t in body["tools"]}
    for name, arguments in calls[:-1] if cut else calls:
        if name not in schemas or (choice != "required" and name != choice["function"]["name"]):
            return f"wrong function: {name}"
        try:
            jsonschema.validate(json.loads(arguments), close_objects({"type": "object", **schemas[name]}, name))
        except ValueError:
            return "does not parse"
        except jsonschema.ValidationError as error:
            return f"does not validate: {error.message[:80]}"
    return "cut off" if cut else "valid"


def read_whole(answer: str) -> tuple[list[tuple[str, str]], str, str]:
    """Calls as (name, arguments), content and finish reason."""
    choice = json.loads(answer)["choices"][0]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", ())]
    return calls, choice["message"]["content"] or "", choice["finish_reason"]


def read_stream(answer: str) -> tuple[list[tuple[str, str]], str, str]:
    """The same of events, by OpenAI's rules: pieces of arguments belong to the call of their index."""
    calls: list[list[str]] = []
    content = reason = ""
    for line in answer.splitlines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        reason = choice["finish_reason"] or reason
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                calls.append([piece["function"]["name"], ""])
            calls[piece["index"]][1] += piece["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls], content, reason


def over_http(url: str) -> Ask:
    """The server at ``url``."""

    def ask(body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(answer.read(), "utf-8")

    return ask


def in_process(llm: Any) -> Ask:
    """The server's own reading and writing around ``llm``, without HTTP."""
    from gpt_fast.serve.routes import openai_context, parse

    context = openai_context(llm, ("demo",))

    def ask(body: dict[str, Any]) -> str:
        request = parse("v1/chat/completions", json.loads(json.dumps(body)), context)
        [handle] = llm.submit_all([(request.prompts[0], request.params)])
        said = ""
        for delta in handle:
            said += request.write_delta(0, delta) if request.stream else ""
        return said + request.write_end([handle.completion])

    return ask


def verdicts(ask: Ask, bodies: Iterator[dict[str, Any]], at_once: int = 8) -> Iterator[tuple[dict[str, Any], str]]:
    """Each request and what became of it, ``at_once`` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda body: (body, judge(body, ask(body))), bodies)


def main() -> int:
    """Ask, judge, print the counts; 1 if an answer is not valid."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--calls", type=int, default=1000, help="requests (default 1000)")
    arguments.add_argument("--seed", type=int, default=0, help="of the first request; the next has the next")
    arguments.add_argument("--checkpoint", type=Path, default=DEMO, help="to load, where there is no --url")
    arguments.add_argument("--url", help="of a running server, up to v1")
    arguments.add_argument("--model", default="demo", help="its name there")
    arguments.add_argument("--parallel", action="store_true", help="let answers have several calls")
    arguments.add_argument("--tools-chars", type=int, default=400, help="most of all tools as JSON, for the context")
    given = arguments.parse_args()
    numbers = range(given.seed, given.seed + given.calls)
    bodies = (random_request(seed, given.model, given.tools_chars, given.parallel) for seed in numbers)
    begin = time.perf_counter()
    if given.url:
        counts = count(verdicts(over_http(given.url.rstrip("/")), bodies))
    else:
        from gpt_fast import LLM

        with LLM(given.checkpoint) as llm:
            counts = count(verdicts(in_process(llm), bodies))
    print(f"{sum(counts.values())} requests in {time.perf_counter() - begin:.0f} s")
    for (mode, verdict), number in sorted(counts.items()):
        print(f"  {mode:9} {verdict}: {number}")
    fine = ("valid", "cut off") if given.parallel else ("valid",)
    return 0 if all(verdict in fine for _, verdict in counts) else 1


def count(found: Iterator[tuple[dict[str, Any], str]]) -> Counter[tuple[str, str]]:
    """Verdicts by mode; tells those that are not valid."""
    counts: Counter[tuple[str, str]] = Counter()
    for body, verdict in found:
        mode = "required" if body["tool_choice"] == "required" else "by name"
        counts[mode, verdict] += 1
        if verdict != "valid":
            print(f"seed {body['seed']}, {mode}: {verdict}", file=sys.stderr)
    return counts


if __name__ == "__main__":
    sys.exit(main())
