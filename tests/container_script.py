"""scripts/container.py as a module: it is in no package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_container_script() -> ModuleType:
    """It, as it stands."""
    sys.path[:0] = [folder for folder in (str(SCRIPTS),) if folder not in sys.path]
    import container

    return container
