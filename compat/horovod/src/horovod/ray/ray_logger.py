"""Pass the objects that workers send with `log` to callbacks in the calling program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_queue: Any = None


def configure(queue: Any) -> None:
    """Set the `ray.util.queue.Queue` for this process's reports; None disables them."""
    global _queue
    _queue = queue


def log(info_dict: Any) -> None:
    """Send an object that can be pickled, such as a dict of metrics, to the callbacks of `run` or `execute`."""
    if _queue is None:
        warnings.warn("horovod.ray.ray_logger.log has no effect without callbacks; pass `run` callbacks", stacklevel=2)
    else:
        _queue.put(info_dict)


class Reports:
    """Passes the workers' reports to callbacks during a `with` block.

    `queue` is the argument for the workers' `configure`; None without callbacks.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = callbacks
        self.queue = _queue_here() if callbacks else None

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.deliver()
        finally:
            if self.queue is not None:
                self.queue.shutdown()

    def deliver(self) -> None:
        """Call the callbacks with all new reports."""
        if self.queue is not None:
            with suppress(Empty):
                while True:
                    report = self.queue.get_nowait()
                    for callback in self._callbacks:
                        callback(report)


def _queue_here() -> Queue:
    """Create a queue on this program's node, so that it survives the failure of any other node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
