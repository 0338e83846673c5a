"""Observes the training steps of any program: steps, samples, and the time of each phase of a step.

`autoload` attaches it in the workers of `lockstep run`, and `hvd.init()` under other launchers. It publishes what it
has seen once a second on the worker's board. It changes no result, draws no random number, adds no collective, and
never makes a program fail: at its first error it turns itself off with one line.

- A step is one outermost call of an optimizer's `step`. Optimizers that take turns make one step together; if one steps
  more often than the others, its steps count. A step that GradScaler skips does not count.
- Samples are those of a `DataLoader`'s batches (`loaded_samples`). Without a loader they are unknown.
- `forward` begins with the batch of a loader; without one, with the first call of a module that has parameters.
- `backward` is the worker's own part of the backward pass. `reduction` is the wait for the other workers after it, and
  for a collective in any other phase, such as DDP's broadcast of buffers in the forward pass. On a device with streams,
  collectives that torch makes the stream wait for by itself, as FSDP2 does, are part of the phase.
- Nothing is seen of a step that torch.compile has compiled whole, unless the program calls `lockstep.step`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis import flight_recorder, publisher
from lockstep.diagnosis.board import Board
from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phase
from lockstep.diagnosis.torch_hooks import TorchHooks, attach, before_calls, keep_eager, steps_on_stack
from lockstep.observe.step_counts import FactReader, StepCounts
from lockstep.script_check.state_recorder import Pace, StateRecorder
from lockstep.world import accelerator
from lockstep.world.devices import usable_cores
from lockstep.world.step_clock import DeviceClock, StepClock

if TYPE_CHECKING:
    import torch

    from lockstep.observe.io_sampling import IoSampler

CAPTURES = "torch._inductor.cudagraph_trees"  # captures graphs, whose collectives torch records once
OTHER_WAYS = {"mpi4py", "cupy"}  # in which a program may exchange gradients
IO_SECONDS = 5.0  # between two samples
DEFAULT = Pace()


class Observer(TorchHooks):
    """Times the phases of this process's steps, and has them counted; each method is called by a hook of torch.

    Args:
        board: Where it publishes what it has seen, if anywhere.
        pace: When it publishes fingerprints of what is trained.

    Attributes:
        compares_states: Whether it publishes fingerprints of what is trained.
    """

    compares_states = True

    def __init__(self, board: Board | None = None, pace: Pace = DEFAULT) -> None:
        self.clock, self.counts, self.facts = StepClock(first=BEFORE_BACKWARD), StepCounts(), FactReader()
        self._thread = threading.local()
        self._trainer = threading.get_ident()  # the thread that takes the steps
        self.take_step = self.guard(self._count_told_step)  # for `lockstep.step`
        self.backward_passes = 0
        self.has_captured = False  # whether it has seen the capture of a graph, whose collectives torch records once
        self._handle: Any = None  # of the hook on the current backward pass's loss
        self._forward: Any = None  # the handle of the hook on the call that begins the forward pass
        self._has_forward = False  # whether it begins without that hook, or cannot be seen
        self._on_first_gradient = self.guard(self._first_gradient)
        self._on_own_part = self.guard(self._own_part_ends)
        self._on_call = self.guard(self._module_is_called)
        self._on_end_of_waiting = self.guard(self._waiting_ends)
        self.states = StateRecorder(accelerator.read_later, accelerator.processor, self.seen_exchanges, pace)
        self._io: IoSampler | None = None
        self._queue = sys.modules["torch"].autograd.Variable._execution_engine.queue_callback
        self.begin_generation(board)

    def begin_generation(self, board: Board | None) -> None:
        """Count from 0, on a board of this generation of the workers."""
        self.counts.begin_generation(board)
        if self._io:
            self._io.restart()
        self._backward_depth = 0  # in all threads: autograd runs backward passes in its own threads, too
        self._has_gradients = False  # whether a backward pass was completed since the last step or batch
        self.states.forget()
        self.clock.forget()

    @property
    def _step_depth(self) -> int:
        """How many calls of `step` this thread is in; an optimizer's may call another's."""
        return getattr(self._thread, "depth", 0)

    def step_begins(self, optimizer: Any) -> None:
        if self._step_depth:  # torch runs no post hook if the call raised
            self._thread.depth = max(steps_on_stack() - 1, 0)
        if not self._step_depth:
            if self._has_gradients:
                self.clock.begin("optimizer")
            if self.compares_states and not self._is_capturing:
                self.states.step_begins(optimizer)
        self._thread.depth = self._step_depth + 1

    def step_ends(self, optimizer: Any) -> None:
        self._thread.depth = max(self._step_depth - 1, 0)
        if self._step_depth:
            return
        if self.compares_states and not self._is_capturing:
            self.states.step_ends(optimizer)
        self._has_gradients, self._trainer = False, threading.get_ident()
        if self.facts.optimizer() is None:
            self.facts.optimizer = weakref.ref(optimizer)
        if self.counts.is_told:
            self.clock.begin(BEFORE_BACKWARD)
        elif self.counts.count(optimizer, is_readable=not self._is_capturing):
            self.clock.end()
            self.step_is_counted()

    def _count_told_step(self, samples: int | None) -> None:
        self.counts.count_told(samples)
        self._trainer = threading.get_ident()
        if self.clock.clock is None:  # no backward pass has been seen
            self._time_on(accelerator.current())
        self.clock.end()
        self.step_is_counted()

    def _time_on(self, device: torch.device) -> None:
        self.clock.clock = DeviceClock(device)
        if device.type != "cpu":
            publisher.name_gpu(accelerator.pci_address(device))

    @property
    def _is_capturing(self) -> bool:
        """Whether work goes to a graph, and no value of the device can be read."""
        return self.clock.clock is not None and not self.clock.clock.has_time

    def step_is_counted(self) -> None:
        """Publish the steps if that is due."""
        if self.counts.ends_first():
            if self._io:
                self._io.start()  # after the start of loader processes, which may be forks of a process without threads
            self.facts.begin()
        elif self.counts.are_due and not self._is_capturing:
            self.publish()

    def batch_is_requested(self, iterator: Any, indices: Sequence[Any] | None) -> None:
        self.counts.loaders.request(iterator, -1 if indices is None else len(indices))

    def batch_is_awaited(self, has_gradients: bool) -> None:
        self._begin_here("data_wait" if has_gradients else BEFORE_BACKWARD)

    def _begin_here(self, phase: Phase) -> None:
        """Begin a phase, unless this thread only fetches batches for the one that takes the steps."""
        if self.trains_here():
            self.clock.begin(phase)

    def batch_arrives(self, iterator: Any, batch: Any, has_gradients: bool) -> None:
        self._begin_here("forward" if has_gradients else BEFORE_BACKWARD)
        self._has_gradients = False
        self.counts.loaders.deliver(iterator, batch, has_gradients)
        if has_gradients:
            self.states.batch_arrives(batch)
            self.module_is_compiled()

    def batch_fails(self, iterator: Any) -> None:
        """Forget the batch that the loader could not deliver; the program may go on with the next one."""
        self._begin_here(BEFORE_BACKWARD)
        self.counts.loaders.fail(iterator)

    def loader_ends(self, iterator: Any) -> None:
        self._begin_here(BEFORE_BACKWARD)
        if self.counts.loaders.end(iterator):
            self.states.epoch_ends(iterator)

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        """Time a backward pass from now on.

        Args:
            loss: The first of its tensors; None if it is not a tensor or needs no gradient.
        """
        self._backward_depth += 1
        if self._backward_depth > 1 or loss is None:
            return
        if self.clock.clock is None:
            self._time_on(loss.device)
        if self._is_capturing:
            self.has_captured = True
            return
        self.states.backward_begins(loss)
        self.clock.begin("backward")
        self._handle = loss.register_hook(self._on_first_gradient)

    # Callbacks run after the last gradient, in the order of their queueing: DDP's waits for the other workers. The
    # first of these is queued before DDP's, and the second one after it.
    def _first_gradient(self, _: torch.Tensor) -> None:
        self._queue(self._on_own_part)

    def _own_part_ends(self) -> None:
        self.clock.begin(WAITING)
        self._queue(self._on_end_of_waiting)

    def _waiting_ends(self) -> None:
        self.clock.begin("optimizer" if self._step_depth else BEFORE_BACKWARD)  # the former after a closure's

    def backward_ends(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth:
            return
        self.backward_passes += 1
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._has_gradients = True
        self.counts.loaders.train()
        self.states.backward_ends()
        self._waiting_ends()
        if self._forward is None and not self._has_forward:
            self._forward = before_calls(self._on_call)

    def _module_is_called(self, module: Any) -> None:
        """Begin the forward pass, unless this is other work: without parameters, or without gradients."""
        if self.trains_here() and next(module.parameters(), None) is not None:
            self._forget_call()
            if sys.modules["torch"].is_grad_enabled():
                self.clock.begin("forward")

    def _forget_call(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def module_is_compiled(self) -> None:
        self._has_forward = True  # such a module warns of hooks
        self._forget_call()

    def turn_off(self) -> None:
        super().turn_off()
        self._forget_call()

    def publish(self) -> None:
        """Publish what has been seen so far."""
        self.counts.subtract_skipped(unread=1)
        self.counts.publish(self.clock.take_ready(), self.read_facts(), self.states.take())

    def count_io(self) -> None:
        """Publish this process's I/O, too: every few seconds from its first step on, and at the end."""
        from lockstep.observe.io_sampling import IoSampler
        from lockstep.world.launcher_environment import RankInfo

        is_first = RankInfo.from_environment().local_rank == 0
        self._io = self._io or IoSampler(IO_SECONDS, is_first, self.guard(self.counts.publish_io))

    def read_facts(self) -> ProgramFacts:
        return self.facts.read(
            usable_cores(),
            threads=sys.modules["torch"].get_num_threads(),
            loader_processes=self.counts.loaders.processes,
            device=self.clock.clock.device.type if self.clock.clock else "",
            host_wait=round(self.clock.take_host_wait(), 6),
        )

    def finish(self) -> None:
        """Publish the last steps, at the end of the job and at the program's exit."""
        if self._io:
            self._io.stop()
        self.counts.subtract_skipped(unread=0)
        if self.counts.steps or self.counts.samples:
            self.publish()

    def wrapper_is_made(self, wrapper: Any, module: Any) -> None:
        self.states.wrapper_is_made(wrapper)
        self.facts.wrapper = weakref.ref(wrapper)

    def seen_exchanges(self) -> int | None:
        """Return a number that grows with each collective or message; None if it may miss some."""
        device = self.clock.clock.device.type if self.clock.clock else "cpu"
        is_replayed = self.has_captured or (device != "cpu" and CAPTURES in sys.modules)
        recorded = None if is_replayed or not OTHER_WAYS.isdisjoint(sys.modules) else flight_recorder.started()
        return None if recorded is None else recorded + self.clock.pauses

    def follow_trainer(self, clock: StepClock) -> None:
        """Turn off, because Lockstep's trainer starts, which measures and compares its steps by its own clock."""
        self.turn_off()

    def interrupt(self) -> None:
        """Called by the trainer for each step that begins with other work, such as an evaluation or a checkpoint."""

    def trains_here(self) -> bool:
        """Whether this thread takes the steps, or is one of autograd's; others may wait for what no step needs."""
        is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
        return not self._is_off and (threading.get_ident() == self._trainer or is_autograds)


current: Observer | None = None  # of this process


def observe(observer: Observer) -> None:
    """Call the observer's methods from now on, in this process."""
    global current
    current = observer
    attach(observer)
    _watch_waits(observer)


def _watch_waits(observer: Observer) -> None:
    """Replace the method that waits for a collective, and DDP's broadcast of buffers, which waits by itself."""
    from torch import distributed

    if not distributed.is_available():
        return
    clock, is_compiling = observer.clock, sys.modules["torch"].compiler.is_compiling

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wait(self: Any, *arguments: Any, **named: Any) -> Any:  # pybind11 looks for these two names
            if is_compiling() or not observer.trains_here():
                return function(self, *arguments, **named)
            clock.pause()
            try:
                return function(self, *arguments, **named)
            finally:
                clock.resume()

        return keep_eager(wait)

    for owner, name in ((distributed.Work, "wait"), (distributed, "_broadcast_coalesced")):
        setattr(owner, name, counted(getattr(owner, name)))
