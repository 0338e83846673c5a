"""Two network namespaces with a slow link between them: two "hosts" on one machine, for benchmarks.

Needs root and iproute2. The namespaces, the link and its limits vanish with the context.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SUBNET = "10.213.77"
PORT = 29400
BURST, LATENCY = "64kb", "50ms"  # of the token bucket: what may pass at once, and wait at most


@contextmanager
def limited_link(megabits: float) -> Iterator[list[str]]:
    """Two namespaces, by name, joined by a link that carries `megabits` a second each way."""
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
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def run_over_limited_link(megabits: float, words: list[str]) -> int:
    """Run a Python program as two workers, one on each side of the link; the first failing exit code, or 0."""
    with limited_link(megabits) as names:
        jobs = []
        for rank, name in enumerate(names):
            place = [
                "--nodes",
                "2",
                "--node-rank",
                str(rank),
                "--master-addr",
                f"{SUBNET}.1",
                "--master-port",
                str(PORT),
            ]
            command = [sys.executable, "-m", "lockstep", "run", *place, "-np", "1", "--", sys.executable, *words]
            jobs.append(subprocess.Popen(["ip", "netns", "exec", name, *command]))
        return max(job.wait() for job in jobs)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
