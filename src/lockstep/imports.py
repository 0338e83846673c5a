"""Importing large packages without a search for garbage meanwhile.

Python's cyclic collector looks whenever enough objects have been made. Importing torch and what its optimizers need
makes some half a million, which all stay; looking through them took a tenth of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let nothing be collected inside; afterwards the collector does as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
