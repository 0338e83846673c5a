"""The import rule of the design: a module imports its own package and lower layers only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
LAYERS = {
    "errors": 0,
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
    ("hostlist", "store", "place", "address", "interfaces", "rendezvous", "elastic_rendezvous"), "world"
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
    "references",
    "time_limit",
    "run_names",
    "untrusted",
    "world",
    *TOGETHER,
)


def _modules() -> dict[str, Path]:
    paths = {path for path in ROOT.rglob("*.py") if path.name != "__main__.py"}
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def _part(module: str) -> str:
    top = module.split(".")[0]
    return TOGETHER.get(top, top)


def _imports(path: Path) -> set[str]:
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


def test_imports_go_down_only() -> None:
    breaches = []
    for module, path in _modules().items():
        own = _part(module)
        if own == "__init__":
            continue
        for name in _imports(path):
            other = _part(name)
            if other in LAYERS and other != own and LAYERS[other] >= LAYERS[own] > 0:
                breaches.append(f"{module} imports {name}")
            if other in LAYERS and LAYERS[own] == 0 < LAYERS[other]:
                breaches.append(f"{module} imports {name}")
    assert not breaches, breaches


def test_no_two_modules_import_each_other_at_import_time() -> None:
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        graph[module] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
                base = (node.module or "").removeprefix("lockstep").removeprefix(".")
                for alias in node.names:
                    member = f"{base}.{alias.name}".removeprefix(".")
                    graph[module].add(member if member in modules else base)
        graph[module] &= modules.keys() - {module}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"cycle: {' -> '.join([*way, module])}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_what_a_login_node_needs_imports_without_torch() -> None:
    names = [
        f"lockstep.{module}" if module != "__init__" else "lockstep"
        for module in _modules()
        if module.split(".")[0] in WITHOUT_TORCH and module != "launch.agent"
    ]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_changes_neither_environment_nor_logging() -> None:
    code = (
        "import os, logging\n"
        "before = dict(os.environ), list(logging.root.handlers), logging.root.level\n"
        "import lockstep.train, lockstep.data.loaders, lockstep.launch.agent, lockstep.cli\n"
        "assert before == (dict(os.environ), list(logging.root.handlers), logging.root.level)\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
