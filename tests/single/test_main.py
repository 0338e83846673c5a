"""How a worker of `python -m lockstep` ends."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_worker_ends_with_all_its_output_and_without_waiting_for_idle_threads() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(done.stdout.splitlines()) == ["from C", "from Python", "from atexit"]
