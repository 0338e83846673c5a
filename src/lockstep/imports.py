"""Import large packages with the garbage collector paused.

Importing torch and the modules of its optimizers creates about half a million objects, none of them garbage. Scanning
them would take a tenth of the import time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector during a `with` block, and restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
