"""Abort the groups of an accelerator whose collectives wait for a lost peer.

torch's own function clears the registry of groups after the last abort. An abort may take longer than the other workers
need to connect again, and then the groups of the next generation would be removed. Here, threads abort, and only the
main thread changes the registry.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.errors import DeviceError, LockstepError, first_line
from lockstep.files.output import report_to_launcher, say
from lockstep.world import accelerator
from lockstep.world.peer_loss import end_process, print_error

if TYPE_CHECKING:
    import torch

DEVICE_SECONDS = 20.0  # for the work of a few steps that is still enqueued


class GroupAbort:
    """Aborts all groups of this process, once.

    Args:
        device: The device of the groups.

    Attributes:
        seconds: How long a call waits for the end, which delays the exit of a failed process.
        long_seconds: After this time, `finish` prints that it waits.
    """

    seconds, long_seconds = 3.0, 10.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.has_begun = False

    def __call__(self) -> None:
        """Start to abort, in any thread, unless another has; wait a while for the end."""
        import torch.distributed as dist

        with self._lock:
            if not self.has_begun:
                self.has_begun = True
                # A thread each: a communicator's abort may wait for a kernel that waits for another communicator's.
                for group in list(dist.distributed_c10d._world.pg_names):
                    self._threads.append(threading.Thread(target=self._abort, args=[group], daemon=True))
                    self._threads[-1].start()
        self._wait(self.seconds)

    def _abort(self, group: Any) -> None:
        accelerator.use(self._device)  # a new thread's current device is 0, which another worker may use
        try:
            group.abort()
        except RuntimeError as error:
            say(f"lockstep: a process group cannot be aborted: {first_line(error)}")

    def _wait(self, seconds: float) -> bool:
        with self._lock:
            threads, deadline = list(self._threads), time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def drop_groups(self) -> None:
        """Remove the groups from torch's registry, if all aborts have ended; only in the main thread."""
        import torch.distributed as dist

        if self._wait(0.0) and dist.is_initialized():
            dist.distributed_c10d._world.pg_names.clear()  # torch would shut these groups down
            dist.destroy_process_group()

    def finish(self) -> None:
        """Remove the groups from torch's registry when all aborts have ended; only in the main thread.

        Until then, the device and its memory are not free for the groups of another generation. If the device cannot be
        used any more, this process exits.
        """
        if not self._wait(long := self.long_seconds):
            say(f"lockstep: aborting the collectives takes longer than {long:g} s; this worker waits for that")
            for thread in self._threads:
                thread.join()
        exit_if_unusable(self._device)
        self.drop_groups()


def exit_if_unusable(device: torch.device, before_exit: Callable[[], None] = lambda: None) -> None:
    """After a loss, end this process if its device fails or hangs, so that it is replaced with the lost one."""
    if why := accelerator.why_unusable(device, DEVICE_SECONDS):
        before_exit()
        where = f"worker {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        text = f"{where} is replaced, too: its {device.type} device cannot be used after the loss of another: {why}"
        end_process(DeviceError(text), _report_consequence)


def _report_consequence(error: LockstepError) -> int:
    report_to_launcher(f"error: {error}", True, error.exit_code, final=False)
    return print_error(error)
