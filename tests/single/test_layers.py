"""The import rule of the design: a module imports its own package and lower layers only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Container

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


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither when they are imported nor later, nor for types alone. `lockstep` itself only lends its public names."""
    files = {module: path for module, path in modules().items() if module != "__init__"}
    graph = {
        module: {owner(name, files) for name in imports(path)} - {module, "__init__"} for module, path in files.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"circle: {' -> '.join([*way, module])}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def owner(name: str, files: Container[str]) -> str:
    """The module that an imported name is, or is in."""
    while name not in files and name != "__init__":
        name = name.rpartition(".")[0] if "." in name else "__init__"
    return name


def test_a_class_name_means_one_class() -> None:
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_no_modules_have_names_that_differ_by_an_ending() -> None:
    """Where they are not commands, which are named for what users type: `python -m lockstep.observe`, too."""
    found: dict[str, str] = {}
    for module in modules():
        if not module.startswith("cli.") and module != "observe":
            found[module.rpartition(".")[2]] = module
    alike = [(found[name], found[name + ending]) for name in found for ending in ENDINGS if name + ending in found]
    assert not alike


ENDINGS = ("s", "es", "d", "ed", "r", "er", "ing", "ings")


def test_no_folder_has_more_than_18_modules() -> None:
    count = Counter(module.rpartition(".")[0] for module, path in modules().items() if path.name != "__init__.py")
    del count["cli"]  # a module per command
    assert max(count.values()) <= 18, count.most_common(3)


def test_every_package_has_a_map_of_at_most_12_lines() -> None:
    for module, path in modules().items():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text()))
            assert text, module
            assert len(text.splitlines()) <= 12, module


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
def test_training_imports_load_no_decoder_and_no_tensorboard() -> None:
    """Images in memory need no decoder; TensorBoard is imported with the first figures, a run when one is opened."""
    code = (
        "import os, sys, logging\n"
        "before = dict(os.environ), list(logging.root.handlers), logging.root.level\n"
        "import lockstep; lockstep.connect\n"
        "own = [name for name in sys.modules if name.startswith('lockstep')]; assert len(own) <= 65, own\n"
        "import lockstep.train, lockstep.run.records.tracking_services, lockstep.data.sources.digits\n"
        "early = {'PIL', 'simplejpeg', 'torchvision', 'tensorboard', 'vl_convert'} & sys.modules.keys()\n"
        "assert not early, early\n"
        "import lockstep.data.loaders, lockstep.launch.node, lockstep.cli\n"
        "assert before == (dict(os.environ), list(logging.root.handlers), logging.root.level)\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
