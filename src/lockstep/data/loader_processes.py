"""Loader processes: they make the batches that are requested, while the model computes.

They are those of torch's DataLoader: started for each pass or, with `persistent_workers`, once for the loader. If the
loss of a worker interrupts the training, the latter serve the loader that takes its place in the next generation.
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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakMethod, WeakSet, ref

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.worker import _ResumeIteration

from lockstep.config.values import NOTICE
from lockstep.errors import DataError, first_line, reached_limit
from lockstep.world.generations import connections, while_waiting
from lockstep.world.host_memory import return_freed_memory

LONGEST_SOCKET = 107  # characters of a Unix socket's path, as in man 7 unix
SOCKET = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # of a process, in the temporary folder
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
ANSWER_SECONDS = 0.05  # about half of what the launcher takes to prepare a generation on an idle host
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


class _Batches:
    """torch's DataLoader, from which each batch is requested."""

    def __init__(self, source: Any, begin: Callable[[int], None], options: Mapping[str, Any]):
        self.current, self._requests = _CurrentPass(source), _Requests()
        self._missing: int | None = None  # answers to `leave`; None: it was not called
        self._running: Callable[[], Any] = lambda: None  # a weak reference to the iterator of the current processes
        self._loader: DataLoader[Any] = DataLoader(
            self.current,
            batch_sampler=self._requests,  # type: ignore[arg-type]  # a request is for one batch
            collate_fn=as_it_is,
            worker_init_fn=begin,
            generator=torch.Generator(),  # so that an iterator draws nothing from the global one
            **options,
        )

    @property
    def processes(self) -> list[Any]:
        """Those that run until `end`, or until the pass is over."""
        return getattr(self._running(), "_workers", [])

    def prepare(self) -> None:
        """Raise DataError if shared memory or semaphores cannot be made."""
        try:
            self.current.number.share_memory_()
            # What torch's iterator creates, too: one that fails half-way prints a second error.
            queues: list[Any] = [multiprocessing.SimpleQueue() for _ in range(2 * self._loader.num_workers + 2)]
            for queue in queues:
                queue.close()
        except (OSError, RuntimeError) as error:
            raise _cannot_start(error) from error

    def begin(self, requests: Iterator[Any]) -> Iterator[Any]:
        self.current.number += 1
        number = int(self.current.number)
        self._requests.iterator = (_Numbered(number, each) for each in requests)
        if self._missing is None:
            with sigterm_blocked():
                batches = iter(self._loader)
            self._running = ref(batches)
            return batches
        iterator: Any = self._loader._iterator
        try:
            while self._missing:
                self._take(iterator._get_data())
        except Exception:  # one is dead; torch would wait for its answer the next time
            self.end()
            raise
        self._missing = None
        iterator._reset(self._loader, first_iter=True)  # as iter() does, but for what has been exchanged already
        return iterator  # type: ignore[no-any-return]

    def leave(self) -> None:
        """End the pass, and refer to nothing that the loader has, of which the processes have copies.

        They are told that another pass will begin, and answer after their last batches. Most answers come while the
        launcher prepares the next generation: at the beginning of the pass, many processes would take long.
        """
        self.current.number += 1
        self._requests.iterator, self.current.source = iter(()), None
        self._missing = self._loader.num_workers
        for requests in self._loader._iterator._index_queues:  # type: ignore[union-attr]
            requests.put(_ResumeIteration())

    def take_answers(self, deadline: float) -> None:
        """Take what the processes have sent since `leave`, and wait for it until a time of time.monotonic()."""
        while self._missing and (left := deadline - time.monotonic()) > 0:
            self._take(self._loader._iterator._try_get_data(left)[1])  # type: ignore[union-attr]

    def _take(self, answer: Any) -> None:
        assert self._missing
        self._missing -= answer is not None and isinstance(answer[0], _ResumeIteration)

    def end(self) -> None:
        iterator, self._loader._iterator, self._missing = self._running(), None, None
        self._running = lambda: None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _cannot_start(error: OSError | RuntimeError) -> DataError:
    reason = reached_limit(error) or getattr(error, "strerror", None) or first_line(error)
    return DataError(
        f"cannot start loader processes: {reason}; they need a writable /dev/shm (`df /dev/shm`; docker run "
        f"--shm-size) and processes (`ulimit -u`), or use none (--workers 0, num_workers=0)"
    )


class Kind(NamedTuple):
    """What loader processes have: others of this kind can take their place.

    Args:
        objects: The data set and functions, or None, of which they have copies: the same objects.
        settings: Equal values.
    """

    objects: tuple[Any, ...]
    settings: object


class _Kept:
    """Processes that serve no loader, and their kind; without a reference to its objects, which may be large."""

    def __init__(self, batches: _Batches, kind: Kind):
        """Raise TypeError if an object cannot be weakly referenced."""
        self.batches, self._settings, self._place = batches, kind.settings, _place()
        self._references = [
            each if each is None else WeakMethod(each) if isinstance(each, MethodType) else ref(each)
            for each in kind.objects
        ]

    def is_usable(self) -> bool:
        """Whether the processes live, and others of their kind can come."""
        exist = all(each is None or each() is not None for each in self._references)
        return exist and all(each.is_alive() for each in self.batches.processes)

    def read_the_same(self, kind: Kind) -> bool:
        """Whether the first object, the data set, is that of a kind."""
        return self._objects()[0] is kind.objects[0]

    def are_of(self, kind: Kind) -> bool:
        same = all(
            own is each or (isinstance(each, MethodType) and own == each)
            for own, each in zip(self._objects(), kind.objects, strict=True)
        )
        return same and self._settings == kind.settings and self._place == _place()

    def _objects(self) -> list[Any]:
        return [each and each() for each in self._references]


def _place() -> tuple[str | None, ...]:
    """Return the variables of this worker's place, of which a data set may have made file names."""
    return tuple(map(os.environ.get, ("RANK", "LOCAL_RANK")))


class LoaderProcesses:
    """Loader processes that make the batches that are requested; without any, this process makes them.

    Args:
        source: Makes a batch: its `__getitems__` gets a request.
        begin: Called in each new process, with its number.
        kind: None: the processes serve nobody else. Nor do those without `persistent_workers`.
        options: Those of DataLoader.
    """

    def __init__(self, source: Any, begin: Callable[[int], None], kind: Kind | None, **options: Any):
        self.count: int = options["num_workers"]
        self._stays = bool(options.get("persistent_workers"))
        self._source, self._kind = source, kind if self._stays else None
        self._make = partial(_Batches, source, begin, options)
        self._batches = self._make()

    def start(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Begin a pass, and end the one before; start processes, unless there are some that stay.

        Args:
            requests: They are made when they are sent to the processes; the attribute `samples` of each has a length.

        Raises:
            DataError: The processes cannot be started.
        """
        if not self._stays:
            self._batches.end()  # those of a pass that was not finished
        starts = self.count > 0 and not self._batches.processes
        if starts:
            _started.add(self)
            starts = not self._take_over()
        if starts:
            self._batches.prepare()
        try:
            return self._batches.begin(requests)
        except OSError as error:
            if not starts or error.errno not in RESOURCES:  # the data set has raised it while it was sent to processes
                raise
            raise _cannot_start(error) from error

    def _take_over(self) -> bool:
        """Take over processes of this kind that were kept; if there are none, end others with the same data set."""
        _end_unusable()
        if self._kind is None:
            return False
        same = [kept for kept in _kept if kept.read_the_same(self._kind)]
        for kept in same:
            if kept.are_of(self._kind):
                _kept.remove(kept)
                self._batches = kept.batches
                self._batches.current.source = self._source  # if they are ended, and others started
                return True
        for kept in same:
            _kept.remove(kept)
            kept.batches.end()
        return False

    def keep(self) -> None:
        """End the pass, and leave the processes to others of their kind."""
        if self._kind is None or not self._batches.processes:
            return
        with suppress(TypeError):
            _kept.append(_Kept(self._batches, self._kind))
            self._batches.leave()
            self._batches = self._make()

    def close(self) -> None:
        """Shut down the processes; otherwise they live until their garbage is collected."""
        self._batches.end()


_started = WeakSet[LoaderProcesses]()
_kept: list[_Kept] = []


def keep_processes() -> None:
    """Keep the loader processes, after the loss of a worker, for the loaders with which the work begins again.

    They hold copies of this worker's connections, so peers would wait if those were closed without being shut down.
    """
    for each in tuple(_started) if connections.are_all() else ():
        each.keep()
    _started.clear()


def _end_unusable() -> None:
    for kept in [each for each in _kept if not each.is_usable()]:
        _kept.remove(kept)
        kept.batches.end()


def _prepare_kept() -> None:
    _end_unusable()
    deadline = time.monotonic() + ANSWER_SECONDS
    for kept in _kept:
        with suppress(Exception):  # an answer that cannot be read is not needed; if a process is dead, others start
            kept.batches.take_answers(deadline)


while_waiting.append(_prepare_kept)


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
