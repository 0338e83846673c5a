"""Reports of workers to the program that runs them: what `log` is given, its callbacks get."""

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
    """Send what is logged in this process to a `ray.util.queue.Queue`; None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: Any) -> None:
    """Send something that can be pickled, such as a dict of metrics, to the callbacks of `run` or `execute`."""
    if _queue is None:
        warnings.warn("horovod.ray.ray_logger.log: nobody listens; give `run` callbacks", stacklevel=2)
    else:
        _queue.put(info_dict)


class Reports:
    """What workers log while this is open, for callbacks.

    `queue` is what their `configure` takes, None where there are no callbacks.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = callbacks
        self.queue = _queue_here() if callbacks else None

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.hand_on()
        finally:
            if self.queue is not None:
                self.queue.shutdown()

    def hand_on(self) -> None:
        """Give the callbacks what has come since."""
        if self.queue is not None:
            with suppress(Empty):
                while True:
                    report = self.queue.get_nowait()
                    for callback in self._callbacks:
                        callback(report)


def _queue_here() -> Queue:
    """A queue on this program's node: on another one it would be lost with that node, and the job with it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
