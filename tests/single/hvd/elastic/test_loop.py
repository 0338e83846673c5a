"""The loop of hvd.elastic.run, on one worker, with failures made to measure."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from staying_node import Node

from lockstep.hvd import basics
from lockstep.hvd.elastic import TorchState, loop, run, run_fn
from lockstep.hvd.elastic.state import ObjectState
from lockstep.hvd.engine import context as engine
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.world import MemberState


class Told(ObjectState):
    """A state that tells what is done to it."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0, batch=0)
        self.calls: list[str] = []

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def on_reset(self) -> None:
        self.calls.append("on_reset")
        super().on_reset()


def failing(state: Told, *errors: BaseException) -> Callable[[Told], str]:
    """A training function that raises the errors, one a call, and then ends."""
    rest = list(errors)

    def train(state: Told) -> str:
        state.calls.append("train")
        state.batch += 1
        if rest:
            raise rest.pop(0)
        return "done"

    return run_fn(train, lambda: state.calls.append("reset"))


def test_a_lost_worker_costs_what_was_not_committed() -> None:
    state = Told()
    assert failing(state, HorovodInternalError("gone"))(state) == "done"
    assert state.calls == ["sync", "train", "restore", "reset", "on_reset", "sync", "train"]
    assert state.batch == 1


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("is_over", [True, False])
def test_a_device_error_after_a_loss_checks_the_device(
    is_over: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[str]()
    monkeypatch.setattr(engine.current, "end_device_work", lambda before_exit: checked.append("device"))

    @run
    def train(state: TorchState) -> None:
        if is_over:
            node.wait_until(lambda: node.workers.state(7) == MemberState.STAYS)  # it is connected
            node.tell(over=True)
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(TorchState(batch=0))
    assert checked == ["device"] * is_over


def test_changed_hosts_cost_nothing() -> None:
    state = Told()
    assert failing(state, HostsUpdatedInterrupt())(state) == "done"
    assert state.calls == ["sync", "train", "reset", "on_reset", "sync", "train"]
    assert state.batch == 2


def test_removed_hosts_need_no_sync_and_later_failures_do() -> None:
    state = Told()
    assert failing(state, HostsUpdatedInterrupt(skip_sync=True), HorovodInternalError())(state) == "done"
    again = ["reset", "on_reset"]
    assert state.calls == ["sync", "train", *again, "train", "restore", *again, "sync", "train"]


@pytest.mark.parametrize("name", ["sync", "on_reset"])
def test_a_worker_lost_during_the_restart_is_met_by_another(name: str) -> None:
    failures = [HorovodInternalError(), HorovodInternalError()]

    def breaking(self: Told) -> None:
        getattr(Told, name)(self)
        if "restore" in self.calls and failures:
            raise failures.pop()

    state = type("Breaking", (Told,), {name: breaking})()
    assert failing(state, HorovodInternalError())(state) == "done"
    assert not failures
    assert state.calls.count("reset") == 3
    assert state.calls[-2:] == ["sync", "train"]


def test_other_errors_are_the_callers() -> None:
    state = Told()
    with pytest.raises(ZeroDivisionError):
        failing(state, ZeroDivisionError())(state)
    assert state.calls == ["sync", "train"]


def test_decorated_function_keeps_name_arguments_and_result() -> None:
    @run
    def train(state: TorchState, offset: int, *, scale: int = 1) -> int:
        """Train."""
        return (state.batch + offset) * scale

    basics.init()
    try:
        assert train(TorchState(batch=2), 3, scale=10) == 50
    finally:
        basics.shutdown()
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert list(inspect.signature(train).parameters) == ["state", "offset", "scale"]


def test_one_worker_recovers_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod starts again, also where that fails twice, and the training ends as an undisturbed one does."""
    basics.init()
    starts, usual = [], basics.init

    def init() -> None:
        starts.append(basics.is_initialized())
        if len(starts) < 3:
            raise HorovodInternalError("a worker was lost while joining")
        usual()

    monkeypatch.setattr("lockstep.hvd.elastic.loop.init", init)

    def training(failing_at: int | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @run
        def train(state: TorchState) -> None:
            nonlocal failing_at
            for state.batch in range(state.batch, 8):  # noqa: B020 (as Horovod's documentation writes it)
                if state.batch % 3 == 0:
                    state.commit()
                optimizer.zero_grad()
                model(torch.full((2, 3), float(state.batch))).sum().backward()
                if state.batch == failing_at:
                    failing_at = None
                    raise HorovodInternalError("a worker was lost")
                optimizer.step()

        train(TorchState(model, optimizer, batch=0))
        return model.weight.detach().clone()

    try:
        assert torch.equal(training(failing_at=5), training(failing_at=None))
    finally:
        basics.shutdown()
    assert starts == [False, False, False]


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("stays", [True, False])
def test_workers_with_the_state_begin_again_if_a_new_one_leads(
    stays: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stays:
        request.getfixturevalue("node")
    answers = iter([[], [(True, False)], []])  # of rank 0, if it is another worker
    monkeypatch.setattr(loop, "allgather_object", lambda own: [*next(answers), own])
    state = Told()
    train = failing(state, HostsUpdatedInterrupt())
    if stays:
        assert train(state) == "done"
        assert state.calls.count("restore") == 1
    else:
        with pytest.raises(RuntimeError, match="rank 0 is a new worker"):
            train(state)
