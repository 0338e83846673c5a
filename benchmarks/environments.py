"""Peers' environments: made by uv from PyPI when first asked for, with this interpreter's version and torch.

Lockstep is in them, too, for its networks and its batches are given to all contestants alike.

They lie in `.environments/` beside this file, ignored by git; delete it to make them anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / ".environments"
versions: dict[str, str] = {}  # of the packages that this process has asked for, for its records


def python_with(*packages: str) -> str:
    """The interpreter of an environment with torch, torchvision, Lockstep and these packages.

    Raises:
        SystemExit: uv is missing, or cannot install them.
    """
    place = FOLDER / "-".join(("torch", version("torch").partition("+")[0], *packages))
    python = place / "bin" / "python"
    if not (place / "done").exists():
        uv = shutil.which("uv")
        if uv is None:
            raise SystemExit("peers are installed by uv, which is missing: pip install uv")
        same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "torchvision", "numpy")]
        try:
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, place], check=True)
            wanted = [*same, "--editable", str(HERE.parent), *packages]
            subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *wanted], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"uv cannot make the environment of {', '.join(packages)}; its words are above") from error
        (place / "done").touch()
    (site,) = place.glob("lib/python*/site-packages")
    versions.update({name: found.version for name in packages for found in distributions(name=name, path=[str(site)])})
    return str(python)
