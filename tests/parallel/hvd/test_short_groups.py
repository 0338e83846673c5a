"""Groups that a worker leaves as soon as it is connected, while another worker still connects."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from commands import started

WORKER = """
import os, signal, sys
import torch.distributed as dist
from lockstep.hvd.engine.transfers import gloo_group

rank, port, trial = map(int, sys.argv[1:])
server = dist.TCPStore("127.0.0.1", port, is_master=False)

class Store(dist.Store):
    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix

    def set(self, key, value):
        server.set(self.prefix + key, value)
        if rank == 1:  # its address is known: the system accepts connections for it
            os.kill(os.getpid(), signal.SIGSTOP)

    def get(self, key):
        return server.get(self.prefix + key)

    def wait(self, keys, *timeout):
        server.wait([self.prefix + key for key in keys], *timeout)

group = gloo_group(Store(f"{trial}/"), rank, 2, 30.0, one_host=True)
os._exit(0)
"""
TRIALS = 6  # in half of them, by the order of their addresses, the first worker connects to the second


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_may_leave_before_a_peer_has_seen_the_connection(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for trial in range(TRIALS):
        commands = [[sys.executable, "-c", WORKER, str(rank), str(store.port), str(trial)] for rank in range(2)]
        with (
            started(commands[0], tmp_path, output=tmp_path / "0") as first,
            started(commands[1], tmp_path, output=tmp_path / "1") as second,
        ):
            second.wait_until(lambda second=second: second.status() == psutil.STATUS_STOPPED)
            time.sleep(0.7)  # in which the first one connects, and would leave
            os.kill(second.pid, signal.SIGCONT)
            assert second.wait(60) == 0, second.text
            assert first.wait(60) == 0, first.text
