"""The import rule of the design: a module imports its own package and lower layers only."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from layers import LAYERS, WITHOUT_TORCH, imports, modules, part


def test_imports_go_down_only() -> None:
    breaches, known = [], {part(module) for module in modules()}
    for module, path in modules().items():
        own = part(module)
        if own == "__init__":
            continue
        for name in imports(path):
            other = part(name)
            if other in known - {own} and not (other in LAYERS and LAYERS[other] < LAYERS[own]):
                breaches.append(f"{module} imports {name}")
    assert not breaches, breaches


def test_no_two_modules_import_each_other_at_import_time() -> None:
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        graph[module] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
                base = (node.module or "").removeprefix("lockstep").removeprefix(".")
                for alias in node.names:
                    member = f"{base}.{alias.name}".removeprefix(".")
                    graph[module].add(member if member in files else base)
        graph[module] &= files.keys() - {module}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"cycle: {' -> '.join([*way, module])}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.cold
def test_what_a_login_node_needs_imports_without_torch() -> None:
    names = [
        f"lockstep.{module}" if module != "__init__" else "lockstep"
        for module in modules()
        if module.split(".")[0] in WITHOUT_TORCH and module != "cli.before_fork"
    ]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.cold
def test_importing_for_training_changes_nothing_and_takes_no_decoder_and_no_tensorboard() -> None:
    """Images in memory need no decoder; TensorBoard is imported with the first figures."""
    code = (
        "import os, sys, logging\n"
        "before = dict(os.environ), list(logging.root.handlers), logging.root.level\n"
        "import lockstep.train, lockstep.train.trackers.tensorboard, lockstep.data.sources.digits\n"
        "early = {'PIL', 'simplejpeg', 'torchvision', 'tensorboard', 'matplotlib'} & sys.modules.keys()\n"
        "assert not early, early\n"
        "import lockstep.data.loaders, lockstep.launch.node, lockstep.cli\n"
        "assert before == (dict(os.environ), list(logging.root.handlers), logging.root.level)\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
