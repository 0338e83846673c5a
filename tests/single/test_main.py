"""How a worker of `python -m lockstep` ends."""

from __future__ import annotations

import sys
from pathlib import Path

from commands import run

ENDING = """
import atexit, concurrent.futures, ctypes
from lockstep.__main__ import _end

executor = concurrent.futures.ThreadPoolExecutor()
executor.submit(int).result()  # its thread waits for more
atexit.register(print, "from atexit")
ctypes.CDLL(None).printf(b"from C\\n")
print("from Python")
_end(3)
"""


def test_worker_exits_with_all_output_and_without_idle_threads(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", ENDING], tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(done.stdout.splitlines()) == ["from C", "from Python", "from atexit"]
