"""Host discovery for elastic jobs; `lockstep.launch.controller.discovery` runs the scripts."""

from lockstep.launch.controller.discovery import discover

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery:
    """Base class for `settings.discovery` of `horovod.ray`'s executors."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host."""
        raise NotImplementedError


class FixedHosts(HostDiscovery):
    """The hosts passed to the last call of `set`."""

    def __init__(self, host_slots: dict[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self._host_slots

    def set(self, host_slots: dict[str, int]) -> None:
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """The hosts that a script prints, one per line: "host:slots", or "host" for a host with `slots` slots."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = discovery_script
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {host.name: host.slots for host in discover(self._script, self._slots)}
