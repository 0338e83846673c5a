"""Lockstep's layers, and who imports whom, as the source says it."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
LAYERS = {
    "errors": 0,
    "accelerator": 0,
    "imports": 0,
    "config": 0,
    "config_mapping": 0,
    "records": 0,
    "io_records": 0,
    "references": 0,
    "time_limit": 0,
    "run_names": 0,
    "untrusted": 0,
    "recipes": 0,
    "scaling_model": 0,
    "world": 1,
    "seeding": 1,
    "blank_image": 1,
    "global_batch_norm": 1,
    "hvd": 2,
    "data": 2,
    "models": 2,
    "launch": 2,
    "train": 3,
    "study": 4,
    "report": 4,
    "watch": 4,
    "cli": 5,
}
# Modules that belong together as a package's do.
TOGETHER = dict.fromkeys(
    (
        "hostlist",
        "store",
        "place",
        "address",
        "interfaces",
        "rendezvous",
        "elastic_rendezvous",
        "devices",
        "lifeline",
        "loss_watch",
    ),
    "world",
)
WITHOUT_TORCH = (
    "cli",
    "launch",
    "config",
    "config_mapping",
    "records",
    "io_records",
    "report",
    "watch",
    "recipes",
    "scaling_model",
    "errors",
    "accelerator",
    "references",
    "time_limit",
    "run_names",
    "untrusted",
    "world",
    *TOGETHER,
)


def modules() -> dict[str, Path]:
    """The file of each module, by its name without the leading "lockstep."."""
    paths = {path for path in ROOT.rglob("*.py") if path.name != "__main__.py"}
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def part(module: str) -> str:
    """The row of `LAYERS` that a module belongs to."""
    top = module.split(".")[0]
    return TOGETHER.get(top, top)


def imports(path: Path) -> set[str]:
    """The modules of Lockstep that a file imports anywhere, without the leading "lockstep."."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names} if base.count(".") < 2 else {base}
    return {name.removeprefix("lockstep.") for name in found if name.startswith("lockstep.")}
