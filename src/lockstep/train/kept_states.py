"""What a training stores in a checkpoint besides its progress, and how each state is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.run.named_states import GatheredState, OptimizerState
from lockstep.train.job import Optimization
from lockstep.train.precision import Precision
from lockstep.train.strategies.base import Strategy, Tensors


def states_of(weights: nn.Module, optim: Optimization) -> dict[str, Any]:
    """Return the states of a training by their names in checkpoints, in the order in which they are restored."""
    precision = PrecisionState(optim.precision)
    return {
        "model": weights,
        "precision": precision,
        "average": optim.average,
        "optimizer": OptimizerState(optim.optimizer, optim.kept, lambda: precision.is_same),
        "strategy": StrategyState(optim.strategy, precision),
    }


class PrecisionState:
    """The state of the precision, which is left out of a run that another one continues.

    Attributes:
        is_same: Whether the checkpoint is of this precision.
        rescaling: The loss scale by that of the checkpoint.
    """

    def __init__(self, precision: Precision):
        self._precision, self.is_same, self.rescaling = precision, True, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._precision.name, **self._precision.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, after the weights were."""
        precision = self._precision
        precision.refresh()
        self.is_same = state["name"] == precision.name
        if self.is_same:
            precision.load_state_dict(state)
            self.rescaling = precision.loss_scale / state.get("scale", precision.loss_scale)


class StrategyState(GatheredState):
    """The state of the strategy, derived from scaled gradients."""

    def __init__(self, strategy: Strategy, precision: PrecisionState):
        self._strategy, self._precision = strategy, precision

    def gather(self) -> Tensors:
        return self._strategy.gather_state()

    def load_state_dict(self, state: Tensors) -> None:
        self._strategy.load_state_dict(state)
        if self._precision.is_same:
            self._strategy.rescale(self._precision.rescaling)
        else:
            self._strategy.forget_gradients()
