"""How a worker that has shown enough tells the launcher so, and exits in the middle of its program."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.diagnosis import FOLDER

REMOTE_SECONDS = 2.0  # for the workers of other hosts to finish their last step


def send_line(mark: str, content: Any) -> None:
    """Print content as one line of JSON that begins with a mark, even if the program has redirected its output."""
    with suppress(Exception):
        sys.stdout.flush()
    os.write(1, f"\n{mark}{json.dumps(content)}\n".encode())


def exit_early(wait_seconds: float) -> NoReturn:
    """Exit with code 0: no exit handlers, checkpoints or evaluations follow.

    Args:
        wait_seconds: At most so long, wait until the other workers of this host come here, too.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with suppress(OSError):  # the launcher has exited
        folder = Path(os.environ[FOLDER])
        (folder / f"{os.environ['RANK']}.finished").touch()
        end = time.monotonic() + wait_seconds
        while len(list(folder.glob("*.finished"))) < local and time.monotonic() < end:
            time.sleep(0.02)
    if local < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(REMOTE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)
