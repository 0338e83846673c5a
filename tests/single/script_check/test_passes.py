"""What is recorded of the passes of loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.script_check.passes import PassRecorder


class Iterator:
    _dataset = (0, 1)


def test_a_batch_that_fails_leaves_the_indices_of_the_next_one() -> None:
    sent: list[dict[str, Any]] = []
    recorder, iterator = PassRecorder(0, sent.append), Iterator()
    recorder.batch_is_requested(iterator, [0])
    recorder.batch_is_requested(iterator, [1])
    recorder.batch_fails(iterator)
    recorder.batch_arrives(iterator, torch.zeros(1), True)
    recorder.backward_begins(None)
    recorder.loader_ends(iterator)
    assert [(each["indices"], each["sizes"]) for each in sent] == [([1], [1])]


@pytest.mark.parametrize("raises", [False, True])
def test_evaluations_before_an_exception_are_not_judged(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    recorder, iterator = PassRecorder(0, sent.append), Iterator()
    recorder.batch_is_requested(iterator, [0])
    recorder.batch_arrives(iterator, torch.zeros(1), False)
    recorder.loader_ends(iterator)
    if raises:
        monkeypatch.setattr("sys.last_type", ValueError, raising=False)
    recorder.finish()
    assert len(sent) == (not raises)


@pytest.mark.parametrize(("is_read_ahead", "trains"), [(True, True), (False, False)])
def test_a_batch_read_ahead_belongs_to_the_backward_pass(is_read_ahead: bool, trains: bool) -> None:
    sent: list[dict[str, Any]] = []
    recorder, iterator = PassRecorder(0, sent.append), Iterator()
    recorder.batch_is_requested(iterator, [0])
    recorder.batch_arrives(iterator, torch.zeros(1), True)
    recorder.calls += not is_read_ahead
    recorder.loader_ends(iterator)
    recorder.calls += is_read_ahead
    recorder.backward_begins(None)
    assert [each["is_evaluation"] for each in sent] == [not trains]
    assert recorder.epochs == trains
