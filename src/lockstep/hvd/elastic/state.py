"""Elastic state: the base classes, and the state for PyTorch.

Models, optimizers and samplers have handlers; other values are copied as objects.

To add a type, insert a pair (type, handler class) at the start of the list that `get_handler_registry` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import IntFlag
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.hvd.basics import rank
from lockstep.hvd.elastic.commits import StateCopy
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.engine import context as engine
from lockstep.hvd.exceptions import HostsUpdatedInterrupt
from lockstep.hvd.ops.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from lockstep.models.optimizer_state import load_optimizer_state
from lockstep.world import generations
from lockstep.world.generations import ADDED, REMOVED


class HostUpdateResult(IntFlag):
    """A change of the hosts of an elastic job."""

    no_update = 0
    removed = REMOVED
    added = ADDED
    mixed = REMOVED | ADDED


class State:
    """Training state that can be saved, restored, and synchronized between workers. Subclasses define its contents.

    Args:
        bcast_object: Returns rank 0's object on all workers.
        get_rank: Returns this worker's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._get_rank = get_rank
        self._changes_seen = 0
        self._messages: deque[tuple[float, int]] = deque()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after the workers have changed: after `init`, before the state is synchronized.

        For example, to scale the learning rate by the new `size()`.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt the state to changed workers and call the registered functions."""
        self._messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Report a change of the hosts that the launcher has not found. Thread-safe.

        Only reports on rank 0 count: at its next `commit` or `check_host_updates`, all workers reconnect.

        Args:
            timestamp: The time of the change in seconds; changes that are not later than the last one are ignored.
            update_res: A `HostUpdateResult`.
        """
        self._messages.append((timestamp, update_res))

    @property
    def _host_messages(self) -> SimpleNamespace:
        """Horovod's queue of host changes, for scripts that check whether it is empty."""
        is_empty = not self._messages and not generations.host_changes(self._changes_seen)[1]
        return SimpleNamespace(empty=lambda: is_empty)

    def commit(self) -> None:
        """Save the state, then check for host changes.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed; on all workers.
            HorovodInternalError: A worker disconnected, so the state may hold a partial sum; the last copy is kept.
        """
        if engine.current is not None:
            engine.current.settle()
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether the hosts have changed. Rank 0 decides, so all workers get the same result (collective).

        Raises:
            HostsUpdatedInterrupt: The hosts have changed; on all workers.
        """
        news = self._host_news() if self._get_rank() == 0 else None
        self._changes_seen, changes = self._bcast_object(news)
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == REMOVED)

    def _host_news(self) -> tuple[int, int]:
        """Return the number of the launcher's latest host change, and all changes since the last call."""
        seen, changes = generations.host_changes(self._changes_seen)
        while self._messages:
            timestamp, update = self._messages.popleft()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                changes |= update
        return seen, changes

    def save(self) -> None:
        """Save a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all workers, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to a changed number of workers."""


class ObjectState(State):
    """Python objects: each keyword argument becomes an attribute, which is saved as a deep copy and sent by pickle."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = StateCopy(kwargs)
        self._set_attributes(kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def save(self) -> None:
        self._saved = StateCopy(self._attributes())

    def restore(self) -> None:
        self._set_attributes(self._saved.restored())

    def sync(self) -> None:
        if self._saved.value:
            self._set_attributes(self._bcast_object(self._attributes()))
            ObjectState.save(self)  # not self.save(): a subclass may not be synchronized yet

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved.value}

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


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
        self._saved = StateCopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved.restored())

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """For modules, including buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """For optimizers, including hyper-parameters."""

    def restore(self) -> None:
        load_optimizer_state(self.value, self._saved.restored())
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
