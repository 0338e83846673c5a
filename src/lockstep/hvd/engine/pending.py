"""The requests of this worker that no round has finished yet, from any thread, for the communication thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.diagnosis import publisher
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.exceptions import HorovodInternalError

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


class PendingRequests:
    """The pending requests of one process set, and the request of a worker that joins. Any thread may call it.

    Attributes:
        closed: Why no more requests are accepted; None: they are.
        has_failed: Whether results of collectives in progress may be wrong.
        device: The accelerator that this worker's tensors are on, if any.
        joining: The request of `hvd.join`, and the device of its zeros.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._wakeup = threading.Event()  # there is something new to do, or to wait for
        self._requests: dict[bytes, Collective] = {}  # by key, in order of submission
        self._bytes_waiting = 0
        self._urgent = False
        self._asleep = False
        self.closed: str | None = None
        self.has_failed = False
        self.device: torch.device | None = None
        self.joining: tuple[Collective, torch.device] | None = None

    def add(self, request: Collective) -> None:
        """Queue a request, and wake the communication thread if it sleeps or should not wait for more requests.

        Raises:
            HorovodInternalError: Closed, by a shutdown or because a worker disconnected.
            ValueError: A request of the same kind and name is still pending, or is on another accelerator.
        """
        device = request.tensors[0].device if request.tensors else None
        with self._lock:
            self._check_open()
            if request.key in self._requests:
                raise ValueError(DUPLICATE_NAME)
            if device is not None and device.type != "cpu":
                if self.device not in (None, device):
                    raise ValueError(f"tensors on {self.device} and {device}: a worker must use only one GPU")
                self.device = device
            self._requests[request.key] = request
            self._bytes_waiting += request.size_bytes
            self._urgent |= request.urgent or self._bytes_waiting >= self._settings.fusion_threshold_bytes
            wake = self._asleep or self._urgent
        if wake:
            self._wakeup.set()

    def join(self, request: Collective, device: torch.device) -> None:
        """Queue the request of `hvd.join`; its zeros are on `device` if no tensor was on an accelerator."""
        with self._lock:
            self._check_open()
            if self.joining is not None:
                raise ValueError("hvd.join() is already in progress on this worker")
            self.joining = request, self.device or device
        self.hurry()

    def _check_open(self) -> None:
        if self.closed is not None:
            raise HorovodInternalError(self.closed)

    def hurry(self) -> None:
        """Start a round without delay, because a thread is waiting for a pending request."""
        with self._lock:
            self._urgent = True
        self._wakeup.set()

    def ages(self, seconds: float) -> dict[str, float]:
        """Return the ages in seconds, by name, of requests that have been pending for at least `seconds`."""
        now = time.monotonic()
        with self._lock:
            requests = [*self._requests.values(), *([self.joining[0]] if self.joining else [])]
        ages = {request.name: now - request.submitted for request in requests}
        return {name: age for name, age in ages.items() if age >= seconds}

    def close(self, reason: str, has_failed: bool) -> bool:
        """Accept no more requests; return False if they already were not accepted."""
        with self._lock:
            is_first = self.closed is None
            if is_first:
                self.closed = reason
                self.has_failed |= has_failed
        return is_first

    def begin_round(self) -> tuple[list[Collective], bool]:
        """Return the requests of a round, and whether this worker has joined."""
        with self._lock:
            self._urgent = False
            return list(self._requests.values()), self.joining is not None

    @property
    def is_empty(self) -> bool:
        return not self._requests and self.joining is None

    def sleep(self) -> None:
        """Wait for a request; then, unless it is urgent, wait one cycle time for others to share its round."""
        with self._lock:
            self._asleep = self.is_empty and self.closed is None
            asleep = self._asleep
        if asleep:
            self.wait()
        with self._lock:
            self._asleep = False
            linger = not self._urgent and self.closed is None
        if linger:
            self.wait(self._settings.cycle_time_seconds)

    def back_off(self, seconds: float) -> None:
        """Wait for a new request of this worker, up to `seconds`, because another worker may have one sooner."""
        with self._lock:
            self._asleep = not self._urgent
            asleep = self._asleep
        if asleep:
            self.wait(seconds)
        with self._lock:
            self._asleep = False

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until there may be something new to do, on the communication thread."""
        if self._wakeup.wait(timeout_seconds):
            self._wakeup.clear()

    def finish(self, requests: Sequence[Collective], results: Sequence[Any]) -> None:
        """Set the results of requests, except for a joined worker's zeros and for requests that have already failed."""
        pairs = list(zip(requests, results, strict=True))  # before any request is removed
        removed = self._remove(requests)
        for request, result in pairs:
            if request in removed:
                request.finish(result)

    def fail(self, requests: Sequence[Collective], error: str | None) -> None:
        """Set the error of requests that are still pending."""
        for request in self._remove(requests):
            request.finish(error=error)

    def fail_all(self) -> None:
        """Fail everything that is pending with the reason for the end."""
        with self._lock:
            requests = list(self._requests.values())
            joining, self.joining = self.joining, None
        self.fail(requests, self.closed)
        if joining is not None:
            joining[0].finish(error=self.closed)

    def give_back(self, requests: Sequence[Collective]) -> None:
        """Finish the revocable ones of these requests unexecuted."""
        for request in self._remove([request for request in requests if request.revocable]):
            request.finish(given_back=True)

    def finish_join(self, last_rank: int) -> None:
        """Set the result of `hvd.join`, the rank that joined last."""
        with self._lock:
            assert self.joining is not None
            request, self.joining = self.joining[0], None
        request.finish(last_rank)

    def _remove(self, requests: Sequence[Collective]) -> set[Collective]:
        """Remove requests from the pending ones; return those that were pending."""
        with self._lock:
            removed = {request for request in requests if self._requests.get(request.key) is request}
            for request in removed:
                del self._requests[request.key]
                self._bytes_waiting -= request.size_bytes
        publisher.touch()
        return removed
