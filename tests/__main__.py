"""All tests, two folders at a time: `uv run --group dev python tests`.

Some wait for hosts, clocks and signals while others compute, so two side by side take little longer than one. Words
after it go to all, as in `python tests -m long`. A part of the tests is better run by pytest itself:
`uv run --group dev pytest tests/single -k sharding`.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LONGEST_FIRST = ["parallel", "docs", "cluster", "single", "faults"]
NO_TESTS = 5  # pytest's code where the words leave none of a folder


def main() -> int:
    """Run each folder's tests and print what they print as they end; the exit code is 0 only where all passed."""
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    order = [*LONGEST_FIRST, *sorted(folders.difference(LONGEST_FIRST))]
    print(f"two at a time: {', '.join(order)}", flush=True)
    codes = []
    with ThreadPoolExecutor(2) as lanes:
        for name, ended in zip(order, lanes.map(_run, order), strict=True):
            print(f"== {name}\n{ended.stdout}", end="", flush=True)
            codes.append(ended.returncode)
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def _run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(HERE / name), *sys.argv[1:]]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


if __name__ == "__main__":
    sys.exit(main())
