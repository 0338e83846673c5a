"""The state of a PyTorch training: models, optimizers and samplers by handlers of their own, anything else as objects.

To teach it another type, put a pair (type, handler class) first in the list that `get_handler_registry` gives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from lockstep.hvd.basics import rank
from lockstep.hvd.elastic.base import ObjectState, State
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.ops.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """How values of one type are saved, restored and made the same on all workers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value its saved state back."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the value rank 0's state; it is saved when all values have theirs."""
        raise NotImplementedError

    def get_saved(self) -> Any:
        """The saved state, for workers that are started anew: anything that cloudpickle takes.

        Raises:
            NotImplementedError: The class does not say; commits then are not kept beyond the workers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_saved and set_saved")

    def set_saved(self, saved: Any) -> None:
        """Take over such a state, for `restore`."""
        raise NotImplementedError(f"{type(self).__name__} has no get_saved and set_saved")

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Fit the value to a changed number of workers."""


class StateDictHandler(StateHandler):
    """For whatever has `state_dict` and `load_state_dict`, such as learning rate schedulers and gradient scalers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved: Any = None  # frees the former copy, so that there are never two
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)
        self.save()  # an optimizer now works on the saved tensors themselves

    def get_saved(self) -> Any:
        return self._saved

    def set_saved(self, saved: Any) -> None:
        self._saved = saved

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """For modules: parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """For optimizers: hyper-parameters too."""

    def restore(self) -> None:
        super().restore()
        torch.optim.Optimizer.zero_grad(self.value)  # what the broken-off step left behind

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """For `ElasticSampler`s."""

    def reset(self) -> None:
        self.value.reset()


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Pairs (type, handler class); the first that fits a value handles it. Changes to the list count."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Take another list of pairs (type, handler class)."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a PyTorch training; each argument becomes an attribute.

    Modules, optimizers, `ElasticSampler`s, learning rate schedulers and gradient scalers are saved by their
    `state_dict`; every other value is deep-copied and sent by pickle. Assigning a module or the like to its attribute
    saves it at once.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        vars(self).update({name: handler.value for name, handler in self._handlers.items()})
        objects = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **objects)

    def save(self) -> None:
        super().save()
        for handler in self._handlers.values():
            handler.save()

    def restore(self) -> None:
        super().restore()
        for handler in self._handlers.values():
            handler.restore()

    def get_saved(self) -> Any:
        handled = {name: handler.get_saved() for name, handler in self._handlers.items()}
        return {"objects": super().get_saved(), "handled": handled}

    def set_saved(self, saved: Any) -> None:
        super().set_saved(saved["objects"])
        for name, handler in self._handlers.items():
            handler.set_saved(saved["handled"][name])

    def sync(self) -> None:
        # Nothing is saved before all is synchronised: a worker lost midway must not leave a mixture to restore.
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = vars(self).get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
