"""`horovodrun` from Python; implemented by `lockstep.cli.horovodrun`."""

import sys

from lockstep.cli.horovodrun import main

__all__ = ["run_commandline"]


def run_commandline() -> None:
    """Run horovodrun with the arguments in `sys.argv`, and wait until the job finishes.

    Raises:
        SystemExit: With horovodrun's exit code, if it is not 0.
    """
    if code := main():
        sys.exit(code)


if __name__ == "__main__":
    run_commandline()
