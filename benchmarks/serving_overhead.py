"""What TorchServe costs: the same requests by HTTP and straight to the engine, in turns, on one machine.

    python benchmarks/serving_overhead.py --url http://127.0.0.1:8080/predictions/gpt-fast --checkpoint DIR \
        [--dtype D] [--quantize MODE] [--max-seq-len N]
        [--clients 1,8] [--new-tokens 64] [--rounds 5] [--first-token-rounds 30]

The server at ``--url`` and the engine in this process hold the same checkpoint with the same options; only one of
them works at a time. Throughput is all tokens over the wall time from the first request's start to the last one's
end. Time to first token is that of a request alone, prompt of ``--prompt-tokens`` tokens, at the median. The last line
is JSON. Run it when nothing else runs: both sides want every core.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpt_fast import LLM, SamplingParams

WARM_UP = 5

_numbers = itertools.count(1)


def prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that no earlier prompt began with, so that no cache helps."""
    number = next(_numbers)
    return [3 + (number * 7919 + i * (i + number)) % (vocab_size - 3) for i in range(num_tokens)]


def by_http(url: str, ids: list[int], new_tokens: int) -> float:
    """One streamed request; returns seconds to the first piece of the body."""
    parts = urllib.parse.urlsplit(url)
    body = json.dumps({"prompt": ids, "max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True})
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    connection.request("PUT", parts.path, body)
    response = connection.getresponse()
    response.read(1)
    first = time.perf_counter() - begin
    assert response.status == 200, response.read()
    response.read()
    connection.close()
    return first


def by_engine(llm: LLM, ids: list[int], new_tokens: int) -> float:
    """The same without a server."""
    begin = time.perf_counter()
    first = 0.0
    for delta in llm.stream(ids, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)):
        if delta.text and not first:
            first = time.perf_counter() - begin
    return first


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-token-rounds", type=int, default=30)
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    llm = LLM(
        arguments.checkpoint,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        threads=arguments.threads,
        max_seq_len=arguments.max_seq_len,
        progress=True,
    )
    vocab_size = llm.config.vocab_size
    ways: dict[str, Any] = {
        "http": lambda ids, count: by_http(arguments.url, ids, count),
        "engine": lambda ids, count: by_engine(llm, ids, count),
    }
    for way in ways.values():
        for _ in range(WARM_UP):  # Java compiles what it runs often
            way(prompt(arguments.prompt_tokens, vocab_size), 64)
    report: dict[str, Any] = {}
    for clients in map(int, arguments.clients.split(",")):
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                prompts = [prompt(arguments.prompt_tokens, vocab_size) for _ in range(clients)]
                with ThreadPoolExecutor(clients) as pool:
                    begin = time.perf_counter()
                    list(pool.map(lambda ids, way=way: way(ids, arguments.new_tokens), prompts))
                    rates[name].append(clients * arguments.new_tokens / (time.perf_counter() - begin))
        pairs = [h / e for h, e in zip(rates["http"], rates["engine"], strict=True)]
        medians = {name: round(statistics.median(values), 2) for name, values in rates.items()}
        report[f"clients_{clients}"] = {**medians, "ratio": round(statistics.median(pairs), 4)}
        print(f"{clients} clients: {report[f'clients_{clients}']}", file=sys.stderr)
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.first_token_rounds):
        for name, way in ways.items():
            firsts[name].append(way(prompt(arguments.prompt_tokens, vocab_size), 4))
    for name, values in firsts.items():
        report[f"first_token_ms_{name}"] = round(1e3 * statistics.median(values), 2)
    report["first_token_added_ms"] = round(report["first_token_ms_http"] - report["first_token_ms_engine"], 2)
    llm.close()
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
