"""Two network namespaces joined by a slow link: two "hosts" on one machine, for benchmarks.

Needs root and iproute2. The namespaces and the link are removed when the context exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SUBNET = "10.213.77"
PORT = 29400
BURST, LATENCY = "64kb", "50ms"  # token bucket: maximum burst and maximum queueing delay


@contextmanager
def limited_link(megabits: float) -> Iterator[list[str]]:
    """Create two namespaces joined by a link of `megabits` Mbit/s each way; yield their names."""
    names = [f"lockstep-link-{os.getpid()}-{side}" for side in ("a", "b")]
    try:
        for name in names:
            _ip("netns", "add", name)
        first, second = names
        _ip("link", "add", "name", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
        for host, name in enumerate(names, start=1):
            _ip("-n", name, "address", "add", f"{SUBNET}.{host}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
            limit = ["rate", f"{megabits}mbit", "burst", BURST, "latency", LATENCY]
            _run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        for name in names:
            while " UP " not in _ip("-n", name, "-brief", "link", "show", "wire"):  # the kernel takes some time
                time.sleep(0.01)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def run_over_limited_link(
    megabits: float, arguments: Sequence[str], first_flags: Sequence[str] = (), **options: Any
) -> int:
    """Run a Python program as two workers, one on each side of the link; return the largest exit code.

    Args:
        first_flags: Flags of `lockstep run` on the first side.
        options: Those of Popen.
    """
    with limited_link(megabits) as names:
        jobs = []
        for rank, name in enumerate(names):
            flags = [
                "--nodes",
                "2",
                "--node-rank",
                str(rank),
                "--master-addr",
                f"{SUBNET}.1",
                "--master-port",
                str(PORT),
            ]
            flags += ["-np", "1", *(first_flags if rank == 0 else ())]
            command = [sys.executable, "-m", "lockstep", "run", *flags, "--", sys.executable, *arguments]
            jobs.append(subprocess.Popen(["ip", "netns", "exec", name, *command], **options))
        return max(job.wait() for job in jobs)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
