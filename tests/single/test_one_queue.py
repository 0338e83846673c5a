"""How tests are handed out to processes, with nodes that only record what they get."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from one_queue import pytest_xdist_make_scheduler

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/single/test_one_queue.py::test_{number}" for number in range(12)]


class _Node(SimpleNamespace):
    """A process that runs nothing."""

    __hash__ = object.__hash__
    shutting_down = False

    def __init__(self) -> None:
        super().__init__(gateway=SimpleNamespace(id="gw"), got=[])

    def send_runtest_some(self, indices: list[int]) -> None:
        self.got += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_queue_goes_on_when_two_processes_crash_at_once() -> None:
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(rootpath=ROOT, getvalue=lambda name: ["popen", "popen"], option=option)
    queue = pytest_xdist_make_scheduler(config, SimpleNamespace(loadscopesched=lambda *text: None))
    first: list[Any] = [_Node(), _Node()]
    for node in first:
        queue.add_node(node)
        queue.add_node_collection(node, TESTS)
    queue.schedule()
    assert all(node.got for node in first)
    crashed = [queue.remove_node(node) for node in first]
    assert crashed == [TESTS[node.got[0]] for node in first]

    successors: list[Any] = [_Node(), _Node()]
    for node in successors:
        queue.add_node(node)
    queue.add_node_collection(successors[1], TESTS)  # the other one is still collecting
    queue.schedule()
    assert successors[1].got
    assert not successors[0].got

    queue.add_node_collection(successors[0], TESTS)
    queue.schedule()
    assert successors[0].got
