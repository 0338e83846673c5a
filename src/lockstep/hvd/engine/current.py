"""The running Horovod of this process, if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.hvd.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from lockstep.hvd.engine.context import Context

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

context: Context | None = None


def get() -> Context:
    """The running context.

    Raises:
        ValueError: There is none.
    """
    if context is None:
        raise ValueError(NOT_INITIALIZED)
    return context


def get_for_operation() -> Context:
    """The running context, for a collective.

    Raises:
        HorovodInternalError: There is none.
    """
    if context is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return context
