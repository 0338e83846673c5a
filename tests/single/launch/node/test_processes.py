"""Sockets that killed processes have left are distinguished from those in use."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from lockstep.launch.node.processes import remove_dead_sockets, socket_folders


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Path:
    with tempfile.TemporaryDirectory() as folder:  # short, as the names of sockets must be
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def _listener(folder: Path) -> socket.socket:
    folder.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "listener-1"))
    server.listen()
    return server


def test_only_folders_of_dead_sockets_go(temporary: Path) -> None:
    _listener(temporary / "pymp-dead").close()
    (temporary / "pymp-empty").mkdir()
    (temporary / "pymp-file").mkdir()
    (temporary / "pymp-file" / "data").touch()
    _listener(temporary / "other").close()
    with _listener(temporary / "pymp-living") as server:
        server.setblocking(False)
        remove_dead_sockets(set())
        with pytest.raises(BlockingIOError):
            server.accept()  # it has noticed nothing
    assert sorted(path.name for path in temporary.iterdir()) == ["other", "pymp-empty", "pymp-file", "pymp-living"]


def test_what_is_older_than_the_job_stays(temporary: Path) -> None:
    _listener(temporary / "pymp-old").close()
    earlier = socket_folders()
    _listener(temporary / "pymp-new").close()
    os.utime(temporary / "pymp-new", (1, 1))  # the clock was set back since
    remove_dead_sockets(earlier)
    assert [path.name for path in temporary.iterdir()] == ["pymp-old"]
