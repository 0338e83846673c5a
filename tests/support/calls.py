"""Call functions that start workers, in a separate program."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from commands import run as run_command

CALLER = """
import pickle
from pathlib import Path
try:
    result = pickle.loads(Path("call").read_bytes())()
except Exception as error:
    result = error
Path("result").write_bytes(pickle.dumps(result))
"""


def in_a_program(folder: Path, call: Callable[[], Any]) -> Any:
    """Call a function in a separate program; return its result or raise its error, and repeat its output."""
    (folder / "call").write_bytes(cloudpickle.dumps(call))
    done = run_command([sys.executable, "-c", CALLER], folder)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    result = pickle.loads((folder / "result").read_bytes())
    if isinstance(result, Exception):
        raise result
    return result
