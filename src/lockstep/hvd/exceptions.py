"""The exceptions of Horovod's API, with the names and bases that scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: the workers do not agree on it, a worker is lost, or Horovod is not running."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; raised on every worker at the same commit.

    Attributes:
        skip_sync: Whether the state is the same on all workers that go on, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What is wrong where a framework is not of the version that something was built against."""
    return f"{name} was built against {version}, but {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """Two parts of an installation are of different versions. Lockstep has nothing compiled and never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
