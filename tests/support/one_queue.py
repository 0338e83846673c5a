"""Run all tests from one queue with pytest-xdist: each process takes the next test when it is free.

A file whose tests share a fixture stays in one process. So do the tests that need their own hosts, which
mostly wait while the other processes compute, and those on simulated GPUs, which fork from a server of their own.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.world.devices import usable_cores

TOGETHER = {
    "tests/cluster/": "hosts",
    "tests/faults/test_network_cut.py": "hosts",
    "tests/faults/test_standstill.py": "hosts",
    "tests/parallel/simgpu/": "simulated GPUs",
}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Default to one process per core, plus one for tests that wait, if folders are tested and -n is not given."""
    is_one_of_them = "PYTEST_XDIST_WORKER" in os.environ  # or a pytest that a test started
    if is_one_of_them or not config.pluginmanager.has_plugin("xdist"):
        return
    if config.option.numprocesses is None and all(Path(word).is_dir() for word in config.args):
        config.option.numprocesses = usable_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign tests one by one, but keep tests that share a fixture in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class OneQueue(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            scope = next((scope for start, scope in TOGETHER.items() if path.startswith(start)), None)
            return scope or (path if _is_shared(config.rootpath / path) else nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Give what a crashed process has left to others; return the test in which it crashed.

            pytest-xdist 3.8 also assigns what is finished, as units without a test, after which a process waits for
            ever, and the test that has crashed.
            """
            work = self.assigned_work[node]
            crashed = next((name for unit in work.values() for name, is_done in unit.items() if not is_done), None)
            for scope, unit in [*work.items()]:
                unit |= {crashed: True} if crashed in unit else {}
                if all(unit.values()):
                    del work[scope]
            super().remove_node(node)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """Give a process its next tests; after a crash, its successor has none until it has collected them.

            pytest-xdist 3.8 fails with a KeyError if two processes crash at the same time.
            """
            if node in self.registered_collections:
                super()._reschedule(node)

    return OneQueue(config, log)


@cache
def _is_shared(path: Path) -> bool:
    """Return whether the tests of a file share a fixture."""
    return 'scope="module"' in path.read_text(encoding="utf-8")
