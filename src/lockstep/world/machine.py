"""The machine of this process and the versions of its software, for the records of runs and studies."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from lockstep import __version__
from lockstep.world import accelerator
from lockstep.world.devices import usable_cores

GIT_SECONDS = 5.0
CPUINFO = Path("/proc/cpuinfo")


def describe_machine(workers: int) -> dict[str, Any]:
    """Return versions, processor, accelerators and threads, without host names; this process is one of `workers`."""
    import torch

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _packages(),
        "torch_build": accelerator.build(),
        "drivers": drivers(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": accelerator.names(),
        "workers": workers,
        "threads_per_worker": torch.get_num_threads(),
    }


def drivers(modules: Path = Path("/sys/module")) -> list[str]:
    """Return the loaded GPU drivers of this Linux machine, with their versions where they have one."""
    found = []
    for module, maker in {"nvidia": "NVIDIA", "amdgpu": "AMD", "xe": "Intel", "i915": "Intel"}.items():
        if (modules / module).is_dir():
            number = modules / module / "version"
            found.append(f"{maker} {module} {number.read_text().strip() if number.exists() else ''}".strip())
    return found


def _packages() -> dict[str, str]:
    found = {"lockstep-torch": __version__}  # also available when running from source
    for name in ("torch", "torchvision", "numpy", "pillow"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe_commits(command: Sequence[str] = ()) -> dict[str, str]:
    """Return the Git commits of Lockstep, when running from a checkout, and of a command's script.

    Without a script, the second one is that of the working directory.
    """
    script = next((Path(word) for word in command if word.endswith(".py") and Path(word).is_file()), Path.cwd())
    return {"commit": _commit(Path(__file__)), "project_commit": _commit(script.absolute())}


def _processor() -> str:
    """Return the CPU's model name, or the architecture if that is unknown."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _commit(path: Path) -> str:
    """Return the Git commit of a tracked path, with "-dirty" if the checkout was changed; "" outside a checkout."""
    if not any((folder / ".git").exists() for folder in (path, *path.absolute().parents)):
        return ""
    git = ["git", "-C", str(path if path.is_dir() else path.parent)]
    try:
        _run([*git, "ls-files", "--error-unmatch", str(path)])
        return _run([*git, "describe", "--always", "--dirty"])
    except (OSError, subprocess.SubprocessError):  # git is missing, the path not tracked, or the checkout too large
        return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)
    return done.stdout.strip()
