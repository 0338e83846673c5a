"""How fast is `lockstep --help`, compared with importing torch alone?

    python benchmarks/help.py

Bar: at most 0.12 of the time of `python -c "import torch"` with the same interpreter. It must import neither torch nor
numpy.
"""

from __future__ import annotations

import subprocess
import sys

from harness import Bar, Unit, Work, compare, pin

HELP = ("-m", "lockstep", "--help")


def command(*arguments: str) -> Work:
    """Return work that runs this interpreter with the arguments until it exits."""

    def turn() -> int:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return 1

    return turn


def imported() -> set[str]:
    """Return the modules that `lockstep --help` imports, according to Python's import log."""
    arguments = [sys.executable, "-X", "importtime", *HELP]
    log = subprocess.run(arguments, check=True, capture_output=True, text=True).stderr
    return {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}


def main() -> None:
    modules = imported()
    assert "lockstep.cli" in modules, "cannot parse the import log"
    assert not modules & {"torch", "numpy"}, "lockstep --help imports torch or numpy"
    pin()
    contestants = {
        "import torch": command("-c", "import torch"),
        "lockstep --help": command(*HELP),
        "an empty program": command("-c", "pass"),
    }
    bars = {"lockstep --help": Bar("at most", 0.12)}
    compare("help", contestants, bars, Unit("seconds"), rounds=11)


if __name__ == "__main__":
    main()
