"""All tests, in two halves side by side: `uv run --group dev python tests`.

One half mostly waits, for hosts, clocks and signals, the other computes; together they take little longer than one of
them alone. Words after it go to both, as in `python tests -m long`. A part of the tests is better run by pytest itself:
`uv run --group dev pytest tests/single -k sharding`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

HERE = Path(__file__).parent
WAITING = ["cluster", "compat", "faults", "single"]
NO_TESTS = 5  # pytest's code where the words leave none of a half


def main() -> int:
    """Run both halves; the exit code is 0 only where both passed."""
    others = sorted(path.name for path in HERE.iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    halves = [WAITING, [name for name in others if name not in WAITING]]
    print(f"{' '.join(halves[0])} in the background; now {' '.join(halves[1])}", flush=True)
    with TemporaryFile() as printed:
        behind = subprocess.Popen(_command(halves[0]), stdout=printed, stderr=subprocess.STDOUT)
        codes = [subprocess.run(_command(halves[1]), check=False).returncode, behind.wait()]
        printed.seek(0)
        print(printed.read().decode(errors="replace"), end="", flush=True)
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def _command(names: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *(str(HERE / name) for name in names), *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
