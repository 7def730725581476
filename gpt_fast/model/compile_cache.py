"""What torch.compile has made, kept in one file from one start to the next and from machine to machine.

torch keeps its caches in a folder, here one of the user's own (user_cache.py), which a new container does not have.
The file goes there as well, or where ``compile_cache`` of EngineConfig says: inside an archive for TorchServe, for
instance.

Loading it runs what is in it (compiled code, pickles), so it is never looked for beside a checkpoint, which may come
from a stranger, and a file that other users can write is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpt_fast.user_cache import private_folder, trusted

log = logging.getLogger(__name__)


def default_file(*facts: object) -> Path:
    """Where the code compiled for ``facts``, such as the model's shape, is kept: named by them, by torch, the device
    and this package's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    for fact in (torch.__version__, platform.python_version(), platform.machine(), device, *facts):
        digest.update(repr(fact).encode() + b"\0")
    return private_folder("compiled") / f"{digest.hexdigest()[:20]}.bin"


def keep_private() -> None:
    """Have torch keep its caches in the user's own folder, unless ``$TORCHINDUCTOR_CACHE_DIR`` names another.

    Its default, which it puts into that variable as well, is a name in the shared temporary folder that everybody can
    guess. To be called before torch._dynamo is imported: that makes the folder.
    """
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_")).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder("inductor"))


@contextlib.contextmanager
def kept(file: Path, compiled: Callable[[], bool]) -> Iterator[None]:
    """Fill torch's caches from ``file`` before compiling; write it afterwards if it was not there.

    ``compiled`` says at the end whether anything was. A file that cannot be read or written costs a warning.
    """
    found = _load(file)
    yield
    if not found and compiled():
        try:
            _save(file)
        except OSError as error:
            log.warning("what was compiled could not be kept: %s", str(error))


def _load(file: Path) -> bool:
    try:
        return trusted(file) and torch.compiler.load_cache_artifacts(file.read_bytes()) is not None
    except Exception as error:  # a cut or foreign file raises many types
        log.warning("%s is not used: %s", file, str(error))
        return False


def _save(file: Path) -> None:
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        whole = Path(scratch) / file.name
        whole.write_bytes(artifacts[0])
        whole.chmod(0o600)
        os.replace(whole, file)
    log.info("kept what was compiled in %s (%d kB)", file, len(artifacts[0]) // 1000)
