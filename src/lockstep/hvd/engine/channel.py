"""The engine: one communication thread per process set. Any thread may submit named requests to it.

The workers run rounds together. In a round, each worker sends the others one small message that lists its pending
requests. A request that is pending on all workers is executed if its signature is the same on all of them, and fails
on all of them otherwise; the rest stays pending. All workers derive the same order of execution from the messages. If
all workers have the same pending requests and these are small all-reduces, the messages carry the tensors too, and
nothing else is sent.

A worker enters a round when it has a pending request. It then blocks, without a time limit and without using the CPU,
until every worker has entered. After a round in which no request was executed, the worker waits for a new request, but
only for a limited time, since the new request may be another worker's: 0.5 ms at first, doubling up to 50 ms.

If a thread of every worker waits for a request that another worker lacks, none of them can go on. One worker then gives
back its revocable requests: at the end of a backward pass, it does not insist on gradients that another worker will not
have before it calls `step`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from lockstep.errors import LostPeerError, first_line, is_lost_peer
from lockstep.hvd.engine.pending import PendingRequests
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.engine.rounds import Rounds
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline
from lockstep.hvd.engine.transfers import SetConnections
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world import accelerator, generations
from lockstep.world.peer_loss import exit_if_unusable
from lockstep.world.step_clock import StepClock

BACKOFF_SECONDS = (0.0005, 0.05)
NEWS_SECONDS = 3.0  # for the lifeline to report which worker disconnected
SETTLE_SECONDS = 2.0  # for the device to finish work that does not depend on a disconnected worker


class Channel:
    """The communication of one process set on this worker.

    Args:
        links: The set's connections.
        settings: The same on all workers of the set.
        timeline: Records every round and operation.
        step_times: Paused while a thread waits for a result.
        failed: Called if the engine fails from an error on this worker, which its peers cannot detect.
    """

    def __init__(
        self,
        links: SetConnections,
        settings: Settings,
        timeline: Timeline,
        step_times: StepClock,
        failed: Callable[[], None],
    ) -> None:
        self.ranks = links.ranks
        self.rank = links.rank
        self.size = links.size
        self.step_times = step_times
        self._links = links
        self._failed = failed
        self._pending = PendingRequests(settings)
        self._rounds = Rounds(links, settings, timeline, self._pending)
        self.hurry, self.pending_since = self._pending.hurry, self._pending.ages
        self._alone = threading.Lock()  # held while running a request, if the channel has no thread
        self._thread: threading.Thread | None = None
        if self.size > 1:
            self._thread = threading.Thread(target=self._work, name=f"lockstep-hvd-{self.ranks}", daemon=True)
            self._thread.start()

    def submit(self, request: Collective) -> Collective:
        """Queue a request for the communication thread; with a single worker, run it in the caller's thread.

        Raises:
            HorovodInternalError: The channel is closed, by a shutdown or because a worker disconnected.
            ValueError: A request of the same kind and name is still pending.
        """
        request.channel = self
        self._pending.add(request)
        if self._thread is None:
            self._run_alone(request)
        return request

    def _run_alone(self, request: Collective) -> None:
        try:
            with self._alone, torch.no_grad():
                self._rounds.execute([request])
        except BaseException as error:
            self._pending.fail([request], first_line(error))
            raise

    def join(self, request: Collective, device: torch.device) -> None:
        """Take part in the other workers' all-reduces, with zeros on `device`, until all workers have joined."""
        request.channel = self
        if self._thread is None:
            request.finish(0)
            return
        self._pending.join(request, device)

    def close(self, reason: str, lost_peer: bool = False) -> None:
        """Accept no more requests; after the collective in progress, the thread fails pending ones with `reason`.

        Args:
            lost_peer: Whether a worker of the set disconnected, so that the collective in progress cannot finish.
        """
        self._pending.close(reason, lost_peer)
        self.hurry()

    def end_device_work(self, timeout_seconds: float, before_exit: Callable[[], None]) -> None:
        """After a failure, wait until no operation on the accelerator can still write to the script's tensors."""
        if (device := self._pending.device) is not None:
            self.close("Horovod has been shut down, because a collective failed.", lost_peer=True)
            self.wait_for_end(timeout_seconds)
            if generations.restores_commits():
                exit_if_unusable(device, before_exit)
            accelerator.synchronize(device)

    def settle(self) -> None:
        """Wait until the accelerator has finished all queued work, and check that no collective failed.

        Raises:
            HorovodInternalError: A collective failed, so later results on the accelerator may be wrong.
        """
        try:
            if self._pending.device is not None:
                accelerator.synchronize(self._pending.device)
        except RuntimeError:  # from the device, which an abort may have spoiled
            if not self._pending.has_failed:
                raise
        if self._pending.has_failed:
            raise HorovodInternalError(
                self._pending.closed or "Horovod has been shut down, because a collective failed."
            )

    @property
    def is_closed(self) -> bool:
        """Whether the channel accepts no more requests."""
        return self._pending.closed is not None

    def wait_for_end(self, timeout_seconds: float) -> None:
        """After `close`, wait for the thread to exit; pending requests fail if that takes longer."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)
            self._pending.fail_all()

    def _work(self) -> None:
        """The communication thread."""
        torch.set_grad_enabled(False)
        pending, backoff = self._pending, BACKOFF_SECONDS[0]
        failure: tuple[str, bool] | None = None
        try:
            while pending.closed is None:
                if pending.is_empty:
                    pending.sleep()
                elif self._rounds.run():
                    backoff = BACKOFF_SECONDS[0]
                elif pending.joining is None:
                    pending.back_off(backoff)
                    backoff = min(2 * backoff, BACKOFF_SECONDS[1])
        except Exception as error:
            failure = first_line(error), is_lost_peer(error)  # the error itself would keep the connections open
        pending.has_failed |= failure is not None
        # Disconnect and report the failure before waiting for the device: it may be waiting for peers that wait for
        # this worker in Gloo.
        self._links.disconnect()
        if failure is not None:
            self._explain(*failure)
        try:
            self._end_device_work()
        finally:
            self._pending.fail_all()

    def _end_device_work(self) -> None:
        if not self._pending.has_failed:
            self._pending.fail_all()
            self._links.close()
            return
        if self._links.is_stuck(SETTLE_SECONDS) and not generations.stays():
            from lockstep.world.peer_loss import end_process

            # After an abort, the device would continue with a partial sum, which the script could save before it sees
            # an error. A worker that stays goes back to its last commit or snapshot, so it can abort.
            end_process(
                LostPeerError(f"{self._pending.closed} This worker exits too, because its GPU is waiting for it.")
            )
        self._links.abort()

    def _explain(self, text: str, lost_peer: bool) -> None:
        """Set the reason for the failure; if a peer disconnected, first wait for the lifeline to report its rank."""
        deadline = time.monotonic() + NEWS_SECONDS
        while lost_peer and self._pending.closed is None and time.monotonic() < deadline:
            self._pending.wait(NEWS_SECONDS)
        reason = "another worker disconnected." if lost_peer else f"a collective failed: {text}"
        is_own = self._pending.close(f"Horovod has been shut down, because {reason}", has_failed=True)
        if is_own and not lost_peer:
            self._failed()
