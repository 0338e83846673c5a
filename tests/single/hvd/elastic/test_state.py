"""Elastic states: what is saved comes back bit by bit, whatever happens to the training in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from staying_node import Node
from time_limits import wait_until
from torch import nn
from wide_optimizer import WideOptimizer

from lockstep.hvd.elastic import ElasticSampler, TorchState
from lockstep.hvd.elastic.state import (
    HostUpdateResult,
    ObjectState,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from lockstep.hvd.exceptions import HostsUpdatedInterrupt
from lockstep.world.generations import ADDED, REMOVED, host_changes

pytestmark = pytest.mark.usefixtures("one_worker")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), amsgrad=True),
    lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(data) - data).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)


def bits(state: Any) -> Any:
    """A state whose tensors are bytes, for comparison."""
    if isinstance(state, torch.Tensor):
        return state.dtype, tuple(state.shape), state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, (list, tuple)) else state


def test_restored_optimizer_state_keeps_its_dtypes() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = WideOptimizer(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()

    step()
    state = TorchState(model=model, optimizer=optimizer)
    saved = bits(optimizer.state_dict())
    for _ in range(2):
        step()
        state.restore()
        assert bits(optimizer.state_dict()) == saved


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_restored_training_matches_the_committed_one(build: Callable[..., torch.optim.Optimizer]) -> None:
    model = new_model()
    optimizer = build(model.parameters())
    train(model, optimizer)
    state = TorchState(model, optimizer, batch=2)
    state.commit()
    committed = bits([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, 1)
    once_more = bits([model.state_dict(), optimizer.state_dict()])
    for _ in range(3):  # the copy outlives its use
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 7
        state.batch = 5
        state.restore()
        assert bits([model.state_dict(), optimizer.state_dict()]) == committed
        assert state.batch == 2
        assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer, 1)
        assert bits([model.state_dict(), optimizer.state_dict()]) == once_more


def test_without_a_commit_the_beginning_comes_back() -> None:
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model, optimizer, epoch=0)
    beginning = bits([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer)
    state.epoch = 3
    state.restore()
    assert bits([model.state_dict(), optimizer.state_dict()]) == beginning
    assert state.epoch == 0


def test_objects_are_saved_as_deep_copies() -> None:
    state = TorchState(history={"loss": [1.0]})
    state.history["loss"].append(2.0)
    state.commit()
    for _ in range(2):
        state.history["loss"].append(3.0)
        state.restore()
        assert state.history == {"loss": [1.0, 2.0]}


def test_assigning_a_handled_attribute_saves_it_again() -> None:
    old, new = new_model(), nn.Linear(2, 2)
    state = TorchState(old, batch=1)
    state.model = new
    weight = new.weight.detach().clone()
    with torch.no_grad():
        new.weight.zero_()
        old[0].weight.zero_()
    state.restore()
    assert state.model is new
    assert torch.equal(new.weight, weight)
    assert not old[0].weight.any()


def test_assigning_an_object_does_not_save_it() -> None:
    state = TorchState(batch=1)
    state.batch = 2
    state.other = 3
    state.restore()
    assert (state.batch, state.other) == (1, 3)


def test_schedulers_and_scalers_keep_their_ties() -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = TorchState(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    optimizer.step()
    scheduler.step()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    state.restore()
    state.sync()
    assert state.scheduler is scheduler
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], scaler.get_scale()) == (0, 1.0, 4.0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_sampler_goes_back_to_what_was_processed_at_the_commit() -> None:
    sampler = ElasticSampler(range(10))
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 4)
    state.commit()
    committed = sampler.remaining_indices[4:]
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.processed_num == 4
    assert list(sampler) == committed


def test_a_reset_shares_out_the_samples_and_calls_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, calls = ElasticSampler(range(10), shuffle=False), list[str]()
    state = TorchState(sampler=sampler)
    state.register_reset_callbacks([lambda: calls.append(f"first, {len(sampler)} samples")])
    state.register_reset_callbacks([lambda: calls.append("second")])
    monkeypatch.setattr("lockstep.hvd.elastic.sampler.size", lambda: 5)
    state.on_reset()
    assert calls == ["first, 2 samples", "second"]


def test_a_sync_takes_what_is_there_and_saves_it() -> None:
    model = new_model()
    state = TorchState(model, batch=0)
    with torch.no_grad():
        model[0].weight.fill_(2)
    state.batch = 7
    state.sync()
    with torch.no_grad():
        model[0].weight.fill_(3)
    state.batch = 8
    state.restore()
    assert (state.batch, model[0].weight.unique().item()) == (7, 2)


def test_a_sync_that_breaks_off_leaves_the_commit_whole() -> None:
    model = new_model()

    class Lost(StateHandler):
        def save(self) -> None:
            pass

        def restore(self) -> None:
            pass

        def sync(self) -> None:
            for value in model.state_dict().values():  # as rank 0's, which has arrived
                value.zero_()
            raise ConnectionError

    registry = copy.copy(get_handler_registry())
    set_handler_registry([*registry, (set, Lost)])
    try:
        state = TorchState(model, batch=0, lost=set())
    finally:
        set_handler_registry(registry)
    committed = bits(model.state_dict())
    with pytest.raises(ConnectionError):
        state.sync()
    state.restore()
    assert bits(model.state_dict()) == committed


def test_object_states_take_rank_0s_values() -> None:
    state = ObjectState(lambda values: {**values, "epoch": 4}, lambda: 1, epoch=2, batch=1)
    state.sync()
    state.epoch = state.batch = 0
    state.restore()
    assert (state.epoch, state.batch) == (4, 1)


def test_a_users_handler_goes_before_the_others() -> None:
    class Counting(StateHandler):
        saved = 0

        def save(self) -> None:
            self.saved = self.value["count"]

        def restore(self) -> None:
            self.value["count"] = self.saved

        def sync(self) -> None:
            self.value["count"] += 100

    registry = copy.copy(get_handler_registry())
    set_handler_registry([(dict, Counting), *registry])
    try:
        counter = {"count": 1}
        state = TorchState(counter=counter)
        state.sync()
        counter["count"] = 0
        state.restore()
        assert state.counter is counter
        assert counter == {"count": 101}
    finally:
        set_handler_registry(registry)


@pytest.mark.parametrize("result", list(HostUpdateResult)[1:])
def test_script_may_report_changed_hosts_itself(result: HostUpdateResult) -> None:
    state = TorchState(batch=0)
    state.on_hosts_updated(5.0, HostUpdateResult.no_update)
    state.check_host_updates()
    assert state._host_messages.empty()  # scripts ask Horovod's queue
    state.on_hosts_updated(6.0, result)
    assert not state._host_messages.empty()
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is (result is HostUpdateResult.removed)
    state.on_hosts_updated(6.0, result)  # no news
    state.check_host_updates()
    state.on_hosts_updated(7.0, result)
    state.on_reset()  # what was told of the former workers
    state.check_host_updates()


@pytest.mark.parametrize(("changes", "skip_sync"), [(ADDED, False), (REMOVED, True), (ADDED | REMOVED, False)])
def test_changed_hosts_interrupt_once(node: Node, changes: int, skip_sync: bool) -> None:
    node.stay()
    state = TorchState(batch=0)
    state.commit()
    for change in (ADDED, REMOVED):
        if changes & change:
            node.tell(change=change)
    wait_until(lambda: host_changes(0)[1] == changes)
    state.batch = 1
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.batch = 2
    state.restore()
    assert state.batch == 1  # saved before the interrupt
    state.check_host_updates()
