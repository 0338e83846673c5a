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

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.diagnosis import publisher
from lockstep.errors import LostPeerError, first_line, is_lost_peer
from lockstep.hvd.engine import fusion
from lockstep.hvd.engine.agreement import HEADER, HEADER_BYTES, Verdict, agree, entries_of, explain_mismatch
from lockstep.hvd.engine.request import Collective, kind_of
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline
from lockstep.hvd.engine.transfers import CAPACITY_BYTES, SetConnections
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world import accelerator, generations
from lockstep.world.group_abort import exit_if_unusable
from lockstep.world.step_clock import StepClock

BACKOFF_SECONDS = (0.0005, 0.05)
STATE = CAPACITY_BYTES - 1  # the index in a message of the worker's state, which may differ in equal messages
WAITING, CAN_GIVE_BACK, LATE = 1, 2, 4  # a thread waits; it waits for a revocable request; a request is late
NEWS_SECONDS = 3.0  # for the lifeline to report which worker disconnected
SETTLE_SECONDS = 2.0  # for the device to finish work that does not depend on a disconnected worker
DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


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
        self._settings = settings
        self._timeline = timeline
        self.step_times = step_times
        self._links = links
        self._failed = failed
        self._lock = threading.Lock()
        self._wakeup = threading.Event()  # there is something new to do, or to wait for
        self._pending: dict[bytes, Collective] = {}  # by key, in order of submission
        self._bytes_waiting = 0
        self._urgent = False
        self._asleep = False
        self._join: tuple[Collective, torch.device] | None = None
        self._device: torch.device | None = None  # the accelerator that this worker's tensors are on
        self._alone = threading.Lock()  # held while running a request, if the channel has no thread
        self._last_joined = -1
        self._joined: tuple[bool, ...] = (False,) * self.size
        self._closing: str | None = None  # the reason, once the channel accepts no more requests
        self._has_failed = False  # results of collectives in progress may be wrong
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
        device = request.tensors[0].device if request.tensors else None
        with self._lock:
            if self._closing is not None:
                raise HorovodInternalError(self._closing)
            if request.key in self._pending:
                raise ValueError(DUPLICATE_NAME)
            if device is not None and device.type != "cpu":
                if self._device not in (None, device):
                    raise ValueError(f"tensors on {self._device} and {device}: a worker must use only one GPU")
                self._device = device
            self._pending[request.key] = request
            self._bytes_waiting += request.size_bytes
            self._urgent |= request.urgent or self._bytes_waiting >= self._settings.fusion_threshold_bytes
            wake = self._asleep or self._urgent
        request.channel = self
        if self._thread is None:
            self._run_alone(request)
        elif wake:
            self._wakeup.set()
        return request

    def _run_alone(self, request: Collective) -> None:
        try:
            with self._alone, torch.no_grad():
                self._execute([request])
        except BaseException as error:
            self._fail([request], first_line(error))
            raise

    def hurry(self) -> None:
        """Start a round without delay, because a thread is waiting for a pending request."""
        with self._lock:
            self._urgent = True
        self._wakeup.set()

    def join(self, request: Collective, device: torch.device) -> None:
        """Take part in the other workers' all-reduces, with zeros on `device`, until all workers have joined."""
        request.channel = self
        if self._thread is None:
            request.finish(0)
            return
        with self._lock:
            if self._closing is not None:
                raise HorovodInternalError(self._closing)
            if self._join is not None:
                raise ValueError("hvd.join() is already in progress on this worker")
            self._join = request, self._device or device
        self.hurry()

    def pending_since(self, seconds: float) -> dict[str, float]:
        """Return the ages in seconds, by name, of requests that have been pending for at least `seconds`."""
        now = time.monotonic()
        with self._lock:
            requests = [*self._pending.values(), *([self._join[0]] if self._join else [])]
        ages = {request.name: now - request.submitted for request in requests}
        return {name: age for name, age in ages.items() if age >= seconds}

    def close(self, reason: str, lost_peer: bool = False) -> None:
        """Accept no more requests; after the collective in progress, the thread fails pending ones with `reason`.

        Args:
            lost_peer: Whether a worker of the set disconnected, so that the collective in progress cannot finish.
        """
        with self._lock:
            if self._closing is None:
                self._closing = reason
                self._has_failed |= lost_peer
        self.hurry()

    def end_device_work(self, timeout_seconds: float) -> None:
        """After a failure, wait until no operation on the accelerator can still write to the script's tensors."""
        if self._device is not None:
            self.close("Horovod has been shut down, because a collective failed.", lost_peer=True)
            self.wait_for_end(timeout_seconds)
            if generations.restores_commits():
                exit_if_unusable(self._device)
            accelerator.synchronize(self._device)

    def settle(self) -> None:
        """Wait until the accelerator has finished all queued work, and check that no collective failed.

        Raises:
            HorovodInternalError: A collective failed, so later results on the accelerator may be wrong.
        """
        try:
            if self._device is not None:
                accelerator.synchronize(self._device)
        except RuntimeError:  # from the device, which an abort may have spoiled
            if not self._has_failed:
                raise
        if self._has_failed:
            raise HorovodInternalError(self._closing or "Horovod has been shut down, because a collective failed.")

    @property
    def is_closed(self) -> bool:
        """Whether the channel accepts no more requests."""
        return self._closing is not None

    def wait_for_end(self, timeout_seconds: float) -> None:
        """After `close`, wait for the thread to exit; pending requests fail if that takes longer."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)
            self._fail_pending()

    def _execute(self, requests: Sequence[Collective]) -> None:
        """Execute agreed requests, all workers in the same order."""
        for batch in fusion.plan_fusion(requests, self._settings.fusion_threshold_bytes):
            device = batch[0].tensors[0].device if batch[0].tensors else torch.device("cpu")
            with self._links.on(device) as stream, self._timeline.activity(batch):
                if stream:
                    fusion.follow(stream, batch)
                results = type(batch[0]).execute_all(batch, self._links)
            ready = stream.record_event() if stream else None
            for request in batch:
                request.ready = ready
            self._finish(batch, results)

    def _finish(self, requests: Sequence[Collective], results: Sequence[Any]) -> None:
        """Set the results of requests, except for a joined worker's zeros and for requests that have already failed."""
        pairs = list(zip(requests, results, strict=True))  # before any request is removed
        removed = self._remove(requests)
        for request, result in pairs:
            if request in removed:
                request.finish(result)

    def _fail(self, requests: Sequence[Collective], error: str | None) -> None:
        """Set the error of requests that are still pending."""
        for request in self._remove(requests):
            request.finish(error=error)

    def _remove(self, requests: Sequence[Collective]) -> set[Collective]:
        """Remove requests from the pending ones; return those that were pending."""
        with self._lock:
            removed = {request for request in requests if self._pending.get(request.key) is request}
            for request in removed:
                del self._pending[request.key]
                self._bytes_waiting -= request.size_bytes
        publisher.touch()
        return removed

    def _fail_pending(self) -> None:
        with self._lock:
            requests = list(self._pending.values())
            join, self._join = self._join, None
        self._fail(requests, self._closing)
        if join is not None:
            join[0].finish(error=self._closing)

    def _work(self) -> None:
        """The communication thread."""
        torch.set_grad_enabled(False)
        failure: tuple[str, bool] | None = None
        backoff = BACKOFF_SECONDS[0]
        try:
            while self._closing is None:
                if not self._pending and self._join is None:
                    self._sleep()
                    continue
                if self._round():
                    backoff = BACKOFF_SECONDS[0]
                elif self._join is None:
                    self._back_off(backoff)
                    backoff = min(2 * backoff, BACKOFF_SECONDS[1])
        except Exception as error:
            failure = first_line(error), is_lost_peer(error)  # the error itself would keep the connections open
        self._has_failed |= failure is not None
        # Disconnect and report the failure before waiting for the device: it may be waiting for peers that wait for
        # this worker in Gloo.
        self._links.disconnect()
        if failure is not None:
            self._explain(*failure)
        try:
            self._end_device_work()
        finally:
            self._fail_pending()

    def _end_device_work(self) -> None:
        if not self._has_failed:
            self._fail_pending()
            self._links.close()
            return
        if self._links.is_stuck(SETTLE_SECONDS) and not generations.stays():
            from lockstep.world.peer_loss import end_process

            # After an abort, the device would continue with a partial sum, which the script could save before it sees
            # an error. A worker that stays goes back to its last commit or snapshot, so it can abort.
            end_process(LostPeerError(f"{self._closing} This worker exits too, because its GPU is waiting for it."))
        self._links.abort()

    def _explain(self, text: str, lost_peer: bool) -> None:
        """Set the reason for the failure; if a peer disconnected, first wait for the lifeline to report its rank."""
        deadline = time.monotonic() + NEWS_SECONDS
        while lost_peer and self._closing is None and time.monotonic() < deadline:
            self._wait(NEWS_SECONDS)
        reason = "another worker disconnected." if lost_peer else f"a collective failed: {text}"
        with self._lock:
            own = self._closing is None
            if own:
                self._closing = f"Horovod has been shut down, because {reason}"
        if own and not lost_peer:
            self._failed()

    def _back_off(self, seconds: float) -> None:
        """Wait for a new request of this worker, up to `seconds`, because another worker may have one sooner."""
        with self._lock:
            self._asleep = not self._urgent
            asleep = self._asleep
        if asleep:
            self._wait(seconds)
        with self._lock:
            self._asleep = False

    def _sleep(self) -> None:
        """Wait for a request; then, unless it is urgent, wait one cycle time for others to share its round."""
        with self._lock:
            self._asleep = not self._pending and self._join is None and self._closing is None
            asleep = self._asleep
        if asleep:
            self._wait()
        with self._lock:
            self._asleep = False
            linger = not self._urgent and self._closing is None
        if linger:
            self._wait(self._settings.cycle_time_seconds)

    def _wait(self, timeout_seconds: float | None = None) -> None:
        if self._wakeup.wait(timeout_seconds):
            self._wakeup.clear()

    def _round(self) -> bool:
        """Run one round of agreement and execution; return whether any request finished or any worker joined."""
        with self._lock:
            requests = list(self._pending.values())
            self._urgent = False
            joined = self._join is not None
        control = self._links.control
        control.outgoing[STATE] = _state_of(requests)
        self._timeline.cycle()
        block = b"".join([request.entry for request in requests])
        place = None if joined else fusion.message_slice(requests, HEADER_BYTES + len(block))
        head = HEADER.pack(len(block), joined) + block
        fits = len(head) <= STATE
        if fits:
            control.outgoing[: len(head)] = head
        else:
            control.outgoing[:HEADER_BYTES] = head[:HEADER_BYTES]
        if place:
            fusion.pack_message(requests, control.outgoing_tensor[place])
        messages = control.exchange()
        if joined or not fits or not all(message[: len(head)] == head for message in messages):
            return self._settle(requests, block, messages)
        _mark_late(requests, [message[STATE] for message in messages])
        if place:
            with self._timeline.activity(requests):
                results = fusion.unpack_message(requests, control.rows()[:, place])
            self._finish(requests, results)
        else:
            self._execute(requests)
        return True

    def _settle(self, requests: Sequence[Collective], block: bytes, messages: Sequence[memoryview]) -> bool:
        """Finish a round in which the workers' messages differ."""
        heads = [HEADER.unpack_from(message) for message in messages]
        states = [message[STATE] for message in messages]
        if HEADER_BYTES + max(length for length, _ in heads) > STATE:
            blocks = self._links.control.exchange_bytes(block)
        else:
            blocks = [
                bytes(message[HEADER_BYTES : HEADER_BYTES + length])
                for message, (length, _) in zip(messages, heads, strict=True)
            ]
        joined = tuple(bool(has_joined) for _, has_joined in heads)
        newly_joined = [rank for rank in range(self.size) if joined[rank] and not self._joined[rank]]
        self._joined = joined
        self._last_joined = max(newly_joined, default=self._last_joined)
        entries = {block: entries_of(block) for block in set(blocks)}  # parsed once per distinct message
        verdict = agree([entries[block] for block in blocks], joined)
        by_key = {request.key: request for request in requests}
        _mark_late([by_key[name] for name in verdict.agreed if name in by_key], states)
        self._carry_out(verdict, by_key)
        if all(joined):
            self._all_joined()
        if verdict.agreed or verdict.mismatched or newly_joined:
            return True
        active = [rank for rank in range(self.size) if not joined[rank]]
        if all(states[rank] & WAITING for rank in active):
            chosen = next((rank for rank in active if states[rank] & CAN_GIVE_BACK), None)
            if chosen == self.rank:
                self._give_back(requests)
        return False

    def _give_back(self, requests: Sequence[Collective]) -> None:
        """Finish the revocable ones of these requests unexecuted."""
        for request in self._remove([request for request in requests if request.revocable]):
            request.finish(given_back=True)

    def _carry_out(self, verdict: Verdict, requests: dict[bytes, Collective]) -> None:
        """Execute the agreed requests, with zeros if this worker has joined, and fail the mismatched ones."""
        descriptions = self._describe([*verdict.mismatched, *verdict.lacking], requests)
        errors = {name: explain_mismatch(descriptions[name]) for name in verdict.mismatched}
        for name in verdict.lacking:
            kind = kind_of(next(iter(descriptions[name].values())))
            if not kind.joinable:
                errors[name] = f"{kind.kind.capitalize()} is not supported with Join at this time."
        for name, error in errors.items():
            if name in requests:
                self._fail([requests[name]], error)
        agreed = []
        for name in verdict.agreed:
            if name in requests:
                agreed.append(requests[name])
            elif self._join is not None and name not in errors:
                description, device = next(iter(descriptions[name].values())), self._join[1]
                accelerator.use(device)  # this may be this thread's first work on it
                agreed.append(kind_of(description).of_zeros(description, device))
        self._execute([request for request in agreed if request.key not in errors])

    def _describe(
        self, names: Sequence[bytes], requests: dict[bytes, Collective]
    ) -> dict[bytes, dict[int, dict[str, Any]]]:
        """Exchange descriptions of these requests; return them by name and global rank."""
        if not names:
            return {}
        mine = {name.hex(): requests[name].describe() for name in names if name in requests}
        replies = [json.loads(reply) for reply in self._links.control.exchange_bytes(json.dumps(mine).encode())]
        return {
            name: {
                rank: reply[name.hex()] for rank, reply in zip(self.ranks, replies, strict=True) if name.hex() in reply
            }
            for name in names
        }

    def _all_joined(self) -> None:
        with self._lock:
            assert self._join is not None
            request, self._join = self._join[0], None
        self._joined = (False,) * self.size
        request.finish(self.ranks[self._last_joined])


def _state_of(requests: Sequence[Collective]) -> int:
    """Return this worker's state, as a byte of its message."""
    state = 0
    for request in requests:
        if request.awaited:
            state |= WAITING | (CAN_GIVE_BACK if request.revocable else 0)
        if request.late:
            state |= LATE
    return state


def _mark_late(requests: Sequence[Collective], states: Sequence[int]) -> None:
    """Mark agreed requests that a worker, by its state, may have submitted as late."""
    if any(state & LATE for state in states):
        for request in requests:
            request.has_late_peer = True
