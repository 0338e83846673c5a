"""Programs of the package: imports, pipes, and their exit."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run

from lockstep.data.sources.pack_reader import is_packed
from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.imports import collector_paused
from lockstep.launch.plan.hosts import find_allocation
from lockstep.report.watch.run import FollowedFile
from lockstep.run.checkpoints.checkpoint_format import describe_file

ENDING = """
import atexit, concurrent.futures, ctypes
from lockstep.__main__ import end

executor = concurrent.futures.ThreadPoolExecutor()
executor.submit(int).result()  # its thread waits for more
atexit.register(print, "from atexit")
ctypes.CDLL(None).printf(b"from C\\n")
print("from Python")
end(3)
"""


def test_worker_exits_with_all_output_and_without_idle_threads(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", ENDING], tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(done.stdout.splitlines()) == ["from C", "from Python", "from atexit"]


def test_collector_pauses_and_is_restored_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "read", "result"),
    [
        ("dataset.json", lambda path: is_packed(path.parent), False),
        ("model.safetensors", describe_file, None),
        ("metrics.jsonl", lambda path: FollowedFile(path).read().records, []),
        ("metrics.jsonl", lambda path: list(read_records(path)), OSError),
        ("nodes", lambda path: find_allocation({"PBS_NODEFILE": str(path), "PBS_JOBID": "1"}), ConfigError),
    ],
    ids=["pack", "checkpoint", "watch", "records", "batch system"],
)
def test_a_pipe_is_not_waited_for(name: str, read: Callable[[Path], Any], result: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    if isinstance(result, type):
        with pytest.raises(result, match="not a regular file"):
            read(tmp_path / name)
    else:
        assert read(tmp_path / name) == result
