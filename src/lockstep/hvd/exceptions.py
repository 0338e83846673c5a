"""Horovod's exceptions, with the names and base classes that scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: mismatched requests, a disconnected worker, or Horovod is not initialized."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; raised on all workers at the same commit.

    Attributes:
        skip_sync: Whether the remaining workers already have the same state, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message for a framework whose installed version is not the one at build time."""
    return f"{name} was built against {version}, but {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """Two parts of an installation have different versions. Lockstep has no compiled code and never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
