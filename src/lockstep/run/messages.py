"""Messages for scripts with an own loop, which name arguments of `TrainingWorld.run` where others name flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import LockstepError

NAMES = "run-dir|keep|log-every|checkpoint-epochs|checkpoint-steps|check-replicas|time-limit"
FLAG = re.compile(rf"--({NAMES})(?![\w-])(?: (\S+?)(?=[:;,.)]*(?:\s|$)))?")


def name_arguments(text: str) -> str:
    """Return a message with arguments instead of flags: "--keep 0" becomes "keep=0"."""
    text = text.replace(" with --resume auto", ": start the same command again")
    return FLAG.sub(lambda flag: f"{flag[1].replace('run-dir', 'folder').replace('-', '_')}={flag[2] or ''}", text)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let the errors that leave the block, or the decorated function, name arguments."""
    try:
        yield
    except LockstepError as error:
        error.args = (name_arguments(str(error)),)
        raise
