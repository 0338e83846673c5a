"""Translate torch's errors about loader processes that exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import LoaderError, first_line


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
