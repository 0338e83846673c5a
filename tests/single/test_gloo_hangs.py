"""Tests are repeated after a hang in Gloo, and only then."""

from __future__ import annotations

from pathlib import Path

import gloo_hangs
import pytest

HEAD = "lockstep: killed, because it has not left its generation within 120 s: rank 2 is in reduction, at a:1 in b\n"
STACK = 'rank 2, process 3, most recent call first:\n  File "/site-packages/torch/{}.py", line 1, in wait\n'


class _Item:
    """A test that fails once, and what it has printed before."""

    def __init__(self, folder: Path, output: str) -> None:
        self.funcargs, self.folders, self.output = {"tmp_path": folder}, list[Path](), output
        self._fixtureinfo = self
        self.argnames = ("tmp_path",)

    def obj(self, tmp_path: Path) -> None:
        self.folders.append(tmp_path)
        if len(self.folders) == 1:
            (tmp_path / "output.txt").write_text(self.output)
            raise AssertionError(self.output)


def _call(item: _Item) -> object:
    """Call a test as pytest does, with the hook around the call."""
    hook = gloo_hangs.pytest_pyfunc_call(item)  # type: ignore[arg-type]
    next(hook)
    try:
        item.obj(**item.funcargs)
    except AssertionError as error:
        with pytest.raises(StopIteration) as end:
            hook.throw(error)
        return end.value.value
    return None


@pytest.mark.parametrize(
    "output",
    [
        "lockstep: error: a collective has not returned 15 s after its connections were shut down (/c.py:1)",
        HEAD + STACK.format("autograd/graph"),
        HEAD + STACK.format("distributed/distributed_c10d"),
    ],
)
def test_test_is_repeated_after_a_hang_of_gloo(tmp_path: Path, output: str) -> None:
    item = _Item(tmp_path, output)
    assert _call(item)
    assert item.folders == [tmp_path, tmp_path / "again-1"]


@pytest.mark.parametrize("output", ["", HEAD, HEAD + STACK.format("utils/data/dataloader")])
def test_other_failure_of_a_test_counts(tmp_path: Path, output: str) -> None:
    with pytest.raises(AssertionError):
        _call(_Item(tmp_path, output))
