"""All tests, two folders at a time: `uv run --group dev python tests`.

Some wait for hosts, clocks and signals while others compute, so two side by side take little longer than one. What has
failed then runs once more, alone: on a busy machine a process may stand still for longer than a test can foresee. It is
printed both times; what fails twice has failed. Words after the command go to all, as in `python tests -m long`. A part
of the tests is better run by pytest itself: `uv run --group dev pytest tests/single -k sharding`.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
LONGEST_FIRST = ["parallel", "docs", "cluster", "single", "faults"]
PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's codes, the last where the words leave none of a folder


def main(cache: Path) -> int:
    """Run each folder's tests and print what they print as they end; the exit code is 0 only where all passed."""
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    order = [*LONGEST_FIRST, *sorted(folders.difference(LONGEST_FIRST))]
    print(f"two at a time: {', '.join(order)}", flush=True)
    codes = {}
    with ThreadPoolExecutor(2) as lanes:
        for name, ended in zip(order, lanes.map(partial(_run, cache), order), strict=True):
            print(f"== {name}\n{ended.stdout}", end="", flush=True)
            codes[name] = ended.returncode
    for name in [name for name, code in codes.items() if code == FAILED]:
        ended = _run(cache, name, "--last-failed")
        print(f"== {name}, what failed, once more and alone\n{ended.stdout}", end="", flush=True)
        codes[name] = ended.returncode
    return next((code for code in codes.values() if code not in (PASSED, NO_TESTS)), PASSED)


def _run(cache: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    own = f"cache_dir={cache / name}"  # two at a time would overwrite each other's failures
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-o", own, *sys.argv[1:], *words]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        sys.exit(main(Path(folder)))
