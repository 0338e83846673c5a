"""A user's script that says how many slots there are."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller import discovery
from lockstep.launch.controller.discovery import Discovery, discover
from lockstep.launch.node import parent_death
from lockstep.launch.plan.hosts import Host


@pytest.mark.cold
def test_slow_script_is_killed_with_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SCRIPT_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"took longer than 0\.5 s"):
        Discovery(partial(discover, "sleep 30 & sleep 30", None))
    assert time.monotonic() - began < 10


@pytest.mark.cold
def test_bytes_that_are_no_text_are_an_error_like_others() -> None:
    with pytest.raises(ConfigError, match="host:slots"):
        Discovery(partial(discover, r"printf '\377\n'", None))


@pytest.fixture
def untied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts by the shell alone, which starts no Python."""
    monkeypatch.setattr(parent_death, "command", list)


def _ends(pid: Path) -> bool:
    """Whether a process, named in a file, ends before the script's time is over."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(discovery.SCRIPT_SECONDS / 2)
    return not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.usefixtures("untied")
def test_a_daemon_that_keeps_the_streams_open_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        assert discover(f"setsid sleep 1000 & echo $! >{pid}; echo localhost:2", None) == (Host("localhost", 2),)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("untied")
def test_endless_output_is_bounded_and_its_process_killed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"printed more than 1,048,576 bytes"):
        discover("yes localhost:2", None)
    pid = tmp_path / "pid"
    assert discover(f"yes >&2 & echo $! >{pid}; echo localhost:2", None) == (Host("localhost", 2),)
    assert _ends(pid)


@pytest.mark.usefixtures("untied")
def test_script_still_running_is_killed_with_its_descendants(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    later = f"sleep 1000 & echo $! >{pid}.part; mv {pid}.part {pid}; wait"
    script = f"if test -e {tmp_path}/asked; then {later}; fi; touch {tmp_path}/asked; echo localhost:2"
    found = Discovery.by_script(script, None)
    while not pid.exists():
        time.sleep(0.01)
    try:
        found.stop()
        assert _ends(pid)
        assert found.hosts == (Host("localhost", 2),)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
