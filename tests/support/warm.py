"""The process that has imported torch, and forks a process for each program that `commands` runs."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forked_programs import fork_python_programs, give_descriptors, open_streams, program_of, python_path, run

from lockstep.launch.forking import forked_worker
from lockstep.launch.forking.preloaded_process import receive, send
from lockstep.launch.forking.python_command import PRELOADED_FOR_LOCKSTEP, NotForkedError
from lockstep.launch.node.processes import end_with_parent

MODULES = (*PRELOADED_FOR_LOCKSTEP, "lockstep.hvd")


def serve() -> None:
    """Serve on the socket given as the first argument; run each requested program in a forked process."""
    descriptor, parent = map(int, sys.argv[1:3])
    sys.path.pop()
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)
    own = dict(os.environ)
    loaded = forked_worker.load(MODULES)
    loaded.path = [entry for entry in loaded.path if entry not in python_path(own, os.getcwd())]
    with socket.socket(fileno=descriptor) as listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exited attendants are reaped automatically
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = _attend(connection, own)
    fork_python_programs(loaded, own)
    os._exit(run(order["words"], order["environment"], order["folder"], loaded))


def _attend(connection: socket.socket, own: Mapping[str, str]) -> dict[str, Any]:
    """Fork the requested process, forward signals to it and report its exit code; return only in the forked process."""
    order, streams = receive(connection)
    assert order is not None
    try:
        program = program_of(order["command"], order["environment"], own)
    except NotForkedError as error:
        send(connection, {"cold": str(error)})
        os._exit(0)
    attendant = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        end_with_parent(attendant, signal.SIGKILL)
        give_descriptors(streams)
        open_streams(program, order["environment"])
        return order | {"words": program.program}
    send(connection, {"pid": pid})
    for each in streams:
        os.close(each)
    with selectors.DefaultSelector() as selector:
        has_ended = os.pidfd_open(pid)
        selector.register(has_ended, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        while all(key.fileobj != has_ended for key, _ in selector.select()):
            message, _ = receive(connection)
            if message is None:
                selector.unregister(connection)
            os.kill(pid, message["signal"] if message else signal.SIGKILL)
    with suppress(OSError):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        send(connection, {"code": end.si_status if end.si_code == os.CLD_EXITED else -end.si_status})
        while connection.recv(1):  # until the client no longer uses the pid
            pass
    os.waitpid(pid, 0)
    os._exit(0)
