"""``gpt-fast serve``: start TorchServe with a model on this machine, and stay until Ctrl-C ends both.

SIGTERM lets the requests that run come to their end first, for --drain-seconds at most; any other signal cuts them off,
and so does a second one. Everything that a server writes goes to its run folder, in the user's cache unless --run-dir
names one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_fast.commands import options, values
from gpt_fast.errors import ServerError
from gpt_fast.serve.launch import ports
from gpt_fast.user_cache import cache_dir, private_folder

if TYPE_CHECKING:  # it needs psutil, of the extra serve
    from gpt_fast.serve.launch.record import Server

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # they ask for the end; SIGINT is Ctrl-C
_LOOK_S = 0.5  # between two looks at whether the server still lives
LOADING_S = 900  # without --timeout
NEEDED = ("ts", "model_archiver", "psutil")  # modules of the extra serve


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    words = "serve a model over HTTP, by TorchServe"
    parser = subparsers.add_parser("serve", help=words, description=__doc__)
    add = parser.add_argument
    model = "a folder, a file, or owner/name or owner/name/FILE.gguf of the Hub (default: the demo model)"
    add("--checkpoint", metavar="MODEL", help=model)
    add("--speculative", action="store_true", help="the demo model with the demo draft, which guesses tokens ahead")
    add("--config", type=Path, metavar="FILE", help="another model_config.yaml; options replace its keys")
    add("--host", default=ports.LOOPBACK, help="address to listen on; 0.0.0.0: all (default: %(default)s)")
    others = "inference port; management and metrics are 1 and 2 above it, gRPC 1010 and 1009 below"
    base = values.whole(ports.LOWEST, ports.HIGHEST)
    add("--port", type=base, default=8080, metavar="BASE", help=f"{others} (default: %(default)s)")
    add("--run-dir", metavar="DIR", help="for archive and logs (default: one for each port, in the cache)")
    loading = f"seconds that loading may take (default: {LOADING_S}, or less by startupTimeout of --config)"
    add("--timeout", type=values.above_zero, metavar="S", help=loading)
    drain = "seconds that running requests have to finish after SIGTERM and with --stop; 0: none (default: %(default)s)"
    add("--drain-seconds", type=values.whole(0, 86_400), default=30, metavar="N", help=drain)
    add("--request", type=Path, metavar="FILE", help="send this JSON once the model is ready, and print the answer")
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--background", action="store_true", help="end once the model is ready; the server stays")
    until.add_argument("--stop", action="store_true", help="stop the server of this port or run folder")
    engine = parser.add_argument_group("engine")
    options.add_options(engine, options.ENGINE | options.MAX_SEQ_LEN | options.MAX_BATCH)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start, stop, or stay until the server ends; 0 when it was asked to."""
    options.set_up_logging(verbose=False)
    if missing := [module for module in NEEDED if importlib.util.find_spec(module) is None]:
        lacking = f"TorchServe is not installed: there is no module {' and no '.join(missing)}"
        raise ServerError(f"{lacking}. Install it:  pip install 'gpt-fast-serve[serve,java]'")
    from gpt_fast.serve.launch.output import lasting_stdout

    run_dir = choose_run_dir(arguments)
    with lasting_stdout():
        return end(arguments, run_dir) if arguments.stop else begin(arguments, run_dir)


def begin(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Start a server; with --background leave it there, else stay until it ends."""
    from gpt_fast.serve.launch.asking import ask, drafts
    from gpt_fast.serve.launch.server import stop

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, _end)
    server = None
    try:
        server = find_or_start(arguments, run_dir)
        announce(server, run_dir, arguments.request)
        if arguments.background:  # before it is asked: that may fail, and the server stays
            print(f"Stop it:  {_stop_command(*_place(arguments))}", flush=True)
        if arguments.request:
            ask(server, arguments.request)
            if told := drafts(server):
                print(told)
        if arguments.background:
            return 0
        stay(server, run_dir, arguments.drain_seconds)
    except (KeyboardInterrupt, SystemExit):
        if server is None or arguments.background:
            raise
    finally:
        if server is not None and not arguments.background:
            _hear_no_more()
            print("Stopping", flush=True)
            print(stop(run_dir) or "It was not running any more.", flush=True)
    return 0


def end(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Stop the server of ``run_dir``. Raises ServerError where there is none, but another one on its port."""
    from gpt_fast.serve.launch.record import load_server
    from gpt_fast.serve.launch.server import run_dir_on, stop

    if running := load_server(run_dir):
        finish_requests(running, arguments.drain_seconds)
    told = stop(run_dir)
    if not told and arguments.run_dir is None:
        if other := run_dir_on(arguments.port):
            where = _stop_command("--run-dir", str(other))
            raise ServerError(f"the server on port {arguments.port} has another run folder. Stop it:  {where}")
        told = f"No server was started on port {arguments.port}."
    print(told or f"No server was started from {run_dir}.")
    return 0


def choose_run_dir(arguments: argparse.Namespace) -> Path:
    """The folder for all that the server writes. Raises ServerError where it would not outlive this command."""
    if arguments.run_dir:
        return Path(arguments.run_dir).resolve()
    folder = private_folder("serve")
    if arguments.background and not folder.is_relative_to(cache_dir()):
        raise ServerError("the cache folder cannot be used; name another place with --run-dir DIR")
    return folder.resolve() / str(arguments.port)


def find_or_start(arguments: argparse.Namespace, run_dir: Path) -> Server:
    """A server as ``arguments`` want it, ready; with --background it may be one that runs already."""
    from gpt_fast.checkpoint.download import ended_at_once
    from gpt_fast.serve.launch.choice import choose, fetch, pack
    from gpt_fast.serve.launch.java import find_java
    from gpt_fast.serve.launch.record import MODEL, load_server
    from gpt_fast.serve.launch.server import STORE, start, stop
    from gpt_fast.serve.launch.turns import turn
    from gpt_fast.serve.launch.watching import is_ready, wait_until_ready
    from gpt_fast.serve.model_yaml import DAY_S

    if (request := arguments.request) and not request.is_file():
        raise ServerError(f"{request} {'is not a file' if request.exists() else 'does not exist'}")
    keys, loading_s = options.engine_options(arguments), arguments.timeout or LOADING_S
    choice = choose(arguments.checkpoint, arguments.speculative, arguments.config, keys)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with turn(run_dir):
        running = load_server(run_dir)
        if running is None:
            java = find_java()
            stop(run_dir)  # what a server that died has left
            ports.refuse_busy(arguments.port, arguments.host)
            print(f"Starting (log: {run_dir / 'server.log'})", flush=True)
            with ended_at_once():
                here = fetch(choice)
            pack(here, MODEL, run_dir / STORE, min(math.ceil(arguments.timeout or 0), DAY_S))
            return start(run_dir, java, arguments.host, arguments.port, str(choice), loading_s)
        wanted = (str(choice), arguments.port, arguments.host)
        if not arguments.background or (running.serves, running.port, running.host) != wanted:
            where = f"port {running.port}" + (f" of {running.host}" if running.host != arguments.host else "")
            told = f"a server already runs on {where} and serves {running.serves}"
            raise ServerError(f"{told}. Stop it first:  {_stop_command(*_place(arguments))}")
        print(f"The server already runs on port {running.port}.", flush=True)
        if not is_ready(running):  # whoever started it was killed, or its worker was
            log = run_dir / "server.log"
            wait_until_ready(running, log, loading_s, after=len(log.read_text(errors="replace")))
        return running


def announce(server: Server, run_dir: Path, request: Path | None) -> None:
    """Print where the model is reached, and how to ask it, by ``request`` if there is one."""
    print(f"Ready. It serves {server.serves}")
    print(f"  completions        {server.url}")
    print(f"  OpenAI's base_url  {server.url}/1.0/v1")
    print(f"  in a browser       {server.url}/1.0/page")
    print(f"  logs               {run_dir / 'server.log'}, {run_dir / 'logs'}")
    if not server.host.startswith("127."):
        print(
            f"  warning            whoever reaches {server.host} may use it: it asks for no token and encrypts nothing"
        )
    print("Ask it:")
    example = shlex.quote(json.dumps({"prompt": "Once upon a time", "max_new_tokens": 50}))
    body = f"-T {shlex.quote(str(request))}" if request else f"-H 'Content-Type: application/json' -d {example}"
    print(f"  curl -N {server.url} {body}", flush=True)


def stay(server: Server, run_dir: Path, drain_s: int) -> None:
    """Until a signal; after SIGTERM until the requests that run have ended, for ``drain_s`` at most. Raises ServerError
    when the server ends by itself."""
    from gpt_fast.serve.launch.watching import told_by_its_log

    asked = False

    def on_term(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            _end(number, None)
        asked = True

    signal.signal(signal.SIGTERM, on_term)
    print("Ctrl-C stops it.", flush=True)
    while server.is_alive():
        if asked:
            finish_requests(server, drain_s)
            return
        time.sleep(_LOOK_S)
    time.sleep(1.0)  # who stops it from elsewhere forgets it a moment later
    if (run_dir / "server.json").exists():
        raise ServerError(told_by_its_log("TorchServe ended by itself", run_dir / "server.log"))


def finish_requests(server: Server, seconds: int) -> None:
    """Refuse new requests and wait for those that run, for ``seconds`` at most."""
    from gpt_fast.serve.launch.draining import Place, drain

    if seconds == 0:
        return
    print(f"Finishing the requests that run, for {seconds} s at most", flush=True)
    if not drain(Place.of(server), seconds):
        print(f"{seconds} s are over: what still runs is cut off", flush=True)


def _end(number: int, _: object) -> None:
    """The first signal ends what runs. A second one would end that ending, and leave something running."""
    _hear_no_more()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _hear_no_more() -> None:
    for number in _ENDING:
        signal.signal(number, lambda *_: None)  # Python complains of SIG_IGN when a signal has already come


def _place(arguments: argparse.Namespace) -> list[str]:
    """The options that lead to the same run folder."""
    return ["--run-dir", str(arguments.run_dir)] if arguments.run_dir else ["--port", str(arguments.port)]


def _stop_command(*place: str) -> str:
    """This program with --stop and the options ``place``, as one would type it here."""
    program = [sys.executable, "-m", "gpt_fast"]
    if (script := Path(sys.argv[0])).name == "gpt-fast":
        on_path = shutil.which("gpt-fast")
        program = ["gpt-fast" if on_path and Path(on_path).resolve() == script.resolve() else sys.argv[0]]
    return shlex.join([*program, "serve", "--stop", *place])
