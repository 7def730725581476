"""benchmarks/compare_peers.py without any peer: the workers' protocol, turns, numbers, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.model.building import random_model
from gpt_fast.model.describing import describe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import compare_peers
from peers import contexts, files, gguf_file, ikllama, openvino, plots, registry, report, rounds
from peers.measures import Measure, plan
from peers.process import Worker, WorkerError
from peers.registry import Peer

OURS = registry.REGISTRY["ours"]
TINY = ModelConfig("llama", 256, 32, 2, 4, 2, 8, 64, 256)
DECODE, TOGETHER = Measure("decode", 1, 6, 4), Measure("decode", 8, 6, 4)
PREFILL, LONG = Measure("prefill", 1, 24), Measure("decode", 1, 59, 4)

FAKE = """
import json, os, sys, time
from peers.worker import serve

class Fake:
    def __init__(self, options):
        self.options, self.count = options, 0
        print("a library prints where answers go")
        os.write(1, b"and so does its C part\\n")

    def facts(self):
        threads = {"threads": self.options["threads"]} if "threads" in self.options else {}
        return {"weight_bytes": 1000, "kv_bytes_per_token": 10, **threads}

    def measure(self, measure):
        self.count += 1
        with open(self.options["events"], "a") as events:
            print(self.options["format"], measure.name, file=events)
        if self.options.get("fails") == self.count:
            raise RuntimeError("no room for the cache")
        if self.options.get("dies") in (self.count, measure.name):
            print("assertion failed deep down", file=sys.stderr)
            os._exit(3)
        time.sleep(self.options.get("sleeps", 0))
        return 2.0 * measure.num_tokens

    def notes(self):
        return {"count": self.count}

def check():
    return {"fake": "1.0"}

if __name__ == "__main__":
    serve(check, Fake)
"""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers find the fake peer; nothing of a tiny model is worth compiling."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "fake_peer.py").write_text(FAKE)
    (modules / "absent_peer.py").write_text(
        "from peers.worker import serve\n\ndef check():\n    import nowhere_to_be\n\n"
    )
    with (modules / "absent_peer.py").open("a") as file:
        file.write('if __name__ == "__main__":\n    serve(check, None)\n')
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    fakes = [Peer("fake", "fake_peer", {"bf16": ("F1", "F2"), "int8": ("F8",)}, "pip install fake", prefill=False)]
    fakes.append(Peer("ours", "fake_peer", {"bf16": ("F",)}, ""))  # tests of the engine itself name its module
    fakes.append(Peer("absent", "absent_peer", {"bf16": ("A",)}, "pip install absent"))
    monkeypatch.setattr(registry, "REGISTRY", registry.REGISTRY | {peer.name: peer for peer in fakes})
    monkeypatch.setattr(compare_peers, "read_bandwidth", lambda threads: 10e9)
    return modules


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    save_checkpoint(random_model(TINY, torch.bfloat16), directory)
    (directory / "tokenizer.model").write_bytes(files.made_up_tokenizer(TINY.vocab_size + 64))
    return directory


def setting(tmp_path: Path, said: list[str], num_rounds: int = 3) -> rounds.Setting:
    pythons = dict.fromkeys(registry.REGISTRY, sys.executable)
    return rounds.Setting(pythons, 1, num_rounds, tmp_path / "logs", lambda: 10e9, said.append)


def entry(tmp_path: Path, format: str, num_bytes: int = 1, **options: Any) -> rounds.Entry:
    options["events"] = str(tmp_path / "events")
    return rounds.Entry(registry.REGISTRY["fake"], "bf16", format, num_bytes, options)


# What is measured.


def test_the_plan_has_what_was_asked_for() -> None:
    measures = plan([1, 8], 256, 30, [128, 2048])
    assert [m.name for m in measures] == ["decode", "decode x8", "prefill 256", "decode at 128", "decode at 2048"]
    assert [m.num_tokens for m in measures] == [30, 240, 256, 30, 30]
    assert measures[-1].longest == 2048  # fits a model made for 2048
    assert [m.name for m in plan([1], 0, 30, [])] == ["decode"]


@pytest.mark.parametrize(("arguments", "words"), [(([0], 8, 4, []), "at least 1"), (([1], 8, 30, [32]), "context 32")])
def test_the_plan_refuses_what_cannot_be_measured(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(*arguments)


# The protocol.


def test_our_engine_is_a_worker(checkpoint: Path, tmp_path: Path) -> None:
    measures = [DECODE, TOGETHER, PREFILL, LONG]
    told = {"checkpoint": str(checkpoint), "format": "int8", "threads": 1}
    with Worker("ours", sys.executable, "peers.ours", tmp_path / "log") as worker:
        assert worker.ask("check")["torch"] == torch.__version__
        with pytest.raises(WorkerError, match="before load"):
            worker.ask("measure", **vars(DECODE))
        facts = worker.ask("load", **told, measures=[vars(m) for m in measures])
        assert facts["kv_bytes_per_token"] == TINY.kv_bytes_per_token(2)
        weights = describe(TINY).num_parameters - TINY.vocab_size * TINY.dim
        assert weights < facts["weight_bytes"] < 2 * weights  # int8 with scales, less than bfloat16
        for measure in measures * 2:
            assert worker.ask("measure", **vars(measure))["seconds"] > 0
        assert worker.ask("notes")["max_seq_len"] >= LONG.longest


def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    with Worker("fake", sys.executable, "fake_peer", tmp_path / "log") as worker:
        told = {"events": str(tmp_path / "events"), "format": "F1"}
        assert worker.ask("load", **told) == {"weight_bytes": 1000, "kv_bytes_per_token": 10}
        assert worker.ask("measure", **vars(DECODE)) == {"seconds": 8.0, "cpu_s": pytest.approx(0, abs=0.5)}
    log = (tmp_path / "log").read_text()
    assert "a library prints" in log
    assert "its C part" in log


def test_a_worker_that_dies_is_quoted(tmp_path: Path) -> None:
    with Worker("fake", sys.executable, "fake_peer", tmp_path / "log") as worker:
        worker.ask("load", events=str(tmp_path / "events"), format="F1", dies=1)
        for _ in range(2):  # the second question finds the pipe closed
            with pytest.raises(WorkerError, match=r"(?s)status 3.*assertion failed deep down"):
                worker.ask("measure", **vars(DECODE))


def test_a_worker_that_says_nothing_is_given_up(tmp_path: Path, environment: Path) -> None:
    (environment / "silent_peer.py").write_text("import time\ntime.sleep(60)\n")
    with Worker("silent", sys.executable, "silent_peer", tmp_path / "log") as worker:
        with pytest.raises(WorkerError, match=r"no answer to check in 0\.2 s"):
            worker.ask("check", timeout_s=0.2)
        worker._process.kill()


def test_peers_wait_as_they_like(tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, pathlib\npathlib.Path(os.environ['SAID']).write_text(str(os.environ.get('OMP_WAIT_POLICY')))\n"
    (environment / "waiting_peer.py").write_text(code)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with Worker("waiting", sys.executable, "waiting_peer", tmp_path / "log") as worker, pytest.raises(WorkerError):
        worker.ask("check")
    assert (tmp_path / "said").read_text() == "None"


def test_a_worker_ends_with_who_asked_it(tmp_path: Path) -> None:
    with Worker("fake", sys.executable, "fake_peer", tmp_path / "log") as worker:
        worker.ask("load", events=str(tmp_path / "events"), format="F1", sleeps=3600)
        with pytest.raises(WorkerError, match="no answer"):
            worker.ask("measure", timeout_s=0.2, **vars(DECODE))
        worker._process.stdin.close()  # as the kernel does for a process that is killed
        assert worker._process.wait(timeout=60) == 1


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no-python does not start: No such file"):
        Worker("fake", str(tmp_path / "no-python"), "fake_peer", tmp_path / "log")


# Turns.


def test_workers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_SETTLE_S", 0)
    said: list[str] = []
    found = rounds.Found()
    both = [entry(tmp_path, "F1"), entry(tmp_path, "F2")]
    rounds.run(both, [DECODE, PREFILL, LONG], setting(tmp_path, said, 2), found)
    events = (tmp_path / "events").read_text().splitlines()
    turn = [["F1", "F2"], ["F2", "F1"]]  # who begins changes from round to round
    assert events == [f"{who} {m}" for i in range(3) for m in ("decode", "decode at 64") for who in turn[i % 2]]
    assert found.seconds == {(f"fake {f}", m): [8.0, 8.0] for f in ("F1", "F2") for m in (DECODE, LONG)}
    assert found.facts["fake F1"]["count"] == 6
    assert found.bandwidths == [10e9, 10e9]
    assert not found.skipped


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_the_others_go_on_without_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(rounds, "_SETTLE_S", 0)
    found = rounds.Found()
    both = [entry(tmp_path, "F1", **{how: 3}), entry(tmp_path, "F2")]  # in the second round after the warm-up
    rounds.run(both, [DECODE], setting(tmp_path, []), found)
    assert [len(found.seconds[f"fake {name}", DECODE]) for name in ("F1", "F2")] == [1, 3]
    (skip,) = found.skipped
    assert skip["what"] == "fake F1 in decode"
    assert ("no room for the cache" if how == "fails" else "status 3") in skip["reason"]


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_what_a_peer_cannot_do_costs_it_no_other_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(rounds, "_SETTLE_S", 0)
    found = rounds.Found()
    failing = {"fails": 2} if how == "fails" else {"dies": "decode x8"}  # it is the second measure
    rounds.run([entry(tmp_path, "F1", **failing)], [DECODE, TOGETHER, LONG], setting(tmp_path, [], 2), found)
    assert {measure.name: len(seconds) for (_, measure), seconds in found.seconds.items()} == {
        "decode": 2,
        "decode at 64": 2,
    }
    (skip,) = found.skipped
    assert skip["what"] == "fake F1 in decode x8"
    events = [line.removeprefix("F1 ") for line in (tmp_path / "events").read_text().splitlines()]
    assert events[:3] == ["decode", "decode x8", "decode at 64"]
    again = ["decode"] if how == "dies" else []  # for nothing, by the worker that was started anew
    assert events[3:] == [*again, "decode", "decode at 64", "decode", "decode at 64"]


def test_what_is_not_measured_at_all_is_not_loaded(tmp_path: Path) -> None:
    found = rounds.Found()
    rounds.run([entry(tmp_path, "F1")], [PREFILL], setting(tmp_path, [], 1), found)
    assert not found.facts
    assert found.skipped == [{"what": "fake F1", "reason": "it is not measured in anything that was asked for"}]


def test_what_does_not_fit_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "available_bytes", lambda: 10_000_000_000)
    monkeypatch.setattr(rounds, "_SETTLE_S", 0)
    found = rounds.Found()
    both = [entry(tmp_path, "F1", 9_000_000_000), entry(tmp_path, "F2")]
    rounds.run(both, [DECODE], setting(tmp_path, [], 1), found)
    assert list(found.facts) == ["fake F2"]
    assert "11.2 GB more memory are needed, 10.0 are free" in found.skipped[0]["reason"]


def test_what_others_compute_is_noticed(tmp_path: Path) -> None:
    found = rounds.Found()
    slow = entry(tmp_path, "F1", sleeps=0.8)
    code = "print('spinning', flush=True)\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        rounds.run([slow], [DECODE], setting(tmp_path, [], 1), found)
    finally:
        spinning.kill()
        spinning.communicate()
    if Path("/proc/stat").exists():
        assert found.others["fake F1", DECODE][0] > 0.2  # a whole CPU, or its share of one that is shared


# Numbers.


def made_report(tmp_path: Path) -> dict[str, Any]:
    """Ours took 1, 2 and 4 seconds where the peer took 2, 3 and 16."""
    ours = rounds.Entry(OURS, "bf16", "bfloat16", 1, {})
    both, measures = [ours, entry(tmp_path, "F1")], [DECODE, TOGETHER, PREFILL, LONG]
    found = rounds.Found(bandwidths=[1e3, 2e3, 9e3])
    for one, seconds in zip(both, ([1.0, 2.0, 4.0], [2.0, 3.0, 16.0]), strict=True):
        found.facts[one.label] = {"weight_bytes": 1000, "kv_bytes_per_token": 10}
        found.seconds |= {(one.label, m): list(seconds) for m in measures if one.takes(m)}
        found.others |= {(one.label, m): [0.0, 0.3, 0.0] for m in measures if one.takes(m)}
    found.skip("absent", "not installed: pip install absent")
    rows = report.results(both, measures, found)
    made = {"model": "tiny", "cpu": "a CPU", "threads": 2, "rounds": 3, "results": rows, "skipped": found.skipped}
    return made | {"ratios": report.ratios(rows), "scaling": report.scaling(rows)}


def test_ratios_are_of_rounds_not_of_medians(tmp_path: Path) -> None:
    made = made_report(tmp_path)
    ratio = next(r for r in made["ratios"] if r["measure"] == "decode")
    assert ratio["rounds"] == [2.0, 1.5, 4.0]
    assert (ratio["ratio"], ratio["least"], ratio["greatest"]) == (2.0, 1.5, 4.0)  # of the medians it would be 1.5
    assert [r["measure"] for r in made["ratios"]] == ["decode", "decode x8", "decode at 64"]  # the peer has no prefill


def test_the_share_counts_weights_once_and_every_cache(tmp_path: Path) -> None:
    rows = {row["measure"]: row for row in made_report(tmp_path)["results"] if row["peer"] == "ours"}
    assert rows["decode x8"]["bytes_per_step"] == 1000 + 8 * 10 * (6 + 4 / 2)
    assert rows["decode x8"]["tokens_per_second"] == 8 * 4 / 2.0
    assert rows["decode x8"]["ceiling_tokens_per_second"] == 8 * 2e3 / 1640
    assert rows["decode x8"]["share_of_ceiling"] == pytest.approx(16 / (8 * 2e3 / 1640))
    assert "share_of_ceiling" not in rows["prefill 24"]


def test_scaling_is_within_a_peer(tmp_path: Path) -> None:
    made = made_report(tmp_path)
    assert [(s["peer"], s["measure"], s["over"], s["ratio"]) for s in made["scaling"]] == [
        ("ours", "decode x8", "decode", 8.0),
        ("fake", "decode x8", "decode", 8.0),
    ]


def test_the_table_shows_everything(tmp_path: Path) -> None:
    lines = report.table(made_report(tmp_path)).splitlines()
    assert lines[0].split()[-8:] == ["decode", "decode", "x8", "prefill", "24", "decode", "at", "64"]
    assert lines[1] == "bf16"
    assert lines[2].split()[:4] == ["ours", "bfloat16", "2.0", "(108%)"]
    assert lines[3].split()[-3:] == ["-", "1.3", "(107%)"]
    assert lines[4].startswith("  ours / fake F1")
    assert "2.00x (1.50-4.00)" in lines[4]
    assert "0.0 CPUs busy meanwhile, up to 0.3" in lines[-2]
    assert lines[-1] == "skipped absent: not installed: pip install absent"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn; no file is written."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    return drawn


def run_of(threads: int, precision: str = "int8") -> dict[str, Any]:
    """Ours beside a peer that could not do 4 sequences."""
    rows = []
    for peer, most in (("ours", 4), ("fake", 2)):
        measured = plan([batch for batch in (1, 2, 4) if batch <= most], 24, 4, [64, 512])
        for m in measured:
            where = {"precision": precision, "peer": peer, "format": "F", "measure": m.name, "batch": m.batch}
            where |= {"prompt_tokens": m.prompt_tokens, "new_tokens": m.new_tokens}
            rates = [threads * m.batch * rate for rate in (9.0, 10.0, 12.0)]
            rows.append(where | {"tokens_per_second": rates[1], "tokens_per_second_rounds": rates})
    made = {"benchmark": "peers", "model": "tiny", "cpu": "a CPU", "threads": threads, "results": rows}
    return made | {"rounds": 3, "skipped": [], "ratios": [{}]}


def lines_of(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Points by peer."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_bars_have_a_panel_for_each_measure(tmp_path: Path, figures: list[Any]) -> None:
    plots.draw([made_report(tmp_path)], tmp_path / "peers.png")
    names = [axes.get_title() for axes in figures[0].axes]
    assert names == [f"{name}, 2 threads" for name in ("decode", "decode x8", "prefill 24", "decode at 64")]
    assert [bar.get_height() for bar in figures[0].axes[0].patches] == [2.0, 4 / 3]


def test_lines_against_rows_and_contexts(figures: list[Any]) -> None:
    runs = [run_of(2), run_of(2, "int4")]
    for axis in ("rows", "contexts"):
        plots.draw(runs, "peers.png", axis)
    for figure in figures:
        assert [axes.get_title() for axes in figure.axes] == ["int8, 2 threads", "int4, 2 threads"]
    rows, contexts = (lines_of(figure.axes[1]) for figure in figures)
    assert rows == {"ours": [(1, 20), (2, 40), (4, 80)], "fake": [(1, 20), (2, 40)]}
    assert contexts == {"ours": [(64, 20), (512, 20)], "fake": [(64, 20), (512, 20)]}
    band = figures[0].axes[0].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (18.0, 96.0)  # least and greatest round, of 1 and of 4 rows
    assert [figure.axes[0].get_xscale() for figure in figures] == ["linear", "log"]


def test_lines_against_threads_have_panels_for_measures(figures: list[Any]) -> None:
    plots.draw([run_of(1), run_of(2)], "peers.png", "threads")
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles == [f"int8, {m.name}" for m in plan([1, 2, 4], 24, 4, [64, 512])]
    assert lines_of(figures[0].axes[2]) == {"ours": [(1, 40), (2, 80)]}  # the peer could not do 4 sequences


def test_a_line_needs_two_points() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="--against threads: measure at two values"):
        plots.draw([run_of(2)], "peers.png", "threads")


def test_files_are_read_together(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    first.write_text("tiny on a CPU\n" + json.dumps(run_of(1)) + "\n" + json.dumps(run_of(2)) + "\n")
    second.write_text(json.dumps(run_of(2, "int4")))
    assert [run["threads"] for run in report.read([first, second])] == [1, 2, 2]
    with pytest.raises(ValueError, match=r"b.txt has what .*b.txt has: int4 ours F decode 2 threads"):
        report.read([first, second, second])
    other.write_text(json.dumps(run_of(2, "bf16") | {"cpu": "another"}))
    with pytest.raises(ValueError, match="differ in their cpu: a CPU, another"):
        report.read([first, other])
    other.write_text("{}")
    with pytest.raises(ValueError, match=r"c.txt has no line that compare_peers.py --json wrote"):
        report.read([other])


# Files.


def gguf(path: Path, sizes: dict[str, int]) -> Path:
    """A header with values of several kinds, and zeros for the tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = [text("general.architecture") + struct.pack("<I", 8) + text("tiny")]
    counts = {"block_count": 3, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    values += [text(f"tiny.{key}") + struct.pack("<II", 4, count) for key, count in counts.items()]
    values.append(text("general.alignment") + struct.pack("<II", 4, 64))
    values.append(text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(sizes), len(values)) + b"".join(values)
    offset = 0
    for name, size in sizes.items():
        header += text(name) + struct.pack("<IQQIQ", 2, 8, 8, 0, offset)
        offset += size
    path.write_bytes(header + bytes(-len(header) % 64 + offset))
    return path


def test_bytes_per_token_of_a_gguf_file(tmp_path: Path) -> None:
    sizes = {"token_embd.weight": 640, "blk.0.attn_q.weight": 128, "output.weight": 320}
    path = gguf(tmp_path / "a.gguf", sizes)
    assert gguf_file.read_header(path)[1] == sizes
    assert gguf_file.kv_bytes_per_token(path, 2) == 3 * 2 * (16 + 16) * 2
    assert gguf_file.bytes_per_token(path) == 128 + 320
    del sizes["output.weight"]  # the head is the embedding: all of it is read
    assert gguf_file.bytes_per_token(gguf(tmp_path / "b.gguf", sizes)) == 640 + 128
    path.write_bytes(b"not one")
    with pytest.raises(ValueError, match="not a GGUF file"):
        gguf_file.read_header(path)


def test_the_made_up_tokenizer_has_every_id() -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=files.made_up_tokenizer(1000))
    assert model.vocab_size() == 1000
    assert (model.unk_id(), model.bos_id(), model.eos_id()) == (0, 1, 2)
    assert model.decode(model.encode("any text, é")) == "any text, é"


def test_a_checkpoint_of_a_shape_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.model.shapes.SHAPES", {"tiny": TINY})
    said: list[str] = []
    for _ in range(2):
        made = files.ensure_checkpoint("tiny", tmp_path, None, said.append)
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
    weights = load_file(made / "model.safetensors")
    first, second = (weights[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not first.equal(second)  # a peer that keeps equal matrices once would read half of them from caches
    assert len(said) == 1


def test_random_weights_are_written_in_several_files_and_loaded(tmp_path: Path) -> None:
    files.write_random(TINY, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert sorted(set(index.values())) == names
    assert len(names) > 2
    assert all((tmp_path / name).stat().st_size < 25_000 for name in names), "a file has one tensor, or 20 kB"
    model = Checkpoint.open(tmp_path).build(torch.bfloat16)  # which refuses missing names and wrong shapes
    assert model.config == replace(TINY, tie_embeddings=False)
    rows = torch.cat([block.get_parameter("wo.weight") for block in model.layers])
    assert len(rows.unique(dim=0)) == len(rows), "no row comes twice"
    assert rows.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert model.get_parameter("head.norm.weight").eq(1).all()


def test_gguf_files_are_made_once_and_by_the_converter(tmp_path: Path) -> None:
    converter = tmp_path / "convert.py"
    converter.write_text(
        "import sys, shutil\nshutil.copy(sys.argv[1] + '/config.json', sys.argv[sys.argv.index('--outfile') + 1])"
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    common: dict[str, Any] = {"convert_python": sys.executable, "quantize_python": sys.executable, "threads": 1}
    out, said = tmp_path / "out", []
    for convert in (converter, None):  # the second time none is needed
        made = files.ensure_gguf(source, out, ["BF16"], convert=convert, say=said.append, **common)
    assert made["BF16"].read_text() == "{}"
    assert len(said) == 1
    with pytest.raises(files.FilesError, match=r"(?s)quantizing to Q4_0 .*--python.* ended with status 1.*llama_cpp"):
        files.ensure_gguf(source, out, ["BF16", "Q4_0"], convert=None, say=said.append, **common)
    with pytest.raises(files.FilesError, match=r"pip download.*llama-cpp-python"):
        files.ensure_gguf(source, tmp_path / "other", ["BF16"], convert=None, say=said.append, **common)


class FakeContext:
    """Notes what is computed; a step takes it ``step_s`` on its own clock."""

    num_vocab = 32
    clock_s = 0.0
    calls: list[list[contexts.Row]]

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s, self.calls, self.closed = step_s, [], False
        self.cached: dict[int, list[int]] = {}

    def decode(self, rows: Any) -> None:
        FakeContext.clock_s += self.step_s
        self.calls.append(list(rows))
        for token, position, sequence, _ in rows:
            assert position == len(self.cached.setdefault(sequence, []))  # no gap, nothing twice
            self.cached[sequence].append(token)

    def likeliest(self, row: int) -> int:
        assert self.calls[-1][row][3], "its logits were not wanted"
        return (self.calls[-1][row][0] + 1) % self.num_vocab

    def forget(self, sequence: int, position: int) -> None:
        del self.cached[sequence][position:]

    def close(self) -> None:
        self.closed = True


def test_a_run_computes_what_its_measure_says() -> None:
    together = FakeContext()
    run = contexts.Run(together, TOGETHER)
    for _ in range(2):  # the prompts stay in the cache, what was decoded does not
        del together.calls[:]
        run.seconds()
        assert [[row[1] for row in rows] for rows in together.calls] == [[p] * 8 for p in (6, 7, 8, 9)]
        first, second = together.calls[:2]
        assert [row[0] for row in second] == [(row[0] + 1) % 32 for row in first]  # greedy
        assert {sequence: len(tokens) for sequence, tokens in together.cached.items()} == dict.fromkeys(range(8), 6)
    alone = FakeContext()
    contexts.Run(alone, Measure("prefill", 1, 700)).seconds()
    assert [len(rows) for rows in alone.calls] == [512, 188]
    assert [row[3] for rows in alone.calls for row in rows] == [False] * 699 + [True]
    assert alone.cached == {0: []}


def test_the_fastest_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "time", SimpleNamespace(perf_counter=lambda: FakeContext.clock_s))
    opened: list[tuple[str, FakeContext]] = []

    def way(name: str, decode_s: float, prefill_s: float) -> Any:
        def open_context(measure: Measure) -> FakeContext:
            opened.append((name, FakeContext(prefill_s if measure.kind == "prefill" else decode_s)))
            return opened[-1][1]

        return open_context

    runs = contexts.FastestRuns({"a": way("a", 1, 3), "b": way("b", 2, 1), "c": way("c", 3, 2)})
    assert [runs.measure(m) for m in (DECODE, PREFILL, DECODE)] == [4.0, 1.0, 4.0]
    assert [name for name, _ in opened] == list("abcabc")
    assert [context.closed for _, context in opened] == [False, True, True, True, False, True]
    assert {name: note["chosen"] for name, note in runs.notes.items()} == {"decode": "a", "prefill 24": "b"}


def test_a_prompt_of_minutes_is_computed_in_one_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "time", SimpleNamespace(perf_counter=lambda: FakeContext.clock_s))
    opened: list[str] = []

    def way(name: str, step_s: float) -> Any:
        return lambda measure: opened.append(f"{name} {measure.name}") or FakeContext(step_s)

    runs = contexts.FastestRuns({"a": way("a", 2), "b": way("b", 1)})
    for context in (64, 2048, 8192):
        assert runs.measure(Measure("decode", 1, context - 5, 4)) == 4.0
    assert opened[2:] == ["a decode at 2048", "b decode at 2048", "b decode at 8192"]
    assert runs.notes["decode at 8192"] == {"chosen": "b", "like": "decode at 2048"}
    others = contexts.FastestRuns({"a": way("a", 2), "b": way("b", 1)})
    for context in (64, 8192):  # what is fast after 64 tokens need not be after 8,192
        others.measure(Measure("decode", 1, context - 5, 4))
    assert opened[-2:] == ["a decode at 8192", "b decode at 8192"]


def test_ik_llama_cpp_is_compiled_against_its_own_header(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    with pytest.raises(RuntimeError, match=r"ik_shim.c does not compile with the llama.h of .*nowhere.*\n.*llama.h"):
        ikllama.compile_shim(tmp_path / "nowhere")


class Node:
    """As much of a node of OpenVINO's graph as counting needs."""

    def __init__(self, kind: str, *inputs: Node, num_bytes: int = 0) -> None:
        self.kind, self.inputs, self.num_bytes = kind, inputs, num_bytes

    def get_type_name(self) -> str:
        return self.kind

    def get_friendly_name(self) -> str:
        return str(id(self))

    def get_byte_size(self) -> int:
        return self.num_bytes

    def get_node(self) -> Node:
        return self

    def input_value(self, index: int) -> Node:
        return self.inputs[index]

    def input_values(self) -> tuple[Node, ...]:
        return self.inputs


def rounded(num_bytes: int) -> Node:
    """A stored weight with its scales: (weight - zero point) * scale."""
    weight, zero, scale = (Node("Constant", num_bytes=n) for n in (num_bytes, 1, 2))
    return Node("Multiply", Node("Subtract", Node("Convert", weight), Node("Convert", zero)), scale)


def graph(*nodes: Node) -> Any:
    return SimpleNamespace(get_ops=lambda: nodes)


def test_bytes_per_token_of_an_openvino_model() -> None:
    table, weight = rounded(1000), rounded(300)
    hidden = Node("MatMul", Node("Gather", table, Node("Parameter")), weight)
    scores = Node("MatMul", hidden, Node("Concat", hidden))  # activations alone: nothing is stored
    assert openvino.weight_bytes(graph(table, weight, hidden, scores)) == 303
    untied, tied = Node("MatMul", scores, rounded(1000)), Node("MatMul", scores, table)
    assert openvino.weight_bytes(graph(table, weight, hidden, scores, untied)) == 303 + 1003
    assert openvino.weight_bytes(graph(table, weight, hidden, scores, tied, tied)) == 303 + 1003


class Tensor:
    """Ids of all cached positions, as a state of OpenVINO holds vectors of them."""

    def __init__(self, kind: str, ids: list[int]) -> None:
        self.ids = list(ids)

    def get_element_type(self) -> str:
        return "f32"

    def get_shape(self) -> list[int]:
        return [0] * len(self.ids)

    def copy_to(self, other: Tensor) -> None:
        other.ids[:] = self.ids


def test_openvino_computes_a_long_prompt_once() -> None:
    state = SimpleNamespace(state=Tensor("f32", []))
    lengths: list[int] = []

    def step(ids: Any, past: int) -> Any:
        assert past == len(state.state.ids)
        lengths.append(ids.shape[1])
        state.state = Tensor("f32", state.state.ids + ids[0].tolist())  # what was set is not written to
        return ids[:, -1:]

    worker = openvino.OpenVino.__new__(openvino.OpenVino)
    worker.np, worker.tensor, worker.vocab_size, worker.kept = importlib.import_module("numpy"), Tensor, 32, {}
    worker.request = SimpleNamespace(
        reset_state=lambda: setattr(state, "state", Tensor("f32", [])), query_state=lambda: [state]
    )
    worker._step = step  # type: ignore[method-assign]
    for _ in range(2):
        worker.measure(Measure("decode", 1, 3000, 2))
        assert len(state.state.ids) == 3002
        worker.measure(Measure("decode", 1, 20, 2))  # another one between the rounds
    assert lengths == [2999, 1, 1, 1, 20, 1, 1, 1, 1, 1, 20, 1, 1]


@pytest.mark.parametrize("equal", [False, True])
def test_openvino_does_not_run_on_equal_matrices(equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Model:
        model = graph(*(Node("MatMul", Node("Parameter"), rounded(300)) for _ in range(2)))

        @staticmethod
        def from_pretrained(checkpoint: str, **options: Any) -> Model:
            asked.update(options)
            return Model()

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "openvino_model.bin").write_bytes(bytes(303 if equal else 606))

    intel = SimpleNamespace(OVModelForCausalLM=Model)
    monkeypatch.setattr(openvino, "importlib", SimpleNamespace(import_module=lambda name: intel))
    if equal:
        with pytest.raises(RuntimeError, match="stored 303 of 606 bytes"):
            openvino.export("weights", str(tmp_path / "made"), "int4")
    else:
        openvino.export("weights", str(tmp_path / "made"), "int4")
        assert asked["quantization_config"]["group_size"] == 32
    assert (tmp_path / "made").is_dir() is not equal


def test_openvino_that_is_not_installed_is_told(tmp_path: Path) -> None:
    if importlib.util.find_spec("openvino") or importlib.util.find_spec("optimum"):
        pytest.skip("it is installed")
    found = rounds.Found()
    assert not rounds.check([registry.REGISTRY["openvino"]], setting(tmp_path, []), found)
    (skip,) = found.skipped
    assert "no module openvino" in skip["reason"]
    assert "pip install openvino optimum-intel nncf" in skip["reason"]
    with pytest.raises(files.FilesError, match=r"(?s)exporting to OpenVINO's int8 ended with status 1.*optimum"):
        files.ensure_openvino(tmp_path, tmp_path / "made", ["int8"], sys.executable, print)
    (tmp_path / "made" / "openvino-int8").mkdir()
    made = files.ensure_openvino(tmp_path, tmp_path / "made", ["int8"], "no-python", print)  # nothing is run
    assert made == {"int8": tmp_path / "made" / "openvino-int8"}


# The command.


@pytest.fixture
def small(tmp_path: Path, checkpoint: Path) -> list[str]:
    work = ["--work", str(tmp_path / "work"), "--checkpoint", str(checkpoint), "--threads", "1"]
    return [*work, "--new-tokens", "4", "--contexts", "64", "--batch", "1,2", "--prompt-tokens", "24", "--rounds", "2"]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's own option is given to all workers."""
    monkeypatch.setattr(rounds, "_SETTLE_S", 0)
    original = rounds.Entry

    def with_events(peer: Peer, *others: Any) -> rounds.Entry:
        others[-1]["events"] = str(tmp_path / "events")
        return original(peer, *others)

    monkeypatch.setattr(rounds, "Entry", with_events)


def test_the_command_compares_skips_and_reports(
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    events: None,
) -> None:
    monkeypatch.setitem(registry.REGISTRY, "ours", OURS)
    picture = tmp_path / "peers.png"
    arguments = [*small, "--peers", "fake,absent", "--precisions", "bf16", "--plot", str(picture), "--json"]
    assert compare_peers.main(arguments) == 0
    out, err = capsys.readouterr()
    made = json.loads(out.splitlines()[-1])
    assert [(r["format"], r["measure"]) for r in made["results"] if r["peer"] == "ours"] == [
        ("bfloat16", name) for name in ("decode", "decode x2", "prefill 24", "decode at 64")
    ]
    assert {(r["format"], r["measure"]) for r in made["ratios"]} == {
        (f, name) for f in ("F1", "F2") for name in ("decode", "decode x2", "decode at 64")
    }
    assert all(len(row["tokens_per_second_rounds"]) == 2 for row in made["results"])
    for row in made["results"]:
        assert row["tokens_per_second"] == pytest.approx(statistics.median(row["tokens_per_second_rounds"]))
    assert made["versions"]["fake"] == {"fake": "1.0"}
    assert made["threads"] == 1
    assert made["cpu"]
    assert made["read_bandwidth_gb_s"] == 10.0
    (skip,) = made["skipped"]
    assert skip["what"] == "absent"
    assert "no module nowhere_to_be" in skip["reason"]
    assert "pip install absent" in skip["reason"]
    assert "skipped absent" in out
    assert "round 2 of 2" in err
    assert picture.stat().st_size > 1000


def test_each_number_of_threads_is_a_run_and_is_drawn_again(
    small: list[str], tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str], events: None
) -> None:
    arguments = ["--precisions", "bf16", "--peers", "fake", "--threads", "1,2", "--against", "threads"]
    assert compare_peers.main([*small, *arguments, "--plot", str(tmp_path / "a.png"), "--json"]) == 0
    out = capsys.readouterr().out
    runs = [json.loads(line) for line in out.splitlines()[-2:]]
    assert [run["threads"] for run in runs] == [1, 2]
    assert [run["formats"]["fake F1"]["threads"] for run in runs] == [1, 2]
    saved = tmp_path / "saved.json"
    saved.write_text(out)
    again = ["--from", str(saved), "--against", "threads", "--plot", str(tmp_path / "b.png"), "--json"]
    assert compare_peers.main(again) == 0
    assert capsys.readouterr().out == out
    first, second = ([lines_of(axes) for axes in figure.axes] for figure in figures)
    assert first == second
    assert set(first[0]) == {"ours", "fake"}


def test_the_figures_in_docs_can_be_drawn(figures: list[Any]) -> None:
    folder = Path(__file__).resolve().parent.parent / "docs"
    assert compare_peers.main(["--from", str(folder / "peers.json"), "--plot", "peers.png"]) == 0
    assert figures


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "rows"], "--against says how to draw: give --plot"),
        (["--plot", "peers.png", "--against", "contexts"], "--against contexts: measure at two values or more"),
        (["--from", "nowhere.json"], "No such file"),
        (["--batch", "", "--contexts", "", "--prompt-tokens", "0"], "nothing is to be measured"),
        (["--threads", "2,0"], "at least 1"),
        (["--peers", "vllm"], "peer 'vllm' is not known; known: llama.cpp, ik_llama.cpp"),
        (["--precisions", "fp3"], "precision 'fp3' is not one of bf16, int8, int4"),
        (["--python", "llama=x"], "--python 'llama=x' is not PEER=PATH"),
        (["--rounds", "0"], "at least 1"),
        (["--checkpoint", "nowhere"], "no config.json in nowhere"),
        (["--plot", "peers.doc"], "must end in one of .png"),
        (["--peers", "absent"], "pip install absent"),
        (["--peers", "fake", "--precisions", "int4"], "fake: it has no format for int4"),
        (["--peers", "gpt-fast"], "--checkout gpt-fast=DIR: gpt-fast needs its checkout, the folder of generate.py"),
        (["--peers", "ik_llama.cpp", "--checkout", "ik_llama.cpp=nowhere"], "the folder of build/src/libllama.so: git"),
        (["--checkout", "nowhere"], "--checkout 'nowhere' is not PEER=PATH"),
        (["--peers", "fake", "--python", "fake=no-such-python"], "no-such-python does not start"),
    ],
)
def test_mistakes_are_told(
    small: list[str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_peers.main([*small, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_without_any_peer_no_weights_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(files, "ensure_checkpoint", lambda *facts: made.append(facts))
    assert compare_peers.main(["--work", str(tmp_path), "--threads", "1", "--peers", "absent"]) == 1
    assert "pip install absent" in capsys.readouterr().err
    assert not made
