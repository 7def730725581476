"""Downloads, against a hub on the loopback interface that answers as the real one does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from gguf_files import write_model

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.download import choose, download, find, find_local
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.errors import DownloadError
from gpt_fast.gguf import all_parts
from gpt_fast.model.building import random_model

COMMIT = "a" * 40
TINY = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)


class Hub(http.server.ThreadingHTTPServer):
    """``repos``: name -> file name -> content. ``gated``: names that need the token ``good``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.served: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        query = parse_qs(urlsplit(self.path).query)
        if path.startswith("/api/models/"):
            repo, _, rest = path.removeprefix("/api/models/").partition("/revision/")
            repo, _, tree = repo.partition("/tree/")
            revision = rest or tree or "main"
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            revision, _, name = rest.partition("/")
        if repo in self.server.broken:
            return self.reply(503, b"", {}, body)
        if repo not in self.server.repos:
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"}, body)
        if repo in self.server.gated and self.headers.get("Authorization") != "Bearer good":
            status = 403 if self.headers.get("Authorization") else 401
            return self.reply(status, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, body)
        if revision not in ("main", COMMIT):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        files = self.server.repos[repo]
        if path.startswith("/api/"):
            if "/tree/" in path:
                listing = [
                    {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                    for n, c in files.items()
                ]
            else:
                siblings = [{"rfilename": n} for n in files]
                listing = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            assert query is not None
            return self.reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body)
        if name not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        if body:
            self.server.served.append(name)
        etag = hashlib.sha1(files[name]).hexdigest()
        return self.reply(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(cache / "no token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, bytes]:
    """The files of a repository with a model and much that nobody here needs."""
    save_checkpoint(random_model(TINY, torch.float32), tmp_path / "made")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    others = (
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE",
        "README.md", "modeling_evil.py", "pytorch_model.bin", "optimizer.pt", "training_args.bin", "flax.msgpack",
        "pytorch_model.bin.index.json", "original/consolidated.00.pth", "onnx/model.safetensors",
    )  # fmt: skip
    files |= {
        name: json.dumps({"name": name}).encode() for name in others
    }  # distinct: the cache stores equal ones once
    return files


WANTED = [
    "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip


@pytest.mark.parametrize("where", ["cache", "directory"])
def test_the_needed_files_and_no_others(where: str, hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos["some/model"] = checkpoint
    out = tmp_path / "some" / "out" if where == "directory" else None
    path = download("some/model", out_dir=out, endpoint=hub.url)
    assert {file.name for file in tmp_path.iterdir()} <= {"made", "some"}, "the cache's notes are not for a directory"
    assert sorted(hub.served) == WANTED
    for name in WANTED:
        assert (path / name).read_bytes() == checkpoint[name]
    if out is not None:
        assert path == out.resolve()
    assert Checkpoint.open(path).build(torch.float32).config == TINY
    hub.served.clear()
    assert download("some/model", out_dir=out, endpoint=hub.url) == path
    assert hub.served == []  # a second time finds everything


@pytest.fixture
def gguf_files(tmp_path: Path) -> dict[str, bytes]:
    """The files of a repository with GGUF models: one that can be read, and one in parts."""
    save_checkpoint(random_model(TINY, torch.float32), tmp_path / "source")
    tiny = write_model(tmp_path / "source", tmp_path / "tiny.gguf").read_bytes()
    parts = {f"big/Q8-{i:05}-of-00002.gguf": b"part %d" % i for i in (1, 2)}
    return {"tiny-Q8_0.gguf": tiny, "LICENSE": b"free", "README.md": b"", "imatrix.dat": b"", **parts}


@pytest.mark.parametrize("where", ["cache", "directory"])
def test_a_gguf_file(where: str, hub: Hub, gguf_files: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos["some/model-GGUF"] = gguf_files
    out = tmp_path / "out" if where == "directory" else None
    path = download("some/model-GGUF", "tiny-Q8_0.gguf", out_dir=out, endpoint=hub.url)
    assert sorted(hub.served) == ["LICENSE", "tiny-Q8_0.gguf"]
    assert path.name == "tiny-Q8_0.gguf"
    assert out is None or path == out.resolve() / path.name
    assert Checkpoint.open(path).config.family == "llama"
    hub.served.clear()
    assert download("some/model-GGUF", "tiny-Q8_0.gguf", out_dir=out, endpoint=hub.url) == path
    assert hub.served == []


@pytest.mark.parametrize("named", [1, 2])
def test_a_gguf_model_in_several_files_comes_whole(named: int, hub: Hub, gguf_files: dict[str, bytes]) -> None:
    hub.repos["some/model-GGUF"] = gguf_files
    path = download("some/model-GGUF", f"big/Q8-0000{named}-of-00002.gguf", endpoint=hub.url)
    assert (path.parent.name, path.name) == ("big", "Q8-00001-of-00002.gguf")
    assert [part.read_bytes() for part in all_parts(path)] == [b"part 1", b"part 2"]
    assert "tiny-Q8_0.gguf" not in hub.served


def test_gguf_files_that_are_not_there(hub: Hub, gguf_files: dict[str, bytes], checkpoint: dict[str, bytes]) -> None:
    hub.repos["some/model-GGUF"], hub.repos["some/model"] = gguf_files, checkpoint
    several = r"big/Q8-00001-of-00002\.gguf, tiny-Q8_0\.gguf$"
    with pytest.raises(DownloadError, match=r"no weights in .*; of its GGUF files name one, such as " + several):
        download("some/model-GGUF", endpoint=hub.url)
    with pytest.raises(DownloadError, match=r"some/model-GGUF has no file tiny\.gguf; it has " + several):
        download("some/model-GGUF", "tiny.gguf", endpoint=hub.url)
    with pytest.raises(DownloadError, match=r"some/model has no file tiny\.gguf; it has no GGUF file"):
        download("some/model", "tiny.gguf", endpoint=hub.url)
    with pytest.raises(DownloadError, match=r"model\.safetensors is no GGUF file; without it the whole checkpoint"):
        download("some/model", "model.safetensors", endpoint=hub.url)
    del gguf_files["big/Q8-00002-of-00002.gguf"]
    with pytest.raises(DownloadError, match=r"has no file big/Q8-00002-of-00002\.gguf"):
        download("some/model-GGUF", "big/Q8-00001-of-00002.gguf", endpoint=hub.url)


def test_the_command_prints_what_checkpoint_takes(hub: Hub, gguf_files: dict[str, bytes], tmp_path: Path) -> None:
    hub.repos["some/model-GGUF"] = gguf_files
    command = [sys.executable, "-m", "gpt_fast", "download", "some/model-GGUF", "tiny-Q8_0.gguf"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Checkpoint.open(Path(done.stdout.strip())).config.family == "llama"
    assert f"--checkpoint {done.stdout.strip()}" in done.stderr


def test_the_cache_is_for_a_hub_that_does_not_answer(hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    """Not for one that refuses, nor for who wants another directory."""
    hub.repos["some/model"] = checkpoint
    download("some/model", endpoint=hub.url)
    hub.gated.add("some/model")
    with pytest.raises(DownloadError, match="some/model is gated"):
        download("some/model", endpoint=hub.url)
    hub.broken.add("some/model")
    assert (download("some/model", endpoint=hub.url) / "config.json").is_file()
    with pytest.raises(DownloadError, match="the Hub answered 503"):
        download("some/model", out_dir=tmp_path / "out", endpoint=hub.url)


def test_the_cache_notes_where_a_branch_has_moved(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    hub.repos["some/model"] = checkpoint
    note = download("some/model", endpoint=hub.url).parents[1] / "refs" / "main"
    assert note.read_text() == COMMIT
    note.write_text("0" * 40)  # where it was before
    download("some/model", endpoint=hub.url)
    assert note.read_text() == COMMIT


def test_whole_weights_come_alone() -> None:
    """What else is there in safetensors may be shards of the same, or another precision of it."""
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = "model.safetensors.index.json"
    for weights, wanted in (([*shards, "model.safetensors"], ["model.safetensors"]), (shards, shards)):
        assert choose(["config.json", index, *weights], "some/model") == sorted(["config.json", index, *wanted])


def test_a_revision(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    hub.repos["some/model"] = checkpoint
    assert download("some/model", revision=COMMIT, endpoint=hub.url).name == COMMIT
    with pytest.raises(DownloadError, match="has no revision 'v7'"):
        download("some/model", revision="v7", endpoint=hub.url)


def test_gated(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    hub.repos["some/model"] = checkpoint
    hub.gated.add("some/model")
    for token in (None, "bad"):  # 401, then 403
        with pytest.raises(DownloadError, match=r"some/model is gated: accept its licence.*HF_TOKEN"):
            download("some/model", token=token, endpoint=hub.url)
    assert (download("some/model", token="good", endpoint=hub.url) / "config.json").is_file()


def test_what_is_not_there(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    with pytest.raises(DownloadError, match=r"no/where does not exist on the Hub, or is private"):
        download("no/where", endpoint=hub.url)
    with pytest.raises(DownloadError, match=r"is not the name of a repository"):
        download("a/b/c", endpoint=hub.url)
    hub.repos["some/dataset"] = {"README.md": b""}
    with pytest.raises(DownloadError, match=r"no weights in .safetensors"):
        download("some/dataset", endpoint=hub.url)
    hub.repos["some/weights"] = {"model.safetensors": b""}
    with pytest.raises(DownloadError, match=r"has no config.json"):
        download("some/weights", endpoint=hub.url)
    hub.repos["some/model"] = checkpoint
    hub.broken.add("some/model")
    with pytest.raises(DownloadError, match="the Hub answered 503"):
        download("some/model", endpoint=hub.url)


def test_a_model_is_found_here_or_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(repo: str, file: str | None = None) -> Path:
        return Path("/fetched", repo, file or "")

    monkeypatch.setattr("gpt_fast.checkpoint.download.download", fetched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    assert find("a") == find_local("a") == tmp_path / "a"
    assert find("owner/name") == Path("/fetched/owner/name")
    assert find("owner/name/q4/big-00001-of-00002.gguf") == Path("/fetched/owner/name/q4/big-00001-of-00002.gguf")
    assert find_local("owner/name") is find_local("owner/name/model.gguf") is None
    assert find("gpt2") == Path("/fetched/gpt2")
    with pytest.raises(DownloadError, match="gpt2 does not exist, and is no name of the Hub"):
        find_local("gpt2")


def test_no_network(hub: Hub) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DownloadError, match=r"the Hub cannot be reached.*check the network"):
            download("some/model", endpoint=url)


@pytest.mark.parametrize("why", ["switched off", "no network"])
def test_without_the_hub_the_cache_is_enough(
    why: str, hub: Hub, checkpoint: dict[str, bytes], gguf_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["some/model"], hub.repos["some/model-GGUF"] = checkpoint, gguf_files
    asked = [
        ("some/model", None),
        ("some/model-GGUF", "tiny-Q8_0.gguf"),
        ("some/model-GGUF", "big/Q8-00002-of-00002.gguf"),
    ]
    fetched = [download(*each, endpoint=hub.url) for each in asked]
    by_commit = download("some/model", revision=COMMIT, endpoint=hub.url)
    if why == "switched off":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        url, words = hub.url, "HF_HUB_OFFLINE is set"
    else:
        url, words = "http://127.0.0.1:9", "the Hub cannot be reached"
    assert [download(*each, endpoint=url) for each in asked] == fetched
    assert download("some/model", revision=COMMIT, endpoint=url) == by_commit
    (fetched[0] / "model.safetensors").unlink()
    (fetched[2].with_name("Q8-00002-of-00002.gguf")).unlink()
    for repo, file in (asked[0], asked[2], ("some/other", None), ("some/model-GGUF", "other.gguf")):
        with pytest.raises(DownloadError, match=words):
            download(repo, file, endpoint=url)


@pytest.mark.parametrize("fault", ["silence", "status 503"])
def test_what_is_in_the_cache_is_taken_where_the_hub_does_not_answer(
    fault: str, hub: Hub, checkpoint: dict[str, bytes], gguf_files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos |= {"some/model": checkpoint, "some/gguf": gguf_files, "part/model": checkpoint}
    whole = download("some/model", endpoint=hub.url)
    model = download("some/gguf", "tiny-Q8_0.gguf", endpoint=hub.url)
    part = download("part/model", endpoint=hub.url)
    (part / "model.safetensors").unlink()
    url = hub.url
    hub.broken |= {*hub.repos}
    if fault == "silence":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert "its cache" not in caplog.text
    assert download("some/model", endpoint=url) == whole
    assert "what its cache holds is taken" in caplog.text
    assert download("some/gguf", "tiny-Q8_0.gguf", endpoint=url) == model
    hub.broken.add("never/seen")
    for missing in (("part/model",), ("some/gguf", "big/Q8-00001-of-00002.gguf"), ("never/seen",)):
        with pytest.raises(DownloadError, match=r"cannot be reached|answered 503"):
            download(*missing, endpoint=url)


def test_an_index_says_whether_the_cache_is_whole(hub: Hub, checkpoint: dict[str, bytes]) -> None:
    shards = {f"model-{i}-of-2.safetensors": b"%d" % i for i in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    files = {"config.json": checkpoint["config.json"], "model.safetensors.index.json": index, **shards}
    hub.repos["two/shards"] = files
    folder = download("two/shards", endpoint=hub.url)
    hub.broken.add("two/shards")
    assert download("two/shards", endpoint=hub.url) == folder
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(DownloadError, match="503"):
        download("two/shards", endpoint=hub.url)


def test_an_old_directory_is_not_taken_for_the_download(
    hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library returns a directory that holds something else when the hub fails after the listing."""
    hub.repos["some/model"] = checkpoint
    (tmp_path / "old.txt").write_text("old")
    monkeypatch.setattr("gpt_fast.checkpoint.download.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(DownloadError, match=r"files did not arrive"):
        download("some/model", out_dir=tmp_path, endpoint=hub.url)


def test_full_disk(hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["some/model"] = checkpoint

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt_fast.checkpoint.download.snapshot_download", full)
    with pytest.raises(DownloadError, match=r"no space left for it in .*out"):
        download("some/model", out_dir=tmp_path / "out", endpoint=hub.url)


def test_what_came_otherwise_than_announced_is_told(
    hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["some/model"] = checkpoint

    endless = type("TooManyRedirects", (Exception,), {})  # as the library's transport names it
    for error, told in (
        (OSError("file should be of size 2 but has size 1\nPlease retry"), "size 1; run the same command again"),
        (endless("Exceeded 20 redirects"), r"cannot be reached \(Exceeded 20 redirects\)"),
    ):
        mock = Mock(side_effect=error)
        monkeypatch.setattr("gpt_fast.checkpoint.download.snapshot_download", mock)
        with pytest.raises(DownloadError, match=f"^some/model: .*{told}"):
            download("some/model", out_dir=tmp_path / "out", endpoint=hub.url)


# The library as it is while it fetches: a thread that is not to be told, and a file that it never takes up again.
FETCHING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from gpt_fast import cli
from gpt_fast.checkpoint import download

def fetch():
    with open(sys.argv[1] + "/a.incomplete", "wb"):
        print("fetching", flush=True)
        time.sleep(60)

def fetch_all(*_, **__):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fetch).result()

download.download = fetch_all
sys.exit(cli.main(["download", "some/model"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_wait_for_the_file_that_is_fetched(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCHING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "fetching\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert "interrupted: the same command keeps the files that are whole" in process.stderr.read()
    assert not list(tmp_path.iterdir()) or sys.platform != "linux"


def test_choice_of_files() -> None:
    assert choose(["config.json", "model.safetensors", "qwen.tiktoken", "tf_model.h5.index.json", "a/NOTICE"], "r") == [
        "config.json", "model.safetensors", "qwen.tiktoken"
    ]  # fmt: skip
    both = ["config.json", "model-1.safetensors", "model.safetensors.index.json", "pytorch_model-1.bin"]
    both += ["pytorch_model.bin.index.json"]
    assert choose(both, "r") == ["config.json", "model-1.safetensors", "model.safetensors.index.json"]
    two = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    mistral = ["config.json", "consolidated.safetensors", "model.safetensors.index.json", *two]
    assert choose(mistral, "r") == sorted({*mistral} - {"consolidated.safetensors"})
    beside = ["adapter_model.safetensors", "config.json", "pytorch_model.bin"]
    assert choose(beside, "r") == ["config.json", "pytorch_model.bin"]
    old = [name for name in both if "safetensors" not in name] + ["training_args.bin", "tokenizer.model"]
    assert choose(old, "r") == ["config.json", "pytorch_model-1.bin", "pytorch_model.bin.index.json", "tokenizer.model"]
