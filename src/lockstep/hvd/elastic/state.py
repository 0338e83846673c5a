"""Elastic state for PyTorch: models, optimizers and samplers have handlers; other values are copied as objects.

To add a type, insert a pair (type, handler class) at the start of the list that `get_handler_registry` returns.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from lockstep.hvd.basics import rank
from lockstep.hvd.elastic.base import ObjectState, State
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.ops.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from lockstep.models.optimizer_state import load_optimizer_state

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
    """Saves, restores and synchronizes a value of one type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all workers. `TorchState` saves it after synchronizing all values."""
        raise NotImplementedError

    def get_saved(self) -> Any:
        """Return the saved state, for restarted workers: anything that cloudpickle can pickle.

        Raises:
            NotImplementedError: The class does not support it; commits do not survive a restart.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement get_saved and set_saved")

    def set_saved(self, saved: Any) -> None:
        """Set the state that `restore` uses."""
        raise NotImplementedError(f"{type(self).__name__} does not implement get_saved and set_saved")

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt the value to a changed number of workers."""


class StateDictHandler(StateHandler):
    """For objects with `state_dict` and `load_state_dict`, such as learning rate schedulers and gradient scalers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved: Any = None  # free the previous copy first, to save memory
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)
        self.save()  # an optimizer uses the loaded tensors without copying them

    def get_saved(self) -> Any:
        return self._saved

    def set_saved(self, saved: Any) -> None:
        self._saved = saved

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """For modules, including buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """For optimizers, including hyper-parameters."""

    def restore(self) -> None:
        load_optimizer_state(self.value, self._saved)
        self.save()
        torch.optim.Optimizer.zero_grad(self.value)  # clears the gradients of the interrupted step

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
    """Return the list of (type, handler class); the first match handles a value. The list may be changed."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the list of (type, handler class)."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a PyTorch training script; each argument becomes an attribute.

    Modules, optimizers, `ElasticSampler`s, learning rate schedulers and gradient scalers are saved with their
    `state_dict`; other values are deep-copied, and sent by pickle. Assigning a new module, optimizer or similar value
    to an attribute also saves it.
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
        # Save only after everything is synchronized: if a worker dies midway, `restore` must not mix two states.
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
