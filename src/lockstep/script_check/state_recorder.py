"""Records now and then what a worker trains, in every observed program; `state_comparison` compares the workers.

It reads weights, gradients, the loss and a part of the batch on the device that has them, and never waits for it. A
step without a comparison costs less than a microsecond; the comparisons become rarer if they take too much time.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis import replicas
from lockstep.diagnosis.loaded_samples import tensors
from lockstep.diagnosis.observed_steps import UNKNOWN, TrainedState
from lockstep.script_check.fingerprints import digest, line_of_script
from lockstep.script_check.parameters import has_hvd, is_joined, is_sharded, managed_by, parameters_of, settings_of

if TYPE_CHECKING:
    import torch

MAX_OPTIMIZERS = 8  # more are parts of one, such as those that step within a backward pass
PASSES = 3  # with the same order: two may belong to one epoch
MAX_LINE = 120  # bytes of the script's line; of a longer path, the end is kept
SAMPLED = 4096  # elements of each tensor in a batch

ReadLater = Callable[["torch.Tensor"], Callable[[], "list[int] | None"]]


@dataclass(frozen=True)
class Pace:
    """When workers are compared, so that all choose the same steps.

    Args:
        first: The first step.
        every: The number of steps between two comparisons, or a power of two times as many.
        seconds: The least time between two comparisons: the board keeps only the newest, and is read once a second.
        share: The largest share of the time that comparisons take.
    """

    first: int = 10
    every: int = 100
    seconds: float = 2.0
    share: float = 0.002


class StateRecorder:
    """Makes a `TrainedState` after some steps of the first optimizer that steps.

    Args:
        read_later: Starts to copy a tensor to the host, and returns what returns its values; None if not yet there.
        processor: Names a device, as far as it affects rounding.
        seen_exchanges: Returns a number that grows with each collective; None if some may be missed.

    Attributes:
        is_due: Whether a comparison follows the next step.
    """

    def __init__(
        self,
        read_later: ReadLater,
        processor: Callable[[torch.device], str],
        seen_exchanges: Callable[[], int | None],
        pace: Pace,
    ) -> None:
        self._read_later, self._processor, self._seen_exchanges = read_later, processor, seen_exchanges
        self._pace = pace
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        # By sampler, its last epoch, and the number of passes in a row with this epoch.
        self._passes: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """Begin again, in another generation of the workers."""
        self.is_due, self._repeats_order = self._pace.first == 1, False
        self._epochs = 0
        self._passes.clear()
        self._began: dict[weakref.ref[Any], torch.Tensor | None] = {}  # of each optimizer, in the order of their steps
        self._first: Callable[[], Any] = lambda: None
        self._step, self._next, self._every = 0, self._pace.first, self._pace.every
        self._last = time.monotonic()
        self._seen: int | None = None  # collectives, before the first step
        self._loss: torch.Tensor | None = None
        self._samples: list[torch.Tensor] = []
        self._is_synchronized = False
        self._pending: tuple[TrainedState, Callable[[], list[int] | None]] | None = None

    def keep_each(self, seconds: float) -> None:
        """Make states at most so often: what reads them more rarely would find other steps of each worker."""
        self._pace = replace(self._pace, seconds=max(self._pace.seconds, seconds))

    def wrapper_is_made(self, wrapper: Any) -> None:
        self._wrappers.add(wrapper)

    def batch_arrives(self, batch: Any) -> None:
        """Add to the samples of the next step."""
        if self.is_due:
            self._samples += map(_sum_of_part, tensors(batch))

    def epoch_ends(self, iterator: Any) -> None:
        """Compare the order of a pass that trained with that of the passes before it."""
        from torch.utils.data import DistributedSampler

        self._epochs += 1
        sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            epoch, passes = self._passes.get(sampler, (-1, 0))
            passes = passes + 1 if sampler.epoch == epoch else 1
            self._passes[sampler] = sampler.epoch, passes
            self._repeats_order |= passes >= PASSES

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        if self.is_due and loss is not None:
            self._loss = replicas.fingerprints([loss])[0]

    def backward_ends(self) -> None:
        if self.is_due:
            self._is_synchronized = all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def step_begins(self, optimizer: Any) -> None:
        """Record the weights before an optimizer's first step. The step must be an outermost one."""
        own = weakref.ref(optimizer)
        if own in self._began or len(self._began) > MAX_OPTIMIZERS:
            return
        if self._first() is None:  # there was none, or it is gone: another training begins
            self.forget()
            self._first, self._seen = own, self._seen_exchanges()
        self._began[own] = _fingerprint(_compared(optimizer, frozenset()))

    def step_ends(self, optimizer: Any) -> None:
        """Count a step, and record what it has trained if that is due."""
        if optimizer is not self._first():
            return
        self._step += 1
        if self.is_due:
            self._record()
        self.is_due = self._step + 1 == self._next

    def take(self) -> TrainedState | None:
        """Return the newest state once the device has written it, and only once."""
        if self._pending is None or (values := self._pending[1]()) is None:
            return None
        state, self._pending = self._pending[0], None
        began, weights, gradients, samples, loss = values
        return replace(state, began=began, weights=weights, gradients=gradients, samples=samples, loss=loss)

    def _record(self) -> None:
        now = time.monotonic()
        if self._step == self._pace.first or now - self._last >= self._pace.seconds:
            self._pending = self._state() or self._pending
            if time.monotonic() - now > self._pace.share * (now - self._last):
                self._every *= 2
            self._last = now
        else:
            self._every *= 2
        self._next = (self._step // self._every + 1) * self._every
        self._loss, self._samples, self._is_synchronized = None, [], False

    def _state(self) -> tuple[TrainedState, Callable[[], list[int] | None]] | None:
        """Return what is known, and what reads the rest; None if the workers' weights cannot be compared."""
        import torch

        optimizers = [found for each in self._began if (found := each()) is not None]
        if len(optimizers) > MAX_OPTIMIZERS or any(map(_updates_late, optimizers)):
            return None
        wrapped = self._wrapped()
        compared = [parameter for each in optimizers for parameter in _compared(each, wrapped)]
        if not compared:
            return None
        device = compared[0].device
        # Workers that hold parts of one layer train on the same samples.
        has_parts = any(is_sharded(parameter) for each in optimizers for parameter in parameters_of(each))
        parts = (
            [each for each in self._began.values() if each is not None],
            [_fingerprint(compared)],
            [_fingerprint([each.grad for each in compared if each.grad is not None])],
            [] if has_parts else self._samples,
            [self._loss],
        )
        zero = torch.zeros((), dtype=torch.int64, device=device)
        values = [
            sum((each.to(device, non_blocking=True) for each in part if each is not None), zero) for part in parts
        ]
        groups = [group for each in optimizers for group in each.param_groups]
        rate, seen = groups[0].get("lr"), None if has_hvd() else self._seen_exchanges()
        state = TrainedState(
            step=self._step,
            settings=_number(*(settings_of(group, with_tensors=False) for group in groups)),
            processor=_number(self._processor(device)),
            exchanges=UNKNOWN if seen is None or self._seen is None else seen - self._seen,
            epochs=self._epochs,
            is_wrapped=bool(wrapped),
            is_joined=is_joined(),
            repeats_order=self._repeats_order,
            rate=float(rate) if isinstance(rate, (int, float)) else 0.0,
            line=os.fsencode(line_of_script())[-MAX_LINE:].decode(errors="replace"),
        )
        return state, self._read_later(torch.stack(values))

    def _wrapped(self) -> frozenset[int]:
        """Return the ids of the parameters whose gradients DistributedDataParallel has averaged over all workers."""
        if not self._is_synchronized or not is_joined():
            return frozenset()
        from torch import distributed

        return frozenset(
            id(parameter)
            for wrapper in self._wrappers
            if wrapper.process_group.size() == distributed.get_world_size()
            and getattr(wrapper, "_comm_hooks", None) == []  # a hook may average over some of the workers
            and not getattr(getattr(wrapper, "_join_config", None), "enable", False)  # so may steps within join()
            for parameter in managed_by(wrapper, wrapper.module)
        )


def _compared(optimizer: Any, wrapped: frozenset[int]) -> list[torch.Tensor]:
    """Return the parameters of which each worker has the whole; if any are wrapped, only these."""
    return [
        each
        for each in parameters_of(optimizer)
        if (not wrapped or id(each) in wrapped) and not is_sharded(each) and replicas.is_comparable(each)
    ]


def _updates_late(optimizer: Any) -> bool:
    """Whether weights may still be on their way from other workers after a step: a form of ZeRO."""
    return bool(getattr(optimizer, "_overlap_with_ddp", False))


def _fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a sum of all bits, int64 of no dimension, which depends on the tensors' order; None without tensors."""
    import torch

    own = [each for each in tensors if replicas.is_comparable(each)]
    if not own:
        return None
    sums = replicas.fingerprints(own)
    return (sums * torch.arange(1, 2 * len(own), 2, device=sums.device)).sum()


def _sum_of_part(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return replicas.fingerprints([flat[:: len(flat) // SAMPLED + 1]])[0]


def _number(*parts: object) -> int:
    return int(digest(*map(str, parts)), 16)
