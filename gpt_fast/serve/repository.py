"""Where the files of the repository's top level are: around the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = PACKAGE / "serve" / "shipped"  # its README.md tells what a wheel has there
ROOT = SHIPPED if (SHIPPED / "handler.py").is_file() else PACKAGE.parent
DEMO = ROOT / "model_store" / "demo"  # the bundled models, target and draft
