"""When a worker's state is recorded, and that reading it never waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.diagnosis.observed_steps import UNKNOWN, TrainedState
from lockstep.script_check.state_recorder import MAX_LINE, Pace, StateRecorder
from lockstep.world import accelerator


def _recorder(pace: Pace, read_later: Any = accelerator.read_later) -> StateRecorder:
    return StateRecorder(read_later, accelerator.processor, lambda: None, pace)


def _optimizer(width: int = 2) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(width))
    parameter.grad = torch.ones(width)
    return torch.optim.SGD([parameter], lr=0.5)


def _step(recorder: StateRecorder, *optimizers: torch.optim.Optimizer, number: int = 1) -> list[TrainedState]:
    states = []
    for _ in range(number):
        for optimizer in optimizers:
            recorder.step_begins(optimizer)
            optimizer.step()
            recorder.step_ends(optimizer)
        states.append(recorder.take())
    return [state for state in states if state]


def test_states_are_of_the_first_step_and_then_of_multiples() -> None:
    recorder, optimizer = _recorder(Pace(3, 10, 0.0, 1e9)), _optimizer()
    states = _step(recorder, optimizer, number=31)
    assert [state.step for state in states] == [3, 10, 20, 30]
    assert len({state.began for state in states}) == 1
    assert len({state.weights for state in states}) == 4
    assert {(state.rate, state.exchanges, state.is_joined) for state in states} == {(0.5, UNKNOWN, False)}


@pytest.mark.parametrize("pace", [Pace(1, 10, seconds=1e9), Pace(1, 10, 0.0, share=0.0)])
def test_states_become_rarer_if_steps_are_fast_or_states_slow(pace: Pace) -> None:
    recorder, optimizer = _recorder(pace), _optimizer()
    _step(recorder, optimizer, number=1000)
    assert recorder._every >= 320


def test_states_are_kept_until_a_slow_exchange_has_sent_them() -> None:
    recorder, optimizer = _recorder(Pace(1, 10, 0.0, 1e9)), _optimizer()
    recorder.keep_each(1e9)
    assert [state.step for state in _step(recorder, optimizer, number=1000)] == [1]


def test_line_of_a_script_is_limited_by_its_bytes() -> None:
    recorder, optimizer = _recorder(Pace(1, 1, 0.0, 1e9)), _optimizer()
    text = "recorder.step_begins(optimizer); optimizer.step(); recorder.step_ends(optimizer)"
    exec(compile(text, "\u540d" * MAX_LINE, "exec"), {"recorder": recorder, "optimizer": optimizer})
    state = recorder.take()
    assert state.line.endswith("\u540d:1")
    assert len(state.line) < MAX_LINE / 2


def test_all_optimizers_are_of_one_state() -> None:
    recorder, first, second = _recorder(Pace(2, 1, 0.0, 1e9)), _optimizer(), _optimizer()
    before, after = _step(recorder, first, second, number=3)
    second.param_groups[0]["params"][0].data += 1
    (changed,) = _step(recorder, first)
    assert (before.step, after.step, changed.step) == (2, 3, 4)
    alone = _recorder(Pace(4, 1, 0.0, 1e9))
    assert _step(alone, _optimizer(), number=4)[0].weights != changed.weights


def test_a_training_with_another_optimizer_begins_again() -> None:
    recorder, optimizer = _recorder(Pace(2, 10, 0.0, 1e9)), _optimizer()
    _step(recorder, optimizer, number=9)
    del optimizer
    assert [state.step for state in _step(recorder, _optimizer(3), number=9)] == [2]


def test_values_not_written_yet_are_not_waited_for() -> None:
    written: list[list[int]] = []

    def read_later(tensor: torch.Tensor) -> Callable[[], list[int] | None]:
        return lambda: tensor.tolist() if written else None

    recorder, optimizer = _recorder(Pace(1, 1000), read_later), _optimizer()
    assert not _step(recorder, optimizer, number=3)
    written.append([])
    state = recorder.take()
    assert state.step == 1
    assert recorder.take() is None


def test_sharded_weights_are_not_compared() -> None:
    optimizer = _optimizer()
    cast(Any, optimizer.param_groups[0]["params"][0])._fsdp_flattened = True
    assert not _step(_recorder(Pace(1, 1, 0.0, 1e9)), optimizer, number=3)


@pytest.mark.parametrize("sets_epoch", [True, False])
def test_three_passes_of_one_epoch_have_one_order(sets_epoch: bool) -> None:
    sampler = DistributedSampler(TensorDataset(torch.ones(20)), num_replicas=2, rank=0)
    loader = DataLoader(sampler.dataset, 2, sampler=sampler)
    recorder, optimizer = _recorder(Pace(5, 5, 0.0, 1e9)), _optimizer()
    seen = []
    for epoch in range(4):
        if sets_epoch:
            sampler.set_epoch(epoch)
        seen += [state.repeats_order for state in _step(recorder, optimizer, number=5)]
        recorder.epoch_ends(iter(loader))
    assert seen == [False, False, False, not sets_epoch]
