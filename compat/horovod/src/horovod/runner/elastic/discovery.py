"""Which hosts an elastic job may have, as a program says; `lockstep.launch.controller.discovery` runs the scripts."""

from lockstep.launch.controller.discovery import discover

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery:
    """What `settings.discovery` of `horovod.ray`'s executors derives from."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Hosts and how many workers each takes."""
        raise NotImplementedError


class FixedHosts(HostDiscovery):
    """The hosts that `set` was given last."""

    def __init__(self, host_slots: dict[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """The hosts that a script prints, a line each: "host:slots", or "host" where `slots` says how many."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = discovery_script
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {host.name: host.slots for host in discover(self._script, self._slots)}
