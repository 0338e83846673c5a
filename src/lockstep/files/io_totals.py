"""What a worker has read and written, as its host counts it. Imports nothing, for processes that only pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KIND = "io"
PROC_NAMES = {  # of /proc/PID/io
    "rchar": "read_bytes",
    "syscr": "read_operations",
    "read_bytes": "storage_read_bytes",
    "wchar": "written_bytes",
    "syscw": "write_operations",
    "write_bytes": "storage_written_bytes",
}
OF_NODE = "node_"  # prefix of the amounts of a node's devices
DISK_NAMES = ("disk_read_bytes", "disk_reads", "disk_written_bytes", "disk_writes")
NETWORK_NAMES = ("network_received_bytes", "network_sent_bytes")
AMOUNTS = (*PROC_NAMES.values(), *(f"{OF_NODE}{name}" for name in DISK_NAMES + NETWORK_NAMES))
NOT_COUNTED = -1


@dataclass(frozen=True)
class IoTotals:
    """A worker's I/O in the `seconds` before `unix_time`: `AMOUNTS`, or `NOT_COUNTED`, as devices by most workers."""

    unix_time: float = 0.0
    seconds: float = 0.0
    amounts: tuple[int, ...] = (NOT_COUNTED,) * len(AMOUNTS)

    def plus(self, unix_time: float, seconds: float, amounts: Mapping[str, int]) -> IoTotals:
        """Return the totals after the next `seconds`."""
        pairs = zip(AMOUNTS, self.amounts, strict=True)
        sums = (max(total, 0) + amounts[name] if name in amounts else total for name, total in pairs)
        return IoTotals(unix_time, self.seconds + seconds, tuple(sums))

    def record(self, rank: int, before: IoTotals) -> dict[str, Any]:
        """Return the record of what a worker has done since `before`."""
        rows = zip(AMOUNTS, self.amounts, before.amounts, strict=True)
        amounts = {name: total - max(earlier, 0) for name, total, earlier in rows if total != NOT_COUNTED}
        seconds = round(self.seconds - before.seconds, 6)
        return {"kind": KIND, "rank": rank, "unix_time": self.unix_time, "seconds": seconds, **amounts}
