"""Run programs in namespaces that have only a loopback interface; all their processes end with the program."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import of_one_thread, run

NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LIMIT_SECONDS = 280  # they start Ray, and several Pythons one after another: slow on a busy machine
COMMAND = [*NAMESPACES, "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
TELL = """
import json
def tell(**what):
    print(json.dumps(what), flush=True)

"""


def skip_without() -> None:
    """Skip the module if namespaces are unavailable."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root and unshare (Debian: util-linux)", allow_module_level=True)


def told(script: str, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a program with additional variables; return the values that it passes to `tell(NAME=VALUE, ...)`."""
    file = folder / "program.py"
    file.write_text(TELL + script)
    done = run([*COMMAND, sys.executable, file], folder, of_one_thread(**variables), LIMIT_SECONDS, cold=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: value for line in lines for name, value in line.items()}
