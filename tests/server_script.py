"""The scripts as modules: they are no package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_server_script() -> ModuleType:
    """scripts/server.py; needs psutil."""
    sys.path[:0] = [folder for folder in (str(SCRIPTS),) if folder not in sys.path]
    import server

    return server


def load_container_script() -> ModuleType:
    """scripts/container.py."""
    sys.path[:0] = [folder for folder in (str(SCRIPTS),) if folder not in sys.path]
    import container

    return container
