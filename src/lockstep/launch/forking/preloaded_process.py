"""The preloaded process: imports what a host's workers need, once, and forks them.

The node process starts it with the workers' environment, interpreter and flags (`lockstep.launch.node.worker_starter`).
An intermediate process forks the workers and exits, so that the node process adopts them. They are then like its own
children: it reaps them, and they die with it. This process uses no device, creates no process group, and has no Python
thread.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lockstep.launch.forking import forked_worker
from lockstep.launch.forking.orders import NO_TORCH, receive, send
from lockstep.launch.node.hardware import bind_worker
from lockstep.launch.node.processes import end_with_parent
from lockstep.world import accelerator

RECORD = struct.Struct("=qq")  # a process's number and pid


def main() -> None:
    """Serve the node process until it exits; in a forked process, run the worker. `sys.argv`: socket, parent's pid."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)
    first, _ = receive(connection)
    if first is None:
        os._exit(0)
    forked_worker.show_as(["lockstep: preloaded for workers"])
    sys.argv = first["arguments"]  # the workers' arguments
    try:
        loaded = forked_worker.load(first["modules"])
        obstacle = _obstacle()
    except Exception as error:
        obstacle = f"{first['modules'][0]} cannot be preloaded ({type(error).__name__}: {error})"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each worker would write the buffer
    send(connection, {"obstacle": obstacle})
    if obstacle:
        os._exit(0)
    order = _serve(connection, parent)
    forked_worker.run(order["command"], order["environment"], order["folder"], loaded)


def _obstacle() -> str:
    """Return why this process must not fork after its imports, or ""."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"an import started the thread {others[0]}"
    if not accelerator.outlives_fork():
        return "torch for XPU is not known to work after a fork"
    return ""


def _serve(connection: socket.socket, parent: int) -> dict[str, Any]:
    """Fork the processes of each message. Return only in a worker, with its order."""
    while True:
        orders, descriptors = receive(connection)
        if orders is None:
            os._exit(0)
        number, pids = _fork(len(orders["processes"]))
        if number is not None:
            connection.close()
            order: dict[str, Any] = orders["processes"][number]
            _begin(order, descriptors, parent)
            return order
        send(connection, {"pids": pids})
        for each in descriptors:
            os.close(each)


def _fork(count: int) -> tuple[int | None, list[int]]:
    """Fork processes that are not children of this process.

    Returns:
        In this process, None and the pids, which are empty if the system's limit is reached. In each new process, its
        number, once the node process has adopted it.
    """
    reading, writing = os.pipe()
    adopted, adopt = os.pipe()
    between = _fork_once()
    if between == 0:
        number = next((number for number in range(count) if _fork_once() == 0), None)
        if number is None:
            os._exit(0)
        os.setsid()  # before the pid is known elsewhere, so that a signal to the session reaches this process
        os.write(writing, RECORD.pack(number, os.getpid()))
        for each in (reading, writing, adopt):
            os.close(each)
        if not os.read(adopted, 1):  # the fork failed for another process
            os._exit(1)
        os.close(adopted)
        return number, []
    os.close(writing)
    os.close(adopted)
    pids = dict(RECORD.unpack(record) for record in iter(lambda: os.read(reading, RECORD.size), b""))
    if between:
        os.waitpid(between, 0)
    if len(pids) < count:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        pids.clear()
    else:
        os.write(adopt, bytes(count))
    os.close(reading)
    os.close(adopt)
    return None, [pids[number] for number in sorted(pids)]


def _fork_once() -> int | None:
    """Call os.fork; return None if the system's limit for processes is reached."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads. There is no Python thread; OpenBLAS stops its threads before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError:
            return None


def _begin(order: Mapping[str, Any], descriptors: Sequence[int], parent: int) -> None:
    """Set up a forked process like a child of the node process: streams, CPU binding, parent-death signal."""
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    own = [descriptors[index] for index in order["descriptors"]]
    serves = order["kind"] == "store"
    stdin = nothing if serves or not os.isatty(own[1]) else own[1]
    for number, descriptor in enumerate((nothing, nothing, nothing) if serves else (stdin, *own)):
        os.dup2(descriptor, number)
    for each in {nothing, *descriptors}.difference(own if serves else ()):
        os.close(each)
    if serves:
        serve_store(own[0], order["address"], order["port"])
    bind_worker(order["bind"], order["environment"])


def serve_store(listener: int, address: str, port: int) -> NoReturn:
    """Serve the job's store, torch's TCPStore, on a listening socket until this process is killed.

    The first host's node process opens the socket. This process is forked together with the workers. If each worker
    starts its own interpreter, it is started at the first connection, so that a job without torch does not import it.
    """
    forked_worker.show_as(["lockstep: the job's store"])
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":  # which the workers have: they connect
            raise SystemExit(NO_TORCH) from None
        store = None  # a torch without TCPStore, whose workers use no store
    else:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while True:
        signal.pause()
        assert store or listener  # keeps the references: both are served while they are referenced
