"""Compares what the workers of an observed program train, and finds what is certainly wrong: a message for each kind.

Weights that differ are not a fault by themselves: workers may hold parts of a model, or average from time to time. They
are one if DistributedDataParallel has averaged their gradients over all workers, if the gradients are equal, or if
workers that began with equal weights have exchanged nothing for long. Equal samples are one if losses and weights
are equal, too: a worker may load a whole batch and train on a part of it, or hold a part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from lockstep.diagnosis.explanation import ranks_text
from lockstep.diagnosis.observed_steps import TrainedState

MAX_STATES = 64  # that are kept of each worker, until all have reached the same step
ALONE_STEPS, ALONE_EPOCHS = 2000, 2  # without an exchange; some programs average weights after each epoch
SAME_SAMPLES = 3  # comparisons with equal samples, and none with different ones
WRAP = "wrap the model in DistributedDataParallel"


class StateComparison:
    """Compares the states of all workers after the same steps.

    Args:
        workers: Their number.
    """

    def __init__(self, workers: int) -> None:
        self._states: list[dict[int, TrainedState]] = [{} for _ in range(workers)]
        self._have_differed = self._order_is_reported = False
        self._same_samples: set[int] | None = set()  # fingerprints; None: they have differed, or are reported

    def compare(self, newest: Sequence[TrainedState]) -> list[str]:
        """Return what is wrong, each only once, given the newest state of each worker."""
        for states, state in zip(self._states, newest, strict=True):
            if state.step and state.step not in states:
                if state.step < max(states, default=0):  # another training started
                    states.clear()
                states[state.step] = state
                if len(states) > MAX_STATES:
                    del states[min(states)]
        found = []
        for step in sorted(set.intersection(*map(set, self._states))):
            found += self._judge([states.pop(step) for states in self._states])
        return found

    def _judge(self, states: Sequence[TrainedState]) -> list[str]:
        if not _are_equal(states, lambda state: (state.processor, state.is_joined)):
            return []
        found = [self._different_weights(states), self._equal_samples(states), self._same_order(states)]
        first = states[0]
        where = f" ({first.line})" if first.line else ""
        return [f"after step {first.step:,}{where}, {why}" for why in found if why]

    def _different_weights(self, states: Sequence[TrainedState]) -> str:
        if self._have_differed or _are_equal(states, lambda state: state.weights):
            return ""
        began_equal = _are_equal(states, lambda state: state.began)
        gradients_equal = _are_equal(states, lambda state: state.gradients) and states[0].gradients != 0
        gradients_equal &= states[0].is_joined
        is_apart = began_equal and all(map(_has_trained_alone, states))
        if not (gradients_equal or is_apart or all(state.is_wrapped for state in states)):
            return ""
        self._have_differed = True
        return f"{_odd(states)}: {_why(states, began_equal, gradients_equal, is_apart)}"

    def _equal_samples(self, states: Sequence[TrainedState]) -> str:
        if self._same_samples is None or not all(state.samples and state.loss for state in states):
            return ""
        if not _are_equal(states, lambda state: (state.samples, state.loss, state.weights)):
            self._same_samples = None
            return ""
        self._same_samples.add(states[0].samples)
        if len(self._same_samples) < SAME_SAMPLES:
            return ""
        self._same_samples = None
        return (
            "all workers train on the same samples, as in each step that was compared: "
            "give the DataLoader a DistributedSampler, or each worker its own part of the data"
        )

    def _same_order(self, states: Sequence[TrainedState]) -> str:
        if self._order_is_reported or not all(state.repeats_order for state in states):
            return ""
        self._order_is_reported = True
        return "each epoch has the same order of samples: call sampler.set_epoch(epoch) at the start of each epoch"


def _why(states: Sequence[TrainedState], began_equal: bool, gradients_equal: bool, is_apart: bool) -> str:
    """Return why weights differ, and what to do, in one clause."""
    if not states[0].is_joined:
        own = "they have no process group, so each trains a model of its own"
        return f"{own}; call torch.distributed.init_process_group(), and {WRAP}"
    if not _are_equal(states, lambda state: state.settings):
        rates = [f"{state.rate:g}" for state in states[:4]]
        rate = f" (learning rates {', '.join(rates)})" if len(set(rates)) > 1 else ""
        # A rate that changes with each step also differs after a skipped one, and then the exchanges do, too.
        skipped = "" if _are_equal(states, lambda state: state.exchanges) else "a worker has skipped a step, or "
        return f"{skipped}the settings of their optimizers differ{rate}"
    if gradients_equal and not began_equal:
        return "they differed before the first step, such as after a checkpoint that only one worker has loaded"
    if gradients_equal:
        return "their gradients are equal: one skipped a step or exchange, or changed weights or optimizer state alone"
    if all(state.is_wrapped for state in states):
        return (
            "their gradients differ, though the model is wrapped in DistributedDataParallel: the loss bypasses the "
            "wrapper, or a worker has skipped a step"
        )
    return f"they have exchanged nothing since the first step; {WRAP}, or average the gradients"


def _has_trained_alone(state: TrainedState) -> bool:
    is_long = state.step >= ALONE_STEPS or state.epochs >= ALONE_EPOCHS
    return state.exchanges == 0 and (is_long or not state.is_joined)


def _odd(states: Sequence[TrainedState]) -> str:
    """Name the workers whose weights differ from those of most workers."""
    usual = max((state.weights for state in states), key=[state.weights for state in states].count)
    odd = [rank for rank, state in enumerate(states) if state.weights != usual]
    if 2 * len(odd) >= len(states):
        return "the workers' weights differ"
    return f"the weights of {ranks_text(tuple(odd))} differ from those of the others"


def _are_equal(states: Sequence[TrainedState], part: Callable[[TrainedState], Hashable]) -> bool:
    return len(set(map(part, states))) == 1
