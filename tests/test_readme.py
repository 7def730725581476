"""README.md and docs/: what they name exists, their commands parse, their Python and the quick commands run."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpt_fast import LLM, SamplingParams, cli
from gpt_fast.checkpoint import gguf_models, gguf_tensors
from gpt_fast.checkpoint.family import Family
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.cli import main
from gpt_fast.commands import serve
from gpt_fast.config import DEFAULT_MAX_BATCH, EngineConfig
from gpt_fast.engine.engine import ABANDONED_S
from gpt_fast.serve import metric_table, model_yaml, session
from gpt_fast.serve.protocol import native
from gpt_fast.serve.settings import HandlerSettings
from gpt_fast.tokenizer import chat_formats, gguf_vocabulary

ROOT = Path(__file__).resolve().parent.parent
# The log tells of files as they were on its dates.
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
SERVING, PYTHON, MODELS = (TEXTS[f"docs/{name}.md"] for name in ("serving", "python", "models"))

# Python that is compiled and not run: the first words of the block, and why.
NOT_RUN = {"from openai import OpenAI": "asks a server; tests/e2e runs the same client"}
# Commands of gpt-fast that are parsed and not run.
ONLY_PARSED = {
    "download": "needs the network",
    "serve": "stays until it is stopped; tests/e2e/test_wheel_served.py",
    "bench --url": "asks a server",
    "bench --shape": "takes minutes and gigabytes",
    "kernels": "compiles for a minute; tests/test_kernels_build.py",
}
# The first words of other commands: nothing of them is checked.
NOT_CHECKED = {
    "python3 -m venv": "makes an environment",
    "pip install": "installs; scripts/lib.sh runs the same",
    "export": "sets a variable",
    "torchserve": "gpt_fast/serve/launch/server.py runs the same",
    "mkdir -p model_store && TMPDIR=$(mktemp -d) torch-model-archiver": "tests/test_archive.py runs it",
    "python -m pytest": "pytest's own; its paths are checked",
    "docker": "needs an engine; tests/test_cluster.py reads the container file",
    "apt-get install": "installs",
    "install -m": "copies a file; its path is checked",
    "openssl rand": "openssl's own",
    "nginx -t": "nginx's own; tests/test_proxy.py runs the file",
    "systemctl": "needs systemd; tests/test_systemd.py reads the unit",
    "useradd": "makes a user",
    "ln -sfn": "makes a link",
    "/opt/gpt-fast-1/bin/pip install": "installs",
    "prometheus": "needs Prometheus; tests/test_dashboards.py reads its files",
    "kubectl": "needs a cluster; tests/test_cluster.py checks the manifests",
}


# Fields of a request that say how its answer is written, beside its prompt and whether it is streamed.
NOT_SAMPLING = ("return_token_ids", "return_origins", "draft_counts")


class Snippet(NamedTuple):
    """A fenced block."""

    document: str
    language: str
    text: str


def blocks(language: str) -> list[Snippet]:
    return [
        Snippet(name, language, found[1])
        for name, text in TEXTS.items()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    ]


def tables(text: str) -> list[list[str]]:
    """Each table's lines, as Markdown sees them: a line that is no row ends a table."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def first_column(text: str, head: str) -> set[str]:
    """The words in backticks of the first column of the table whose head begins with ``head``."""
    (table,) = (t for t in tables(text) if t[0].startswith(f"| {head} |"))
    return {word for row in table[2:] for word in re.findall(r"`([\w-]+)[^`]*`", row.split("|")[1])}


def defaults(text: str, head: str) -> dict[str, Any]:
    """The default of each row of such a table, as a value; what is told in words is left out."""
    (table,) = (t for t in tables(text) if t[0].startswith(f"| {head} | default |"))
    found = {}
    for row in table[2:]:
        names, told = row.split("|")[1:3]
        word = told.strip().strip("`").partition(" (")[0].lower()
        if word not in ("required", "all") and not word.startswith(("the checkpoint's", "drawn")):
            word = word.partition(";")[0]
            value = {"none": None, "true": True, "false": False}.get(word, int(word) if word.isdecimal() else word)
            found |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), value)
    return found


# --- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_every_table_is_whole(name: str) -> None:
    """Rows after a blank line are shown as text, cells too many not at all."""
    for table in tables(TEXTS[name]):
        assert re.fullmatch(r"[|: -]+", table[1]), f"no table begins with {table[0]!r}"
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1, f"rows differ in cells: {table[0]!r}"


def test_the_table_of_fields_has_every_field_that_is_taken_and_no_other() -> None:
    assert first_column(SERVING, "field") == set(native.FIELDS)


def test_the_table_of_options_has_every_option_of_the_engine() -> None:
    assert first_column(PYTHON, "option") == {field.name for field in dataclasses.fields(EngineConfig)}


def test_the_table_of_the_handlers_keys_has_every_key() -> None:
    fields = {field.name for field in dataclasses.fields(HandlerSettings)} - {"engine", "warnings"}
    assert first_column(SERVING, "key of the handler") == fields
    assert {*fields} <= {*model_yaml.read_model_yaml(ROOT / "model_config.yaml").config["handler"]}


def test_the_table_of_metrics_has_every_metric() -> None:
    assert first_column(SERVING, "metric") == {
        family.name for family in (*metric_table.FAMILIES, *metric_table.draft_families(1))
    }


def test_older_names_of_metrics_are_told() -> None:
    for family in metric_table.FAMILIES:
        if family.former is not None:
            assert f"`{family.name}` as `{family.former}`" in SERVING


def test_the_defaults_of_the_options_are_those_of_the_engine() -> None:
    told = defaults(PYTHON, "option")
    assert told == {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert f"| `max_batch` | none ({DEFAULT_MAX_BATCH}) |" in PYTHON


def test_the_defaults_of_the_handlers_keys_are_those_of_the_handler() -> None:
    kept = {field.name: field.default for field in dataclasses.fields(HandlerSettings)}
    kept |= {"checkpoint": str(kept["checkpoint"]), "max_new_tokens": SamplingParams().max_tokens}
    told = defaults(SERVING, "key of the handler")
    assert told == {name: kept[name] for name in told}


def test_the_defaults_of_the_fields_are_those_of_a_request() -> None:
    told = defaults(SERVING, "field")
    kept = {
        field: getattr(SamplingParams(), "max_tokens" if field == "max_new_tokens" else field, None) for field in told
    }
    kept |= {"stream": HandlerSettings().stream, **dict.fromkeys(NOT_SAMPLING, False)}
    assert {name: value or None for name, value in told.items()} == {
        name: value or None for name, value in kept.items()
    }


def test_python_has_the_fields_of_a_request_but_for_those_that_it_names() -> None:
    (left_out,) = re.findall(r"and none of ([^.]*)\.", PYTHON)
    assert set(re.findall(r"`(\w+)`", left_out)) == {"prompt", "stream", *NOT_SAMPLING}
    own = {field.name for field in dataclasses.fields(SamplingParams)} - {"grammar", "shown_special_tokens"}
    assert own == {*native.FIELDS} - {"prompt", "stream", *NOT_SAMPLING, "max_new_tokens"}


def test_the_table_of_extras_has_every_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    assert first_column(TEXTS["docs/development.md"], "extra") == set(re.findall(r"^(\w+) = \[", block, re.M))


def test_the_version_of_torch_is_the_one_that_was_tested() -> None:
    (pinned,) = re.findall(r"^(torch==\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    for name, text in TEXTS.items():
        assert set(re.findall(r"pip install (torch==\S+)", text)) <= {pinned}, name


def test_what_chat_templates_of_a_format_hold_is_told() -> None:
    (table,) = (t for t in tables(SERVING) if t[0].startswith("| format | the template holds |"))
    told = {}
    for row in table[2:]:
        name, holds, *_ = (cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        told[name.partition(" ")[0]] = tuple(re.findall(r"`([^`]+)`", holds))
    assert told == {row.name: row.marks for row in chat_formats.CALL_FORMATS}


def test_what_is_read_of_gguf_files_is_told() -> None:
    (table,) = (t for t in tables(MODELS) if "refused by name" in t[0] and "general.architecture" in t[2])
    told = {row.split("|")[1].strip(): row.split("|")[2] for row in table[2:]}
    names = {what: set(re.findall(r"`([\w-]+)`", cell)) for what, cell in told.items()}
    assert names["`general.architecture`"] == {name for name in gguf_models.ARCHITECTURES if " " not in name}
    assert names["`tokenizer.ggml.pre`"] == {*gguf_vocabulary.SPLITS}
    encodings = set(re.findall(r"[A-Z]+\d\w*", told["encodings"]))
    assert encodings == {*gguf_tensors._PLAIN, *gguf_tensors._DECODE}


def test_the_table_of_families_has_every_family() -> None:
    known = {row.architectures[0] for row in FAMILIES.values()}
    assert first_column(MODELS, "architecture") == known


def test_the_table_of_a_row_has_every_field_of_a_family() -> None:
    assert {field.name for field in dataclasses.fields(Family)} <= first_column(TEXTS["docs/add-a-family.md"], "field")


def test_the_table_of_commands_has_every_command() -> None:
    assert first_column(PYTHON, "command") == {command.__name__.rpartition(".")[2] for command in cli.commands()}


def test_the_limits_are_those_of_the_code_and_of_the_shipped_files() -> None:
    handler = model_yaml.read_model_yaml(ROOT / "model_config.yaml").config["handler"]
    nginx = (ROOT / "configs/proxy/nginx.conf").read_text(encoding="utf-8")
    code = (ROOT / "handler.py").read_text(encoding="utf-8")

    def of_nginx(directive: str) -> str:
        (value,) = re.findall(rf"{directive}(\d+)", nginx)
        return str(value)

    waiting = handler["max_waiting"]
    (unanswered,) = re.findall(r"^MAX_UNANSWERED_BYTES = (\d+) \* 1024 \* 1024$", code, re.M)
    assert handler["max_body_bytes"] == int(of_nginx("client_max_body_size ")) * 2**20
    kept = {
        "a request's bytes": f"{handler['max_body_bytes'] // 2**20} MiB",
        "bytes of all requests that nothing has been answered to yet": f"{unanswered} MiB",
        "preparing a request": f"{session.PARSE_S:g} s",
        "sequences that decode together": f"{handler['max_batch']}",
        "sequences that wait for their first turn": f"{waiting}; of one request {waiting // 2}",
        "an answer in one piece": f"{handler['one_piece_timeout_s']} s",
        "an answer's bytes that are sent at once": f"{session.MAX_PIECE_BYTES // 100_000 / 10} MB",
        "tokens of a stream that TorchServe has not fetched": f"{session.MAX_UNCOLLECTED}, for {ABANDONED_S:g} s",
        "a silent answer": f"{of_nginx('proxy_read_timeout ')} s",
        "a client's requests at a time": f"{of_nginx('limit_conn gpt_fast_client ')}; of an address "
        + of_nginx("limit_conn gpt_fast_address "),
        "a client's requests a second": f"{of_nginx('rate=')}, and {of_nginx('burst=')} at once",
        "a client that sends or reads slowly": f"{of_nginx('client_body_timeout ')} s, {of_nginx('send_timeout ')} s",
    }
    (table,) = (t for t in tables(TEXTS["docs/deploy.md"]) if t[0].startswith("| what | limit |"))
    told = {what.strip(): limit.strip() for what, limit in (row.split("|")[1:3] for row in table[2:])}
    assert {*told} - {*kept} == {"prompt and answer"}
    assert {what: limit for what, limit in kept.items() if not told[what].startswith(limit)} == {}


# --- figures -------------------------------------------------------------------------------------------------------

# Tables of figures beside peers: the document, words of the paragraph before, the runs.
PEERS = {
    "peers.json": ("README.md", "Tokens per second of this engine and of three others"),
    "peers_zen4.json": ("docs/benchmarks.md", "Zen 4: AVX-512"),
    "peers_amx.json": ("docs/benchmarks.md", "On two cores with AMX"),
    "peers_avx2.json": ("docs/benchmarks.md", "On two AVX2 cores"),
}
MEASURES = {
    "one sequence": "decode",
    "eight sequences, sum": "decode x8",
    "prompt of 256 tokens": "prefill 256",
    "one sequence, 2,048 tokens before it": "decode at 2048",
    "one sequence behind 2,048": "decode at 2048",
}


def is_rounded(told: str, measured: float) -> bool:
    """Whether ``told`` is ``measured`` with fewer digits."""
    digits = len(told.partition(".")[2])
    return abs(float(told.replace(",", "")) - measured) < 0.5001 * 10**-digits


@pytest.mark.parametrize("file", PEERS)
def test_figures_beside_peers_are_those_of_the_run(file: str) -> None:
    document, before = PEERS[file]
    run = json.loads((ROOT / "docs" / file).read_text(encoding="utf-8"))
    measured: dict[tuple[str, str, str], list[float]] = {}
    for result in run["results"]:
        measured[result["precision"], result["measure"], result["peer"]] = [result["tokens_per_second"]]
    for ratio in run["ratios"]:
        key = ratio["precision"], ratio["measure"], ratio["peer"]
        measured[key] += [ratio["ratio"], ratio["least"], ratio["greatest"]]
    table = tables(TEXTS[document][TEXTS[document].index(before) :])[0]
    peers = ["ours" if (word := cell.split()[0]) == "ours" else word.lower() for cell in table[0].split("|")[2:-1]]
    for head in table[0].split("|")[3:-1]:
        name, _, version = head.strip().partition(" ")
        assert version in "".join(run["versions"][name.lower()].values()), f"{file}: {head}"
    precision = ""
    for row in table[2:]:
        label, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if label.startswith("int"):
            precision, _, label = label.partition(", ")
        for peer, cell in zip(peers, cells, strict=True):
            figures = re.findall(r"[\d,]+(?:\.\d+)?", cell.replace("-", " "))
            kept = measured[precision, MEASURES[label], peer]
            for told, value in zip(figures, kept, strict=False):
                assert is_rounded(told, value), f"{file}: {peer}, {precision}, {label}: {told} is {value}"


def test_figures_of_the_gpu_are_those_of_the_run() -> None:
    run = json.loads((ROOT / "docs/gpu_h100.json").read_text(encoding="utf-8"))
    steps = {(s["precision"], s["batch"], s["context"]): s for s in run["decode"] if s["each"] == 1}
    (table,) = (t for t in tables(TEXTS["docs/benchmarks.md"]) if t[0].startswith("| sequences, context |"))
    for row in table[2:]:
        place, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        batch, context = (int(number.replace(",", "")) for number in place.split(", "))
        for precision, cell in zip(("bf16", "int8", "int4"), cells, strict=True):
            step = steps[precision, batch, context]
            kept = [step["milliseconds"], step["times_one_row"]]
            if "%" in cell:
                kept[1:] = [step["tokens_per_second"], 100 * step["share_of_copy"]]
            for told, value in zip(re.findall(r"[\d.]+", re.sub("times.*", "", cell)), kept, strict=True):
                assert is_rounded(told, value), f"{row}: {told} is {value}"


# --- names ---------------------------------------------------------------------------------------------------------

_PATH = re.compile(r"(?<![\w./-])(?:gpt_fast|tests|docs|benchmarks|scripts|configs|model_store|\.ci)/[\w./@-]*")


@cache
def sources() -> str:
    """All code of the project in one string."""
    suffixes = {".py", ".sh", ".h", ".cpp"}
    folders = ("gpt_fast", "tests", "scripts", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "handler.py"])


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_exists(name: str) -> None:
    missing = {p for p in _PATH.findall(TEXTS[name]) if not (ROOT / p.rstrip(".")).exists()}
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_named_alone_exists(name: str) -> None:
    """`handler.py`, `cache.py`: somewhere."""
    there = {p.name for folder in ("gpt_fast", "tests", "scripts", "benchmarks") for p in (ROOT / folder).rglob("*")}
    named = set(re.findall(r"`([\w-]+\.(?:py|sh|h|properties))`", TEXTS[name]))
    assert not {file for file in named - there if not (ROOT / file).exists()}


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "docs").glob("*.json*")))
def test_figures_are_json(file: str) -> None:
    """One for each run, or one for all."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    runs = [json.loads(text)] if text.startswith("{\n") else [json.loads(line) for line in text.splitlines()]
    assert runs
    assert all(isinstance(run, dict) for run in runs)


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
            assert path.exists(), target
            heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            assert not anchor or anchor in anchors, target


def names_in(path: Path) -> set[str]:
    """What a module defines: ``name`` and ``Class.name``; of another file all its words."""
    if path.suffix != ".py":
        return set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return set(_names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _names(node.body, f"{prefix}{node.name}.")
        for target in getattr(node, "targets", []) or [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                yield prefix + target.id


@pytest.mark.parametrize("name", ["docs/structure.md", "docs/add-a-family.md"])
def test_every_name_is_defined_in_the_file_beside_it(name: str) -> None:
    """`Checkpoint.open` (`gpt_fast/checkpoint/checkpoint.py`), and `empty_model` in `gpt_fast/...`."""
    pairs = re.findall(r"`([\w.]+)`\s+(?:\(|in\s+)`((?:gpt_fast/|tests/|handler)[\w./]+\.\w+)`", TEXTS[name])
    assert len(pairs) > 2
    wrong = [(what, file) for what, file in pairs if what not in {*names_in(ROOT / file), "native.parse_request"}]
    assert not wrong


@pytest.mark.parametrize("name", TEXTS)
def test_every_name_of_code_is_in_the_code(name: str) -> None:
    """Words in backticks that look like names of ours: with capitals, an underscore, a point or brackets."""
    words = re.findall(r"`(\w+(?:\.\w+)*)(?:\(\w*(?:, [\w.]+)*\))?`", TEXTS[name])
    settings = [ROOT / "model_config.yaml", ROOT / "config.properties", ROOT / "configs/proxy/nginx.conf"]
    settings += (ROOT / "configs/kserve").glob("*.yaml")
    known = set(re.findall(r"\w+", sources()))
    known |= {word for path in settings for word in re.findall(r"[\w-]+", path.read_text(encoding="utf-8"))}
    unknown = {w for w in words if re.search(r"[A-Z_.]", w) and w.rpartition(".")[2] not in known}
    assert not unknown


# --- Python --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda s: f"{s.document}: {s.text.splitlines()[0]}")
def test_python_runs(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(snippet.text, snippet.document, "exec")
    if any(snippet.text.startswith(words) for words in NOT_RUN):
        return
    monkeypatch.chdir(ROOT)
    exec(code, {"__name__": "example"})


def test_what_is_not_run_is_still_there() -> None:
    for words in NOT_RUN:
        assert any(snippet.text.startswith(words) for snippet in blocks("python"))


# --- requests ------------------------------------------------------------------------------------------------------


def test_the_answer_in_the_readme_is_the_one_that_comes() -> None:
    (curl,) = (line for line in commands("README.md") if line.startswith("curl"))
    arguments = shlex.split(curl)
    request = native.parse_request(json.loads(arguments[arguments.index("-d") + 1]))
    with LLM(ROOT / "model_store/demo/target") as llm:
        (prompt,) = request.prompts
        done = llm.generate(prompt, request.params)
    (answer,) = (s.text for s in blocks("json") if s.document == "README.md")
    assert json.loads(request.write_end([done])) == json.loads(answer)


@pytest.mark.parametrize("snippet", [s for s in blocks("json") if s.document != "README.md"], ids=lambda s: s.document)
def test_requests_are_understood(snippet: Snippet) -> None:
    assert native.parse_request(json.loads(snippet.text)).prompts
    assert json.loads(snippet.text) == json.loads((ROOT / "request.json").read_text())


# --- commands ------------------------------------------------------------------------------------------------------


def commands(document: str) -> list[str]:
    """The command lines of a document; lines that end with a backslash go on."""
    text = "".join(s.text for s in blocks("bash") if s.document == document).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


ALL_COMMANDS = [(document, line) for document in TEXTS for line in commands(document)]


@pytest.mark.parametrize(("document", "line"), ALL_COMMANDS)
def test_commands_parse(document: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line.split(" && ")[0], comments=True)
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
        assert words[0] == "gpt_fast"
    if words[0] in ("gpt-fast", "gpt_fast"):
        parse(words[1:], monkeypatch)
    elif words[0].endswith("archive.sh"):
        parse(["archive", *words[1:]], monkeypatch)
    elif (script := words[1] if words[0] == "python" else words[0]).removeprefix("./").split("/")[0] in (
        "scripts",
        "benchmarks",
    ):
        folder = ROOT / "benchmarks" / "gpu" if script.endswith("gpu.sh") else None
        text = "".join(p.read_text() for p in folder.glob("*.py")) if folder else (ROOT / script).read_text()
        for option in [word for word in words[1:] if word.startswith("--")]:
            assert re.search(rf"{option}\b", text), f"{script} has no {option}"
    elif words[0] == "curl":
        if "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            if "/v1/" in line:
                assert isinstance(body.pop("model"), str)
            assert native.parse_request(body).prompts
    else:
        assert any(line.startswith(first) for first in NOT_CHECKED), f"{document}: nothing checks {line!r}"


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line of gpt-fast; exits where it is wrong."""
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 0

    for command in cli.commands():
        monkeypatch.setattr(command, "run", run)
    assert main(words) == 0
    assert seen


def test_the_options_of_quickstart_are_those_of_the_script() -> None:
    text = (ROOT / "scripts" / "quickstart.sh").read_text()
    usage = set(re.findall(r"^#   (--[\w-]+)", text, re.M))
    assert {"--" + name.lstrip("-") for name in first_column(SERVING, "option of quickstart.sh")} == usage


def test_the_table_of_serve_has_its_options() -> None:
    own = set(re.findall(r'(?:add|add_argument)\("--([\w-]+)"', inspect.getsource(serve.add_parser)))
    shown = {name.lstrip("-") for name in first_column(SERVING, "option of serve")}
    assert shown - own == {"draft", "quantize", "device"}, "they are options of the engine"
    assert own <= shown


def quick_commands(document: str) -> list[str]:
    lines = [line for line in commands(document) if line.startswith("gpt-fast ")]
    return [line for line in lines if not any(line.startswith(f"gpt-fast {words}") for words in ONLY_PARSED)]


@pytest.mark.slow
@pytest.mark.parametrize("document", [name for name in TEXTS if quick_commands(name)])
def test_commands_run_as_they_stand(document: str, tmp_path: Path) -> None:
    """In the document's order: what one command writes the next one may read."""
    for name in ("model_store", "README.md", "tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for line in quick_commands(document):
        command = [sys.executable, "-m", "gpt_fast", *shlex.split(line, comments=True)[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("name", TEXTS)
def test_variables_of_the_environment_are_read_somewhere(name: str) -> None:
    for variable in re.findall(r"\bGPT_FAST_[A-Z_]+", TEXTS[name]):
        assert variable in sources(), variable


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 180
