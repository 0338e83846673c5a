"""The context of this process between `init` and `shutdown`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.hvd.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from lockstep.hvd.engine.context import Context

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

context: Context | None = None


def get() -> Context:
    """Return the current context.

    Raises:
        ValueError: Horovod is not initialized.
    """
    if context is None:
        raise ValueError(NOT_INITIALIZED)
    return context


def get_for_operation() -> Context:
    """Return the current context, for a collective.

    Raises:
        HorovodInternalError: Horovod is not initialized.
    """
    if context is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return context
