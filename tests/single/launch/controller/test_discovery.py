"""Hosts from a discovery script."""

from __future__ import annotations

import threading

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller.discovery import discover
from lockstep.launch.node import parent_death
from lockstep.launch.plan.hosts import Host


@pytest.fixture(autouse=True)
def plain_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the script without the Python process that ends it with this one."""
    monkeypatch.setattr(parent_death, "command", list)


def test_daemon_of_a_script_does_not_delay_its_answer() -> None:
    assert discover("echo a:2; sleep 1000 & echo b >&2", None) == (Host("a", 2),)


@pytest.mark.parametrize(
    ("script", "message"),
    [("yes", "printed more than 1,048,576 bytes"), ("yes >&2", "printed more"), ("echo no >&2; exit 3", "code 3: no")],
)
def test_script_that_fails_is_an_error(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        discover(script, None)


def test_script_ends_when_the_job_does() -> None:
    end = threading.Event()
    end.set()
    with pytest.raises(ConfigError, match="took longer"):
        discover("sleep 1000", None, end)
