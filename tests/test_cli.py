"""The command line as a user meets it: its streams and exit status, of a process where that matters."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fake_model import Bytes, FakeModelLLM
from test_speculation import near_model

from gpt_fast import SamplingParams, __version__, cli
from gpt_fast.commands.generate import end_line
from gpt_fast.commands.origins import Painter
from gpt_fast.outputs import Delta
from gpt_fast.tokenizer import IncrementalDetokenizer

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "model_store" / "demo" / "target"

pytestmark = pytest.mark.usefixtures("one_thread")


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def gpt_fast(
    *arguments: str | Path, stdin: str | bytes = "", stream: type[io.StringIO] = io.StringIO
) -> subprocess.CompletedProcess[str]:
    """The command in this process, which has loaded torch already: a new process takes seconds to do so.
    ``stream``: what stdout and stderr are."""
    command = list(map(str, arguments))
    out, err = stream(), stream()
    typed = io.StringIO(stdin) if isinstance(stdin, str) else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", typed),
    ):
        try:
            status = cli.main(command)
        except SystemExit as left:  # argparse's own refusals
            status = left.code if isinstance(left.code, int) else 1
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def gpt_fast_process(*arguments: str | Path, stdin: str = "", joined: bool = False) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it. ``joined``: stdout and stderr as one, as a terminal shows them."""
    return subprocess.run(
        [sys.executable, "-m", "gpt_fast", *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else subprocess.PIPE,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, not measured: 10 GB/s."""
    monkeypatch.setattr("gpt_fast.llm.read_bandwidth", lambda *_: 10e9)


@pytest.fixture(scope="module")
def checkpoint(data_dir: Path) -> Path:
    return data_dir / "models" / "stories260K_hf"


def generate(checkpoint: Path, *arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    return gpt_fast(
        "generate", "--checkpoint", checkpoint, "--no-compile", "--dtype", "float32", *arguments, stdin=stdin
    )


def test_golden_text_byte_for_byte(checkpoint: Path, data_dir: Path) -> None:
    result = gpt_fast_process(
        *("generate", "--checkpoint", checkpoint, "--prompt", "", "--max-new-tokens", "200"),
        *("--temperature", "0", "--dtype", "float32"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == (data_dir / "golden" / "stories260K_greedy_200steps.txt").read_text()
    assert "tokens/s" in result.stderr
    assert "GB/s" in result.stderr


def test_the_statistics_have_a_line_of_their_own() -> None:
    """Where stdout and stderr are one, as in ``2>&1 | tee``; where they are two, stdout is the completion alone."""
    arguments = ("generate", "--checkpoint", DEMO, "--no-compile", "--prompt", "Once upon", "--max-new-tokens", "8")
    alone = gpt_fast(*arguments)
    assert alone.stdout
    assert not alone.stdout.endswith("\n")
    joined = gpt_fast_process(*arguments, joined=True).stdout.splitlines()
    assert joined[-2].endswith(alone.stdout.splitlines()[-1])
    assert re.match(r"[\d.]+ tokens/s, ", joined[-1])


@pytest.mark.parametrize(
    ("text", "own_line", "out", "err"),
    [("a", False, "", "\n"), ("a\n", False, "", ""), ("", False, "", "\n"), ("a", True, "\n", "")],
)
def test_a_line_is_ended_once(
    text: str, own_line: bool, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end_line(text, own_line)
    assert capsys.readouterr() == (out, err)


def test_version() -> None:
    told = gpt_fast("--version")
    assert (told.returncode, told.stdout) == (0, f"gpt-fast {__version__}\n")
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert declared[1] == __version__


def test_json_on_the_last_line_and_a_seed_repeats(checkpoint: Path) -> None:
    arguments = ("--prompt", "Once", "--max-new-tokens", "12", "--temperature", "0.9", "--seed", "5", "--json")
    first, second = (generate(checkpoint, *arguments) for _ in range(2))
    last = json.loads(first.stdout.splitlines()[-1])
    assert last["num_new_tokens"] == 12
    assert last["finish_reason"] == "length"
    assert last["token_ids"] == json.loads(second.stdout.splitlines()[-1])["token_ids"]
    assert first.stdout.startswith(last["text"])
    assert last["tokens_per_second"] > 0
    assert last["machine_bandwidth_gb_s"] == 10.0
    share = last["tokens_per_second"] / last["ceiling_tokens_per_second"]
    assert last["share_of_ceiling"] == pytest.approx(share, rel=0.01, abs=0.001)
    assert last["achieved_bandwidth_gb_s"] == pytest.approx(10.0 * share, rel=0.01, abs=0.01)


# ---- where tokens come from ----

STORY = ("generate", "--checkpoint", DEMO, "--dtype", "float32", "--prompt", "Once upon", "--max-new-tokens", "40")
SEEDED = (*STORY, "--temperature", "1", "--seed", "2")
DRAFTED = (*SEEDED, "--draft", DEMO.parent / "draft", "--speculate", "always", "--verbose")
ESCAPES = re.compile("(\x1b\\[[0-9]+m)")


def test_verbose_tells_where_tokens_come_from_and_whether_drafts_pay() -> None:
    plain, told = gpt_fast(*SEEDED), gpt_fast(*DRAFTED, "--num-samples", "2", "--json")
    assert told.returncode == 0, told.stderr
    *_, last = told.stdout.splitlines()
    assert told.stdout == f"{plain.stdout}\n\n{plain.stdout}\n{last}\n"  # byte for byte: nobody looks
    facts = json.loads(last)
    drafted, accepted = facts["num_drafted"], facts["num_accepted"]
    assert 0 < accepted < drafted
    assert facts["acceptance"] == pytest.approx(accepted / drafted, abs=1e-4)
    assert "magenta" not in told.stderr
    tokens, drafts, length, times, rule, *sides = told.stderr.splitlines()[-8:]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+) \(", tokens)}
    assert tokens.startswith("tokens: 80, ")
    assert sum(counts.values()) == 80
    assert counts["accepted"] == 2 * accepted
    assert drafts.startswith(f"drafts: {2 * drafted} verified, {2 * accepted} right (")
    assert len(drafts.partition("position")[2].split(",")) == 4
    assert length.startswith("mean accepted length: ")
    assert "(78 tokens behind the first in " in length
    assert re.fullmatch(r"times: one draft .* ms, the step that verifies .* drafts .* ms, a plain step .* ms", times)
    assert "(accepted + 1) x plain step > k x draft step + verification step" in rule
    assert re.fullmatch(r"  \([\d.]+ \+ 1\) x [\d.]+ ms = [\d.]+ ms", sides[0])
    assert re.fullmatch(r"  [\d.]+ x [\d.]+ ms \+ [\d.]+ ms = [\d.]+ ms", sides[1])
    plain_side, draft_side = (float(side.split()[-2]) for side in sides[:2])
    gain = float(re.findall(r": ([\d.]+) times", sides[2])[0])
    assert gain == pytest.approx(plain_side / draft_side, abs=0.02)
    assert ("pays:" if plain_side > draft_side else "loses:") in sides[2] or gain == 1.0


def test_a_terminal_gets_colours_and_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown, plain = gpt_fast(*DRAFTED, stream=Terminal), gpt_fast(*DRAFTED)
    assert ESCAPES.sub("", shown.stdout) == plain.stdout + "\n"
    assert {"\x1b[32m", "\x1b[35m", "\x1b[0m"} <= set(ESCAPES.findall(shown.stdout))
    legend = "(magenta): in the place of the first wrong draft"
    assert legend in shown.stderr
    monkeypatch.setenv("NO_COLOR", "1")
    plainly = gpt_fast(*DRAFTED, stream=Terminal)
    assert plainly.stdout == plain.stdout + "\n"
    assert not ESCAPES.search(plainly.stderr)
    assert legend not in plainly.stderr


def test_a_terminal_sees_how_far_a_comparison_of_drafts_is() -> None:
    arguments = ("--checkpoint", DEMO, "--draft", "lookup", "--new-tokens", "3", "--repeats", "1", "--speculate-k", "1")
    result = gpt_fast("bench", *arguments, stream=Terminal)
    assert result.returncode == 0, result.stderr
    runs = 8 * 2 * 3  # prompts, rounds with the first one that does not count, methods
    assert f"/{runs} [" in result.stderr
    assert "[" not in result.stdout


def test_verbose_without_drafts_says_nothing_of_them(checkpoint: Path) -> None:
    result = generate(checkpoint, "--prompt", "Once", "--max-new-tokens", "5", "--verbose", "--json")
    assert "draft" not in result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    assert (facts["num_drafted"], facts["num_accepted"], facts["acceptance"]) == (0, 0, None)


def test_a_conversation_ends_with_the_totals() -> None:
    arguments = ("--checkpoint", DEMO, "--draft", "lookup", "--verbose", "--max-new-tokens", "6")
    result = gpt_fast("generate", *arguments, "--interactive", stdin="Once upon\nLily\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert "tokens: 12, of them " in result.stderr
    assert gpt_fast("generate", *arguments, "--interactive").returncode == 0  # nothing was asked


def test_every_character_has_the_colour_of_the_token_that_completes_it() -> None:
    """Random bytes: characters of several tokens, some broken, and stop strings; deltas bring several tokens."""
    prompt, letters = [200, 5, 6], {"32": "a", "35": "c", "36": "b", "0": "p"}
    seen: set[str] = set()
    with FakeModelLLM(drafter=near_model) as llm:
        for seed in range(12):
            params = SamplingParams(max_tokens=50, temperature=1.0, seed=seed, stop=("a", "\x05"), ignore_eos=True)
            deltas = list(llm.stream(prompt, params))
            done = deltas[-1].completion
            assert done is not None
            assert tuple(origin for delta in deltas for origin in delta.origins) == done.origins
            single, painter = IncrementalDetokenizer(Bytes(), prompt), Painter(IncrementalDetokenizer(Bytes(), prompt))
            painted = "".join(painter.paint(delta) for delta in deltas)
            assert ESCAPES.sub("", painted) == done.text
            tokens = zip(done.token_ids, done.origins, strict=True)
            expected = "".join(origin[0] * len(single.push(token)) for token, origin in tokens)
            colours, now = "", "p"
            for piece in ESCAPES.split(painted):
                if ESCAPES.fullmatch(piece):
                    now = letters[piece[2:-1]]
                else:
                    colours += now * len(piece)
            assert colours == expected[: len(done.text)].ljust(len(done.text), "p")
            seen |= set(colours)
    assert seen == set("abcp")


def test_a_token_keeps_its_colour_where_a_delta_holds_its_end_back() -> None:
    words: Any = SimpleNamespace(push=["abc", "", "de", "f"].__getitem__)
    painter = Painter(words)
    first = Delta("ab", (0, 1), origins=("accepted", "bonus"))
    assert painter.paint(first) == "\x1b[32mab\x1b[0m"
    last = Delta("cde", (2, 3), origins=("corrected", "plain"))  # a stop string began with the last token
    assert painter.paint(last) == "\x1b[32mc\x1b[0m\x1b[35mde\x1b[0m"


def test_prompt_from_stdin(checkpoint: Path) -> None:
    arguments = ("--checkpoint", checkpoint, "--no-compile", "--dtype", "float32", "--max-new-tokens", "5")
    typed = generate(checkpoint, "--prompt", "Lily saw\n", "--max-new-tokens", "5")
    piped = gpt_fast_process("generate", *arguments, "--prompt", "-", stdin="Lily saw\n\n")  # as echo ends a line
    assert piped.stdout == typed.stdout != ""


@pytest.mark.parametrize("asked", [("--prompt", "-"), ("--interactive",)])
def test_stdin_that_is_no_text_is_told(asked: tuple[str, ...], checkpoint: Path) -> None:
    result = generate(checkpoint, *asked, stdin=b"Lily \xff\n")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "gpt-fast generate: stdin is not a text in UTF-8"


@pytest.mark.parametrize(("closed", "shown"), [("<&- 2>&-", "Once"), ("<&- >&-", "")])
def test_a_closed_stream_is_as_the_null_device(closed: str, shown: str, checkpoint: Path) -> None:
    options = ("--checkpoint", str(checkpoint), "--prompt", "-", "--max-new-tokens", "1")
    command = [sys.executable, "-m", "gpt_fast", "generate", *options]
    result = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (result.returncode, result.stdout) == (0, shown)


def test_an_error_without_a_stderr_is_not_on_stdout() -> None:
    command = [sys.executable, "-m", "gpt_fast", "info", "--checkpoint", "/nowhere"]
    result = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (result.returncode, result.stdout) == (1, "")


def test_stdout_escapes_what_its_encoding_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.kernels.cpu.building.build_all", lambda folder: [folder / "\xfc.so"])
    written = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(written, "ascii", write_through=True)):
        assert cli.main(["kernels", "--output", str(tmp_path)]) == 0
        assert written.getvalue() == f"{tmp_path}/\\xfc.so\n".encode()


def test_interactive_without_a_template_completes_each_line(checkpoint: Path) -> None:
    result = generate(checkpoint, "--interactive", "--max-new-tokens", "4", stdin="Once upon\n\nLily\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert "no chat template" in result.stderr
    assert "--system has no effect" not in result.stderr
    spoken = generate(checkpoint, "--interactive", "--system", "Rhyme.", stdin="")
    assert "no chat template: every line is completed by itself, and --system has no effect" in spoken.stderr


def test_interactive_forgets_a_question_that_has_no_answer(checkpoint: Path, tmp_path: Path) -> None:
    turns = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('not in turns') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(turns)
    result = generate(tmp_path, "--interactive", "--max-new-tokens", "4", stdin="a " * 600 + "\nOnce upon\nLily\n")
    assert result.returncode == 0, result.stderr
    assert "context of 512" in result.stderr
    assert "not in turns" not in result.stderr
    assert len(result.stdout.splitlines()) == 3
    assert all(result.stdout.splitlines()[1:])


def test_stop_string(checkpoint: Path) -> None:
    result = generate(checkpoint, "--prompt", "", "--max-new-tokens", "200", "--stop", "Lily")
    assert result.stdout == "Once upon a time, there was a little girl named "


def test_profile_writes_a_trace_of_the_engine_thread(checkpoint: Path, tmp_path: Path) -> None:
    result = generate(checkpoint, "--prompt", "a", "--max-new-tokens", "3", "--profile", str(tmp_path))
    assert result.returncode == 0, result.stderr
    trace = json.loads((tmp_path / "generate.trace.json").read_text())
    assert any("gpt_fast::cpu_" in event.get("name", "") for event in trace["traceEvents"])


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("generate", "target"):
        (tmp_path / f"{name}.trace.json").mkdir()
    asked = ["generate", "--prompt", "a"], ["bench", "--draft", "lookup", "--new-tokens", "2", "--repeats", "1"]
    for (command, *more), name in zip(asked, ("generate", "target"), strict=True):
        result = gpt_fast(command, "--checkpoint", checkpoint, *more, "--profile", tmp_path)
        assert (result.returncode, result.stdout) == (1, "")
        place = tmp_path / f"{name}.trace.json"
        assert result.stderr == f"gpt-fast {command}: --profile: {place} cannot be used: Is a directory\n"


def test_info(checkpoint: Path) -> None:
    result = gpt_fast("info", "--checkpoint", checkpoint, "--json", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["parameters"] == 260_032
    assert facts["weight_bytes"] == 4 * 260_032
    assert facts["kv_bytes_per_token"] == 2 * 5 * 4 * 8 * 4
    assert facts["eos_token_ids"] == [2]
    assert facts["ceiling_tokens_per_second"] > 0


def test_info_without_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path)
    result = gpt_fast("info", "--checkpoint", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["tokenizer"], facts["tokenizer_vocab_size"], facts["parameters"]) == (None, None, 260_032)


def test_kernels_prints_what_it_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpt_fast.kernels.cpu.building.build_all", lambda folder: [folder / "a.so", folder / "b.so"])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["kernels", "--output", "built"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "built" / name) for name in ("a.so", "b.so")]


def test_a_refusal_is_one_line_and_the_exit_status_of_a_process() -> None:
    result = gpt_fast_process("info", "--checkpoint", "/nowhere")
    assert (result.returncode, result.stdout) == (1, "")
    assert "/nowhere" in result.stderr
    assert len(result.stderr.splitlines()) == 1


INT8 = ["quantize", "--checkpoint", "CKPT", "--mode", "int8"]
GPTQ = ["quantize", "--checkpoint", "CKPT", "--mode", "int4-gptq", "--out", "OUT"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["generate", "--checkpoint", "CKPT"], 2, "--prompt --interactive"),
        (["generate", "--checkpoint", "/nowhere", "--prompt", "a"], 1, "/nowhere"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--temperature", "-1"], 1, "temperature"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--dtype", "float8"], 1, "float8"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--device", "cuda:99"], 1, "cuda:99"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--max-new-tokens", "0"], 1, "max_tokens"),
        (["generate", "--checkpoint", "CKPT", "--no-compile", "--prompt", "a " * 600], 1, "context of 512"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--bogus"], 2, "--bogus"),
        (["info", "--checkpoint", "/nowhere"], 1, "/nowhere"),
        (["info", "--checkpoint", "CKPT", "--dtype", "float8"], 1, "--dtype must be one of auto, float32"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--quantize", "int9"], 1, "--quantize must be one of"),
        (["bench", "--checkpoint", "CKPT", "--kv-cache-dtype", "x"], 1, "--kv-cache-dtype must be one of auto"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "x", "--threads", "0"], 1, "--threads must be a whole"),
        (["batch", "--checkpoint", "CKPT", "--input", "x", "--output", "OUT", "--max-batch", "0"], 1, "--max-batch"),
        (["info", "--dtype", "float16"], 1, "--dtype means nothing without --checkpoint"),
        (["info", "--quantize", "int8"], 1, "--quantize means nothing without --checkpoint"),
        (["convert", "CKPT", "--out", "OUT", "--config", "llama-68m"], 1, "says by itself what its model is"),
        ([*INT8, "--out", "OUT", "--calibration-sequences", "9"], 1, "nothing with --mode int8"),
        (["info", "--device", "cuda:x"], 1, "device must be one of auto, cpu, cuda, cuda:N, not 'cuda:x'"),
        (["convert", "/nowhere", "--out", "OUT"], 1, "/nowhere"),
        ([], 2, "COMMAND"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--num-samples", "0"], 2, "of at least 1, not 0"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--system", "b"], 1, "without --interactive"),
        (["generate", "--checkpoint", "CKPT", "--interactive", "--json"], 1, "--json means nothing with --interactive"),
        (["generate", "--checkpoint", "CKPT", "--interactive", "--num-samples", "2"], 1, "--num-samples means nothing"),
        (["generate", "--checkpoint", "CKPT", "--interactive", "--profile", "OUT"], 1, "--profile means nothing"),
        (["generate", "--checkpoint", "a/b", "--prompt", "a"], 1, "Fetch it:  gpt-fast download a/b --out DIR"),
        (["eval", "--checkpoint", "a/b/c.gguf", "--perplexity", "x"], 1, "gpt-fast download a/b c.gguf --out DIR"),
        (["info", "--checkpoint", ""], 1, "--checkpoint is empty"),
        (["generate", "--checkpoint", "CKPT", "--prompt", "a", "--lora", ""], 1, "--lora is empty"),
        (["convert", "CKPT", "--out", "OUT", "--lora", "a", "--lora", "a=2"], 2, "a is named twice; add its weights"),
        (["serve", "--stop", "--checkpoint", ""], 1, "--checkpoint is empty"),
        (["serve", "--stop", "--draft", ""], 1, "--draft is empty"),
        (["serve", "--stop", "--run-dir", ""], 1, "--run-dir is empty"),
        (["archive", "--checkpoint", "CKPT", "--output", "OUT", "--draft", ""], 1, "--draft is empty"),
        (["convert", "", "--out", "OUT"], 1, "SOURCE is empty"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "x", "--max-tokens", "-1"], 2, "of at least 1, not -1"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "x", "--stride", "0"], 2, "of at least 1, not 0"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "x", "--context", "1"], 2, "of at least 2, not 1"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "x", "--limit", "1"], 1, "nothing with --perplexity"),
        (["eval", "--checkpoint", "CKPT", "--examples", "x", "--max-tokens", "1"], 1, "nothing with --examples"),
        (["eval", "--checkpoint", "CKPT", "--examples", "x", "--separator", "a"], 1, "nothing with --examples"),
        (["eval", "--checkpoint", "CKPT", "--perplexity", "/no"], 1, "--perplexity: /no cannot be used: No such file"),
        ([*GPTQ, "--calibration", "x", "--calibration-sequences", "-1"], 2, "of at least 1, not -1"),
        ([*GPTQ, "--calibration", "/no"], 1, "--calibration: /no cannot be used: No such file"),
        ([*GPTQ, "--calibration", "LATIN"], 1, "latin.txt is not a text in UTF-8: byte 1 is wrong"),
        ([*INT8[:-1], "int4", "--out", "OUT", "--group-size", "0"], 1, "group_size: 0 is not one of 32, 64, 128"),
        ([*INT8, "--out", "."], 1, ". is the current folder, which cannot be replaced"),
        (["convert", "CKPT", "--out", "."], 1, ". is the current folder, which cannot be replaced"),
        (["convert", "CKPT", "--out", "/"], 1, "/ exists and is not empty"),
        ([*INT8, "--out", "/dev/null/x"], 1, "--out: /dev/null/x.partial cannot be used: Not a directory"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], status: int, words: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"CKPT": str(checkpoint), "OUT": str(tmp_path / "out"), "LATIN": str(tmp_path / "latin.txt")}
    (tmp_path / "latin.txt").write_bytes(b"d\xe9j\xe0")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = gpt_fast(*(places.get(a, a) for a in arguments))
    assert result.returncode == status
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/a/b.jsonl.part", "--output: /a/b.jsonl.part cannot be used: No"),
        ("/a/b.jsonl/c", "--output: /a/b.jsonl/c cannot be used: No"),
        ("/a", "--output: /a cannot be used: No"),
        ("/text", "--calibration: /text cannot be used: No"),
        ("/elsewhere", "/elsewhere cannot be used: No"),
        (None, "No"),
    ],
)
def test_an_error_of_the_system_names_the_option(file: str | None, told: str) -> None:
    arguments = Namespace(output="/a/b.jsonl", calibration=["/other", "/text"], checkpoint=None)
    assert cli._told(OSError(errno.EIO, "No", file), arguments) == told


def test_every_help_begins_with_a_sentence() -> None:
    for command in cli.commands():
        verb = command.__name__.rpartition(".")[2]
        text = gpt_fast(verb, "--help").stdout.split("\n\n")[1]
        assert text[0].isupper(), text
        assert "`" not in text, text


def test_python_may_leave_docstrings_out() -> None:
    command = [sys.executable, "-OO", "-m", "gpt_fast", "serve", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--checkpoint MODEL" in result.stdout


def test_ctrl_c_says_so_on_a_line_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    with mock.patch.object(cli, "commands", side_effect=KeyboardInterrupt):  # while the commands are imported
        early = gpt_fast("info")
    assert (early.returncode, early.stderr) == (130, "\ninterrupted\n")
    with mock.patch("gpt_fast.quantize.writer.quantize_checkpoint", side_effect=KeyboardInterrupt):
        left = gpt_fast("quantize", "--checkpoint", checkpoint, "--mode", "int8", "--out", tmp_path / "out")
    assert left.returncode == 130
    assert left.stderr == "\ninterrupted: the same command with --resume goes on from here\n"


# The command line without torch, and a command that makes a folder, says so and waits.
WAITING = """
import contextlib, sys, tempfile, time
from types import SimpleNamespace
from gpt_fast import cli

def run(arguments):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("made", flush=True)
        time.sleep(60)

def add_parser(subparsers):
    subparsers.add_parser("wait").set_defaults(run=run)

cli.commands = lambda: (SimpleNamespace(add_parser=add_parser),)
sys.exit(cli.main(["wait"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing_half_made(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "made\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert process.stderr.read() == ("\ninterrupted\n" if number == signal.SIGINT else "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "to", "status", "told"),
    [
        ("", "/dev/full", 1, "gpt-fast say: stdout cannot be used: No space left on device\n"),
        (", flush=True", "/dev/full", 1, "gpt-fast say: No space left on device\n"),
        ("", "nobody", 0, ""),
        (", flush=True", "nobody", 0, ""),
    ],
)
def test_a_stdout_that_takes_nothing_is_told_once(more: str, to: str, status: int, told: str) -> None:
    said = f"def run(_):\n    print('a'{more})\n    return 0\n\ndef _"
    code = WAITING.replace('"wait"', '"say"').replace("def run", said)
    read, write = os.pipe() if to == "nobody" else (None, os.open(to, os.O_WRONLY))
    if read is not None:
        os.close(read)
    command, buffered = [sys.executable, "-c", code, "x"], {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=buffered, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (status, told)
