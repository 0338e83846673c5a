"""What `lockstep stacks` does with the answer of another version's launcher."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from lockstep.launch.controller import stack_server


def test_launcher_of_another_version_is_named() -> None:
    worker = {"host": "a", "rank": 0, "pid": 1, "age_s": 2.0}

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps({"command": "lockstep run", "workers": [worker]}).encode())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0lockstep-launcher-{os.getuid()}-{os.getpid()}")
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match=r"runs another version of Lockstep .*unknown field age_s"):
            stack_server.ask(os.getpid())
        thread.join()
