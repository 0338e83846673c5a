"""The environment of a run: machine, versions and command."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep import __version__
from lockstep.world import accelerator
from lockstep.world.world import World, usable_cores

PRIVATE = ("command", "folder", "host")  # left out of public records
GIT_SECONDS = 5.0
CPUINFO = Path("/proc/cpuinfo")


def describe_environment(world: World) -> dict[str, Any]:
    """Return the machine, the versions and the command, as needed to repeat a run."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {
            "lockstep-torch": __version__,  # also available when running from source
            **{name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")},
        },
        "commit": _commit(Path(__file__)),  # Lockstep's, when running from a checkout
        "project_commit": _commit(Path.cwd()),  # of the working directory
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": accelerator.names(),
        "workers": world.size,
        "threads_per_worker": torch.get_num_threads(),
    }


def describe_publicly(world: World) -> dict[str, Any]:
    """Return the environment for a public record, without names of machines and folders."""
    facts = describe_environment(world)
    return {
        **{key: value for key, value in facts.items() if key not in PRIVATE},
        "load_average": os.getloadavg(),
    }


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
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # git is missing, the path is not tracked, or the checkout is too large
        return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)
    return done.stdout.strip()
