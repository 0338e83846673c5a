"""`python -m lockstep.observe [--dir DIR] SCRIPT ARGUMENTS`: observe a program under any launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from lockstep.diagnosis import FOLDER, OBSERVE
from lockstep.errors import ConfigError

USAGE = "use: python -m lockstep.observe [--dir DIR] SCRIPT ARGUMENTS, or -m MODULE instead of SCRIPT"


def main(arguments: Sequence[str], interpreter: Sequence[str]) -> int:
    """Replace this process by the program; return an exit code if that is impossible."""
    try:
        folder, program = parse(arguments)
        if folder and FOLDER in os.environ:
            raise ConfigError(f"--dir {folder}: this job's launcher keeps the records; set {OBSERVE}={folder} for it")
        os.execve(interpreter[0], [*interpreter, *program], {**os.environ, OBSERVE: folder or "1"})
    except (ConfigError, OSError) as error:
        print(f"lockstep.observe: error: {error}", file=sys.stderr)
        return ConfigError.exit_code


def parse(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder for records, or "", and Python's arguments.

    Raises:
        ConfigError: A flag is unknown, or there is no script.
    """
    folder, rest = "", list(arguments)
    if rest and rest[0].startswith("--dir"):
        name, has_value, folder = rest.pop(0).partition("=")
        folder = folder if has_value else rest.pop(0) if rest else ""
        if name != "--dir" or not folder or folder.startswith("-"):
            raise ConfigError(f"{name}: expected --dir DIR; {USAGE}")
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        raise ConfigError(f"{rest[0] if rest else 'no SCRIPT'}: {USAGE}")
    return folder, rest


if __name__ == "__main__":
    flags = takewhile(lambda word: not word.startswith("-m"), sys.orig_argv[1:])  # of Python, such as -u
    raise SystemExit(main(sys.argv[1:], [sys.executable, *flags]))
