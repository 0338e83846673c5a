"""Lockstep's layers, and the imports between modules, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
# A module imports its own row and rows with lower numbers. The figure shows the whole numbers.
LAYERS = {
    "errors": 0,
    "imports": 0,
    "energy": 0,
    "files": 0.1,
    "config": 0.2,
    "diagnosis": 0.3,
    "script_check": 0.4,
    "observe": 0.5,
    "world": 1,
    "models": 1,
    "seeding": 1.1,
    "hvd": 2,
    "data": 2,
    "launch": 2,
    "run": 3,
    "train": 4,
    "study": 5,
    "report": 5,
    "lightning": 5,
    "cli": 6,
}
WITHOUT_TORCH = (
    *("errors", "imports", "energy", "files", "config", "diagnosis", "script_check", "observe", "world"),
    *("launch", "report", "cli"),
)


def modules() -> dict[str, Path]:
    """Return the file of each module, by its name without the leading "lockstep."."""
    paths = {path for path in ROOT.rglob("*.py") if path.name != "__main__.py"}
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def part(module: str) -> str:
    """Return the row of `LAYERS` that a module belongs to."""
    return module.split(".")[0]


def imports(path: Path) -> set[str]:
    """Return the modules of Lockstep that a file imports anywhere, without the leading "lockstep."."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name.removeprefix("lockstep.") for name in found if name.startswith("lockstep.")}
