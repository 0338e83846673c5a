"""Repeat a test in which a worker hung in Gloo: no test can rule that out, and any other failure counts at once.

If a peer dies while a worker posts an operation, Gloo sometimes never returns from the collective, even after all its
connections are shut down (twice in about 700 losses on busy cores). That worker exits after 15 s, or is killed after
Timings.leave, and another one is started, so that fewer workers keep their processes than a test expects.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

ATTEMPTS = 3
HUNG = re.compile(
    r"a collective has not returned 15 s after its connections were shut down|"
    r"killed, because it has not left its generation within 120 s: .*\n.*most recent call first:\n"
    r'  File "[^"]*/torch/(?:autograd/graph|distributed/[^"]*)\.py"'
)
_seen: list[str] = []


def note(output: str) -> None:
    """Remember a hang that a command has printed."""
    _seen.extend(HUNG.findall(output))


def _has_hung(folder: Path) -> bool:
    for path in folder.rglob("*.txt"):
        note(path.read_text(errors="replace"))
    return bool(_seen)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Call a test function again, in another temporary folder, if a worker of it hung."""
    folder: Path | None = pyfuncitem.funcargs.get("tmp_path")
    _seen.clear()
    try:
        return (yield)
    except Exception:
        if folder is None or not _has_hung(folder):
            raise
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for attempt in range(1, ATTEMPTS):
        arguments["tmp_path"] = folder / f"again-{attempt}"
        arguments["tmp_path"].mkdir()
        _seen.clear()
        try:
            assert pyfuncitem.obj(**arguments) is None
        except Exception:
            if attempt == ATTEMPTS - 1 or not _has_hung(arguments["tmp_path"]):
                raise
        else:
            break
    return True
