"""`horovodrun` from Python; `lockstep.cli.horovodrun` does the work."""

import sys

from lockstep.cli.horovodrun import main

__all__ = ["run_commandline"]


def run_commandline() -> None:
    """Start the job that `sys.argv` asks for, and wait for its end.

    Raises:
        SystemExit: With horovodrun's exit code, if that is not 0.
    """
    if code := main():
        sys.exit(code)


if __name__ == "__main__":
    run_commandline()
