"""The shape of the code: imports point one way, the request path needs no torch, nothing names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpt_fast"

# From the ground up. A module may import from its own layer and from those above it in this list. A new module gets a
# place here: that is the moment to ask where it belongs.
LAYERS = (
    {"errors", "fields", "config", "params", "outputs", "user_cache", "text_files", "gguf", "cgroups"},
    {"tokenizer"},
    {"kernels", "model", "checkpoint", "quantize", "foreign", "memory", "placement", "devices"},
    {"parallel"},
    {"engine"},
    {"loading", "llm", "hf"},
    {"serve", "bench", "evaluate"},
    {"batch"},
    {"commands", "cli"},
    {"handler"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Validated, scheduled and answered in milliseconds, in processes that never load torch.
TORCH_FREE = (
    "gpt_fast.config",
    "gpt_fast.params",
    "gpt_fast.engine.pages",
    "gpt_fast.engine.request",
    "gpt_fast.engine.scheduler",
    "gpt_fast.serve.protocol",
    "gpt_fast.serve.launch.choice",
)


def module_name(path: Path) -> str:
    """gpt_fast/engine/pages.py -> gpt_fast.engine.pages; a package's __init__.py -> the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    files = [*PACKAGE.rglob("*.py"), ROOT / "handler.py"]
    return {module_name(path): path for path in files if path.exists()}


def layer_of(module: str) -> str:
    """The name that LAYERS knows a module by: the part below the package, or ``handler``. Empty for the package."""
    parts = module.split(".")
    return parts[0] if parts[0] != "gpt_fast" else ".".join(parts[1:2])


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """What ``from ... import`` names, relative imports resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def imports_in(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Dotted names that the module imports anywhere, functions and type-checking blocks included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package)
            # `from gpt_fast import model` imports a module, `from gpt_fast.llm import LLM` a name of one
            names.update(f"{base}.{alias.name}" if base == "gpt_fast" else base for alias in node.names)
    return names


def wrong_way(module: str, imported: set[str]) -> list[str]:
    """Imports of the project that lead from a lower layer to a higher one."""
    wrong = []
    for name in imported:
        target = layer_of(name) if name.split(".")[0] in ("gpt_fast", "handler") else ""
        if target in LEVEL and LEVEL[target] > LEVEL[layer_of(module)]:
            wrong.append(f"{module} imports {name}")
    return sorted(wrong)


def test_every_module_has_a_layer() -> None:
    homeless = sorted({layer_of(module) for module in sources()} - set(LEVEL) - {"", "__main__"})
    assert not homeless, f"give {homeless} a place in LAYERS"


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in sources().items():
        if layer_of(module) in LEVEL:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            wrong += wrong_way(module, imports_in(tree, module, path.name == "__init__.py"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        ("gpt_fast.model.transformer", "from gpt_fast.engine.pages import Pages", 1),
        ("gpt_fast.model.transformer", "import gpt_fast.engine.pages", 1),
        ("gpt_fast.model.transformer", "from gpt_fast import engine", 1),
        ("gpt_fast.engine.runner", "def f():\n    from ..serve import session", 1),
        ("gpt_fast.engine.runner", "from .pages import Pages\nfrom ..model import Transformer", 0),
        ("gpt_fast.serve.protocol.native", "from handler import Handler", 1),
        ("gpt_fast.config", "import torch", 0),
        ("handler", "from gpt_fast import LLM\nfrom gpt_fast.llm import LLM", 0),
    ],
)
def test_the_direction_check_sees_each_way_to_import(module: str, code: str, found: int) -> None:
    assert len(wrong_way(module, imports_in(ast.parse(code), module, is_package=False))) == found


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_request_path_needs_no_torch(module: str) -> None:
    if module not in sources():
        pytest.fail(f"{module} is gone; take its name out of TORCH_FREE")
    code = f"import sys, {module}; print(*sorted(m for m in sys.modules if m in ('torch', 'numpy', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split(), f"importing {module} brings in {done.stdout}"


def test_the_package_itself_needs_no_torch() -> None:
    """``import gpt_fast`` is what every torch-free module does first."""
    code = "import sys, gpt_fast; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Written in pieces, so that this file does not hold what it looks for.
PLACES = {
    "a package index's host": r"\b(?:files\.python" + r"hosted|pypi|test\.pypi|download\.py" + r"torch)\.org\b",
    "a path of one machine": r"(?<![\w.$}~/-])/(?:home|root|Users|work|opt/wheels)" + r"/\w",
}


def project_files() -> list[Path]:
    """What is or would be committed; without git everything that is not hidden or built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and "/." not in str(path.relative_to(ROOT.parent))]


@pytest.mark.parametrize("what", PLACES)
def test_no_file_names(what: str) -> None:
    hits = []
    for path in project_files():
        data = path.read_bytes()
        if b"\0" in data[:8192] or len(data) > 2_000_000:
            continue  # weights and tokenizers
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            if re.search(PLACES[what], line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not hits, f"{what}:\n" + "\n".join(hits)


def test_the_place_patterns_match_what_they_mean() -> None:
    host = "https://download.py" + "torch.org/whl"
    assert re.search(PLACES["a package index's host"], host)
    assert re.search(PLACES["a path of one machine"], "open('/ho" + "me/me/x')")
    assert not re.search(PLACES["a path of one machine"], "see docs/work/plan and $ROOT/work/x")
