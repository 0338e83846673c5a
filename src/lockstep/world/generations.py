"""Generations: how a worker keeps its process when others of its job are lost or added.

A generation is a set of workers with ranks and a store. A worker that can continue in another one tells the node
process on its host (`stay`). When it has lost a peer, or is notified that the hosts have changed, it leaves its process
groups and calls `join_next`; `survive` does that for any work. Other workers are ended and started again. Both sides of
their connection on this host, of which `lockstep.launch.node.worker_watch` is the other, have the worker's state:

    ENDS ─ stay ─> STAYS ─ it loses a peer ─> CUT_OFF ─┐
                     │                                 ├─ it is over ─> LEAVES ─ it left its groups ─> WAITS
                     └─────────────────────────────────┘
    WAITS ─ variables of the next generation ─> STAYS;   WAITS ─ no variables ─> it exits

A worker in another state also waits after it has left its groups, if the hosts have changed. When a generation is over,
workers that LEAVE have time for that; those in ENDS, and those that stay too late to be notified, are ended.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from lockstep.diagnosis import publisher
from lockstep.errors import LostPeerError, WorldError, is_lost_peer
from lockstep.files.untrusted import parse_json
from lockstep.world import NODE_PROCESS, MemberState, accelerator, rendezvous
from lockstep.world.peer_loss import GroupAbort

T = TypeVar("T")
REMOVED, ADDED = 1, 2  # changes of the hosts; 3 is both
CONNECT_SECONDS = 10.0
VERDICT = "_lockstep_is_interruption"  # an attribute of exceptions
PARTS = 20  # of a wait: a pause of the whole machine ends one of them, and not the wait
COLLECTIVE_FILES = ("/torch/autograd/graph.py", "/torch/distributed/distributed_c10d.py")


class Waits(NamedTuple):
    """How long a worker that stays waits, in seconds."""

    patience: float = 0.5  # from the end of a generation until its collectives are ended
    news: float = 2.0  # from an error until the message of the generation's end, which may have caused it
    loss_news: float = 10.0  # the same, if a peer has disconnected: the launcher may only miss its heartbeats
    # Gloo rarely never returns from a collective although its connections are shut down (about 2 in 700 losses on busy
    # cores). Such a worker stays so long at one instruction of COLLECTIVE_FILES, and computes next to nothing.
    hung: float = 15.0
    hung_cpu: float = 1.0


USUAL = Waits()


class HostsChangedError(Exception):
    """This worker leaves its generation between two steps, with all others, because hosts were added or removed."""


class _Line:
    """This worker's connection to the node process, and what a thread has received from it."""

    def __init__(self, address: str, must_lead: bool, end_collectives: Callable[[], None], limits: Waits) -> None:
        host, port, secret, number = address.rsplit(":", 3)
        self.owner, self.must_lead, self.limits = os.getpid(), must_lead, limits
        self.news = threading.Condition()
        self.changes: list[int] = []
        self.included = 0  # how many of the changes the current generation includes
        self.generation = 0  # how many this worker has joined later
        self.state = MemberState.STAYS
        self.answers: list[Mapping[str, str]] = []
        self.is_closed = False
        self._end_collectives = end_collectives
        self._connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        self._connection.settimeout(None)
        self.send({"secret": secret, "worker": int(number), "must_lead": must_lead})
        threading.Thread(target=self._listen, name="lockstep-generations", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the thread notices that the connection is closed
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def enter(self, state: MemberState) -> None:
        """Enter a state, unless this worker is in a later one, and report it."""
        with self.news:
            self.state = max(self.state, state)
        self.send({"state": state.name})

    def wait(self, is_true: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until something is true, up to `seconds`, or the connection is closed; return whether it is true."""
        with self.news:
            self.news.wait_for(lambda: is_true() or self.is_closed, seconds)
            return bool(is_true())

    def _listen(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = parse_json(line)
                with self.news:
                    if "change" in message:
                        self.changes.append(int(message["change"]))
                    if "variables" in message:  # another generation begins
                        self.answers.append(message["variables"])
                        self.generation += 1
                        self.included, self.state = len(self.changes), MemberState.STAYS
                    if "over" in message and self.state != MemberState.WAITS:
                        self.state = MemberState.LEAVES
                        timer = threading.Timer(self.limits.patience, self._end_if_still_in, [self.generation])
                        timer.daemon = True
                        timer.start()
                    self.news.notify_all()
        self._connection.close()
        with self.news:
            self.is_closed = True
            self.news.notify_all()

    def _end_if_still_in(self, generation: int) -> None:
        def has_left() -> bool:
            return self.state == MemberState.WAITS or self.generation != generation or self.is_closed

        with self.news:
            if has_left():
                return
            self._end_collectives()
            place, cpu = _collective(), time.process_time()
            if any(self.news.wait_for(has_left, self.limits.hung / PARTS) for _ in range(PARTS)):
                return
            if place is None or _collective() != place or time.process_time() - cpu > self.limits.hung_cpu:
                return
        from lockstep.world.peer_loss import end_process

        end_process(
            LostPeerError(
                f"a collective has not returned {self.limits.hung:g} s after its connections were shut down "
                f"({place[0]}); this worker exits and is started again"
            )
        )


def _collective() -> tuple[str, int, int] | None:
    """Return where the main thread is in torch: the line and the instruction; None if no collective can be there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.endswith(COLLECTIVE_FILES):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", id(frame), frame.f_lasti


_line: _Line | None = None


def _own_line() -> _Line | None:
    """Return the connection, unless this process is a forked child of the worker."""
    return _line if _line and _line.owner == os.getpid() else None


def stay(must_lead: bool = False, end_collectives: Callable[[], None] = lambda: None, limits: Waits = USUAL) -> None:
    """Tell the node process that this worker can continue in another generation, if its launcher supports that.

    From now on, a lost peer does not end this worker, which must call `join_next` within Timings.leave. It continues
    from an earlier state, since an accelerator's collectives are aborted, which leaves wrong numbers.

    Args:
        must_lead: Rank 0 of the next generation has to be a worker that stays, because the others copy its state.
        end_collectives: Called in a thread if this worker has not left in time, so that it waits for no lost peer.
    """
    global _line
    if not _own_line() and (address := os.environ.get(NODE_PROCESS)):
        with suppress(OSError):  # then it is started again, like other programs
            _line = _Line(address, must_lead, end_collectives, limits)


def stays() -> bool:
    """Whether this worker can continue in another generation, from an earlier state."""
    return _own_line() is not None


def restores_commits() -> bool:
    """Whether this worker stays, and goes back to a commit if another is lost, as `hvd.elastic.run` does."""
    return bool((line := _own_line()) and line.must_lead)


def join_next(meanwhile: Iterable[Callable[[], object]] = ()) -> None:
    """Wait for the next generation; set this process's variables, from which its new rank info can be read.

    The process must have left its groups.

    Args:
        meanwhile: Functions to call while the launcher prepares the generation.

    Raises:
        SystemExit: With code 0, if the job no longer needs this worker.
        WorldError: The node process has exited.
    """
    if (line := _own_line()) is None:
        raise WorldError("this worker cannot continue with other workers: no launcher of Lockstep watches it")
    observed = getattr(sys.modules.get("lockstep.world.observer"), "current", None)  # only programs with torch have it
    if observed:
        observed.guard(observed.finish)()
    line.enter(MemberState.WAITS)
    for each in meanwhile:
        each()
    if not line.wait(lambda: line.answers):
        raise WorldError("the node process on this host, which starts the workers, has exited")
    variables = line.answers.pop()
    if not variables:
        raise SystemExit(0)
    os.environ.update(variables)
    rendezvous.forget_stores()
    publisher.move()
    if observed and observed.counts.board:
        observed.begin_generation(publisher.own_board())


def is_over(seconds: float | None = None) -> bool:
    """Return whether this worker stays and its generation is over; wait for the message, up to `Waits.news`."""
    if (line := _own_line()) is None:
        return False
    part = (line.limits.news if seconds is None else seconds) / PARTS
    return any(line.wait(lambda: line.state == MemberState.LEAVES, part) for _ in range(PARTS))


def check() -> None:
    """Raise LostPeerError if this worker's generation is over, although it may not wait for a lost worker itself."""
    if (line := _own_line()) and line.state == MemberState.LEAVES:
        raise LostPeerError("the workers start again without one that disconnected")


def host_changes(since: int) -> tuple[int, int]:
    """Return the number of changes of the hosts so far, and which of ADDED | REMOVED those after the first `since` are.

    Changes that the current generation includes are left out, even if they are after `since`.
    """
    if (line := _own_line()) is None:
        return 0, 0
    news = 0
    for kind in line.changes[max(since, line.included) :]:
        news |= kind
    return len(line.changes), news


on_loss: list[Callable[[Exception], None]] = []
"""Called when the work is interrupted, before its objects are dropped, with the exception that has interrupted it."""
while_waiting: list[Callable[[], object]] = [gc.collect, accelerator.empty_cache]
"""Called when its objects are dropped and the process has left its groups, while the launcher prepares the next one."""


class Connections:
    """The connections that Gloo opens for a process group, which can be shut down to interrupt a collective.

    If a host is cut off, nothing tells Gloo so, and it cannot be interrupted otherwise.

    Attributes:
        abort: Aborts the collectives of an accelerator; None without one, or if a script made the group alone.
        is_aborted: Whether they were aborted because of a loss, so that nothing computed since then is right.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # descriptor to inode
        self._before: dict[int, int] | None = None  # while this process connects
        self.abort: GroupAbort | None = None
        self.is_aborted = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the sockets that the block opens, for a new group."""
        self.is_aborted, self.abort = False, None
        before = self._sockets()
        yield
        self._known = {number: inode for number, inode in self._sockets().items() if before.get(number) != inode}

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Surround all of a process's connecting, of which a part may wait for a peer that is lost.

        Raises:
            WorldError: The generation is over, with its store, which torch would try to reach for minutes.
        """
        if is_over(0.0):
            raise WorldError("another worker disconnected before this one had connected")
        self._before = self._sockets()
        try:
            yield
        finally:
            self._before = None

    def abort_after_loss(self) -> None:
        """Abort the accelerator's collectives."""
        self.is_aborted = True
        if self.abort:
            self.abort()

    def shut_down(self) -> None:
        """Shut down those that are still open, and abort the accelerator's collectives."""
        self.abort_after_loss()
        self.end()

    def end(self) -> None:
        """Shut down those that are still open: closing would not do, as loader processes hold copies of them."""
        before = self._before
        for number, inode in self._sockets().items():
            is_new = before is not None and before.get(number) != inode
            if is_new or self._known.get(number) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                    copy.getpeername()  # which fails for a socket that listens: Gloo would abort
                    copy.shutdown(socket.SHUT_RDWR)

    def leave_groups(self) -> None:
        """Destroy the process groups; after an abort, as soon as it is complete."""
        import torch.distributed as dist

        if self.abort and self.abort.has_begun:
            self.abort.finish()
        elif dist.is_initialized():
            dist.destroy_process_group()
        self.abort = None

    @staticmethod
    def _sockets() -> dict[int, int]:
        found = {}
        with suppress(OSError):  # a system without /proc
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    status = os.fstat(int(name))
                    if stat.S_ISSOCK(status.st_mode):
                        found[int(name)] = status.st_ino
        return found


connections = Connections()
"""Those of the group that `lockstep.world.connect` makes."""


def survive(work: Callable[[], T]) -> T:
    """Do some work in a job of several workers, and return its result; begin again if another worker is lost.

    The work connects to the other workers, for example by `lockstep.connect`, and is the same on all of them. If the
    launcher can replace a lost worker (`--max-restarts`), the others leave the work by an exception, drop all that it
    has made, and begin it again together with the new one. A run that the work opens continues from its newest snapshot
    in memory or checkpoint. Without such a launcher, this only calls `work`.

    Args:
        work: A function without arguments, which makes the model, the optimizer and the loaders again. On an
            accelerator, a lost worker leaves wrong numbers until the exception: save the state by the run.

    Raises:
        Exception: Any exception of the work that no lost worker has caused.
    """
    stay(end_collectives=connections.shut_down)
    while True:
        try:
            return work()
        except Exception as error:
            if not is_interruption(error):
                raise
            for each in on_loss:
                each(error)
        # Outside of the handler, where nothing refers to the interrupted work and its process group any more.
        _leave()
        join_next(while_waiting)


def is_interruption(error: Exception) -> bool:
    """Whether an exception of the work comes from the loss of another worker, or a change of the hosts."""
    if isinstance(error, HostsChangedError):
        return True
    if VERDICT not in vars(error):  # which may take a while, and is asked for several times
        setattr(error, VERDICT, _is_from_loss(error))
    return bool(getattr(error, VERDICT))


def _is_from_loss(error: Exception) -> bool:
    import torch.distributed as dist

    if not connections.is_aborted and not isinstance(error, RuntimeError | LostPeerError | WorldError):
        return False
    # A group of an accelerator may still wait for the lost member, if it is not aborted.
    line = _own_line()
    is_stuck = dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO and connections.abort is None
    seconds = None
    if line is not None and is_lost_peer(error):  # also by an exit with code 0, which ends no generation by itself
        line.enter(MemberState.CUT_OFF)
        seconds = line.limits.loss_news
    return line is not None and not is_stuck and is_over(seconds)


def _leave() -> None:
    import torch.distributed as dist

    connections.end()  # peers may wait for this worker
    if not dist.is_initialized():
        # Of an interrupted init_process_group, torch keeps the number of groups, by which it names the next one.
        dist.distributed_c10d._world.group_count = 0
        return
    group = weakref.ref(dist.group.WORLD)
    connections.leave_groups()
    if group() is not None:  # it ends with what still refers to it, which may take time
        gc.collect()
