"""What a run ran on: the machine, the versions and the command."""

from __future__ import annotations

import platform
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep import __version__
from lockstep.world import World, usable_cores


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
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "workers": world.size,
        "threads_per_worker": torch.get_num_threads(),
    }
