"""The network interfaces of the workers: those in the settings; by default, each worker detects its own."""

from collections.abc import Sequence
from typing import Any

__all__ = ["detect_nics", "nics_to_env_var"]


def detect_nics(settings: Any, all_host_names: Sequence[str], node_workers: Sequence[Any] | None = None) -> list[str]:
    """Return `settings.nics`, sorted."""
    return sorted(settings.nics or ())


def nics_to_env_var(nics: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that select these interfaces; empty for no interfaces."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}
