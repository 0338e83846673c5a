"""What a run ran on: the machine, the versions and the command."""

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

PRIVATE = ("command", "folder", "host")  # facts that are not for a public record
GIT_SECONDS = 5.0
CPUINFO = Path("/proc/cpuinfo")


def describe_environment(world: World) -> dict[str, Any]:
    """The machine, the versions and the command, as far as they may matter for repeating a run."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {
            "lockstep-torch": __version__,  # also where it runs from its sources, without being installed
            **{name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")},
        },
        "commit": _commit(Path(__file__)),  # Lockstep's, where it runs from a checkout
        "project_commit": _commit(Path.cwd()),  # of the folder that the run was started in
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": accelerator.names(),
        "workers": world.size,
        "threads_per_worker": torch.get_num_threads(),
    }


def describe_publicly(world: World) -> dict[str, Any]:
    """What figures depend on, for a record that may be published: the same without names of machines and folders."""
    facts = describe_environment(world)
    return {
        **{key: value for key, value in facts.items() if key not in PRIVATE},
        "load_average": os.getloadavg(),
    }


def _processor() -> str:
    """The model's name, or the architecture where the system does not tell it."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _commit(path: Path) -> str:
    """The Git commit of what a checkout tracks, with "-dirty" if that was changed; "" outside one."""
    if not any((folder / ".git").exists() for folder in (path, *path.absolute().parents)):
        return ""
    git = ["git", "-C", str(path if path.is_dir() else path.parent)]
    try:
        _run([*git, "ls-files", "--error-unmatch", str(path)])
        return _run([*git, "describe", "--always", "--dirty"])
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or one so large that it takes its time
        return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)
    return done.stdout.strip()
