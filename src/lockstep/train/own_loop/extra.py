"""Values of the user's that checkpoints store: `TrainingRun.extra`."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from lockstep.errors import ConfigError
from lockstep.train.checkpoints import state_tree


class Extra(dict[str, Any]):
    """A dictionary that refuses values which no checkpoint can store when they are set.

    Raises:
        ConfigError: A value, or one in it, is neither a tensor nor JSON.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        check_storable(value, f"extra.{key}")
        super().__setitem__(key, value)

    setdefault, update = MutableMapping.setdefault, MutableMapping.update  # by __setitem__

    def __ior__(self, values: Mapping[str, Any]) -> Extra:  # type: ignore[override,misc]
        self.update(values)
        return self


def check_storable(state: Any, name: str) -> None:
    """Check that a checkpoint can store a state.

    Raises:
        ConfigError: A value is neither a tensor nor JSON; the message says where it is.
    """
    try:
        state_tree.split(state, name, {})
    except TypeError as error:
        raise ConfigError(f"{error}, which a checkpoint cannot store") from None
