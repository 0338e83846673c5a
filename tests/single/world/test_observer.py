"""The observer's parts that need no hooks of torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_modules

from lockstep.diagnosis.loaded_samples import first_length
from lockstep.diagnosis.phases import BEFORE_BACKWARD
from lockstep.world.observer import Observer
from lockstep.world.step_clock import DeviceClock


class TimeLimitError(Exception):
    """Raised by the program's own handler of a signal."""


def _raise(*_: object) -> None:
    raise TimeLimitError


def test_an_exception_of_a_signals_handler_is_the_programs() -> None:
    observer = Observer()
    before = signal.signal(signal.SIGUSR1, _raise)
    try:
        with pytest.raises(TimeLimitError):
            observer.guard(lambda: os.kill(os.getpid(), signal.SIGUSR1))()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert observer.trains_here()


def test_an_error_in_a_hook_turns_the_observer_off(capsys: pytest.CaptureFixture[str]) -> None:
    observer = Observer()
    observer.guard(_raise)()
    assert "this worker is not observed any more: TimeLimitError" in capsys.readouterr().err
    assert not observer.trains_here()


def test_a_thread_that_fetches_batches_begins_no_phase() -> None:
    observer = Observer()
    observer.take_step(None)  # starts the first step that is timed
    for thread in (threading.Thread(target=observer.batch_is_awaited, args=(True,)) for _ in range(2)):
        thread.start()
        thread.join()
    observer.take_step(None)
    observer.batch_is_awaited(True)
    observer.take_step(None)
    observer.batch_is_awaited(False)  # of an evaluation
    observer.take_step(None)
    phases = [set(step) for step in observer.clock.take()]
    assert phases == [{BEFORE_BACKWARD}, {BEFORE_BACKWARD, "data_wait"}, {BEFORE_BACKWARD}]


MODEL, WEIGHT, INPUTS = torch.nn.Linear(4, 1), torch.ones(4, requires_grad=True), torch.ones(2, 4)


def _evaluate_first() -> torch.Tensor:
    with torch.no_grad():
        MODEL(INPUTS)
    return INPUTS @ WEIGHT


def _call_in_another_thread() -> torch.Tensor:
    thread = threading.Thread(target=MODEL, args=(INPUTS,))
    thread.start()
    thread.join()
    return INPUTS @ WEIGHT


def _train(observer: Observer, forward: Callable[[], torch.Tensor], steps: int = 3) -> set[str]:
    """Take steps as the hooks report them, and return the phases of the last one."""
    for _ in range(steps):
        loss = forward().sum()
        observer.backward_begins(loss)
        loss.backward()
        observer.backward_ends()
        observer.take_step(None)
    phases: set[str] = {*observer.clock.take()[-1]}
    observer.turn_off()
    assert not torch_modules._global_forward_pre_hooks
    return phases


@pytest.mark.parametrize(
    ("forward", "is_seen"),
    [
        (lambda: MODEL(INPUTS), True),
        (lambda: torch.nn.Sequential(torch.nn.ReLU(), MODEL)(INPUTS), True),
        (lambda: torch.nn.ReLU()(INPUTS) @ WEIGHT, False),  # such as an augmentation
        (_evaluate_first, False),
        (_call_in_another_thread, False),
    ],
)
def test_a_forward_pass_without_a_loader_begins_at_a_call(forward: Callable[[], torch.Tensor], is_seen: bool) -> None:
    assert ("forward" in _train(Observer(), forward)) == is_seen


def test_modules_of_compiled_programs_get_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer()
    assert "forward" not in _train(observer, lambda: observer.module_is_compiled() or MODEL(INPUTS))  # type: ignore[func-returns-value]
    counters = importlib.import_module("torch._dynamo.utils").counters
    monkeypatch.setitem(counters, "frames", {"total": 1})
    assert "forward" not in _train(Observer(), lambda: MODEL(INPUTS))


def test_steps_that_are_said_late_start_all_counts_again() -> None:
    observer = Observer()
    for _ in range(3):
        observer.counts.steps += 1
        observer.step_is_counted()
    observer.publish()
    for _ in range(2):
        observer.take_step(5)
    observer.publish()
    published = observer.counts.published
    assert (published.steps, published.samples) == (2, 10)
    assert (published.interval_steps, published.interval_samples) == (1, 5)
    assert published.steps_per_second > 0


class FusedOptimizer:
    """What GradScaler leaves on an optimizer that skips steps by itself."""

    found_inf = torch.tensor(1.0)
    param_groups = ()


def test_first_steps_that_are_all_skipped_are_published() -> None:
    observer, optimizer = Observer(), FusedOptimizer()
    for _ in range(2):
        observer.step_begins(optimizer)
        observer.step_ends(optimizer)
    observer.finish()
    observer.publish()
    assert (observer.counts.steps, observer.counts.published.interval_steps) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the I/O of processes")
def test_thread_that_samples_io_ends_with_the_job() -> None:
    observer, running = Observer(), list[list[str]]()
    observer.count_io()
    before = threading.enumerate()
    for happens in (observer.step_is_counted, observer.finish):
        happens()
        running.append([thread.name for thread in threading.enumerate() if thread not in before])
    assert running == [["lockstep-io"], []]


@pytest.mark.parametrize(("hooks", "exchange"), [([], "ddp"), ([("hook", None)], "ddp hook"), (None, "")])
def test_the_facts_of_a_program_are_published(hooks: list[Any] | None, exchange: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    observer = Observer()
    if hooks is not None:
        model._comm_hooks = hooks  # type: ignore[assignment]
        observer.wrapper_is_made(model, model)
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(2):
        observer.step_begins(optimizer)
        observer.step_ends(optimizer)
    observer.publish()
    facts = observer.counts.published.facts
    assert (facts.gradient_bytes, facts.element_bytes, facts.tensors, facts.exchange) == (32, 4, 2, exchange)
    assert (facts.threads, facts.loader_processes) == (torch.get_num_threads(), -1)
    assert 0 <= facts.free_cores <= facts.cores


class CapturingClock(DeviceClock):
    """A clock of a device whose stream captures a graph."""

    @property
    def has_time(self) -> bool:
        return False


class Publishing(Observer):
    """An observer that publishes by an exception."""

    def publish(self) -> None:
        raise TimeLimitError


def test_nothing_is_read_while_a_graph_is_captured() -> None:
    observer, optimizer = Publishing(), FusedOptimizer()
    observer.counts.report_seconds = 1e-9  # each step is due
    observer.clock.clock = CapturingClock(torch.device("cpu"))
    for _ in range(3):
        observer.step_begins(optimizer)
        observer.step_ends(optimizer)
    observer.counts.subtract_skipped(unread=0)
    assert observer.counts.steps == 3
    observer.clock.clock = DeviceClock(torch.device("cpu"))
    observer.step_begins(optimizer)
    with pytest.raises(TimeLimitError):
        observer.step_ends(optimizer)
    observer.counts.subtract_skipped(unread=0)
    assert observer.counts.steps == 3  # this one was skipped


class Lazy(Mapping[str, Any]):
    """A batch that loads its items when they are asked for."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.loaded.append(name)
        return torch.zeros(3, 2)

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


def test_the_length_of_a_batch_is_its_first_tensors() -> None:
    lazy = Lazy()
    assert first_length({"ids": ["a", "b"], "inner": [None, lazy], "labels": torch.zeros(4)}) == 3
    assert lazy.loaded == ["a"]
    assert first_length([[], {}, "text", torch.tensor(1.0)]) == 1
    assert first_length(["text"] * 5000) == 0
