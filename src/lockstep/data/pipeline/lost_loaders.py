"""Let a loader process that cannot send its batches exit, and translate torch's errors about processes that exited."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from typing import Any

from lockstep.errors import LoaderError, first_line

LONGEST_SOCKET = 107  # characters of a Unix socket's path, as in man 7 unix
SOCKET = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # of a process, in the temporary folder
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def be_able_to_send() -> None:
    """In a loader process: choose a folder for its socket, and exit if a batch cannot be sent.

    Otherwise only the thread that sends would end, and the parent would wait for ever.
    """
    Queue._on_queue_feeder_error = staticmethod(_exit)  # type: ignore[attr-defined]
    given = tempfile.gettempdir()
    if len(os.fsencode(given + SOCKET)) <= LONGEST_SOCKET:
        return
    for folder in SHORT_FOLDERS:
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            break
    multiprocessing.util.get_temp_dir()  # which it keeps
    tempfile.tempdir = given


def _exit(error: Exception, _: Any) -> None:
    print(f"lockstep: a loader process cannot send a batch: {first_line(error)}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def lost_loaders_named() -> Iterator[None]:
    """Raise LoaderError for torch's error about a loader process that exited.

    torch raises it in a signal handler, so it may occur anywhere in the main thread.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(("DataLoader worker", "Pin memory thread")):
            raise
        raise loader_error(error) from error


def loader_error(error: Exception) -> LoaderError:
    """Return the LoaderError for torch's error."""
    return LoaderError(
        f"a loader process exited ({first_line(error).strip()}); if memory or /dev/shm ran out, lower --workers or "
        f"--batch-size"
    )
