"""What a run says before it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.train.run import _crowded_hosts


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        ([["a", [0, 1]], ["a", [0, 1]]], []),
        ([["a", [0, 1]]] * 3, ["a: warning: 3 workers share 2 cores and will slow each other down"]),
        ([["a", [0]], ["a", [1]], ["a", [2]]], []),  # each is bound to a core of its own
        (
            [["a", [0, 1]], ["b", [5]], ["b", [5]]],
            ["b: warning: 2 workers share 1 core and will slow each other down"],
        ),
    ],
)
def test_hosts_with_fewer_cores_than_workers_are_named(
    told: list[Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world: Any = SimpleNamespace(size=len(told), gather=lambda own: told)
    monkeypatch.delenv("HOROVOD_HOSTNAME", raising=False)
    assert _crowded_hosts(world) == lines
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")  # Lockstep's launcher has said it
    assert _crowded_hosts(world) == []
