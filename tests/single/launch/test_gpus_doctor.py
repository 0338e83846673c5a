"""What `lockstep doctor` makes of a trial of a machine's GPUs, with Gloo in their library's place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from lockstep.launch.gpus_doctor import Trial, reduce_together, try_gpus


class Lossy:
    """A group whose all-reduces change nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(wait=lambda: None)


def _connect(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, rank, size, timeout)


def _busy(*_: object) -> Any:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\ndetails")


@pytest.mark.parametrize(
    ("group", "card", "found", "error"),
    [
        (_connect, "PCI {}", "2 GPUs, all-reduce at ", ""),
        (_connect, "PCI 0", "not tried, because some of these devices are parts of one card", ""),
        (Lossy, "PCI {}", "", "all-reduces give wrong sums"),
        (_busy, "PCI {}", "", "CUDA error: all CUDA-capable devices are busy or unavailable"),
    ],
)
def test_trial_checks_the_sums(
    accelerators: Callable[..., None], group: Callable[..., Any], card: str, found: str, error: str
) -> None:
    accelerators(kind=None, card=lambda device: card.format(device.index), group=group)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: reduce_together(store, rank, 2, Trial(4000, 0.01)), range(2)))
    for described, failure in results:
        assert described.startswith(found)
        assert failure == error


def test_gpus_that_do_not_answer_are_an_error(accelerators: Callable[..., None]) -> None:
    """The other process is ready, but does not take part."""
    store = HashStore()
    store.set("ready/1", "null")
    accelerators(kind=None)
    assert reduce_together(store, 0, 2, Trial(limit_seconds=0.05)) == ("", "no answer within 0.05 s")
    store.set("card/1", "null")  # ends its thread


WORKS = (
    "set it for jobs here until direct access between the GPUs works (check PCIe ACS and IOMMU in the firmware, and "
    "the driver)"
)
LOOK = "check what else uses the GPUs, and the driver's messages (dmesg)"
GOOD = """echo '["2 GPUs", ""]'"""
NEEDS_SWITCH = f"""[ $NCCL_P2P_DISABLE ] && {GOOD} || echo '["", "hangs"]'"""
LOGGED = """
printf '\\nn1:1:2 [0] shm.cc:7 NCCL WARN no space\\n' > "$0/log.$1"
case $1 in 0) echo '["", "no answer within 30 s"]';; *) echo '["", "shm fails"]';; esac
"""


@pytest.mark.parametrize(
    ("library", "script", "found", "fix"),
    [
        ("nccl", GOOD, "2 GPUs", ""),
        ("nccl", NEEDS_SWITCH, "", f"hangs; works with NCCL_P2P_DISABLE=1: {WORKS}"),
        ("nccl", """echo '["", "busy"]'""", "", f"busy, also with NCCL_P2P_DISABLE=1; {LOOK}"),
        ("xccl", """echo '["", "busy"]'""", "", f"busy; {LOOK}"),
        ("xccl", "exit 7", "", f"a trial process exited with code 7; {LOOK}"),
        ("xccl", LOGGED, "", f"shm fails: no space; {LOOK}"),  # the cause, before its consequences
    ],
)
def test_failed_trial_names_cause_and_fix(
    accelerators: Callable[..., None], library: str, script: str, found: str, fix: str
) -> None:
    accelerators(kind="cuda", count=2, has_collectives=True, backend=library)
    assert try_gpus(("/bin/sh", "-c", script)) == (f"{library}: {found or 'all-reduces fail'}", fix)


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 1), ("mps", 2)])
def test_fewer_than_two_gpus_are_not_tried(accelerators: Callable[..., None], kind: str | None, count: int) -> None:
    accelerators(kind=kind, count=count)
    assert try_gpus() is None
