"""Reports of workers to the program that runs them: what `log` is given, its callbacks get."""

from __future__ import annotations

import warnings
from typing import Any

_queue: Any = None


def configure(queue: Any) -> None:
    """Send what is logged in this process to a `ray.util.queue.Queue`; None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: Any) -> None:
    """Send something that can be pickled, such as a dict of metrics, to the callbacks of `run` or `execute`."""
    if _queue is None:
        warnings.warn("horovod.ray.ray_logger.log: nobody listens; give `run` callbacks", stacklevel=2)
    else:
        _queue.put(info_dict)
