"""Allow only tests marked `cold` to start Python from the test process: with torch, each start costs 3 s of a core.

For other tests, `commands` forks programs from a process that has imported torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(sys.executable).parent
STARTED = ("python", "lockstep", "horovodrun", "torchrun")
_started: list[str] = []
reasons: list[str] = []
"""Why programs that were to be forked could not be."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        paths = (Path(os.fsdecode(word)) for word in (arguments[0], *arguments[1]) if word)
        _started.extend(str(path) for path in paths if path.parent == PROGRAMS and path.name.startswith(STARTED))


sys.addaudithook(_note)


@contextmanager
def allowed() -> Iterator[None]:
    """Allow starts of Python within this block, in any test."""
    before = len(_started)
    yield
    del _started[before:]


@pytest.fixture(autouse=True)
def only_marked_tests_start_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test without the mark that starts Python or a program next to it, directly or through another program."""
    yield
    started, why = _started.copy(), "; ".join(reasons)
    _started.clear()
    reasons.clear()
    if started and sys.platform == "linux" and not request.node.get_closest_marker("cold"):
        pytest.fail(f"this test starts {started[0]} really: use tests/support/commands.py, or mark it cold. {why}")
