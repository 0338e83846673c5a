"""A worker of `run_function`: call the pickled function and write its result, or its traceback, to a folder.

Run as `python function_worker.py FOLDER`. It depends only on the file names in that folder, so that the worker can use
another Python. It unpickles only what the caller wrote to the user's folder.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

CALL, RESULT, ERROR = "call", "result.", "error."


def main(folder: Path) -> int:
    try:
        path, call = pickle.loads((folder / CALL).read_bytes())
        sys.path[0:1] = []  # this script's folder, whose modules are not top-level modules
        sys.path += [entry for entry in path if entry not in sys.path]
        import cloudpickle

        function, arguments, keywords = pickle.loads(call)
        result = cloudpickle.dumps(function(*arguments, **keywords))
    except Exception:
        text = traceback.format_exc().rstrip()
        print(text, file=sys.stderr)
        _write(folder / f"{ERROR}{os.getpid()}", pickle.dumps((time.time_ns(), _rank_and_size()[0], text)))
        return 1
    rank, size = _rank_and_size()
    _write(folder / f"{RESULT}{rank}.{size}", result)
    return 0


def _rank_and_size() -> tuple[int, int]:
    """Return the worker's rank and the number of workers; in an elastic job, of its latest generation."""
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically, because a worker may be ended at any moment."""
    draft = file.with_name(f"draft.{file.name}")
    draft.write_bytes(content)
    draft.rename(file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
