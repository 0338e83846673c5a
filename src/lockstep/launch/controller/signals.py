"""The signals that stop a launcher."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_stopping(handler: Callable[[int, Any], None]) -> tuple[signal.Signals, ...]:
    """Install a handler for these signals and return them; signals that `nohup` or a shell ignores stay ignored."""
    caught = tuple(number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN)
    for number in caught:
        signal.signal(number, handler)
    return caught
