"""Environments for peers, created by uv from PyPI on first use, with this interpreter's versions of Python and torch.

They also contain Lockstep, as all contestants use its networks and batches.

They are in `.environments/` next to this file, ignored by git; to recreate them, delete that folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / ".environments"
PEERS: dict[str, tuple[str, ...]] = {  # packages of the hand-written loops
    "DDP loop": (),
    "Accelerate": ("accelerate",),
    "Fabric": ("lightning-fabric",),
}
versions: dict[str, str] = {}  # versions of the packages that this process uses, for its records


def python_with(*packages: str) -> str:
    """Return the interpreter of an environment with torch, torchvision, Lockstep and these packages.

    Raises:
        SystemExit: uv is missing or failed to install them.
    """
    environment = FOLDER / "-".join(("torch", version("torch").partition("+")[0], *packages))
    python = environment / "bin" / "python"
    if not (environment / "done").exists():
        uv = shutil.which("uv")
        if uv is None:
            raise SystemExit("uv is missing and needed to install peers; run pip install uv")
        same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "torchvision", "numpy")]
        try:
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment], check=True)
            wanted = [*same, "--editable", str(HERE.parent), *packages]
            subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *wanted], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"uv failed to create the environment for {', '.join(packages)}; see above") from error
        (environment / "done").touch()
    (site,) = environment.glob("lib/python*/site-packages")
    versions.update({name: found.version for name in packages for found in distributions(name=name, path=[str(site)])})
    return str(python)


def torchrun(python: str, workers: int) -> list[str]:
    """Return the start of a command that runs a script in workers of this machine."""
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]


def add_version(name: str, checkout: Path) -> None:
    """Add the commit of a checkout to the versions in this process's records.

    Raises:
        SystemExit: It is not the top folder of a git checkout.
    """
    git = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    top, _, commit = found.stdout.strip().partition("\n")
    if found.returncode or not checkout.samefile(top):
        raise SystemExit(f"{checkout}: not a git checkout, so its version is unknown")
    versions[name] = commit
