"""What a tethered command inherits."""

from __future__ import annotations

import signal
import subprocess

import pytest

from lockstep.launch.node import parent_death


@pytest.mark.cold
@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGXFSZ])
def test_the_command_does_not_ignore_signals_that_python_ignores(number: signal.Signals) -> None:
    done = subprocess.run(parent_death.command(["sh", "-c", f"kill -{int(number)} $$"]), check=False)
    assert done.returncode == -number
