"""A small package named torch, which notes the pids of its importers: the import of the real one takes seconds."""

from __future__ import annotations

from pathlib import Path

TORCH = """
import os, pathlib
with open(os.environ["IMPORTS"], "a") as file:
    print(os.getpid(), file=file)
from torch import version
class default_generator:
    initial_seed = staticmethod(lambda: 67280421310721)  # as the real one begins
"""


def write_small_torch(packages: Path) -> None:
    """Write it into a folder of packages, and an empty torchvision."""
    for name, text in (("torch", TORCH), ("torchvision", "")):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(text)
    for name in ("version", "_dynamo"):
        (packages / "torch" / f"{name}.py").write_text("")
