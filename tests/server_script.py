"""scripts/server.py as a module: the scripts are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "server.py"


def load_server_script() -> ModuleType:
    """The module; needs psutil."""
    spec = importlib.util.spec_from_file_location("server", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
