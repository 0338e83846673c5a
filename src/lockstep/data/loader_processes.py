"""Loader processes: they make the batches that are requested, while the model computes.

They are those of torch's DataLoader: started for each pass or, with `persistent_workers`, once for the loader.
"""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.config.values import NOTICE
from lockstep.errors import DataError, first_line, reached_limit
from lockstep.world.host_memory import return_freed_memory

LONGEST_SOCKET = 107  # characters of a Unix socket's path, as in man 7 unix
SOCKET = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # of a process, in the temporary folder
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # that a new process lacks


@dataclass(frozen=True)
class _Numbered:
    """A request, with the number of its pass. Its length is the number of samples, as of DataLoader's own requests."""

    number: int
    request: Any

    def __len__(self) -> int:
        return len(self.request.samples)


class _CurrentPass(Dataset[Any]):
    """Makes the batches of the current pass. Of an earlier one, no batch is started, so that its requests end soon.

    Attributes:
        number: The current pass, int64 [1], in memory that is shared with the loader processes.
    """

    def __init__(self, source: Any):
        self.source = source
        with torch.inference_mode(False):  # the next pass may begin outside of it
            self.number = torch.zeros(1, dtype=torch.int64, device="cpu")

    def __getitems__(self, numbered: _Numbered) -> Any:
        return self.source.__getitems__(numbered.request) if numbered.number == self.number.item() else None


class _Requests:
    """The requests of the current pass, which are made when they are sent to the loader processes."""

    iterator: Iterator[_Numbered] = iter(())

    def __iter__(self) -> Iterator[_Numbered]:
        return self.iterator


class LoaderProcesses:
    """Loader processes that make the batches that are requested; without any, this process makes them.

    Args:
        source: Makes a batch: its `__getitems__` gets a request.
        begin: Called in each new process, with its number.
        options: Those of DataLoader.
    """

    def __init__(self, source: Any, begin: Callable[[int], None], **options: Any):
        self.count: int = options["num_workers"]
        self._stays = bool(options.get("persistent_workers"))
        self._current, self._requests = _CurrentPass(source), _Requests()
        if self.count and options.get("multiprocessing_context") is None:
            options["multiprocessing_context"] = start_method(multiprocessing.get_start_method(allow_none=True))
        self._running: Callable[[], Any] = lambda: None  # a weak reference to the iterator of the current processes
        self._loader: DataLoader[Any] = DataLoader(
            self._current,
            batch_sampler=self._requests,  # type: ignore[arg-type]  # a request is for one batch
            collate_fn=as_it_is,
            worker_init_fn=begin,
            generator=torch.Generator(),  # so that an iterator draws nothing from the global one
            **options,
        )

    def start(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Begin a pass, and end the one before; start processes, unless there are some that stay.

        Args:
            requests: They are made when they are sent to the processes; the attribute `samples` of each has a length.

        Raises:
            DataError: The processes cannot be started.
        """
        if not self._stays:
            self.close()  # the processes of a pass that was not finished
        starts = self.count > 0 and not self._processes
        if starts:
            self._prepare()
        self._current.number += 1
        number = int(self._current.number)
        self._requests.iterator = (_Numbered(number, each) for each in requests)
        try:
            with sigterm_blocked():
                batches = iter(self._loader)
        except OSError as error:
            if not starts or error.errno not in RESOURCES:  # the data set has raised it while it was sent to processes
                raise
            raise _cannot_start(error) from error
        self._running = ref(batches)
        return batches

    @property
    def _processes(self) -> list[Any]:
        """Those that run until `close`, or until the pass is over."""
        return getattr(self._running(), "_workers", [])

    def _prepare(self) -> None:
        """Raise DataError if shared memory or semaphores cannot be made."""
        try:
            self._current.number.share_memory_()
            # What torch's iterator creates, too: one that fails half-way prints a second error.
            context: Any = self._loader.multiprocessing_context or multiprocessing
            queues: list[Any] = [context.SimpleQueue() for _ in range(2 * self._loader.num_workers + 2)]
            for queue in queues:
                queue.close()
        except (OSError, RuntimeError) as error:
            raise _cannot_start(error) from error

    def close(self) -> None:
        """Shut down the processes; otherwise they live until their garbage is collected."""
        iterator, self._loader._iterator = self._running(), None
        self._running = lambda: None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def start_method(given: str | None, version: tuple[Any, ...] = sys.version_info) -> str | None:
    """Return "fork", the default of Linux up to Python 3.13, unless the program has certainly chosen another method.

    `given` is multiprocessing's, with Python's `version`. A forked process has the data set as it is, and starts in
    10 ms. Others import torch, run the script again as far as no `if __name__ == "__main__"` prevents it, and can be
    sent neither lambdas nor local classes.
    """
    defaults = (None, "fork", "forkserver") if version >= (3, 14) else (None, "fork")
    return "fork" if sys.platform == "linux" and given in defaults else None


def _cannot_start(error: OSError | RuntimeError) -> DataError:
    reason = reached_limit(error) or getattr(error, "strerror", None) or first_line(error)
    return DataError(
        f"cannot start loader processes: {reason}; they need a writable /dev/shm (`df /dev/shm`; docker run "
        f"--shm-size) and processes (`ulimit -u`), or use none (--workers 0, num_workers=0)"
    )


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread, and in the processes started in the block, which inherit the mask.

    If the parent has called `torch.set_num_threads`, torch may start threads in a loader process
    before `begin_loader` runs there.
    """
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_loader(worker: int) -> None:
    """Called in a new loader process."""
    return_freed_memory()
    _be_able_to_send()
    _ignore_group_signals()


def _be_able_to_send() -> None:
    """Choose a folder for this process's socket, and exit if a batch cannot be sent.

    Otherwise only the thread that sends would end, and the parent would wait for ever.
    """
    Queue._on_queue_feeder_error = staticmethod(_exit)  # type: ignore[attr-defined]
    given = tempfile.gettempdir()
    if len(os.fsencode(given + SOCKET)) <= LONGEST_SOCKET:
        return
    for folder in SHORT_FOLDERS:
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            break
    multiprocessing.util.get_temp_dir()  # which it keeps
    tempfile.tempdir = given


def _exit(error: Exception, _: Any) -> None:
    print(f"lockstep: a loader process cannot send a batch: {first_line(error)}", file=sys.stderr, flush=True)
    os._exit(1)


def _ignore_group_signals() -> None:
    """Ignore signals sent to the whole process group to request an orderly stop.

    Ctrl-C signals all processes of a terminal, and Slurm all of a job step. The current step still needs batches, so a
    loader process runs on until its parent shuts it down, with SIGTERM at the latest.
    """
    for number in (signal.SIGINT, *NOTICE):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # gives a signal's sender; missing on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged; the collate function of a data set that returns whole batches."""
    return batch
